"""Scans through the kernels of scan_chunks.cu, emulated with every check on, beside the operator in fp64; and wrong kernels."""

import math
from itertools import product

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.compared import CLOSE_RECURRENCES
from agentcompile_runtime_cuda.recurrent_rows import Kind
from agentcompile_runtime_cuda.scan_chunks import (
    FEWEST_TOKENS,
    PIECES_OF_X,
    SCHEDULES,
    ChunkSchedule,
    Scan,
    ScanChunks,
    schedule_for,
    source,
)
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_recurrence_emulated import TYPES, stored

from agentcompile_core.ops.recurrence import recurrence
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, RecurrenceCall

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES as ORDERS
from agentcompile_validator_emulation.module import EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
TARGET = preset("h200")
EPS = torch.finfo(torch.float32).eps
CLOSE = 24.0  # units in the last place of the largest element, a twentieth of what a comparison on a device allows
BY_CHUNK = [ChunkSchedule(chunk=16, rows=16, warps=1), ChunkSchedule(chunk=32, rows=16, warps=2), ChunkSchedule(chunk=32, rows=32, warps=4),
            ChunkSchedule(chunk=64, rows=16, warps=4), ChunkSchedule(chunk=64, rows=32, warps=8), *SCHEDULES]


@frozen(kw_only=True)
class Drawn:
    """Sizes of one scan, what it is given, how strongly it decays and how its kernels work."""

    tokens: int
    schedule: ChunkSchedule
    groups: int = 1
    heads: int = 1  # of a group
    width: int = 16
    terms: int = 16
    rated: bool = False
    begins: str = "state"  # or "turned", "nothing"
    by_token: bool = False
    valid: int | None = None
    skips: bool = False
    scaled: bool = False
    dtype: torch.dtype = torch.bfloat16
    keys_of: torch.dtype = torch.bfloat16  # what they were before
    queries_of: torch.dtype = torch.bfloat16
    exact_until: int = 0  # tokens whose keys and queries were bf16 in any case
    beside: int = 0  # columns between tokens of x that are not of x
    decays: float = 1.0  # of their size
    in_turns: bool = False  # strong ones, and much weaker ones behind them
    growing: bool = False
    seed: int = 0

    @property
    def kind(self) -> Kind:
        """That of the call."""
        return Kind(terms=self.terms, rows_of_head=self.width, rows_of_group=self.heads * self.width, rates_each=int(self.rated),
                    is_scaled=self.scaled)

    @property
    def fits(self) -> bool:
        """Whether there are such kernels."""
        return self.schedule.fits(self.kind, PIECES_OF_X[TYPES[self.dtype]], TARGET)

    def call(self) -> RecurrenceCall:
        """With normal numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.groups * self.heads

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        def rows(*size: int) -> torch.Tensor:
            return drawn(*size[:1], *size[2:], size[1]).movedim(-1, 1) if self.by_token else drawn(*size)

        decay = rows(1, self.tokens, heads).abs() * self.decays
        if self.in_turns:
            decay = torch.where(torch.arange(self.tokens)[None, :, None] % 37 < 5, decay, decay * 1e-3)
        if heads > 1:
            decay = decay * torch.logspace(-3, 0, heads)  # weak and strong ones beside each other
        decay = decay if self.rated or self.growing else -decay
        state = drawn(1, heads, self.terms, self.width).mT if self.begins == "turned" else drawn(1, heads, self.width, self.terms)
        keys, queries = ((drawn(1, self.tokens, self.groups, self.terms) / self.terms**0.5).to(of).float()
                         for of in (self.keys_of, self.queries_of))
        for one in (keys, queries):
            one[:, :self.exact_until] = one[:, :self.exact_until].bfloat16().float()
        x = rows(1, self.tokens, heads, self.width).to(self.dtype)
        if self.beside:
            x = torch.cat([x.flatten(2), x.new_ones(1, self.tokens, self.beside)], -1)[..., :heads * self.width].view(x.shape)
        if self.by_token and self.dtype is torch.bfloat16:
            x = x.clone(memory_format=torch.contiguous_format)
        valid = None if self.valid is None else torch.tensor([self.valid])
        rates, skip = -drawn(heads, 1).abs() if self.rated else None, drawn(heads) if self.skips else None
        first = None if self.begins == "nothing" else state
        return RecurrenceCall(first, decay, x, keys, queries, rates, None, valid, skip, self.scaled)


@st.composite
def scans(draw: st.DrawFn) -> Drawn:
    """Few and many tokens beside chunks; only sizes that have kernels."""
    tokens = draw(st.one_of(st.integers(1, 33), st.integers(1, 150)))
    one = Drawn(tokens=tokens, schedule=draw(st.sampled_from(BY_CHUNK)), groups=draw(st.integers(1, 2)), heads=draw(st.integers(1, 2)),
                width=draw(st.sampled_from([16, 32, 48, 64])), terms=draw(st.sampled_from([16, 32, 64, 128])), rated=draw(st.booleans()),
                begins=draw(st.sampled_from(["state", "turned", "nothing"])), by_token=draw(st.booleans()),
                valid=draw(st.one_of(st.none(), st.integers(-1, tokens + 3))), skips=draw(st.booleans()),
                scaled=draw(st.booleans()), dtype=draw(st.sampled_from([torch.bfloat16, *TYPES])),
                keys_of=draw(st.sampled_from(list(TYPES))),
                queries_of=draw(st.sampled_from(list(TYPES))), exact_until=draw(st.sampled_from([0, 0, 20])),
                beside=draw(st.sampled_from([0, 8])),
                decays=draw(st.sampled_from([0.01, 1.0, 30.0])), in_turns=draw(st.booleans()), seed=draw(st.integers(0, 99)))
    return one if one.fits else evolve(one, schedule=BY_CHUNK[0], width=16)


def run(one: Drawn, call: RecurrenceCall, out: tuple[torch.Tensor, torch.Tensor], options: LaunchOptions,
        right: str = "", wrong: str = "") -> None:
    """Both kernels, ``right`` in their text replaced by ``wrong``. Raises EmulationError."""
    made = source(TYPES[one.dtype], one.kind, one.schedule)
    if right:
        texts = [made.code, *(text for name, text in made.headers if "agentcompile" not in name)]
        assert sum(text.count(right) for text in texts) == 1, right
        headers = tuple((name, text.replace(right, wrong)) for name, text in made.headers)
        made = evolve(made, code=made.code.replace(right, wrong), headers=headers)
    scan = Scan.of(call, out, one.schedule)
    for name in ("key_pieces", "query_pieces", "own_pieces", "of_keys"):
        between = scan.tensors[name]
        if between is not None:
            between.fill_(math.nan)
    for index, launch in enumerate(made.launches):
        names = [argument.name for argument in launch.arguments if argument.addressed]
        memory = {name: stored(tensor) for name, tensor in zip(names, scan.of_launch(index), strict=True) if tensor is not None}
        is_null = {name for name in names if name not in memory}
        launch = evolve(launch, arguments=tuple(evolve(argument, operand="") if argument.name in is_null else argument
                                                for argument in launch.arguments))
        run_called(made, (launch, scan.scalars[index]), scan.blocks[index], memory, options)


def errors(one: Drawn, options: LaunchOptions, right: str = "", wrong: str = "") -> tuple[float, float]:
    """How far the worst element of y and of the last state is off, in units in the last place of the largest. Raises EmulationError."""
    call = one.call()
    out = torch.full(call.x.shape, math.nan), call.new_state().fill_(math.nan)
    run(one, call, out, options, right, wrong)
    state, decay, x, keys, queries, rates, skip = (None if given is None else given.double() for given in (
        call.state, call.decay, call.x, call.keys, call.queries, call.rates, call.skip))
    assert decay is not None
    wanted = recurrence(state, decay, x, keys, queries, rates, None, call.valid, skip, call.scaled)
    found = [float((mine.double() - theirs).abs().nan_to_num(math.inf).max() / theirs.abs().max().clamp_min(1e-30)) / EPS
             for mine, theirs in zip(out, wanted, strict=True)]
    return found[0], found[1]


@SETTINGS
@given(one=scans(), order=st.sampled_from(ORDERS), seed=st.integers(0, 99))
def test_any_scan_is_that_of_the_operator(one: Drawn, order: LaunchOptions, seed: int) -> None:
    assert max(errors(one, evolve(order, seed=seed))) <= CLOSE < CLOSE_RECURRENCES


@pytest.mark.parametrize("decays", [0.001, 0.1, 3.0, 1000.0])
@pytest.mark.parametrize("given", [{}, {"keys_of": torch.float32, "dtype": torch.float32}, {"growing": True}])
def test_errors_of_many_tokens_are_those_of_steps_or_less(decays: float, given: dict) -> None:
    """Beside the operator in fp32: what many tokens of x of a thousand, strongly and weakly decaying in turns, leave in fp64."""
    one = Drawn(tokens=300, schedule=ChunkSchedule(chunk=64, rows=32, warps=4), width=32, terms=64, skips=True, decays=decays,
                in_turns=True, **given)
    if one.growing and decays > 0.1:
        one = evolve(one, decays=0.01)
    call = one.call()
    call = evolve(call, x=call.x * 1000)
    given_names = {name: getattr(call, name) for name in ("state", "decay", "x", "keys", "queries", "skip")}
    double = {name: None if tensor is None else tensor.double() for name, tensor in given_names.items()}
    exact, steps = (recurrence(**of) for of in (double, given_names))
    out = torch.full(call.x.shape, math.nan), call.new_state().fill_(math.nan)
    run(one, call, out, ORDERS[0])
    for mine, of_steps, right in zip(out, steps, exact, strict=True):
        mistakes = [float((found.double() - right).abs().max() / right.abs().max()) / EPS for found in (mine, of_steps)]
        assert mistakes[0] <= max(2.0 * mistakes[1], 4.0), mistakes


CASES = [Drawn(tokens=45, schedule=BY_CHUNK[0], groups=2, heads=2, terms=32, rated=True, scaled=True, skips=True, valid=40,
               begins="turned"),
         Drawn(tokens=70, schedule=BY_CHUNK[2], groups=2, heads=2, width=32, terms=64, keys_of=torch.float32, dtype=torch.float32,
               skips=True, by_token=True),
         Drawn(tokens=130, schedule=BY_CHUNK[3], groups=2, width=32, terms=64, scaled=True, growing=True, decays=0.01, valid=129),
         Drawn(tokens=100, schedule=BY_CHUNK[4], heads=2, width=64, terms=128, queries_of=torch.float16, dtype=torch.float16, decays=0.1,
               skips=True, exact_until=50),
         Drawn(tokens=70, schedule=SCHEDULES[2], width=64, terms=64, decays=300.0, begins="nothing"),
         Drawn(tokens=3, schedule=BY_CHUNK[1], terms=32, valid=-2),
         Drawn(tokens=41, schedule=BY_CHUNK[1], heads=2, terms=128, valid=37, beside=8),
         Drawn(tokens=150, schedule=ChunkSchedule(chunk=64, rows=32, warps=4), width=32, terms=64, decays=1000.0, in_turns=True),
         Drawn(tokens=64, schedule=ChunkSchedule(chunk=64, rows=32, warps=4), width=32, terms=128, decays=3e38, keys_of=torch.float32),
         Drawn(tokens=40, schedule=BY_CHUNK[2], width=32, terms=32, keys_of=torch.float16, decays=0.1)]
FIRST = (1, 0, 3, 8)  # cases that tell most of these, tried first: each is a build
WRONG = {
    "what a step reads is waited for no longer": ("    ac::cp_async_wait<0>();\n", ""),
    "a step before all of it is there": ("    __syncthreads();  // what the step", "    __syncwarp();  // what the step"),
    "a state that is still read": ("      __syncthreads();  // nobody", "      __syncwarp();  // nobody"),
    "one slot for two steps": ("slot = 1 - slot)", "slot = slot)"),
    "x of one chunk for two": ("shared->tokens[next / chunk % 2];", "shared->tokens[first / chunk % 2];"),
    "padding counts": ("min(static_cast<long long>(tokens), valid[0])", "min(static_cast<long long>(tokens), valid[0] + 1)"),
    "fewer tokens than none": ("max(0ll, min(static_cast<long long>(tokens), valid[0]))", "min(static_cast<long long>(tokens), valid[0])"),
    "padding is not zero": ("i % rows] = 0.0f;", "i % rows] = 1.0f;"),
    "keys of the first group": ("  keys += group * key_group;\n", ""),
    "queries of the first group": ("  queries += group * query_group;\n", ""),
    "pieces of the first group": ("static_cast<long long>(group) * tokens;", "static_cast<long long>(0) * tokens;"),
    "products of the first group": ("(token / step * groups + group) * token_tiles * 64", "(token / step * groups) * token_tiles * 64"),
    "counts of another tile": ("counts[i * groups + group]", "counts[group]"),
    "two pieces of three": ("has_third ? 3 : has_second ? 2 : 1;\n  }", "has_second ? 2 : 1;\n  }"),
    "one piece of two of queries": ("second |= query[1][i] | key[1][i]", "second |= key[1][i]"),
    "one piece of two of keys": ("second |= query[1][i] | key[1][i]", "second |= query[1][i]"),
    "a piece of S less": ("read_state<3>(slots", "read_state<2>(slots"),
    "a piece of weighed x less": ("add_tokens<3>(shared", "add_tokens<2>(shared"),
    "a second piece of queries by one of S": ("read_state<2>(slots", "read_state<1>(slots"),
    "a second piece of keys by one of x": ("add_tokens<2>(shared", "add_tokens<1>(shared"),
    "a third piece that nobody adds": ("      add_tokens<1>(shared", "      if (false) add_tokens<1>(shared"),
    "decays of the first head": ("decay + head * decay_head, decay_token, first, live); };", "decay, decay_token, first, live); };"),
    "a rate of the first head": ("static_cast<double>(rates[head])", "static_cast<double>(rates[0])"),
    "what a float leaves of a sum": ("(end.x - begin.x) + (end.y - begin.y)", "end.x - begin.x"),
    "tokens that come later": ("key + e % 2 <= first + e / 2 * 8", "key + e % 2 <= first + e / 2 * 8 + 1"),
    "a token does not see itself": ("key + e % 2 <= first + e / 2 * 8", "key + e % 2 < first + e / 2 * 8"),
    "an infinite decay": ("log_decay < -1000.0 ? -1000.0 : log_decay", "log_decay"),
    "sums of some lanes": ("offset = 1; offset < 32;", "offset = 1; offset < 8;"),
    "what is not scaled": ("is_scaled ? steps[i] : 1.0f", "is_scaled ? 1.0f : 1.0f"),
    "what decays is not y": (" * decayed[e / 2],", ","),
    "S does not decay": ("fmaf(kept, s[n][e],", "fmaf(1.0f, s[n][e],"),
    "S decays by every piece": ("piece == 0 ? own.kept : 1.0f", "own.kept"),
    "what is skipped is of the first head": ("? skip[head] :", "? skip[0] :"),
    "what is skipped is x of another row": ("x_pair(own, place<rows>(line_of_lane + half * 8,", "x_pair(own, place<rows>(line_of_lane,"),
    "rows behind the last token": ("if (of_half < live) *to = pair;", "*to = pair;"),
    "a state whose rows lie otherwise": ("s_row + row_of_lane) * state_row;", "s_row + row_of_lane) * terms;"),
    "a last state whose terms lie otherwise": ("to[state_term] = ", "to[1] = "),
    "x by another step": (
        "(static_cast<long long>(p) * tokens + first) * x_token", "(static_cast<long long>(p) * tokens + first) * all_rows"),
    "pieces of x of the first group": ("row = group * ", "row = 0 * "),
    "what lies behind the last token": ("const bool here = line + i * lines < left;", "const bool here = true;"),
    "and in other schedules": ("const bool here = line < left;", "const bool here = true;"),
    "lines of S lie otherwise": ("half * 8, s_term / 8 + n) + 2 * column", "half * 8, s_term / 8 + (n ^ 1)) + 2 * column"),
}


@pytest.mark.parametrize("name", some(WRONG))
def test_a_wrong_kernel_is_seen(name: str) -> None:
    right, wrong = WRONG[name]
    cases = [*(CASES[at] for at in FIRST), *(one for at, one in enumerate(CASES) if at not in FIRST)]
    for one, order in product(cases, ORDERS):
        try:
            if max(errors(one, order, right, wrong)) > CLOSE:
                return
        except EmulationError:
            return
    pytest.fail("no case and no order tells it from a right one")


def test_what_is_drawn_has_kernels() -> None:
    for one in CASES:
        assert one.fits and max(errors(one, ORDERS[0])) <= CLOSE


@pytest.mark.parametrize("case", [0, 1, 3])
def test_calls_through_a_backend(case: int) -> None:
    """As the runtime makes them: whose addresses, copies of what lies otherwise; and what is refused."""
    one = evolve(CASES[case], tokens=FEWEST_TOKENS + 7)
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    kernels = ScanChunks(emulation, lambda: TARGET)
    call = one.call()
    apart = evolve(call, **{name: torch.stack([given, given], -1)[..., 0] for name in ("decay", "x", "keys", "queries")
                            for given in (getattr(call, name),)})
    for given_call in (call, apart):
        found = kernels.laid(given_call)
        assert found is not None
        laid, kind = found
        assert kind == one.kind
        out = torch.full(laid.x.shape, math.nan), laid.new_state().fill_(math.nan)
        kernels(laid, out)
        wanted = recurrence(call.state, call.decay, call.x, call.keys, call.queries, call.rates, None, call.valid, call.skip,
                            call.scaled)
        for mine, theirs in zip(out, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert kernels.laid(evolve(call, state=torch.stack([call.state, call.state], -1)[..., 0])) is None
    assert kernels.laid(evolve(call, keys=call.keys.half())) is None and ScanChunks(emulation, lambda: None).laid(call) is None
    assert kernels.laid(evolve(one, tokens=FEWEST_TOKENS - 1, valid=None).call()) is None
    assert kernels.laid(evolve(call, strength=torch.ones(call.decay.shape), scaled=False)) is None


@pytest.mark.compile
@pytest.mark.parametrize(("target", "terms", "dtype"), [
    ("h200", 128, DType.BF16), ("h200", 256, DType.BF16), ("h200", 128, DType.F32), ("h200", 64, DType.F16),
    ("a100", 128, DType.BF16), ("a100", 256, DType.BF16)])
def test_it_builds_without_spilling(target: str, terms: int, dtype: DType) -> None:
    kind = Kind(terms=terms, rows_of_head=64, rows_of_group=1536, rates_each=1, is_scaled=True)
    of = preset(target)
    x_pieces = PIECES_OF_X[dtype]
    schedule = schedule_for(kind, 5120, x_pieces, of)
    assert schedule is not None
    kernel = CudaBackend().build(source(dtype, kind, schedule, schedule.blocks(kind, x_pieces, of)), of)
    assert kernel.resources.spill_bytes == 0
