"""The largest elements of rows through the kernel of choose_rows.cu, emulated with every check on; and wrong kernels."""

import math
from itertools import product

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.choose_rows import HELD, THREADS, WARP, ChooseRows, source
from agentcompile_runtime_cuda.compared import Compared
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
TYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}


@frozen(kw_only=True)
class Drawn:
    """Rows and how many of their elements are chosen; ``levels``: of how many values elements are, 0: all differ."""

    rows: int
    columns: int
    chosen: int
    dtype: torch.dtype = torch.float32
    levels: int = 0
    special: bool = False
    seed: int = 0

    def elements(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.rows, self.columns, generator=generator)
        if self.levels:
            x = torch.randint(0, self.levels, x.shape, generator=generator) - self.levels / 2.0
        if self.special:
            x.view(-1)[:: 3] = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e30])[: x.view(-1)[:: 3].numel()].repeat(
                -(-x.view(-1)[:: 3].numel() // 5))[: x.view(-1)[:: 3].numel()]
        return x.to(self.dtype)


@st.composite
def choices(draw: st.DrawFn) -> Drawn:
    """Rows that end within a block, columns at the edges of what lanes hold, few and all of them chosen."""
    columns = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 128, 130, 256, 257, 512])))
    return Drawn(rows=draw(st.integers(1, 9)), columns=columns, chosen=draw(st.integers(1, min(columns, 12))),
                 dtype=draw(st.sampled_from(list(TYPES))), levels=draw(st.sampled_from([0, 0, 3])), special=draw(st.booleans()),
                 seed=draw(st.integers(0, 99)))


def held_of(columns: int) -> int:
    return next(one for one in HELD if columns <= one * WARP)


def first_of(x: torch.Tensor, chosen: int) -> torch.Tensor:
    """Places by the definition: NaN above all, equal ones in their order."""
    keys = [[(math.inf if math.isnan(v) else v, math.isnan(v)) for v in row] for row in x.double().tolist()]
    return torch.tensor([sorted(range(len(row)), key=lambda i: (not row[i][1], -row[i][0], i))[:chosen] for row in keys])


def is_right(one: Drawn, options: LaunchOptions, right: str = "", wrong: str = "") -> bool:
    """Whether places and values are those of the definition, bit by bit. Raises EmulationError."""
    x, made = one.elements(), source(TYPES[one.dtype], held_of(one.columns))
    if right:
        assert made.code.count(right) == 1, right
        made = evolve(made, code=made.code.replace(right, wrong))
    memory = {"x": x.view(-1).clone(), "values": torch.full((one.rows * one.chosen,), -7.0, dtype=one.dtype),
              "places": torch.full((one.rows * one.chosen,), -1)}
    run_called(made, (made.launches[0], (one.rows, one.columns, one.chosen)), -(-one.rows // (THREADS // WARP)), memory, options)
    wanted, found = first_of(x, one.chosen), memory["places"].view(one.rows, one.chosen)
    if (x == 0).sum() > 1:  # 0 and -0 are equal, and 0 comes first here
        same = torch.equal(x.gather(1, found).nan_to_num(9e9), x.gather(1, wanted).nan_to_num(9e9))
        same = same and all(len(set(row)) == one.chosen for row in found.tolist())
    else:
        same = torch.equal(found, wanted)
    return same and torch.equal(memory["values"].view_as(found).nan_to_num(9e9), x.gather(1, found).nan_to_num(9e9))


@SETTINGS
@given(one=choices(), order=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_any_choice_is_that_of_the_definition(one: Drawn, order: LaunchOptions, seed: int) -> None:
    assert is_right(one, evolve(order, seed=seed))


WRONG = {
    "the last of equal ones": ("order == other.order && column < other.column", "order == other.order && column > other.column"),
    "negative numbers from behind": ("bits & 0x80000000u ? ~bits : bits | 0x80000000u", "bits | 0x80000000u"),
    "NaN as a number": ("if (x != x) return 0xffffffffu;", "if (x != x) return 0x80000000u;"),
    "columns of the next row": ("column < columns ? order_of", "true ? order_of"),
    "the same again": ("if (lane + i * lanes == column) orders[i] = 0;", ""),
    "half of the lanes": ("apart = lanes / 2", "apart = lanes / 4"),
    "a row too many": ("if (row >= rows) return;", "if (row > rows) return;"),
    "values of the first row": ("values[at] = elements[column];", "values[at] = x[column];"),
    "places of another turn": ("row) * chosen + turn", "row) * chosen + (turn ^ 1)"),
}
CASES = [Drawn(rows=5, columns=60, chosen=6, dtype=torch.bfloat16, levels=3), Drawn(rows=6, columns=130, chosen=8, special=True)]


@pytest.mark.parametrize("name", some(WRONG))
def test_a_wrong_kernel_is_seen(name: str) -> None:
    for one, order in product(CASES, SCHEDULES):
        try:
            if not is_right(one, order, *WRONG[name]):
                return
        except EmulationError:
            return
    pytest.fail("no case and no order tells it from a right one")


def test_calls_through_a_backend() -> None:
    """As the runtime makes them, and what is refused."""
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    body = ChooseRows(emulation, lambda: preset("h200"), Compared(emulation, lambda: False)).topk
    for dtype, shape in ((torch.float32, (2, 3, 60)), (torch.bfloat16, (7, 128))):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        found, wanted = body(x, 4), torch.topk(x, 4, -1)
        assert found is not None and torch.equal(found[0], wanted.values) and torch.equal(x.gather(-1, found[1]), wanted.values)
    x = torch.randn(3, 600)
    refused = [body(x, 4), body(x[:, :60], 4), body(x[:, :60].contiguous(), 4, 0), body(x[:, :60].contiguous(), 4, -1, False),
               body(x[0, :60].double(), 4), body(torch.zeros(3, 40, dtype=torch.int64), 2), body(torch.zeros(0, 40), 2)]
    assert refused == [None] * len(refused)
