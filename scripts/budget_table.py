"""Measure the error budgets: how far honest results of the framework stay inside what a candidate is allowed.

    python scripts/budget_table.py                 # 2,000 draws of every row, into benchmarks/results/cpu/budgets.json
    python scripts/budget_table.py --draws 50 --family attention --dtype fp16 --show
    python scripts/budget_table.py --family softmax --family mean --keep   # only these; the other rows of the file stay

One row per family, element type and size: the budget by which candidates are judged, against the results of the framework on
the CPU. ``median``: of budget over error, over all elements that have an error; ``outside``: how
many elements of all draws lie outside their budget.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS
from attrs import asdict, frozen
from checkout import commit
from torch import Tensor

from agentcompile_core.ir.graph import DType, Graph
from agentcompile_core.ir.region import Match
from agentcompile_core.ir.verdict import Case, InputFamily
from agentcompile_core.ops.interpreter import Prepared, compile_nodes
from agentcompile_core.ops.reference import Bounded, compare, oracle
from agentcompile_core.version import __version__
from agentcompile_core.worker.operands import make_inputs

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "budgets.json"
DTYPES = {"fp32": DType.F32, "fp16": DType.F16, "bf16": DType.BF16}
Maker = Callable[..., tuple[Match, Graph]]
BY_NAME = {kind.name: kind for kind in KINDS}
# Of the two large means one, since errors have no sign.
DRAWN = tuple(f for f in InputFamily if f not in ("one_hot", "max_finite", "nan", "infinite", "all_minus_inf", "large_mean_below"))


BATCH = 50  # draws in one graph where rows are independent


def _attention(rope: str) -> dict[str, Maker]:
    def maker(capacity: int) -> Maker:
        return lambda d: cases.attention_case(heads=(2, 1), head_dim=64, capacity=capacity, rope=rope, dtype=d)

    return {f"capacity {capacity}": maker(capacity) for capacity in (512, 1024, 2048)}


# Products are not in the table: on processors torch rounds every partial one to the element type, where devices keep float32. Nor are
# running sums, which it keeps in float64 there, so that errors in float32 say nothing of the budget.
def _reduction(op: str, before: tuple[str, ...] = ()) -> dict[str, Maker]:
    def maker(n: int) -> Maker:
        return lambda d: cases.reduction_case(shape=(1, 4, n), op=f"aten.{op}", before=before, dtype=d)

    return {str(n): maker(n) for n in (64, 512, 4096)}


# Left out in float32, where its budget is wider than the bar of the table.
NARROW_ONLY = ("gemv, layer norm",)
# Whose budget of a row is the same among others; a linear layer of several rows is given more room than one of a single row.
BATCHED = ("rms norm", "layer norm", "elementwise")
FAMILIES: dict[str, dict[str, Maker]] = {
    "gemv": {f"64 x {k}": (lambda d, k=k: cases.linear_case(n=64, k=k, dtype=d)) for k in (512, 1024, 4096)},
    "gemv, rms norm": {f"64 x {k}": (lambda d, k=k: cases.linear_case(n=64, k=k, norm="rms", dtype=d)) for k in (1024, 2048, 4096)},
    "gemv, layer norm": {f"64 x {k}": (lambda d, k=k: cases.linear_case(n=64, k=k, norm="layer", dtype=d)) for k in (1024, 2048, 4096)},
    "gemv, norm, gate": {f"64 x {k}": (lambda d, k=k: cases.gated_case(n=64, k=k, norm="rms", dtype=d)) for k in (1024, 2048, 4096)},
    "experts": {f"2 of 4, 32 x {k}": (lambda d, k=k: cases.experts_case(sizes=(4, 2, 32, k), activation="", dtype=d))
                for k in (512, 1024, 2048)},
    "router": {f"{s} of {n}": (lambda d, s=s, n=n: cases.router_case(experts=n, slots=s, dtype=d)) for s, n in ((2, 8), (4, 60), (8, 64))},
    "gemm": {f"16 x 64 x {k}": (lambda d, k=k: cases.rows_case(rows=(16,), n=64, k=k, dtype=d)) for k in (64, 196, 512)},
    "gemm, heads": {f"2 x 16 x 32 x {k}": (lambda d, k=k: cases.matmul_case(shapes=((2, 16, k), (2, 32, k)), turned="b", dtype=d))
                    for k in (64, 512)},
    "rms norm": {str(n): (lambda d, rows=1, n=n: cases.norm_case(columns=n, rows=rows, dtype=d)) for n in (64, 512, 4096)},
    "layer norm": {str(n): (lambda d, rows=1, n=n: cases.norm_case(columns=n, rows=rows, norm="layer", dtype=d)) for n in (64, 512, 4096)},
    "group norm": {f"4 x {n}": (lambda d, n=n: cases.channel_norm_case(shape=(1, 16, n), groups=4, dtype=d)) for n in (16, 128, 1024)},
    "batch norm": {f"8 x {n}": (lambda d, n=n: cases.batch_norm_case(shape=(2, 8, n), dtype=d)) for n in (16, 128, 1024)},
    "rope": {f"{h} x {n}": (lambda d, h=h, n=n: cases.rope_case(heads=h, head_dim=n, dtype=d)) for h, n in ((2, 32), (8, 64), (16, 128))},
    "rope table": {str(n): (lambda d, n=n: cases.rope_table_case(half=n, dtype=d)) for n in (16, 32, 64)},
    "attention": _attention(""),
    "masked attention": {f"{n} x {n}": (lambda d, n=n: cases.masked_attention_case(sizes=(1, 2, 2, n, n, 64), mask=(n, n), dtype=d))
                         for n in (16, 64, 256)},
    "attention, norm, rope": _attention("rms"),
    "elementwise": {str(n): (lambda d, rows=1, n=n: cases.elementwise_case(columns=n, rows=rows, dtype=d)) for n in (64, 512, 4096)},
    "gather": {str(n): (lambda d, n=n: cases.gather_case(columns=n, vocabulary=16, dtype=d)) for n in (64, 512, 4096)},
    "softmax": {str(n): (lambda d, n=n: cases.softmax_case(shape=(1, 4, n), dtype=d)) for n in (64, 512, 4096)},
    "log softmax": {str(n): (lambda d, n=n: cases.softmax_case(shape=(1, 4, n), log=True, dtype=d)) for n in (64, 512, 4096)},
    **{name: _reduction(op, *more) for name, (op, *more) in {
        "sum": ("sum.dim_IntList",), "sum of products": ("sum.dim_IntList", ("mul",)), "mean": ("mean.dim",),
        "vector norm": ("linalg_vector_norm.default",), "variance": ("var.correction",), "maximum and place": ("max.dim",),
        "sum of exponentials": ("logsumexp.default",)}.items()},
    "argmax": {str(n): (lambda d, n=n: cases.argmax_case(n=n, dtype=d)) for n in (64, 512, 4096)},
}


@frozen(kw_only=True)
class Row:
    """One line of the table; ratios are 0 where no element has any error (copies, integers)."""

    family: str
    dtype: str
    size: str
    draws: int
    median: float
    least: float  # of budget over error: below 1 means outside
    outside: int
    seconds: float
    commit: str


def drawn(match: Match, draws: int, first_seed: int) -> Iterator[Case]:
    """``draws`` cases over the input families whose results are finite, at seeded positions."""
    kind = BY_NAME[match.kind]
    generator = torch.Generator().manual_seed(first_seed)
    families = (*DRAWN, *kind.families, *kind.lasting_families(match))
    has_position = any(operand.role.value == "length" for operand in match.operands)
    for i in range(draws):
        position = int(torch.randint(0, kind.capacity(match), (1,), generator=generator)) if has_position else 1
        yield Case(family=families[i % len(families)], seed=first_seed + i, position=position)


def given(match: Match, graph: Graph, every: list[Case], rows: int) -> Iterator[dict[str, Tensor]]:
    """Values of the graph for all cases, ``rows`` of them at a time: their inputs behind each other, the weights of the first."""
    inputs = {operand.name for operand in match.operands if operand.role.value == "input"}
    for start in range(0, len(every) - rows + 1, rows):
        made = [make_inputs(match, BY_NAME[match.kind], case, "cpu") for case in every[start : start + rows]]
        stacked = dict(made[0])
        if rows > 1:
            stacked |= {name: torch.cat([one[name] for one in made], 1) for name in inputs}
        names = {o.name: o for o in match.operands}
        yield {value: part for name, tensor in stacked.items() for value, part in _parts(names[name].values, tensor, graph).items()}


def _parts(values: tuple[str, ...], tensor: Tensor, graph: Graph) -> dict[str, Tensor]:
    sizes = [graph.spec(name).numel for name in values]
    return {name: part.view(graph.spec(name).shape) for name, part in zip(values, tensor.reshape(-1).split(sizes), strict=True)}


def by_row(run: Prepared, graph: Graph, values: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """What the framework computes, one row (one token) at a time: other sums are made of many at once."""
    if rows == 1:
        return {**values, **run.run(dict(values))}
    found = [run.run({n: t[:, i : i + 1] if n in graph.inputs else t for n, t in values.items()}) for i in range(rows)]
    return {name: torch.cat([one[name] for one in found], 1) for name in graph.outputs}


def ratios(result: Tensor, bound: Bounded) -> Tensor:
    """Budget over error of the elements that have one."""
    error = (result.double().reshape(-1) - bound.value.reshape(-1)).abs()
    some = (error > 0) & error.isfinite()
    return (bound.error.reshape(-1)[some] / error[some]).float()


def measure(family: str, size: str, dtype: str, draws: int, of: str, seed: int = 1) -> Row:
    """One row; ``of`` is the commit it is measured of."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    match, graph = FAMILIES[family][size](DTYPES[dtype])
    rows = min(BATCH, draws) if family in BATCHED else 1
    run = compile_nodes(graph, device="cpu")
    if rows > 1:
        graph = FAMILIES[family][size](DTYPES[dtype], rows=rows)[1]
    seen, outside = [], 0
    for values in given(match, graph, list(drawn(match, draws, seed)), rows):
        expected = oracle(graph, values)
        found = by_row(run, graph, values, rows)
        for name in graph.outputs:
            outside += compare(found[name], expected[name]).wrong
            if found[name].is_floating_point():
                seen.append(ratios(found[name], expected[name]))
    every = torch.cat(seen) if seen else torch.zeros(0)
    median, least = (float(every.median()), float(every.min())) if every.numel() else (0.0, 0.0)
    return Row(family=family, dtype=dtype, size=size, draws=draws, median=round(median, 2), least=round(least, 3),
               outside=outside, seconds=round(time.perf_counter() - began, 1), commit=of)


def versions() -> dict[str, str]:
    """What the figures depend on, beside each row's commit."""
    return {"agentcompile": __version__, "torch": torch.__version__, "python": platform.python_version(), "processor": processor()}


def processor(facts: Path = Path("/proc/cpuinfo")) -> str:
    """Which processor this is, and the instructions that torch uses on it: by these its libraries choose the order of their sums."""
    read = facts.read_text() if facts.is_file() else ""
    known = dict(line.split(":", 1) for line in read.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in known.items()}
    words = [f"{word} {named[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in named]
    name = named.get("model name") or platform.processor() or platform.machine()
    return ", ".join((name, *([" ".join(words)] if words else []), torch.backends.cpu.get_cpu_capability()))


def kept(path: Path, measured: list[Row]) -> list[dict[str, Any]]:
    """The rows of a results file that were not measured again, and those that were, in the order of the families.

    Raises:
        SystemExit: see ``comparable``.
    """
    found = comparable(path)
    rows = {(row["family"], row["dtype"], row["size"]): row for row in (*found["rows"], *map(asdict, measured))}
    order = list(FAMILIES)
    return sorted(rows.values(), key=lambda row: order.index(row["family"]))


def comparable(path: Path) -> dict[str, Any]:
    """The results file, beside whose rows may stand what is measured here.

    Raises:
        SystemExit: there is none, or its rows are of another processor or other versions.
    """
    if not path.is_file():
        raise SystemExit(f"{path} is not there, so that --keep has nothing to keep: measure all rows, without --keep")
    found: dict[str, Any] = json.loads(path.read_text())
    here, there = versions(), found["versions"]
    apart = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if apart:
        said = "; ".join(f"{name} {there.get(name, 'unknown')} there, {here.get(name, 'unknown')} here" for name in apart)
        raise SystemExit(f"{path} holds rows that may not stand beside those measured here ({said}): measure all rows here, without "
                         "--keep, or these where the others were measured")
    return found


def main() -> None:
    """Measure what was asked for, print it, and write the results file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--family", choices=list(FAMILIES), action="append", help="only this family, or these")
    parser.add_argument("--dtype", choices=list(DTYPES), help="only this element type")
    parser.add_argument("--show", action="store_true", help="print only; write nothing")
    parser.add_argument("--keep", action="store_true", help="leave the other rows of the results file as they are")
    parser.add_argument("--processes", type=int, default=2, help="rows at a time (default: %(default)s)")
    parser.add_argument("--commit", help="where there is no git here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    wanted = [(family, size, dtype) for family in asked.family or FAMILIES for dtype in ([asked.dtype] if asked.dtype else DTYPES)
              for size in FAMILIES[family] if dtype != "fp32" or family not in NARROW_ONLY]
    if asked.keep and not asked.show:
        comparable(asked.out)  # before minutes are spent
    rows = []
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool:
        measuring = [pool.submit(measure, *row, asked.draws, commit(asked.commit)) for row in wanted]
        for row in measuring:
            rows.append(row.result())
            print(asdict(rows[-1]), flush=True)
    if not asked.show:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        found = kept(asked.out, rows) if asked.keep else [asdict(row) for row in rows]
        asked.out.write_text(json.dumps({"versions": versions(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
