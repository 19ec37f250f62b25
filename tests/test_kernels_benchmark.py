"""The benchmark of single operators: its cases, its clock, what is claimed of its rows, and the file that it writes."""

import importlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

ROOT = Path(__file__).parents[1]
MODULES = ("harness", "markdown_table", "operator_claims", "paired_ratio", "kernel_tables", "operators", "operators.cases",
           "operators.clock", "operators.contenders", "operators.compiling", "operators.results", "single_operators")
HEAD = {"gpu": "NVIDIA X", "gpu_uuid": "GPU-1", "driver": "1.2", "read_ceiling_gbps": 4000.0, "copy_ceiling_gbps": 3800.0}


@pytest.fixture(scope="module")
def tools() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in [name for name in sys.modules if name.partition(".")[0] in (*MODULES, "covered")]:
            sys.modules.pop(name, None)


def row(family: str, op: str, **said: Any) -> dict[str, Any]:
    times = {f"{peer}_us": 12.0 for peer in ("eager", "torch_compile", "cublas")}
    spreads = {f"{peer}_spread_us": 0.2 for peer in ("eager", "torch_compile", "cublas")}
    return {"family": family, "op": op, "shape": "1x2048", "dtype": "float16", "names": ["some q"], "bytes": 1 << 20, "flops": 4096,
            "us": 10.0, "spread_us": 0.1, "floor_us": 9.0, "share": 0.9, "why": "", "path": "", "paths": {}, "ratio": 1.2,
            "schedule": {"threads": 128}, **times, **spreads, **said}


def test_the_cases_are_those_that_are_claimed(tools: Any) -> None:
    found = tools.cases.cases()
    assert len({case.key for case in found}) == len(found)
    projections = {name for case in found if case.family == "gemv" for name in case.names}
    assert len({name.split()[0] for name in projections}) == 9 and sum(name.endswith(" head") for name in projections) == 9
    assert len(projections) == 9 * 6
    wanted = {(op, f"{r}x{c}", t) for op in ("rms_norm", "layer_norm", "softmax", "silu_mul", "sum", "amax") for r, c in tools.cases.ROWS
              for t in ("float16", "float32")}
    assert {(case.op, case.shape, case.key[3]) for case in found if case.family not in ("gemv", "gemm")} == wanted
    assert [case.family for case in found[:3]] == ["gemm"] * 3 and {case.op for case in found[3:12]} == {"head"}


@pytest.mark.parametrize(("name", "folder"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"),
                                              ("NVIDIA GeForce RTX 4090", "rtx4090"), ("Quadro", "cpu")])
def test_results_lie_by_the_name_of_the_gpu(tools: Any, name: str, folder: str) -> None:
    assert tools.harness.gpu_folder(name) == ROOT / "benchmarks" / "results" / folder


def test_a_case_is_the_same_operator_for_the_compiler_and_for_its_peers(tools: Any) -> None:
    for case in tools.cases.cases(small=True):
        module, inputs = case.made("cpu")
        parameters = tuple(module.parameters())
        assert tuple(tuple(t.shape) for t in (*inputs, *parameters)) == (*case.inputs, *case.parameters)
        with torch.no_grad():
            out = module(*inputs)
            assert tuple(out.shape) == case.result and torch.equal(out, case.function(*inputs, *parameters))
            near = {"eager": out, **({"fused": case.fused(*inputs, *parameters)} if case.fused else {}), "wrong": out * 1.05}
            found = tools.contenders.errors(case, (*inputs, *parameters), near)
        assert found.pop("wrong") > 5e-3 and max(found.values()) < 2e-3
        moved = sum(math.prod(shape) for shape in (*case.inputs, *case.parameters, case.result)) * case.dtype.itemsize
        assert case.nbytes == moved


@pytest.mark.parametrize(("nbytes", "copies"), [(8 << 10, 64), (4 << 20, 31), (1 << 30, 2), (9 << 30, 2)])
def test_copies_exceed_the_cache_twice_where_that_is_possible(tools: Any, nbytes: int, copies: int) -> None:
    assert tools.clock.copies_of(nbytes, 60 << 20) == copies
    assert copies == tools.clock.MOST_COPIES or copies * nbytes >= 2 * (60 << 20)


def test_without_captured_graphs_every_contender_is_timed_by_the_host(tools: Any) -> None:
    ran: list[str] = []
    contenders = {name: [lambda name=name: ran.append(name)] * 3 for name in ("ours", "eager")}
    found = tools.clock.measured(contenders, SimpleNamespace(captures=False), 4096)
    assert set(found) == {"ours", "eager"} and all(timing.us >= 0 for timing in found.values()) and len(ran) == 12


def test_the_best_peer_is_the_fastest_of_all_and_cublas_the_fastest_of_its_calls(tools: Any) -> None:
    def timing(us: float) -> Any:
        return tools.clock.Timing(us=us, spread_us=0.1)

    times = {"ours": timing(8.0), "eager": timing(12.0), "torch_compile": "cannot be captured", "cublas_mm_cublas": timing(11.0),
             "cublas_mm_cublaslt": timing(10.0), "cublas_mv": timing(13.0), "path_simt": timing(20.0)}
    found = tools.single_operators.columns(times, {"simt": SimpleNamespace(facts={"schedule": {"path": "simt"}})})
    assert (found["baseline"], found["baseline_us"], found["ratio"], found["cublas_call"]) == ("cublas", 10.0, 1.25, "cublas_mm_cublaslt")
    assert found["not_timed"] == {"torch_compile": "cannot be captured"} and "torch_compile_us" not in found
    assert found["paths"]["simt"]["us"] == 20.0
    with pytest.raises(ValueError, match="cannot be timed: no graph"):
        tools.single_operators.columns({**times, "ours": "no graph"}, {})


def test_no_slower_is_decided_by_the_bound_of_the_paired_ratio(tools: Any) -> None:
    """Medians of a noisy turn may lie apart by more than their spread; what counts is what the same turns say of both."""
    turns = [10.0, 11.0, 12.0, 10.5]
    for factor, held in ((1.02, True), (1.04, False)):
        times = {"ours": tools.clock.timing_of([factor * us for us in turns]), "torch_compile": tools.clock.timing_of(turns)}
        found = row("norm", "rms_norm") | tools.single_operators.columns(times, {})
        assert found["torch_compile_upper"] == pytest.approx(factor)
        assert tools.operator_claims.no_slower(found, "torch_compile") == held
    assert not tools.operator_claims.no_slower(found | {"us": None}, "torch_compile")
    noisy = {**times, "ours": tools.clock.timing_of([us + off for us, off in zip(turns, (3.0, -3.0, 3.0, -3.0), strict=True)])}
    assert tools.single_operators.columns(noisy, {})["torch_compile_upper"] > 1.03


@pytest.mark.parametrize("count", [1, 64])
def test_a_single_sum_near_zero_is_measured_by_its_terms(tools: Any, count: int) -> None:
    sums = next(case for case in tools.cases.cases(small=True) if case.op == "sum")
    case = evolve(sums, inputs=((count, 4096),), result=(count,), dtype=torch.float32)
    x = torch.randn(count, 4096)
    x[:, 0] -= x.double().sum(-1).float() - 1e-6
    exact = x.double().sum(-1)
    found = tools.contenders.errors(case, (x,), {"near": (exact + 1e-6).float(), "wrong": (exact + 4.0).float()})
    assert found["near"] < 1e-6 < 1e-2 < found["wrong"]


@pytest.mark.parametrize(("changed", "text"), [
    ({"us": 12.4}, "GEMV at batch 1"), ({"us": None}, "GEMV at batch 1"), ({"cublas_us": None}, "GEMV at batch 1"),
    ({"op": "head", "share": 0.87}, "heads"), ({"family": "norm", "bytes": 1 << 28, "share": 0.84}, "beyond 128 MiB"),
    ({"family": "norm", "us": 12.4}, "no slower than torch.compile"),
    ({"family": "gemm", "shape": "4096x4096x4096", "path": "tensor", "us": 22.0}, "mma.sync"),
    ({"family": "gemm", "shape": "4096x4096x4096", "path": "tensor", "us": 12.0}, "wgmma"),
])
def test_a_row_that_misses_a_claim_is_named(tools: Any, changed: dict[str, Any], text: str) -> None:
    good = [row("gemv", "linear"), row("gemv", "head"), row("norm", "rms_norm", bytes=1 << 28),
            row("gemm", "linear", shape="4096x4096x4096", path="wgmma", paths={"tensor": {"us": 21.0}})]
    assert all(held == about > 0 for _, held, about, _ in tools.operator_claims.claims(good))
    missed = {claim: rows for claim, _, _, rows in tools.operator_claims.claims([*good, row("gemv", "linear") | changed]) if rows}
    assert any(text in claim for claim in missed), missed


def test_rows_of_one_commit_are_kept_and_a_row_without_a_time_is_measured_again(tools: Any, tmp_path: Path) -> None:
    results = tools.results
    results.write(row("gemv", "linear"), tmp_path, "a" * 40, HEAD)
    results.write(row("norm", "rms_norm"), tmp_path, "b" * 40, HEAD)
    results.write(row("softmax", "softmax", us=None, why="NoKernel: none passed"), tmp_path, "b" * 40, HEAD)
    assert set(results.known(tmp_path, "a" * 40)) == set()
    assert {key[0] for key in results.known(tmp_path, "b" * 40)} == {"norm"}
    path = results.write(row("gemv", "head"), tmp_path, "b" * 40, HEAD)
    found = json.loads(path.read_text())
    assert [(r["family"], r["commit"][0], r["gpu_uuid"]) for r in found["rows"]] == [("gemv", "b", "GPU-1"), ("norm", "b", "GPU-1")]
    assert found["copy_ceiling_gbps"] == 3800.0


def test_every_table_shows_its_rows_also_those_without_a_time(tools: Any) -> None:
    rows = [row("gemv", "linear"), row("norm", "rms_norm", eager_fused_us=11.0), row("gemm", "linear", path="tensor"),
            row("softmax", "softmax", us=None, ratio=None, schedule={}, why="NoKernel: no | step", torch_compile_us=None),
            row("gemm", "linear", us=None, why="NoKernel: none", cublas_us=None)]
    document = {**HEAD, "rows": [{**one, **HEAD} for one in rows]}
    tables = tools.kernel_tables
    assert "| 1x2048 | some q | 10.00 | 90% | 12.00 | 12.00 | 12.00 | 1.20x | threads 128 |" in tables.gemv(document)
    text = tables.rows(document)
    assert "12.00 (11.00 fused)" in text and "| softmax | 1x2048 | fp16 | 1.00 | - | - |" in text and "no / step" in text
    assert "| 120% |" in tables.products(document) and tables.products(document).count("\n") == 3
    assert "3800 GB/s" in tables.held(document) and "norm rms_norm" not in tables.held(document)


def test_a_shard_takes_its_part_and_all_shards_take_everything(tools: Any) -> None:
    def wanted(*given: str) -> list[Any]:
        return [case.key for case in tools.single_operators.wanted(tools.single_operators.parser().parse_args(given))]

    parts = [wanted("--shard", f"{n}/3") for n in (1, 2, 3)]
    assert sorted(key for part in parts for key in part) == sorted(wanted())
    assert {key[1] for key in wanted("--only", "rms_norm,softmax")} == {"rms_norm", "softmax"}
    with pytest.raises(SystemExit, match="4/3"):
        wanted("--shard", "4/3")


def test_no_script_hides_a_package_that_others_look_for() -> None:
    """The folder of a script comes first where Python looks, so that ``kernels.py`` would be taken for the package of that name."""
    from transformers.utils import import_utils

    wanted = set(re.findall(r'_is_package_available\("(\w+)"', Path(import_utils.__file__).read_text()))
    assert "kernels" in wanted
    folders = (ROOT / "benchmarks", ROOT / "scripts", ROOT / "examples")
    assert not {path.stem for folder in folders for path in folder.iterdir()} & (wanted | sys.stdlib_module_names)
