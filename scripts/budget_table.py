"""Measure the error budgets: how far honest results of the framework stay inside what a candidate is allowed.

    python scripts/budget_table.py                 # 2,000 draws of every row, into benchmarks/results/cpu/budgets.json
    python scripts/budget_table.py --draws 50 --family attention --dtype fp16 --show

One row per family, element type and size: the budget by which the family's first schedule is judged on the h200, against the
results of the framework on the CPU. ``median``: of budget over error, over all elements that have an error; ``outside``: how
many elements of all draws lie outside their budget.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS
from attrs import asdict, frozen
from torch import Tensor

from agentcompile_core.ir.graph import DType, Graph
from agentcompile_core.ir.region import Match
from agentcompile_core.ir.verdict import Case, InputFamily
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import Bounded, compare, oracle
from agentcompile_core.ops.reference.depth import reduction_depth
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.version import __version__
from agentcompile_core.worker.operands import graph_values, make_inputs

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "budgets.json"
DTYPES = {"fp32": DType.F32, "fp16": DType.F16, "bf16": DType.BF16}
Maker = Callable[[DType], tuple[Match, Graph]]
BY_NAME = {kind.name: kind for kind in KINDS}
DRAWN = tuple(f for f in InputFamily if f not in ("one_hot", "max_finite", "nan", "infinite", "all_minus_inf"))


def _attention(rope: str) -> dict[str, Maker]:
    def maker(capacity: int) -> Maker:
        return lambda d: cases.attention_case(heads=(4, 2), head_dim=64, capacity=capacity, rope=rope, dtype=d)

    return {f"capacity {capacity}": maker(capacity) for capacity in (256, 1024, 2048)}


FAMILIES: dict[str, dict[str, Maker]] = {
    "gemv": {f"{n} x {k}": (lambda d, n=n, k=k: cases.linear_case(n=n, k=k, dtype=d)) for n, k in ((64, 256), (64, 1024), (64, 4096))},
    "gemv, norm, gate": {f"{n} x {k}": (lambda d, n=n, k=k: cases.gated_case(n=n, k=k, norm="rms", dtype=d))
                         for n, k in ((64, 512), (64, 1024), (64, 2048))},
    "rms norm": {str(n): (lambda d, n=n: cases.norm_case(columns=n, dtype=d)) for n in (64, 512, 4096)},
    "layer norm": {str(n): (lambda d, n=n: cases.norm_case(columns=n, norm="layer", dtype=d)) for n in (64, 512, 4096)},
    "rope": {f"{h} x {n}": (lambda d, h=h, n=n: cases.rope_case(heads=h, head_dim=n, dtype=d)) for h, n in ((2, 32), (8, 64), (16, 128))},
    "rope table": {str(n): (lambda d, n=n: cases.rope_table_case(half=n, dtype=d)) for n in (16, 32, 64)},
    "attention": _attention(""),
    "attention, norm, rope": _attention("rms"),
    "elementwise": {str(n): (lambda d, n=n: cases.elementwise_case(columns=n, dtype=d)) for n in (64, 512, 4096)},
    "gather": {str(n): (lambda d, n=n: cases.gather_case(columns=n, vocabulary=16, dtype=d)) for n in (64, 512, 4096)},
    "argmax": {str(n): (lambda d, n=n: cases.argmax_case(n=n, dtype=d)) for n in (64, 512, 4096)},
}


@frozen(kw_only=True)
class Row:
    """One line of the table; ratios are 0 where no element has any error (copies, integers)."""

    family: str
    dtype: str
    size: str
    draws: int
    depth: int
    median: float
    least: float  # of budget over error: below 1 means outside
    outside: int
    seconds: float


def judged_depth(match: Match, graph: Graph) -> int:
    """The reduction depth by which the first schedule of whoever serves the match is judged."""
    target = preset("h200")
    for family in load_catalog(strict=False).template_families.values():
        if family.accepts(match, target) is True:
            honest = reduction_depth(graph, family.lower(match, family.space(match, target).points[0], target))
            return 1 << (honest - 1).bit_length() if honest > 0 else 0
    raise SystemExit(f"no installed family serves {match.id}; install the families of plugins/templates_cuda")


def drawn(match: Match, draws: int, first_seed: int) -> Iterator[Case]:
    """``draws`` cases over the input families whose results are finite, at seeded positions."""
    kind = BY_NAME[match.kind]
    generator = torch.Generator().manual_seed(first_seed)
    families = (*DRAWN, *kind.families)
    has_position = any(operand.role.value == "length" for operand in match.operands)
    for i in range(draws):
        position = int(torch.randint(0, kind.capacity(match), (1,), generator=generator)) if has_position else 1
        yield Case(family=families[i % len(families)], seed=first_seed + i, position=position)


def ratios(result: Tensor, bound: Bounded) -> Tensor:
    """Budget over error of the elements that have one."""
    error = (result.double().reshape(-1) - bound.value.reshape(-1)).abs()
    some = (error > 0) & error.isfinite()
    return (bound.error.reshape(-1)[some] / error[some]).float()


def measure(family: str, size: str, dtype: str, draws: int, seed: int = 1) -> Row:
    """One row."""
    began = time.perf_counter()
    match, graph = FAMILIES[family][size](DTYPES[dtype])
    depth, run = judged_depth(match, graph), compile_nodes(graph, device="cpu")
    seen, outside = [], 0
    for case in drawn(match, draws, seed):
        values = graph_values(match, graph, make_inputs(match, BY_NAME[match.kind], case, "cpu"))
        expected = oracle(graph, values, depth)
        found = {**values, **run.run(dict(values))}
        for name in graph.outputs:
            outside += compare(found[name], expected[name]).wrong
            if found[name].is_floating_point():
                seen.append(ratios(found[name], expected[name]))
    every = torch.cat(seen) if seen else torch.zeros(0)
    median, least = (float(every.median()), float(every.min())) if every.numel() else (0.0, 0.0)
    return Row(family=family, dtype=dtype, size=size, draws=draws, depth=depth, median=round(median, 2), least=round(least, 3),
               outside=outside, seconds=round(time.perf_counter() - began, 1))


def versions() -> dict[str, str]:
    """What the figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": commit, "agentcompile": __version__, "torch": torch.__version__, "python": platform.python_version(),
            "processor": platform.machine()}


def main() -> None:
    """Measure what was asked for, print it, and write the results file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--family", choices=list(FAMILIES), help="only this family")
    parser.add_argument("--dtype", choices=list(DTYPES), help="only this element type")
    parser.add_argument("--show", action="store_true", help="print only; write nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in [asked.family] if asked.family else FAMILIES:
        for dtype in [asked.dtype] if asked.dtype else DTYPES:
            for size in FAMILIES[family]:
                rows.append(measure(family, size, dtype, asked.draws))
                print(asdict(rows[-1]), flush=True)
    if not asked.show:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps({"versions": versions(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
