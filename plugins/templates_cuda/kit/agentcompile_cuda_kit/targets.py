"""NVIDIA GPUs as targets: named presets, and a live device rounded to its preset."""

import re

from agentcompile_core.plugin_api import Feature, StepSource, Target, UsageError

WARP = 32
_SM_80 = (Feature.ATOMICS, Feature.MMA_SYNC, Feature.BF16)
_SM_90 = (*_SM_80, Feature.BULK_COPY, Feature.MBARRIER, Feature.GRIDDEPCONTROL, Feature.CLUSTER)
_LARGE_CLUSTERS = (90, 100, 103)  # compute capabilities
_VARIANTS = {("sm_90", Feature.WGMMA): "sm_90a"}  # what is built for instead where a source uses the feature
_DEFAULT = "h200"  # compiled for where there is no GPU


def sm_number(arch: str) -> int:
    """Compute capability as one number: 90 for ``sm_90`` and ``sm_90a``; 0 for what is no such architecture."""
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    return int(found.group(1)) if found else 0


def capabilities(arch: str) -> tuple[str, ...]:
    """What sources for ``arch`` may use. WGMMA is of compute capability 9.0 alone; see ``built_arch``. Clusters of 16 blocks are of the
    large chips, which ask for them as a size that is not portable."""
    number = sm_number(arch)
    found = _SM_90 if number >= 90 else _SM_80 if number >= 80 else ()
    large = (Feature.LARGE_CLUSTER,) if number in _LARGE_CLUSTERS else ()
    return (*found, *large, Feature.WGMMA) if number == 90 else (*found, *large)


def built_arch(source: StepSource, target: Target) -> str:
    """What ``source`` is compiled for: the target's architecture, or its variant that has what the source uses (sm_90a for WGMMA).

    A binary of the variant runs on the devices of the architecture, and on none of later ones; other sources stay as they were.
    """
    return next((_VARIANTS[target.arch, feature] for feature in source.features if (target.arch, feature) in _VARIANTS), target.arch)


def _preset(name: str, arch: str, sms: int, l2_mb: int, shared_kb: tuple[int, int], memory: tuple[int, float],
            threads: int = 2048) -> Target:
    """``shared_kb``: KiB of shared memory per SM and per block; ``memory``: GiB and GB/s; ``threads`` per SM."""
    (sm_kb, block_kb), (gb, gbps) = shared_kb, memory
    return Target(name=name, arch=arch, backend="cuda", languages=("cuda",), capabilities=capabilities(arch), lanes=WARP, sm_count=sms,
                  l2_bytes=l2_mb << 20, shared_bytes_per_sm=sm_kb << 10, shared_bytes_per_block=block_kb << 10, registers_per_sm=65536,
                  memory_bytes=gb << 30, memory_gbps=gbps, threads_per_sm=threads, preference=10 if name == _DEFAULT else 0)


# Figures: CUDA C++ programming guide (compute capabilities) and NVIDIA datasheets; L2 of the H200 as its driver reports.
PRESETS: dict[str, Target] = {t.name: t for t in (
    _preset("h200", "sm_90", 132, 60, (228, 227), (141, 4800.0)),
    _preset("h100", "sm_90", 132, 50, (228, 227), (80, 3350.0)),
    _preset("a100", "sm_80", 108, 40, (164, 163), (80, 2039.0)),
    _preset("rtx3090", "sm_86", 82, 6, (100, 99), (24, 936.0), 1536),
    _preset("rtx4090", "sm_89", 128, 72, (100, 99), (24, 1008.0), 1536),
    _preset("b200", "sm_100", 148, 126, (228, 227), (180, 8000.0)),
    _preset("rtx5090", "sm_120", 170, 96, (100, 99), (32, 1792.0), 1536),
)}


def preset(name: str) -> Target:
    """Return the preset called ``name``.

    Raises:
        UsageError: there is no such preset.
    """
    if name not in PRESETS:
        raise UsageError(f"unknown NVIDIA target {name!r}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def nearest_preset(device_name: str, number: int, sm_count: int) -> Target | None:
    """The preset of a live device: by its name, else the one of the same compute capability with the closest SM count."""
    words = device_name.lower().replace(" ", "")
    for name, target in PRESETS.items():
        if name in words and sm_number(target.arch) == number:
            return target
    same = [t for t in PRESETS.values() if sm_number(t.arch) == number]
    return min(same, key=lambda t: abs(t.sm_count - sm_count)) if same else None
