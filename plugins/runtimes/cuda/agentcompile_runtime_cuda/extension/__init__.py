"""The part of a bundle that works without AgentCompile: a small pybind11 package that launches every kernel by name."""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from agentcompile_core.plugin_api import DType, Kernel, KernelArgument, ProgramParts, Role, Segment, StepSource, Target, Tiling

from ..driver import TENSOR_MAP_SWIZZLES, TENSOR_MAP_TYPES

PACKAGE = "agentcompile_kernels"


def files(programs: Mapping[str, ProgramParts], kernels: Mapping[str, Kernel], target: Target) -> dict[str, bytes]:
    """Files of the extension, by path: build scripts, launcher source, signatures, and the cubins as package data.

    A signature is one launch of one source: entry, grid, block, shared memory, and its ordered arguments with sizes.
    ``kernels`` by digest of their source; sources without one are not in it. Steps that an implementation binds are code
    of their plugins: the README names them, so that nobody looks for them here.
    """
    sources: dict[str, tuple[StepSource, Segment]] = {}
    for program in programs.values():
        by_key = {s.key: s for s in program.sources}
        for segment in program.segments:
            if segment.source in by_key:
                sources.setdefault(segment.source, (by_key[segment.source], segment))
    signatures: dict[str, Any] = {}
    found: dict[str, bytes] = {}
    for _, (source, segment) in sorted(sources.items()):
        digest = source.digest
        kernel = kernels.get(digest)
        if kernel is None:
            continue
        found[f"{PACKAGE}/cubins/{digest}.cubin"] = kernel.binary
        for launch in source.launches:
            # Matches of other shapes launch the same entry in other grids: each is a signature of its own.
            twins = sum(name.split("@")[0] == launch.entry for name in signatures)
            signatures[f"{launch.entry}@{twins}" if twins else launch.entry] = {
                "entry": launch.entry, "cubin": f"{digest}.cubin", "sha256": kernel.sha256, "grid": launch.grid, "block": launch.block,
                "shared_bytes": launch.shared_bytes, "cluster": launch.cluster, "pdl": launch.pdl, "label": segment.label,
                "arguments": [_argument(a, source, segment) for a in launch.arguments],
            }
    for name in ("launcher.cpp", "setup.py", "pyproject.toml", "README.md", "check.py"):
        text = (resources.files(__package__) / "files" / f"{name}.in").read_text()
        text = text.replace("@ARCH@", target.arch).replace("@COUNT@", str(len(signatures))).replace("@CALLS@", _calls(programs))
        found[name] = text.encode()
    found[f"{PACKAGE}/__init__.py"] = (resources.files(__package__) / "files" / "package.py.in").read_bytes()
    document = {"arch": target.arch, "target": target.name, "signatures": signatures}
    found[f"{PACKAGE}/signatures.json"] = json.dumps(document, indent=1, sort_keys=True).encode()
    return found


def _calls(programs: Mapping[str, ProgramParts]) -> str:
    """A paragraph on the steps that are not in the package; empty if there are none."""
    named = {f"{s.step.implementation} (version {s.version})" for p in programs.values() for s in p.segments if s.is_call and s.step}
    if not named:
        return ""
    return (f"\nNot in this package, because plugins serve them with code of their own: the steps of {', '.join(sorted(named))}. "
            "They run where AgentCompile and those plugins are installed.\n")


def tiles_of(dtype: DType, tiling: Tiling) -> dict[str, Any]:
    """What the launcher's ``encode_tiles`` takes beside an address: numbers of the driver, bytes and elements."""
    return {"type": TENSOR_MAP_TYPES[dtype], "offset": tiling.offset * dtype.bytes, "extents": tiling.extents, "tile": tiling.tile,
            "strides": [step * dtype.bytes for step in tiling.steps[1:]], "swizzle": TENSOR_MAP_SWIZZLES[tiling.swizzle]}


def _argument(argument: KernelArgument, source: StepSource, segment: Segment) -> dict[str, Any]:
    found: dict[str, Any] = {"name": argument.name, "kind": argument.kind.value}
    if not argument.addressed:
        return {**found, "value": argument.value}
    if argument.role is None:
        return {**found, "null": True}
    found |= {"role": argument.role.value, "access": argument.access.value}
    if argument.tiling is not None and argument.dtype is not None:
        found["tiles"] = tiles_of(argument.dtype, argument.tiling)
    if argument.role is Role.WORKSPACE:
        workspace = next(w for w in source.workspaces if w.name == argument.operand)
        return {**found, "nbytes": workspace.nbytes, "zeroed": workspace.zeroed}
    operand = segment.match.need(argument.operand) if segment.match else None
    if operand is None:
        return found
    return {**found, "nbytes": operand.spec.nbytes, "shape": operand.spec.shape, "dtype": operand.spec.dtype.value}
