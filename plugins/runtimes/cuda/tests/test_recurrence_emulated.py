"""Recurrences through the kernel of recurrence.cu, emulated with every check on; and wrong kernels."""

import math
from itertools import product

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.recurrent_rows import ORDER, Kind, RecurrentRows, rows_of, scalars_of, schedule_for, source, tensors_of
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.recurrence import recurrence
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, RecurrenceCall

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
TYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}


@frozen(kw_only=True)
class Drawn:
    """Sizes of one recurrence, how its decay is given, and where its operands lie."""

    tokens: int
    groups: int
    heads: int  # of a group
    width: int
    terms: int
    rates_each: int = 0  # 0, 1 or -1: all terms
    decay_of_terms: bool = False
    is_delta: bool = False
    begins: str = "state"  # or "turned", "nothing"
    by_token: bool = False
    valid: int | None = None
    skips: bool = False
    scaled: bool = False
    dtype: torch.dtype = torch.float32
    sms: int = 3
    seed: int = 0

    def call(self) -> RecurrenceCall:
        """With normal numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.groups * self.heads

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        def rows(*size: int) -> torch.Tensor:
            return drawn(*size[:1], *size[2:], size[1]).movedim(-1, 1) if self.by_token else drawn(*size)

        of_terms = (self.terms,) if self.decay_of_terms else ()
        decay = (drawn if of_terms else rows)(1, self.tokens, heads, *of_terms).abs()
        decay = decay if self.rates_each else -decay
        state = drawn(1, heads, self.terms, self.width).mT if self.begins == "turned" else drawn(1, heads, self.width, self.terms)
        keys, queries = (drawn(1, self.tokens, self.groups, self.terms) / self.terms**0.5 for _ in range(2))
        rates = -drawn(heads, self.terms if self.rates_each < 0 else 1).abs() if self.rates_each else None
        strength = rows(1, self.tokens, heads).sigmoid() if self.is_delta else None
        valid = None if self.valid is None else torch.tensor([self.valid])
        return RecurrenceCall(None if self.begins == "nothing" else state, decay, rows(1, self.tokens, heads, self.width).to(self.dtype),
                              keys, queries, rates, strength, valid, drawn(heads) if self.skips else None, self.scaled)


@st.composite
def recurrences(draw: st.DrawFn) -> Drawn:
    """Few and many tokens beside tiles, rows of heads that straddle blocks, all ways of decay; only sizes that have a schedule."""
    how = draw(st.sampled_from([(0, False), (1, False), (-1, False), (0, True)]))
    scaled = not how[1] and draw(st.booleans())
    tokens = draw(st.one_of(st.integers(1, 17), st.integers(1, 70)))
    return Drawn(tokens=tokens, groups=draw(st.integers(1, 2)), heads=draw(st.sampled_from([1, 2, 4, 6])),
                 width=draw(st.sampled_from([1, 4, 8, 12, 16, 24, 40])),
                 terms=draw(st.sampled_from([4, 8, 16, 24, 64, 96, 128, 256])),
                 rates_each=how[0], decay_of_terms=how[1], is_delta=draw(st.booleans()),
                 begins=draw(st.sampled_from(["state", "turned", "nothing"])), by_token=draw(st.booleans()),
                 valid=draw(st.one_of(st.none(), st.integers(-1, tokens + 3))), skips=draw(st.booleans()), scaled=scaled,
                 dtype=draw(st.sampled_from(list(TYPES))), sms=draw(st.integers(1, 8)), seed=draw(st.integers(0, 99)))


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory from its first element on."""
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def error(one: Drawn, options: LaunchOptions, right: str = "", wrong: str = "") -> float:
    """How far the worst element is off, beside what sums leave open. Raises EmulationError."""
    call = one.call()
    kind, all_rows = Kind.of(call), rows_of(call)
    schedule = schedule_for(kind, all_rows, evolve(preset("h200"), sm_count=one.sms))
    if schedule is None:
        return 0.0
    made = source(TYPES[one.dtype], kind, schedule)
    if right:
        assert made.code.count(right) == 1, right
        made = evolve(made, code=made.code.replace(right, wrong))
    out = torch.full((one.tokens * all_rows,), math.nan), call.new_state().fill_(math.nan)
    memory = {name: stored(tensor) for name, tensor in zip(ORDER, tensors_of(call), strict=True) if tensor is not None}
    launch = made.launches[0]
    launch = evolve(launch, arguments=tuple(evolve(argument, operand="") if argument.operand in ORDER and argument.operand not in memory
                                            else argument for argument in launch.arguments))
    run_called(made, (launch, scalars_of(call)), all_rows // schedule.rows, {**memory, "y": out[0], "last": stored(out[1])}, options)
    wanted = recurrence(*(tensor.double() if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors_of(call)),
                        one.scaled)
    scale = max(1.0, *(float(tensor.abs().max()) for tensor in wanted))
    return max(float((mine.view_as(theirs).double() - theirs).abs().nan_to_num(math.inf).max()) for mine, theirs in
               zip(out, wanted, strict=True)) / (1e-5 * scale)


@SETTINGS
@given(one=recurrences(), order=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_any_recurrence_is_that_of_the_operator(one: Drawn, order: LaunchOptions, seed: int) -> None:
    assert error(one, evolve(order, seed=seed)) <= 1.0


WRONG = {
    "the tile before is waited for no longer": ("    ac::cp_async_wait<0>();\n", ""),
    "a tile is read before all of it is there": ("    __syncthreads();", "    __syncwarp();"),
    "one stage for two tiles": ("    Stage& stage = stages[first / tile % 2];", "    Stage& stage = stages[0];"),
    "padding counts": ("min(static_cast<long long>(tokens), valid[0])", "min(static_cast<long long>(tokens), valid[0] + 1)"),
    "more values than a tile has": ("value.token = max(tokens, tile);", "value.token = tokens;"),
    "fewer tokens than none": ("max(0ll, min(static_cast<long long>(tokens), valid[0]))", "min(static_cast<long long>(tokens), valid[0])"),
    "padding is not zero": ("i % rows] = 0.0f;", "i % rows] = 1.0f;"),
    "keys of the first group": ("keys += group * key_group;", ""),
    "queries of the first group": ("queries += group * query_group;", ""),
    "decays of the first head": ("first_row / rows_of_head * decay_head : 0;", "0 * decay_head : 0;"),
    "a state whose rows lie otherwise": ("(head) * rows_of_head * terms + row % rows_of_head * state_row",
                                         "(head) * rows_of_head * terms + row % rows_of_head * terms"),
    "rates of the head before": ("rates[head * terms + term]", "rates[max(head - 1, 0) * terms + term]"),
    "a rate of the head before": ("rates_each == 1 ? rates[head]", "rates_each == 1 ? rates[first_row / rows_of_head]"),
    "decays of the first row's head": ("head * decay_head;", "first_row / rows_of_head * decay_head;"),
    "a delta rule that reads the state before it decays": ("(has_terms ? all : factor[0] * all)", "all"),
    "and of terms": ("has_terms ? s[r][j] * factor[j] : s[r][j]", "s[r][j]"),
    "a part of a sum": ("float sum = parts[0] + parts[1];", "float sum = parts[0];"),
    "another part of a sum": ("sum += parts[2] + parts[3];", "sum += parts[2];"),
    "what lies behind the last token": ("const bool here = first + quad.token < live;", "const bool here = true;"),
    "queries before the token is added": ("fmaf(s[r][j], query[j], sum[j % chains])",
                                        "fmaf(s[r][j] - added * key[j], query[j], sum[j % chains])"),
    "sums of the neighbour's token": ("const bool upper = (lane & offset) != 0;", "const bool upper = (lane & offset) == 0;"),
    "rows of the next block": ("+ first_row + row] = sum + skipped;", "+ first_row + row + 1] = sum + skipped;"),
    "the last state of the row before": ("    const int row = first_row + row_of_block + r * apart;\n",
                                       "    const int row = first_row + max(row_of_block + r * apart - 1, 0);\n"),
    "strengths of the first head": ("head * strength_head;", "first_row / rows_of_head * strength_head;"),
    "a tile of tokens again": ("    queries += tile * query_token;\n", ""),
    "values of a tile again": ("    x += tile * x_token;\n", ""),
    "rows behind the last token": ("const bool here = first + value.token < live;", "const bool here = first + value.token < tokens;"),
    "a last state whose terms lie otherwise": ("last[begin + (term + j) * state_term]", "last[begin + term + j]"),
    "what is not scaled": ("of_row * step : of_row", "of_row : of_row"),
    "what is skipped is of the first head": ("? skip[head] :", "? skip[0] :"),
    "what is skipped is forgotten": ("sum + skipped;", "sum;"),
}
CASES = [Drawn(tokens=70, groups=2, heads=2, width=24, terms=64, rates_each=1, begins="turned", valid=45, skips=True, scaled=True, sms=1),
         Drawn(tokens=50, groups=1, heads=64, width=1, terms=16, rates_each=-1, by_token=True, sms=2),
         Drawn(tokens=43, groups=2, heads=1, width=16, terms=128, decay_of_terms=True, is_delta=True, sms=2),
         Drawn(tokens=70, groups=2, heads=2, width=24, terms=96, is_delta=True, by_token=True, begins="turned", valid=66),
         Drawn(tokens=3, groups=1, heads=1, width=32, terms=64, valid=-2),
         Drawn(tokens=15, groups=1, heads=1, width=12, terms=256, rates_each=1, scaled=True, skips=True, by_token=True),
         Drawn(tokens=20, groups=1, heads=1, width=32, terms=512, dtype=torch.float16, rates_each=1, scaled=True)]


@pytest.mark.parametrize("name", some(WRONG))
def test_a_wrong_kernel_is_seen(name: str) -> None:
    right, wrong = WRONG[name]
    for one, order in product(CASES, SCHEDULES):
        try:
            if error(one, order, right, wrong) > 1.0:
                return
        except EmulationError:
            return
    pytest.fail("no case and no order tells it from a right one")


def test_what_is_drawn_has_kernels() -> None:
    for one in CASES:
        assert error(one, SCHEDULES[0]) <= 1.0
        assert schedule_for(Kind.of(one.call()), one.groups * one.heads * one.width, preset("h200")) is not None


@pytest.mark.parametrize("case", range(len(CASES)))
def test_calls_through_a_backend(case: int) -> None:
    """As the runtime makes them: whose addresses, copies of what lies otherwise; and what is refused."""
    one = CASES[case]
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    kernels = RecurrentRows(emulation, lambda: evolve(preset("h200"), sm_count=one.sms))
    call = one.call()
    apart = RecurrenceCall(*(tensor if tensor is None or not tensor.is_floating_point() or tensor is call.state
                             else torch.stack([tensor, tensor], -1)[..., 0] for tensor in tensors_of(call)), one.scaled)
    for given_call in (call, apart):
        found = kernels.laid(given_call)
        assert found is not None
        laid, _ = found
        out = torch.full(laid.x.shape, math.nan), laid.new_state().fill_(math.nan)
        kernels(laid, out)
        for mine, theirs in zip(out, recurrence(*tensors_of(call), one.scaled), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert call.state is None or kernels.laid(evolve(call, state=torch.stack([call.state, call.state], -1)[..., 0])) is None
    assert kernels.laid(evolve(call, keys=call.keys.half())) is None and RecurrentRows(emulation, lambda: None).laid(call) is None


@pytest.mark.compile
@pytest.mark.parametrize("kind", [
    Kind(terms=128, rows_of_head=64, rows_of_group=5120, rates_each=1), Kind(terms=16, rows_of_head=1, rows_of_group=5120, rates_each=16),
    Kind(terms=128, rows_of_head=128, rows_of_group=256, is_delta=True), Kind(terms=256, rows_of_head=64, rows_of_group=1536, rates_each=1),
    Kind(terms=128, rows_of_head=128, rows_of_group=128, is_delta=True, decay_of_terms=True)])
def test_it_builds_without_spilling(kind: Kind) -> None:
    schedule = schedule_for(kind, 5120, preset("h200"))
    assert schedule is not None
    kernel = CudaBackend().build(source(DType.F32, kind, schedule), preset("h200"))
    assert kernel.resources.spill_bytes == 0 and kernel.resources.registers * schedule.threads <= 65536
