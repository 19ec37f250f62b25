"""Several runs of a kernel that do not depend on each other in one launch, by a kernel made of the text of one."""

import re
from pathlib import Path

from attrs import evolve

from agentcompile_core.plugin_api import Access, ArgumentKind, ContractError, DType, Launch, Role, StepSource, pointer, source_digest

from .render import LANGUAGE, read_template

HEADER = Path(__file__).with_name("runs.cuh")
ADDRESSES = "addresses"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ON_DEVICE = re.compile(r"__(?:device|managed)__(?P<what>[^(){};=]*)(?P<end>[(){};=])")
_PARAMETER = re.compile(r"(?P<type>.*[\s*&])[A-Za-z_]\w*", re.DOTALL)


def several_runs(source: StepSource) -> StepSource | None:
    """A source whose launches may have any number of runs of those of ``source`` in one grid; None: there is none.

    The arguments of such a launch are ``addresses``, i64 [runs, n], of the n arguments that are addressed, and the others as they are. Its
    grid is that of one run, times the number of runs along z. There is none of another language than CUDA's, of launches that differ in
    depth, and of arguments that fetch tiles, which are no addresses.

    Nor of sources with variables of their own, which runs beside each other would share.

    Raises:
        ContractError: the text has no kernel of a launch, or not as many plain parameters as that has arguments.
    """
    depths = {launch.grid[2] for launch in source.launches}
    is_tiled = any(argument.kind is ArgumentKind.TILES for launch in source.launches for argument in launch.arguments)
    texts = (source.code, *(text for _, text in source.headers))
    if source.language != LANGUAGE or len(depths) != 1 or is_tiled or any(map(_has_variables, texts)):
        return None
    code = f'// Several runs.\n#define AC_RUN_DEPTH {depths.pop()}\n#include "{HEADER.name}"\n{source.code}'
    for launch in {one.entry: one for one in source.launches}.values():
        code = _with_wrapper(code, launch)
    digest = source_digest(code, *(part for pair in source.headers for part in pair), language=LANGUAGE)

    def named(text: str) -> str:
        return text.replace(source.digest, digest)  # names end in the digest of their source

    return evolve(source, code=named(code), digest=digest, workspaces=(), launches=tuple(map(_launch, source.launches, map(
        named, (one.entry for one in source.launches)))), headers=(*((name, named(text)) for name, text in source.headers),
                                                                   (HEADER.name, read_template(HEADER))))


def _launch(launch: Launch, entry: str) -> Launch:
    addresses = pointer(ADDRESSES, Role.CONSTANT, DType.I64, Access.READ)
    return evolve(launch, entry=entry, arguments=(addresses, *(argument for argument in launch.arguments if not argument.addressed)))


def _with_wrapper(code: str, launch: Launch) -> str:
    """The text where the kernel of a launch is a function, and a kernel of its name calls it with the arguments of a run."""
    kernel = re.search(r'extern\s+"C"\s+__global__\s+void\s+(?P<bounds>__launch_bounds__\s*\([^)]*\)\s*)?' + launch.entry + r"\s*\(", code)
    if kernel is None:
        raise ContractError(f"the source has no kernel {launch.entry}")
    end = _closing(code, kernel.end())
    parameters = _split(_COMMENT.sub(" ", code[kernel.end() : end]))
    if len(parameters) != len(launch.arguments):
        raise ContractError(f"kernel {launch.entry} has {len(parameters)} parameters and its launch {len(launch.arguments)} arguments")
    given, kept, number = list[str](), [f"const long long* {ADDRESSES}"], 0
    for parameter, argument in zip(parameters, launch.arguments, strict=True):
        named = _PARAMETER.fullmatch(parameter)
        if named is None or "=" in parameter:
            raise ContractError(f"kernel {launch.entry}: {parameter!r} is not a type and a name")
        if argument.addressed:
            given.append(f"reinterpret_cast<{named['type'].strip()}>(of_run[{number}])")
            number += 1
        else:
            kept.append(parameter)
            given.append(parameter[named.end("type"):])
    function = f"{launch.entry}_of_run"
    wrapper = (f'\nextern "C" __global__ void {kernel["bounds"] or ""}{launch.entry}({", ".join(kept)}) {{\n'
               f"  const long long* const of_run = {ADDRESSES} + ac::number_of_run() * {number};\n"
               f"  {function}({', '.join(given)});\n}}\n")
    return f"{code[: kernel.start()]}static __device__ __forceinline__ void {function}({code[kernel.end() :]}{wrapper}"


def _has_variables(text: str) -> bool:
    """Whether the device has variables of the text's own that may change."""
    found = _ON_DEVICE.finditer(_COMMENT.sub(" ", text))
    return any(one["end"] != "(" and not re.search(r"\bconst(expr)?\b", one["what"]) for one in found)


def _closing(code: str, start: int) -> int:
    """The place of the parenthesis that closes the one in front of ``start``; comments do not count. Raises ContractError."""
    plain, depth = _COMMENT.sub(lambda comment: " " * len(comment[0]), code), 1
    for at in range(start, len(plain)):
        depth += {"(": 1, ")": -1}.get(plain[at], 0)
        if not depth:
            return at
    raise ContractError("a kernel's parameters have no end")


def _split(parameters: str) -> list[str]:
    """At commas that stand in no brackets; each with single spaces."""
    found, depth = [""], 0
    for letter in parameters:
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [" ".join(one.split()) for one in found]
