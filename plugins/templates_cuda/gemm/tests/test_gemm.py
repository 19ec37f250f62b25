"""The gemm family against fp64 on the CPU: both paths, ragged shapes, both sides in any layout, batches, tails; and wrong kernels."""

import math
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import matmul_case
from agentcompile_templates_cuda_gemm import GemmFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import Bounded, DType, Graph, Match, Schedule, StepSource, compare, oracle

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned

H200 = preset("h200")
FAMILY = GemmFamily()
FEW = settings(max_examples=4, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
RAGGED, EVEN = (1, 7, 33, 65), (8, 16, 40, 72)


def simt(rows: int, columns: int, depth: int, each: tuple[int, int], splits: int = 1) -> Schedule:
    return Schedule({"path": "simt", "rows": rows, "columns": columns, "depth": depth, "thread_rows": each[0],
                     "thread_columns": each[1], "splits": splits})


def tensor(rows: int, columns: int, depth: int, each: tuple[int, int], stages: int, splits: int = 1, ahead: bool = False) -> Schedule:
    return Schedule({"path": "tensor", "rows": rows, "columns": columns, "depth": depth, "warp_rows": each[0], "warp_columns": each[1],
                     "stages": stages, "ahead": ahead, "splits": splits})


def pieces(rows: int, columns: int, each: tuple[int, int], splits: int = 1) -> Schedule:
    return Schedule({"path": "bf16x6", "rows": rows, "columns": columns, "depth": 32, "warp_rows": each[0], "warp_columns": each[1],
                     "stages": 2, "splits": splits})


def one_row(columns: int, threads: int, unroll: int, cluster: int) -> Schedule:
    return Schedule({"path": "row", "rows": 1, "columns": columns, "splits": 1, "row_threads": threads, "unroll": unroll,
                     "cluster": cluster})


CASES = {  # the schedule, the type, and what one build serves: layouts, tails, and extents that allow vectors or do not
    "single elements": (simt(32, 64, 16, (4, 4)), DType.F32, {"extents": RAGGED, "activation": "relu"}),
    "vectors along terms": (simt(64, 64, 16, (4, 4)), DType.F16, {"extents": EVEN, "turned": "b", "bias": "n", "residual": True}),
    "vectors along lines, split": (simt(64, 64, 16, (4, 4), splits=2), DType.BF16, {"extents": EVEN, "turned": "a", "bias": "mn"}),
    "tensor": (tensor(32, 64, 32, (16, 32), 3), DType.F16, {"extents": EVEN, "turned": "b", "bias": "n", "residual": True}),
    "tensor, a warp that fills a block": (tensor(64, 64, 64, (64, 64), 3, ahead=True), DType.F16,
                                          {"extents": EVEN, "bias": "n", "residual": True}),
    "tensor, turned, split": (tensor(64, 32, 64, (32, 16), 2, splits=2), DType.BF16, {"extents": EVEN, "turned": "a"}),
    "tensor, single elements": (tensor(32, 64, 32, (16, 32), 4, ahead=True), DType.F16,
                                {"extents": RAGGED, "turned": "ab", "weight": True}),
    "one row": (one_row(32, 256, 4, 1), DType.F16, {"extents": EVEN, "rows": 1, "bias": "n", "residual": True}),
    "one row, by a cluster": (one_row(64, 256, 4, 4), DType.BF16,
                              {"extents": EVEN, "rows": 1, "terms": RAGGED, "activation": "relu", "weight": True}),
    "one row, fp32": (one_row(32, 256, 8, 2), DType.F32, {"extents": EVEN, "rows": 1, "terms": RAGGED, "bias": "n"}),
    "pieces": (pieces(64, 64, (32, 32)), DType.F32, {"extents": EVEN, "turned": "b", "bias": "n", "residual": True}),
    "pieces, turned, split": (pieces(32, 64, (16, 32), splits=2), DType.F32, {"extents": EVEN, "turned": "a"}),
    "pieces, single elements": (pieces(32, 32, (16, 16)), DType.F32, {"extents": RAGGED, "turned": "ab", "activation": "relu"}),
}


def product(data: st.DataObject, dtype: DType, said: dict[str, Any]) -> tuple[Match, Graph]:
    """Two matrices, each as it is or turned, in no, one or two batch axes of which b may have fewer."""
    extents = {"m": said["extents"], "n": said["extents"], "k": said.get("terms", said["extents"])}
    sizes = {name: data.draw(st.sampled_from(allowed), name) for name, allowed in extents.items()}
    sizes["m"] = said.get("rows", sizes["m"])
    sizes["k"] *= data.draw(st.sampled_from((1, 1, 5)), "longer")
    m, n, k = sizes.values()
    turned, batch = said.get("turned", ""), data.draw(st.sampled_from(((), (3,), (2, 2))), "batch")
    weight = said.get("weight", False) or data.draw(st.booleans(), "one b for all")
    a, b = ((k, m) if "a" in turned else (m, k)), ((n, k) if "b" in turned else (k, n))
    return matmul_case(shapes=((*batch, *a), (*(() if weight else batch), *b)), turned=turned, weight=weight, dtype=dtype,
                       bias=tuple(sizes[name] for name in said.get("bias", "")), activation=said.get("activation", ""),
                       residual=said.get("residual", False))


def drawn(match: Match, seed: int, integers: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for operand in match.operands:
        shape = operand.spec.shape
        values = torch.randint(-2, 3, shape, generator=generator) if integers else torch.randn(shape, generator=generator)
        values = torch.full(shape, math.nan) if operand.name == "out" else values.float()
        tensors[operand.name] = aligned(values, TORCH[operand.spec.dtype])
    return tensors


def expected_of(match: Match, graph: Graph, tensors: dict[str, torch.Tensor]) -> Bounded:
    """What the inputs among ``tensors`` make, in fp64, with its budget."""
    values = {o.values[0]: tensors[o.name] for o in match.operands if o.name != "out"}
    (expected,) = oracle(graph, values).values()
    return expected


def budget_use(match: Match, graph: Graph, tensors: dict[str, torch.Tensor]) -> float:
    return compare(tensors["out"], expected_of(match, graph, tensors)).budget_use


@pytest.mark.parametrize("name", CASES)
@FEW
@given(data=st.data())
def test_within_budget(name: str, data: st.DataObject) -> None:
    point, dtype, said = CASES[name]
    match, graph = product(data, dtype, said)
    assert FAMILY.accepts(match, H200) is True
    tensors = drawn(match, data.draw(st.integers(0, 99), "seed"))
    Emulated(FAMILY.lower(match, point, H200), match, H200).run(tensors, data.draw(st.sampled_from(SCHEDULES), "order"))
    assert budget_use(match, graph, tensors) <= 1.0


@pytest.mark.parametrize("name", ["vectors along lines, split", "tensor", "pieces", "pieces, turned, split"])
def test_integers_are_exact_and_orders_of_threads_change_no_bit(name: str) -> None:
    point, dtype, said = CASES[name]
    b, n = ((72, 40), 72) if said["turned"] == "b" else ((40, 72), 72)
    match, _ = matmul_case(shapes=((3, 40, 72) if said["turned"] == "a" else (3, 72, 40), b), turned=said["turned"], dtype=dtype)
    exact, real = drawn(match, 3, integers=True), drawn(match, 4)
    emulated = Emulated(FAMILY.lower(match, point, H200), match, H200)
    emulated.run(exact)
    a, b = (exact[name].double().mT if name in said["turned"] else exact[name].double() for name in "ab")
    assert torch.equal(exact["out"].double(), a @ b) and exact["out"].shape[-1] == n
    emulated.run(real)
    first = real["out"].clone()
    for order in SCHEDULES:
        emulated.run(real, order)
        assert torch.equal(real["out"], first)


@pytest.mark.parametrize("name", ["tensor", "pieces"])
def test_a_nan_reaches_exactly_the_row_and_the_column_that_use_it(name: str) -> None:
    point, dtype, _ = CASES[name]
    match, _ = matmul_case(shapes=((40, 72), (72, 40)), dtype=dtype)
    tensors = drawn(match, 5)
    tensors["a"][17, 71] = math.nan
    tensors["b"][3, 39] = math.inf
    Emulated(FAMILY.lower(match, point, H200), match, H200).run(tensors)
    wrong = ~tensors["out"].isfinite()
    assert wrong[17].all() and wrong[:, 39].all() and not wrong[:17, :39].any() and not wrong[18:, :39].any()


SPECIAL = (math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-38, 1e-44, 0.0, -0.0, 1.0)


@FEW
@given(data=st.data())
def test_pieces_give_infinities_and_nans_where_fp32_does(data: st.DataObject) -> None:
    point, dtype, _ = CASES["pieces, single elements"]
    match, graph = matmul_case(shapes=((33, 40), (40, 24)), dtype=dtype)
    tensors = drawn(match, data.draw(st.integers(0, 99), "seed"))
    for name, size in (("a", 33), ("b", 24)):
        for _ in range(data.draw(st.integers(1, 4))):
            line, term = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 39))
            tensors[name].view(-1)[line * 40 + term if name == "a" else term * 24 + line] = data.draw(st.sampled_from(SPECIAL))
    Emulated(FAMILY.lower(match, point, H200), match, H200).run(tensors)
    assert budget_use(match, graph, tensors) <= 1.0
    product = tensors["a"].double() @ tensors["b"].double()
    unknown = product.abs() > 3e38  # which of them fp32 reaches depends on the order
    assert torch.equal(tensors["out"].isnan() | unknown, product.isnan() | unknown)


WRONG = {  # what is wrong: file, text, with what it is replaced, case
    "a barrier is missing": ("gemm.cu", "    __syncthreads();\n", "", "vectors along lines, split"),
    "the tail of the terms counts twice": ("gemm.cu", "&& at < end", "", "single elements"),
    "rows behind the last are read": ("gemm.cu", "&& line < lines ", "", "vectors along terms"),
    "parts are left out": ("gemm.cuh", "split < splits; ++split", "split < splits - 1; ++split", "vectors along lines, split"),
    "a bias is that of the row": ("gemm.cuh", "address[column]", "address[index / period % period]", "tensor"),
    "a slice is not waited for": ("gemm_tensor.cu", "ac::cp_async_wait<stages - 2>();", "ac::cp_async_wait<stages - 1>();", "tensor"),
    "a place is written while it is read": ("gemm_tensor.cu", "    __syncthreads();\n", "", "tensor"),
    "a part of a copy is left out": ("gemm_tensor.cu", "const int end = loads * (part + 1) / count;",
                                     "const int end = loads * (part + 1) / count - part % 2;", "tensor, a warp that fills a block"),
    "lanes exchange no groups": ("gemm.cuh", "    ac::transpose(words);\n", "", "tensor, a warp that fills a block"),
    "the last bits of a are left out": ("gemm_bf16x6.cu", "pieces[2] = rest - pieces[1];", "pieces[2] = 0.0f;", "pieces, single elements"),
    "a product of pieces is left out": ("gemm_bf16x6.cu", "for (int p = 0; p <= order; ++p) {",
                                        "for (int p = order / 2; p <= order; ++p) {", "pieces"),
    "pieces are written while they are read": ("gemm_bf16x6.cu", "    half ^= 1;\n", "", "pieces"),
    "sums of a slice replace the others": ("gemm_bf16x6.cu", "sums[j][e] += parts[j][e]", "sums[j][e] = parts[j][e]", "pieces"),
    "terms are those of the cluster's first block": ("gemm_row.cu", "long long term = rank * terms +", "long long term =",
                                                      "one row, by a cluster"),
    "a block is left out": ("gemm_row.cu", "block < cluster; ++block", "block < cluster - 1; ++block", "one row, by a cluster"),
    "sums leave before all have come": ("gemm_row.cu", "    ac::cluster_arrive_release();\n    ac::cluster_wait();\n", "",
                                        "one row, by a cluster"),
    "terms behind the last are read": ("gemm_row.cu", "min(k, (rank + 1) * terms)", "(rank + 1) * terms", "one row, by a cluster"),
    "a warp is left out": ("gemm_row.cu", "warp < warps; ++warp", "warp < warps - 1; ++warp", "one row"),
    "groups of lanes are not added": ("gemm_row.cu", "offset >= lanes;", "offset > lanes;", "one row"),
    "the last round is left out": ("gemm_row.cu", "while (term < end)", "while (term + groups * unroll <= end)", "one row"),
    "x is read before it is there": ("gemm_row.cu", "  ac::grid_dependency_wait();\n", "", "one row, fp32"),
    "terms behind the last are multiplied": ("gemm_tensor.cu", "chunk * 8 + e < length", "true", "tensor, single elements"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    file, text, wrong, name = WRONG[what]
    point, dtype, said = CASES[name]
    m, n, k = (33, 65, 71) if said["extents"] is RAGGED else (said.get("rows", 40), 72, 135 if "terms" in said else 136)
    a, b = ((k, m) if "a" in said.get("turned", "") else (m, k)), ((n, k) if "b" in said.get("turned", "") else (k, n))
    match, graph = matmul_case(shapes=(a, b), turned=said.get("turned", ""), dtype=dtype, bias=(n,))
    changed = replaced(FAMILY.lower(match, point, H200), file, text, wrong)
    tensors = drawn(match, 5)
    try:
        Emulated(changed, match, H200).run(tensors)
    except EmulationError:
        return
    assert budget_use(match, graph, tensors) > 1.0


def replaced(source: StepSource, file: str, text: str, wrong: str) -> StepSource:
    headers = tuple((name, part.replace(text, wrong) if name == file else part) for name, part in source.headers)
    changed = evolve(source, headers=headers, code=source.code.replace(text, wrong) if file not in dict(headers) else source.code)
    assert changed != source
    return changed
