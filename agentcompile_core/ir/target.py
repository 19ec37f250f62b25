"""The hardware that code is made for: named presets, or a live device rounded to its preset."""

import re

from attrs import field, frozen
from attrs import validators as v

from ..errors import UsageError


@frozen(kw_only=True)
class Target:
    """Limits of one kind of GPU.

    ``arch`` is the variant the code is built for (``sm_90``; ``sm_90a`` where architecture-specific features are
    used). Bytes are bytes; ``memory_gbps`` is the datasheet bandwidth in 1e9 bytes per second.
    """

    name: str
    arch: str = field(validator=v.matches_re(r"sm_\d{2,3}a?"))
    sm_count: int
    l2_bytes: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    memory_bytes: int
    memory_gbps: float

    @property
    def capability(self) -> int:
        """Compute capability as one number: 90 for sm_90 and sm_90a."""
        return int(re.sub(r"\D", "", self.arch))

    @property
    def has_bulk_copy(self) -> bool:
        """Whether cp.async.bulk, mbarrier transactions and programmatic dependent launch exist."""
        return self.capability >= 90


def _preset(name: str, arch: str, sms: int, l2_mb: int, sm_kb: int, block_kb: int, gb: int, gbps: float,
            threads: int = 2048) -> Target:
    return Target(name=name, arch=arch, sm_count=sms, l2_bytes=l2_mb << 20, shared_bytes_per_sm=sm_kb << 10,
                  shared_bytes_per_block=block_kb << 10, memory_bytes=gb << 30, memory_gbps=gbps, threads_per_sm=threads)


# Figures: CUDA C++ programming guide (compute capabilities) and NVIDIA datasheets; L2 of the H200 as its driver reports.
PRESETS: dict[str, Target] = {t.name: t for t in (
    _preset("h200", "sm_90", 132, 60, 228, 227, 141, 4800.0),
    _preset("h100", "sm_90", 132, 50, 228, 227, 80, 3350.0),
    _preset("a100", "sm_80", 108, 40, 164, 163, 80, 2039.0),
    _preset("rtx3090", "sm_86", 82, 6, 100, 99, 24, 936.0, 1536),
    _preset("rtx4090", "sm_89", 128, 72, 100, 99, 24, 1008.0, 1536),
    _preset("b200", "sm_100", 148, 126, 228, 227, 180, 8000.0),
    _preset("rtx5090", "sm_120", 170, 96, 100, 99, 32, 1792.0, 1536),
)}


def preset(name: str) -> Target:
    """Return the preset called ``name``.

    Raises:
        UsageError: there is no such preset.
    """
    if name not in PRESETS:
        raise UsageError(f"unknown target {name!r}; known targets: {', '.join(sorted(PRESETS))}; pass one of them as --target")
    return PRESETS[name]


def nearest_preset(device_name: str, capability: int, sm_count: int) -> Target | None:
    """The preset of a live device: by its name, else the one of the same capability with the closest SM count."""
    words = device_name.lower().replace(" ", "")
    for name, target in PRESETS.items():
        if name in words and target.capability == capability:
            return target
    same = [t for t in PRESETS.values() if t.capability == capability]
    return min(same, key=lambda t: abs(t.sm_count - sm_count)) if same else None
