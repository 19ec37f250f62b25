"""The experts family against fp64 on the CPU: every form, ragged sizes, orders of threads; and wrong kernels."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import experts_case
from agentcompile_templates_cuda_moe import ExpertsFamily
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Graph, Match, Schedule

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from moe_cases import H200, budget_use, drawn, ran, replaced

FAMILY = ExpertsFamily()
FEW = settings(max_examples=3, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def point(warps: int, rows: int, unroll: int, turns: int) -> Schedule:
    return Schedule({"warps": warps, "rows": rows, "unroll": unroll, "turns": turns})


VECTORS, ODD = (8, 264, 520, 1032), (1, 7, 33, 255)
def columns(lanes: int, warps: int, unroll: int, split: int = 1) -> Schedule:
    return Schedule({"lanes": lanes, "warps": warps, "unroll": unroll, "split": split})


CASES: dict[str, tuple[Schedule, dict[str, Any], tuple[int, ...]]] = {  # schedule, form, and lengths of rows that one build serves
    "gate": (point(4, 1, 2, 2), {}, VECTORS),
    "gate, row by row": (point(4, 2, 1, 1), {"lies": ("interleaved",), "bias": True, "activation": "gelu", "dtype": DType.BF16}, VECTORS),
    "gate, f32": (point(8, 1, 4, 1), {"dtype": DType.F32, "bias": True}, VECTORS),
    "alone, single elements": (point(4, 4, 1, 2), {"activation": "", "bias": True}, ODD),
    "sum": (point(4, 2, 2, 2), {"down": True}, VECTORS),
    "sum, in f32": (point(8, 1, 1, 4), {"down": True, "wide": True, "bias": True, "dtype": DType.BF16}, VECTORS),
    "sum, single elements": (point(4, 1, 2, 1), {"down": True, "dtype": DType.F32}, ODD),
    "columns, gate": (columns(8, 4, 2), {"lies": ("columns",)}, ODD),
    "columns, gate row by row": (columns(4, 8, 4), {"lies": ("columns", "interleaved"), "bias": True, "dtype": DType.BF16}, ODD),
    "columns, sum": (columns(16, 4, 1), {"lies": ("columns",), "down": True, "wide": True, "bias": True}, ODD),
    "columns, gate, split": (columns(8, 4, 2, 2), {"lies": ("columns",), "bias": True}, ODD),
    "columns, gate row by row, split": (columns(4, 8, 1, 4), {"lies": ("columns", "interleaved"), "bias": True, "dtype": DType.BF16}, ODD),
    "columns, sum, split": (columns(16, 4, 1, 8), {"lies": ("columns",), "down": True, "wide": True, "bias": True}, ODD),
    "columns, alone, f32": (columns(32, 4, 2), {"lies": ("columns",), "activation": "", "bias": True, "dtype": DType.F32}, ODD),
}


def case(name: str, sizes: tuple[int, int, int], k: int) -> tuple[Match, Graph]:
    return experts_case(sizes=(*sizes, k), **CASES[name][1])


@pytest.mark.parametrize("name", CASES)
@FEW
@given(data=st.data())
def test_within_budget(name: str, data: st.DataObject) -> None:
    schedule, _, lengths = CASES[name]
    slots = data.draw(st.sampled_from((1, 3, 5)), "slots")
    n = data.draw(st.sampled_from((8, 40, 96) if name.startswith("columns") and data.draw(st.booleans(), "vectors") else range(1, 61)), "n")
    sizes = (slots + data.draw(st.integers(0, 5), "others"), slots, n)
    match, graph = case(name, sizes, data.draw(st.sampled_from(lengths), "k"))
    assert FAMILY.accepts(match, H200) is True
    tensors = drawn(match, data.draw(st.integers(0, 99), "seed"))
    ran(FAMILY.lower(match, schedule, H200), match, tensors, data.draw(st.sampled_from(SCHEDULES), "order"))
    assert budget_use(match, graph, tensors) <= 1.0


@pytest.mark.parametrize("name", ["alone, single elements", "sum", "columns, sum, split"])
def test_integers_are_exact_and_orders_of_threads_change_no_bit(name: str) -> None:
    schedule, said, lengths = CASES[name]
    match, _ = case(name, (5, 3, 45), lengths[2])
    exact, real = drawn(match, 3, integers=True), drawn(match, 4)
    source = FAMILY.lower(match, schedule, H200)
    ran(source, match, exact)
    chosen = exact["experts"].flatten()
    matrices = exact["weight"].double()[chosen]
    matrices = matrices.mT if match.flag("transposed") else matrices
    products = torch.einsum("snk,sk->sn", matrices, exact["x"].double()[0].expand(3, -1))
    if said.get("bias"):
        products = products + exact["bias"].double()[chosen]
    want = (products * exact["scale"].double()[0]).sum(0) + exact["aux0"].double()[0, 0] if match.flag("summed") else products
    assert torch.equal(exact["out"].double().reshape(want.shape), want.to(exact["out"].dtype).double())
    first = ran(source, match, real)["out"].clone()
    for order in SCHEDULES:
        assert torch.equal(ran(source, match, real, order)["out"], first)


@pytest.mark.parametrize("name", ["gate", "sum"])
def test_what_was_not_chosen_is_not_read(name: str) -> None:
    match, _ = case(name, (7, 3, 30), 264)
    tensors = drawn(match, 5)
    want = ran(FAMILY.lower(match, CASES[name][0], H200), match, dict(tensors))["out"].clone()
    rest = [e for e in range(7) if e not in tensors["experts"].flatten().tolist()]
    tensors["weight"][rest] = math.nan
    assert torch.equal(ran(FAMILY.lower(match, CASES[name][0], H200), match, tensors)["out"], want) and want.isfinite().all()


def test_a_nan_reaches_exactly_the_slot_and_the_row_that_use_it() -> None:
    match, _ = case("gate", (6, 3, 30), 264)
    tensors = drawn(match, 6)
    tensors["weight"][tensors["experts"].flatten()[1], 30 + 7, 263] = math.nan  # of up
    out = ran(FAMILY.lower(match, CASES["gate"][0], H200), match, tensors)["out"]
    assert out.isnan().nonzero().tolist() == [[1, 7]] or out.reshape(3, 30).isnan().nonzero().tolist() == [[1, 7]]


def test_unaligned_operands_take_the_path_of_single_elements() -> None:
    match, graph = case("sum", (5, 2, 19), 264)
    tensors = drawn(match, 7, offset=3)
    ran(FAMILY.lower(match, CASES["sum"][0], H200), match, tensors)
    assert budget_use(match, graph, tensors) <= 1.0


WRONG = {  # what is wrong: text, with what it is replaced, case
    "a barrier is missing": ("  __syncthreads();\n  finish", "  finish", "sum"),
    "the experts are not waited for": ("part.slots, chosen);\n  __syncthreads();", "part.slots, chosen);", "sum"),
    "every slot reads the first row": ("static_cast<long long>(part.slot + slot) * operands.k", "0", "sum"),
    "a bias is that of the first expert": ("const long long first = part.chosen[slot]", "const long long first = 0", "sum, in f32"),
    "the tail of a row counts": ("(vector < vectors ? ", "(true ? ", "alone, single elements"),
    "rows behind the last are written": ("if (row < part.count) part.sums", "part.sums", "gate, row by row"),
    "the last slot is left out": ("slot < part.slots; ++slot", "slot < part.slots - 1; ++slot", "sum"),
    "columns: weights of slots are left out": ("batch.given[u] *= ac::to_float(operands.scale[slot])", "", "columns, sum"),
    "columns: biases are not weighed": ("fmaf(ac::to_float(operands.scale[slot]), bias, sum)", "sum + bias", "columns, sum"),
    "columns: rows behind the last count": ("place.slot < part.slots;", "true;", "columns, gate"),
    "columns: the last slot's rows are left out": ("part.slots * part.rows", "(part.slots - 1) * part.rows", "columns, sum"),
    "columns: a warp's sums are left out": ("; ++warp) sum +=", "; warp += 2) sum +=", "columns, gate"),
    "columns: a block's sums are left out": ("int block = 0;", "int block = 1;", "columns, sum, split"),
    "columns: a block's rows are read twice": ("::split * span;", "::split * 0;", "columns, gate, split"),
    "columns: nobody waits for what blocks send": ("    ac::cluster_arrive_release();\n    ac::cluster_wait();\n", "",
                                                   "columns, sum, split"),
    "columns: blocks send before the others have started": ("    ac::cluster_wait();\n    send", "    send", "columns, sum, split"),
    "the dependency is not waited for": ("  ac::grid_dependency_wait();\n", "", "gate"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    text, wrong, name = WRONG[what]
    schedule, _, lengths = CASES[name]
    match, graph = case(name, (6, 3, 45), lengths[2])
    tensors = drawn(match, 5)
    source = replaced(FAMILY.lower(match, schedule, H200), text, wrong)
    try:
        for order in (None, SCHEDULES[2], SCHEDULES[3]):
            ran(source, match, tensors, order)
    except EmulationError:
        return
    assert budget_use(match, graph, tensors) > 1.0
