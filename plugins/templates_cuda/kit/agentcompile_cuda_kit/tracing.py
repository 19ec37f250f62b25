"""Kernels that also note when their blocks pass their phases, made of the text of those that do not."""

import math
import re
from pathlib import Path

from attrs import evolve

from agentcompile_core.plugin_api import PHASES, StepSource, source_digest

from .render import LANGUAGE, entries_of, read_template

HEADER = Path(__file__).with_name("trace.cuh")
SYMBOL = "agentcompile_trace"  # what the kernels write to: u64 [entries, BLOCKS, phases], nanoseconds of the device's clock
NEVER = (1 << 64) - 1  # what stands where a first time has not come
BLOCKS = 4096  # of one grid; what further ones pass is not noted
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\b')


def traced(source: StepSource, tag: str = "") -> StepSource | None:
    """``source`` with kernels that note when each block passes ``PHASES``; None for a language that is not CUDA's.

    They compute what they did. ``tag`` makes another source of the same text, so that its notes are apart. Where a source has several
    kernels only starts and ends are noted.

    Raises:
        ValueError: the text has an ``extern "C" __global__`` whose body cannot be found.
    """
    if source.language != LANGUAGE:
        return None
    entries = entries_of(source.code)
    sizes = {"ENTRIES": len(entries), "BLOCKS": BLOCKS, "PHASES": len(PHASES)}
    head = "".join(f"#define AC_TRACE_{name} {size}\n" for name, size in sizes.items()) + f'#include "{HEADER.name}"\n'
    code = f"// Traced{' for ' + tag if tag else ''}.\n{head}{_with_blocks(source.code)}"
    digest = source_digest(code, tag, *(part for pair in source.headers for part in pair), language=LANGUAGE)

    def named(text: str) -> str:
        return text.replace(source.digest, digest)  # names end in the digest of their source

    return evolve(source, code=named(code), digest=digest, launches=tuple(evolve(one, entry=named(one.entry)) for one in source.launches),
                  headers=(*((name, named(text)) for name, text in source.headers), (HEADER.name, read_template(HEADER))))


def _with_blocks(code: str) -> str:
    """The text with a TracedBlock at the start of each kernel's body."""
    found, at = [], 0
    for index, kernel in enumerate(_KERNEL.finditer(code)):
        body = _body(code, kernel.end())
        if not body:
            raise ValueError(f"kernel {index} of the source has no body")
        found.append(code[at:body] + f"\n  const ac::TracedBlock<{index}> traced_block;")
        at = body
    return "".join(found) + code[at:]


def _body(code: str, start: int) -> int:
    """Behind the brace that opens a kernel's body, which lies in no parentheses; 0: there is none."""
    depth = 0
    for at in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        if code[at] == "{" and depth == 0:
            return at + 1
    return 0


def phases_of(notes: bytes, source: StepSource) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per launch of a traced source and per block the nanoseconds of each phase, 0 where it was not passed; ``notes`` as they lie at
    SYMBOL."""
    numbers, count, entries = memoryview(notes).cast("Q"), len(PHASES), entries_of(source.code)
    found = []
    for launch in source.launches:
        first = entries.index(launch.entry) * BLOCKS * count
        blocks = min(math.prod(launch.grid), BLOCKS)
        rows = (numbers[first + block * count : first + (block + 1) * count].tolist() for block in range(blocks))
        found.append(tuple(tuple(0 if time == NEVER else time for time in row) for row in rows))
    return tuple(found)
