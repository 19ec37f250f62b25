"""Templates made concrete: a ``.cu`` file plus a generated ``plan.cuh``, under names that carry the digest of both."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from attrs import evolve

from agentcompile_core.plugin_api import ContractError, DType, Launch, StepSource, Workspace, rename, source_digest

from .functors import INCLUDES, literal

LANGUAGE = "cuda"
HEADER_NAME = "plan.cuh"
RENAMED = ("Plan", "Epilogue")
Value = bool | int | float | str
_PREAMBLE = "// Written by AgentCompile: the choices of one schedule.\n#pragma once\n#include <cuda_bf16.h>\n" \
    "#include <cuda_fp16.h>\n" + INCLUDES
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_TYPE = re.compile(r"[A-Za-z_][\w:]*( [A-Za-z_]\w*)*")
_OWN_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?([A-Za-z_]\w*)\s*\(')
_C_TYPES = {
    DType.F64: "double", DType.F32: "float", DType.F16: "__half", DType.BF16: "__nv_bfloat16", DType.I64: "long long",
    DType.I32: "int", DType.I16: "short", DType.I8: "signed char", DType.U8: "unsigned char", DType.BOOL: "bool",
}


def c_type(dtype: DType) -> str:
    """The C++ type of one element."""
    return _C_TYPES[dtype]


def entries_of(template: str) -> tuple[str, ...]:
    """Names of the ``extern "C" __global__`` functions of a template, in order."""
    return tuple(dict.fromkeys(_ENTRY.findall(template)))


def plan_struct(plan: Mapping[str, Value]) -> str:
    """``struct Plan`` with a ``using`` for each type (a string, see ``c_type``), then a ``constexpr`` for each number, as ordered.

    Raises:
        ContractError: a name is not an identifier, or a type is not a plain type name.
    """
    lines = [f"  using {_checked(name)} = {_checked_type(text)};" for name, text in plan.items() if isinstance(text, str)]
    lines += [f"  static constexpr {_constant(_checked(name), v)};" for name, v in plan.items() if not isinstance(v, str)]
    return "struct Plan {\n" + "\n".join(lines) + "\n};\n"


def make_source(
    template: Path | str,
    *,
    plan: Mapping[str, Value],
    launches: Sequence[Launch],
    epilogue: str = "",
    features: Iterable[str] = (),
    workspaces: Iterable[Workspace] = (),
    reduction_depth: int = 0,
) -> StepSource:
    """A StepSource from a template and the choices of a schedule.

    ``template`` is the path of the ``.cu`` file (``__file__``'s neighbour) or its text. Headers that lie beside the file and
    are included with quotes become headers of the source. ``plan`` is what ``struct Plan`` holds: numbers, and types as text.
    ``launches`` name entries as the template does; ``epilogue`` is the text of ``epilogue_struct`` or ``elementwise_struct``.

    Raises:
        ContractError: a launch names an entry that the template does not have, ``plan`` holds no C++ name or type, or a header
            that is included with quotes is not there.
    """
    text, own = (read_template(template), own_headers(template)) if isinstance(template, Path) else (template, ())
    entries = entries_of(text)
    for launch in launches:
        if launch.entry not in entries:
            raise ContractError(f"launch of {launch.entry!r}: the template has the entries {', '.join(entries) or 'none'}")
    header = "\n".join([_PREAMBLE, plan_struct(plan), *([epilogue] if epilogue else [])])
    digest = source_digest(text, header, *(part for pair in own for part in pair), language=LANGUAGE)
    renamed = (*RENAMED, *entries)
    return StepSource(
        language=LANGUAGE,
        digest=digest,
        code=rename(text, renamed, digest),
        headers=tuple((name, rename(part, renamed, digest)) for name, part in ((HEADER_NAME, header), *own)),
        features=tuple(sorted(set(features))),
        launches=tuple(evolve(launch, entry=f"{launch.entry}_{digest}") for launch in launches),
        workspaces=tuple(workspaces),
        reduction_depth=reduction_depth,
    )


@lru_cache(maxsize=64)
def read_template(path: Path) -> str:
    """The text of a template file."""
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def own_headers(path: Path) -> tuple[tuple[str, str], ...]:
    """(name, text) of every header that a template includes with quotes, itself or through one of them; not the plan.

    Raises:
        ContractError: there is no such file beside the template.
    """
    found: dict[str, str] = {}
    waiting = [(path.name, read_template(path))]
    while waiting:
        includer, text = waiting.pop()
        for name in _OWN_INCLUDE.findall(text):
            if name in found or name == HEADER_NAME:
                continue
            if not (path.parent / name).is_file():
                raise ContractError(f'{includer} includes "{name}", which is not beside it; allowed are {HEADER_NAME}, headers in the '
                                    "template's folder, and <agentcompile/...>")
            found[name] = read_template(path.parent / name)
            waiting.append((name, found[name]))
    return tuple(found.items())


def _checked(name: str) -> str:
    if not _IDENTIFIER.fullmatch(name):
        raise ContractError(f"{name!r} is not a C++ identifier; names of plan values are letters, digits and underscores")
    return name


def _checked_type(text: str) -> str:
    if not _TYPE.fullmatch(text):
        raise ContractError(f"{text!r} is not a plain type name; use c_type(dtype)")
    return text


def _constant(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {'true' if value else 'false'}"
    if isinstance(value, int):
        return f"int {name} = {value}" if -(2**31) < value < 2**31 else f"long long {name} = {value}ll"
    return f"float {name} = {literal(float(value))}"
