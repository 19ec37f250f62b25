"""Products by warpgroups, emulated with every check on: every layout, tails, splits, blocks that stay, clusters; and wrong kernels."""

import math
import sys
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit import include_dir
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import matmul_case
from agentcompile_templates_cuda_gemm import GemmFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Schedule, StepSource

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError
from agentcompile_validator_emulation.testing import Emulated, some

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from test_gemm import budget_use, drawn

FAMILY = GemmFamily()
SMALL = evolve(preset("h200"), sm_count=2)  # blocks that stay have several tiles to make
FEW = settings(max_examples=3, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
EXTENTS = st.sampled_from((8, 64, 72, 136, 200))


def warpgroups(rows: int, columns: int, stages: int, **others: int | bool) -> Schedule:
    found = {"warp_rows": 64, "cluster": 1, "resident": False, "splits": 1, **others}
    return Schedule({"path": "wgmma", "rows": rows, "columns": columns, "depth": 64, "warp_columns": columns, "stages": stages, **found})


POINTS = {
    "one warpgroup": warpgroups(64, 128, 2),
    "wide": warpgroups(64, 256, 3),
    "two warpgroups": warpgroups(128, 128, 4),
    "two bands": warpgroups(256, 128, 2, warp_rows=128),
    "blocks that stay": warpgroups(64, 128, 3, resident=True),
    "split": warpgroups(128, 128, 2, splits=2),
    "cluster": warpgroups(64, 128, 2, cluster=2),
    "cluster that stays": warpgroups(128, 256, 2, cluster=2, resident=True),
}


@pytest.mark.parametrize("name", POINTS)
@FEW
@given(data=st.data())
def test_within_budget(name: str, data: st.DataObject) -> None:
    m, n, k = (data.draw(EXTENTS, extent) for extent in "mnk")
    turned, batch = data.draw(st.sampled_from(("", "a", "b", "ab"))), data.draw(st.sampled_from(((), (3,), (2, 2))))
    a, b = ((k, m) if "a" in turned else (m, k)), ((n, k) if "b" in turned else (k, n))
    match, graph = matmul_case(shapes=((*batch, *a), (*(data.draw(st.sampled_from((batch, ())))), *b)), turned=turned,
                               dtype=data.draw(st.sampled_from((DType.F16, DType.BF16))), bias=data.draw(st.sampled_from(((n,), ()))))
    tensors, order = drawn(match, data.draw(st.integers(0, 99), "seed")), data.draw(st.sampled_from(SCHEDULES))
    Emulated(FAMILY.lower(match, POINTS[name], SMALL), match, SMALL).run(tensors, order)
    assert budget_use(match, graph, tensors) <= 1.0


@pytest.mark.parametrize("name", ["two warpgroups", "cluster that stays"])
def test_integers_are_exact_and_orders_of_threads_change_no_bit(name: str) -> None:
    match, _ = matmul_case(shapes=((2, 200, 200), (2, 200, 264)))
    exact, real = drawn(match, 3, integers=True), drawn(match, 4)
    emulated = Emulated(FAMILY.lower(match, POINTS[name], SMALL), match, SMALL)
    emulated.run(exact)
    assert torch.equal(exact["out"].double(), exact["a"].double() @ exact["b"].double())
    emulated.run(real)
    first = real["out"].clone()
    for order in SCHEDULES[:4]:
        emulated.run(real, order)
        assert torch.equal(real["out"], first)


def test_a_nan_reaches_exactly_the_row_and_the_column_that_use_it() -> None:
    match, _ = matmul_case(shapes=((72, 136), (136, 72)))
    tensors = drawn(match, 5)
    tensors["a"][17, 135] = math.nan
    tensors["b"][3, 71] = math.inf
    Emulated(FAMILY.lower(match, POINTS["one warpgroup"], SMALL), match, SMALL).run(tensors)
    wrong = ~tensors["out"].isfinite()
    assert wrong[17].all() and wrong[:, 71].all() and not wrong[:17, :71].any() and not wrong[18:, :71].any()


RELEASE, WAIT = "        if (done > 0) release(before);\n", "        wg::wait<1>();\n"
FULL = "ac::mbarrier_wait(full + turn.stage, turn.parity);"
ALL_ARE_HERE = "    ac::cluster_arrive_release();\n    ac::cluster_wait();\n"
BEGIN = "  __syncthreads();\n  if constexpr (cluster > 1) {\n" + ALL_ARE_HERE + "  }\n"
END = "nobody leaves while others may still write into its memory\n" + ALL_ARE_HERE
STAY, CLUSTER = "blocks that stay", "cluster that stays"
WRONG: dict[str, tuple[str, list[tuple[str, str]]]] = {  # the schedule; texts, and with what they are replaced
    "a place is given back before the wait": (STAY, [
        (RELEASE, ""), (WAIT, "        release(turn.stage);\n" + WAIT), ("      release(before);\n", "")]),
    "the latest place is given back": (STAY, [("release(before);\n        before", "release(turn.stage);\n        before")]),
    "sums are used before their wait": (STAY, [("      wg::wait<0>();", "      wg::wait<1>();")]),
    "the last place is never given back": (STAY, [("      wg::wait<0>();\n      release(before);", "      wg::wait<0>();")]),
    "slices of the phase before are taken": (STAY, [(FULL, FULL.replace("parity)", "parity ^ 1)"))]),
    "slices are not waited for": (STAY, [(FULL, "")]),
    "slices are fetched over those in use": (STAY, [("ac::mbarrier_wait(free + turn.stage, turn.parity ^ 1);", "")]),
    "the phase never turns": (STAY, [("ac::mbarrier_wait(full + turn.stage, turn.parity);", "ac::mbarrier_wait(full + turn.stage, 0);")]),
    "one warp is not counted": ("two warpgroups", [("groups * 4 * cluster", "(groups * 4 - 1) * cluster")]),
    "a panel is not fetched": ("one warpgroup", [("i < boxes; ++i)", "i < 1; ++i)")]),
    "panels are fetched from one place": ("one warpgroup", [("line + i * wg::span", "line")]),
    "panels lie apart": ("one warpgroup", [("panels = panel_spans * 128 / 16", "panels = panel_spans * 64 / 16")]),
    "groups of spans lie apart": ("one warpgroup", [("eight_spans / 16", "eight_spans / 32")]),
    "terms are half a step on": ("one warpgroup", [("ByTerms ? 16 * 2 : 16 * 128", "ByTerms ? 16 : 8 * 128")]),
    "the second warpgroup reads the first's rows": ("two warpgroups", [("slice + warp_row * wg::span", "slice")]),
    "the second band is the first": ("two bands", [("left + band * (64 * 128 / 16)", "left")]),
    "a slice begins a term late": ("one warpgroup", [("          SlicesA::fetch", "          ++term;\n          SlicesA::fetch")]),
    "registers are not fenced": ("one warpgroup", [("        wg::fence();\n", "")]),
    "products are not committed": ("one warpgroup", [("        wg::commit();\n", "")]),
    "the cluster's share is this block's": (CLUSTER, [("SlicesA::elements + rank * SlicesB::elements", "SlicesA::elements")]),
    "the cluster fetches the same columns": (CLUSTER, [("tile.column + static_cast<int>(rank)", "tile.column + 0")]),
    "the other block is not told": (CLUSTER, [("if (lane < cluster) wg::arrive_in_cluster(free + stage, lane);",
                                               "if (lane < cluster) ac::mbarrier_arrive(free + stage);")]),
    "one block's arrivals are enough": (CLUSTER, [("groups * 4 * cluster", "groups * 4")]),
    "blocks do not wait for the others to begin": (CLUSTER, [(BEGIN, "  __syncthreads();\n")]),
    "a block leaves before the others have told it": (CLUSTER, [(END, "\n")]),
}


def changed(source: StepSource, pairs: list[tuple[str, str]]) -> StepSource:
    """The kernel with its text, or that of the device library, changed."""
    code, library = source.code, (include_dir() / "agentcompile" / "wgmma.cuh").read_text(encoding="utf-8")
    for old, new in pairs:
        assert old in code or old in library
        code, library = code.replace(old, new), library.replace(old, new)
    return evolve(source, code=code, headers=(*source.headers, ("agentcompile/wgmma.cuh", library)))


@pytest.mark.parametrize("what", some(WRONG))
def test_a_wrong_kernel_is_refused_or_wrong(what: str) -> None:
    name, pairs = WRONG[what]
    match, graph = matmul_case(shapes=((200, 328), (328, 264)))
    emulated = Emulated(changed(FAMILY.lower(match, POINTS[name], SMALL), pairs), match, SMALL)
    for order in (SCHEDULES[0], SCHEDULES[1], SCHEDULES[5]):
        tensors = drawn(match, 5)
        try:
            emulated.run(tensors, evolve(order, deadline_s=20.0))
        except EmulationError:
            return
        if budget_use(match, graph, tensors) > 1.0:
            return
    pytest.fail("nothing saw it")
