"""Every accumulator of every family kept in half precision, and whether the cases of a candidate refuse it.

    PYTHONPATH=scripts python -m mutants.sums                      # all families: an hour of one processor
    PYTHONPATH=scripts python -m mutants.sums --family softmax --line "own.sum"

A mutant is tried on every subject of the family with results of one type, on the cases of its candidate, those for sums first.
Printed are the subjects that refuse it and the family of inputs that shows it, and those that write other bits within the budget.
"""

import argparse
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from agentcompile_rules_transformers import testing as made
from attrs import frozen

from agentcompile_core.plugin_api import BuildError, DType, StepSource

from .differences import differences, first_beyond
from .narrow import Narrow, accumulators, narrowed
from .planning import NOT_MUTATED, without_digests
from .subjects import LIBRARY, PLAN, Subject, load, subject_of, subjects
from .text import line_at, line_of

BITS = range(12)  # random cases that say whether any bit changes
_FAMILY, _SHOWN = re.compile(r".* on (\w+) seed .*", re.DOTALL), r"\1"
ROWS, STRIDED = {"path": "rows"}, {"path": "strided"}
SOFTMAX: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("warp", {"shape": (4, 200)}, {"path": "held", "warps_per_row": 1, "lanes": 32}),
    ("lanes", {"shape": (9, 200)}, {"path": "held", "lanes": 8}),
    ("block", {"shape": (2, 1501)}, {"path": "held", "warps_per_row": (4, 8)}),
    ("looped", {"shape": (2, 4609)}, {"path": "looped"}), ("split", {"shape": (2, 5003)}, {"path": "split", "splits": 4}),
    ("log", {"shape": (2, 4609), "log": True}, {"path": "looped"}),
    ("strided", {"shape": (2, 90, 35), "axis": 1}, {**STRIDED, "warps": 4}),
)
REDUCTION: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("sum", {"shape": (5, 707)}, {**ROWS, "warps_per_row": 1, "lanes": 32}), ("lanes", {"shape": (9, 200)}, {**ROWS, "lanes": 8}),
    ("mean", {"shape": (2, 2101), "op": "aten.mean.dim"}, {**ROWS, "splits": 1, "warps_per_row": (4, 8)}),
    ("parts", {"shape": (1, 9001)}, {**ROWS, "splits": (2, 3, 4, 5, 6, 7, 8, 9)}),
    ("l1", {"shape": (3, 331), "op": "aten.linalg_vector_norm.default", "arguments": (1,)}, {**ROWS, "warps_per_row": 1}),
    ("l2", {"shape": (2, 2100), "op": "aten.linalg_vector_norm.default"}, {**ROWS, "splits": 1, "warps_per_row": (4, 8)}),
    ("var", {"shape": (5, 707), "op": "aten.var.correction"}, {**ROWS, "warps_per_row": 1}),
    ("prod", {"shape": (5, 70), "op": "aten.prod.dim_int"}, {**ROWS, "warps_per_row": 1}),
    ("strided", {"shape": (2, 200, 40), "dim": 1}, {**STRIDED, "splits": 1, "warps": 4}),
    ("strided_std", {"shape": (2, 150, 40), "op": "aten.std.dim", "dim": 1}, {**STRIDED, "splits": 2}),
)
ATTENTION: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("heads", {"heads": (2, 1), "head_dim": 128, "capacity": 160, "rope": "rms"}, {"path": "lanes", "lanes": (8, 16), "splits": (2, 4)}),
    ("long", {"heads": (1, 1), "head_dim": 64, "capacity": 2048}, {"path": "lanes", "splits": (2, 4, 8)}),
)
EXPERTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("gate", {"sizes": (6, 3, 41, 1032)}, {"warps": 4, "rows": 1, "unroll": 2, "turns": 2}),
    ("sum", {"sizes": (10, 8, 50, 264), "down": True}, {"warps": 4, "rows": 2, "unroll": 1, "turns": 4}),
    ("stream", {"sizes": (6, 3, 41, 1032)}, {"path": "stream", "warps": 4}),
    ("stream_sum", {"sizes": (10, 8, 50, 264), "down": True}, {"path": "stream", "warps": 4}),
    ("columns", {"sizes": (10, 8, 88, 200), "down": True, "lies": ("columns",)}, {"lanes": 8, "warps": 4, "unroll": 2}),
)
ROUTER: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("all", {"experts": 128, "slots": 8}, {}), ("chosen", {"experts": 60, "slots": 4, "normalized": True}, {}),
)
MORE = {"softmax": (made.softmax_case, SOFTMAX), "reduction": (made.reduction_case, REDUCTION),
        "attention": (made.attention_case, ATTENTION), "experts": (made.experts_case, EXPERTS), "router": (made.router_case, ROUTER)}
TYPES = {"fp32": DType.F32, "fp16": DType.F16, "bf16": DType.BF16}


@frozen(kw_only=True)
class Place:
    """One accumulator of one text, by where it stands, what became of its line, and its type."""

    file: str
    line: int
    type: str
    text: str
    number: int  # among those of the text


def places(subject: Subject) -> Iterator[tuple[Place, StepSource]]:
    """Every narrowed accumulator of a subject's texts, and the source with it."""
    files = subject.files()
    own = {name for file, text in files.items() if not file.startswith(LIBRARY) for name in accumulators(text)}
    for file, text in files.items():
        if file == PLAN or file in NOT_MUTATED:
            continue
        for number, found in enumerate(narrowed(text, () if file.startswith(LIBRARY) else own)):
            yield _place(file, text, number, found), subject.mutated(file, found.edit.apply(text))


def _place(file: str, text: str, number: int, found: Narrow) -> Place:
    changed = without_digests(line_at(found.edit.apply(text), found.edit.start))
    return Place(file=file, line=line_of(text, found.edit.start), type=found.type, number=number, text=changed)


def refusal(subject: Subject, source: StepSource) -> str:
    """What refuses a source on the cases of its candidate; empty: nothing does."""
    kind = load().kinds[subject.match.kind]
    lasting = kind.lasting_families(subject.match)
    cases = sorted(subject.job(source).trial.cases, key=lambda case: case.family not in lasting)
    return first_beyond(subject, source, cases)


@cache
def candidates(family: str, dtype: DType) -> tuple[Subject, ...]:
    """The subjects of a family whose first output is of ``dtype``, and for what only reduces further ones: every path in every type."""
    found = [subject for subject in subjects().values() if subject.family == family]
    make, table = MORE.get(family, (made.softmax_case, ()))
    for name, said, wanted in table:
        match, graph = make(**said, dtype=dtype)
        found.append(subject_of(f"{family}_{name}_{dtype.value}", family, match, graph, wanted))
    return tuple(subject for subject in found if subject.graph.spec(subject.graph.outputs[0]).dtype is dtype)


def judged(family: str, dtype: DType, wanted: str = "", types: tuple[str, ...] = ("fp16", "bf16")) -> Iterator[tuple[Place, str]]:
    """Every place of a family and what became of it in kernels whose results are of ``dtype``."""
    found: dict[Place, list[tuple[Subject, StepSource]]] = {}
    for subject in candidates(family, dtype):
        for place, source in places(subject):
            if wanted in f"{place.file}: {place.text}" and place.type in types:
                found.setdefault(place, []).append((subject, source))
    for place, tried in found.items():
        yield place, _judged(tried)


def _judged(tried: list[tuple[Subject, StepSource]]) -> str:
    """The subjects that refuse it and on which families of inputs, those that it leaves within the budget, and the number of others."""
    refused: list[str] = []
    within: list[str] = []
    for subject, source in tried:
        try:
            seen = refusal(subject, source)
        except BuildError:
            return "does not compile"
        if seen:
            refused.append(f"{subject.name} ({_FAMILY.sub(_SHOWN, seen)})")
        elif differences(subject, [source], BITS)[0]:
            within.append(subject.name)
    parts = (("refused on", refused), ("WITHIN the budget on", within))
    return "; ".join(f"{said} {', '.join(names)}" for said, names in parts if names) or f"no effect on {len(tried)}"


def main() -> None:
    """Print what becomes of every place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", action="append", help="only this family, or these")
    parser.add_argument("--line", default="", help="only places whose file and line hold this text")
    parser.add_argument("--narrow", choices=("fp16", "bf16"), action="append", help="sums kept in this type only")
    parser.add_argument("--dtype", choices=list(TYPES), action="append", help="only kernels whose results are of this type")
    asked = parser.parse_args()
    for family in asked.family or sorted({subject.family for subject in subjects().values()}):
        for dtype in asked.dtype or TYPES:
            for place, outcome in judged(family, TYPES[dtype], asked.line, tuple(asked.narrow or ("fp16", "bf16"))):
                print(f"{family} {dtype} {place.file}:{place.line} {place.type}: {place.text}\n    {outcome}", flush=True)


if __name__ == "__main__":
    main()
