"""Templates made concrete: a ``.cu`` file plus a generated ``plan.cuh``, under names that carry the digest.

Two schedules of one family must live in one extension, so ``Plan``, ``Epilogue``, ``Prologue`` and every entry get the
digest of the text as a suffix. The digest is over text alone: shapes are kernel arguments, so matches of different
shapes with one schedule share one kernel.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from attrs import evolve

from ..errors import ContractError
from ..ir import serial
from ..ir.candidate import Feature, Launch, StepSource, Workspace
from ..ir.graph import DType
from .pointwise import INCLUDES, literal

HEADER_NAME = "plan.cuh"
RENAMED = ("Plan", "Epilogue", "Prologue")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_TYPE = re.compile(r"[A-Za-z_][\w:]*( [A-Za-z_]\w*)*")
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


def plan_struct(constants: Mapping[str, bool | int | float], types: Mapping[str, str]) -> str:
    """``struct Plan`` with ``using`` types and ``constexpr`` values, in the order given.

    Raises:
        ContractError: a name is not an identifier, or a type is not a plain type name.
    """
    lines = [f"  using {_checked(name)} = {_checked_type(text)};" for name, text in types.items()]
    lines += [f"  static constexpr {_constant(_checked(name), value)};" for name, value in constants.items()]
    return "struct Plan {\n" + "\n".join(lines) + "\n};\n"


def plan_header(constants: Mapping[str, bool | int | float], types: Mapping[str, str], functors: Iterable[str] = ()) -> str:
    """The text of ``plan.cuh`` before renaming: includes, ``struct Plan``, then ``functors`` (Epilogue, Prologue)."""
    return "\n".join([_PREAMBLE, plan_struct(constants, types), *functors])


_PREAMBLE = "// Written by AgentCompile: the choices of one schedule.\n#pragma once\n#include <cuda_bf16.h>\n" \
    "#include <cuda_fp16.h>\n" + INCLUDES


def source_digest(*texts: str, language: str = "cuda") -> str:
    """16 hex digits that name a source: over its language and texts, before renaming."""
    return serial.digest("source", language, list(texts))


def render(template: str, header: str, digest: str, entries: Sequence[str]) -> tuple[str, str]:
    """Return code and header in which Plan, Epilogue, Prologue and ``entries`` end in ``_<digest>``, as whole identifiers."""
    names = "|".join(re.escape(name) for name in (*RENAMED, *entries))
    pattern = re.compile(rf"(?<![\w])({names})(?!\w)")
    code, plan = (pattern.sub(rf"\1_{digest}", text) for text in (template, header))
    return code, plan


def make_source(
    template: Path | str,
    *,
    constants: Mapping[str, bool | int | float],
    types: Mapping[str, str],
    launches: Sequence[Launch],
    epilogue: str = "",
    prologue: str = "",
    features: Iterable[Feature] = (),
    workspaces: Iterable[Workspace] = (),
    reduction_depth: int = 1,
) -> StepSource:
    """A StepSource from a template and the choices of a schedule.

    ``template`` is the path of the ``.cu`` file (``__file__``'s neighbour) or its text. ``launches`` name entries as the
    template does; ``epilogue`` and ``prologue`` are the text of ``pointwise.epilogue_struct`` and its siblings.

    Raises:
        ContractError: a launch names an entry that the template does not have.
    """
    text = read_template(template) if isinstance(template, Path) else template
    entries = entries_of(text)
    for launch in launches:
        if launch.entry not in entries:
            raise ContractError(f"launch of {launch.entry!r}: the template has the entries {', '.join(entries) or 'none'}")
    header = plan_header(constants, types, [functor for functor in (prologue, epilogue) if functor])
    digest = source_digest(text, header)
    code, plan = render(text, header, digest, entries)
    return StepSource(
        digest=digest,
        code=code,
        headers=((HEADER_NAME, plan),),
        features=tuple(sorted(set(features), key=lambda f: f.value)),
        launches=tuple(evolve(launch, entry=f"{launch.entry}_{digest}") for launch in launches),
        workspaces=tuple(workspaces),
        reduction_depth=reduction_depth,
    )


@lru_cache(maxsize=64)
def read_template(path: Path) -> str:
    """The text of a template file."""
    return path.read_text(encoding="utf-8")


def _checked(name: str) -> str:
    if not _IDENTIFIER.fullmatch(name):
        raise ContractError(f"{name!r} is not a C++ identifier; names of plan values are letters, digits and underscores")
    return name


def _checked_type(text: str) -> str:
    if not _TYPE.fullmatch(text):
        raise ContractError(f"{text!r} is not a plain type name; use render.c_type(dtype)")
    return text


def _constant(name: str, value: bool | int | float) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {'true' if value else 'false'}"
    if isinstance(value, int):
        return f"int {name} = {value}" if -(2**31) < value < 2**31 else f"long long {name} = {value}ll"
    return f"float {name} = {literal(value)}"
