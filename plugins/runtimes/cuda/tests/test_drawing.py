"""Draws from 16-bit logits, emulated and on a device: the tokens that transformers' processors leave, and the one that rings first."""

import logging
import math
from typing import Any

import pytest
import torch
import transformers
from agentcompile_cuda_kit.targets import PRESETS, preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.drawing import BLOCK_ELEMENTS, THREADS, Drawing, source
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import ContractError, DType, Odds, scores_of

HALVES = (torch.float16, torch.bfloat16)
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=60)
CLOSE = 3e-5  # of the probability: nearer to top_p the order of a sum decides
ODDS = st.builds(Odds, temperature=st.sampled_from([1.0, 0.6, 0.05, 2.5]), top_k=st.sampled_from([0, 1, 2, 7, 40, 5000]),
                 top_p=st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.9, 0.99]), min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]))
WHERE = ["emulated", pytest.param("cuda", marks=pytest.mark.device)]


@pytest.fixture(scope="module", params=WHERE)
def drawing(request: pytest.FixtureRequest) -> Drawing:
    if request.param == "cuda":
        backend = CudaBackend()
        return Drawing(backend, backend.live_target, lambda: False)
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    return Drawing(emulation, lambda: preset("h200"), lambda: False)


def place(drawing: Drawing) -> str:
    return "cuda" if isinstance(drawing._kernels.backend, CudaBackend) else "cpu"


@st.composite
def logits_of(draw: Any) -> torch.Tensor:
    """Spread out, with many equals, alike, with large ones, or with some that are left out already."""
    count, seed = draw(st.sampled_from([1, 2, 7, 8, 9, 64, 250, 1000, 2049, 6200])), draw(st.integers(0, 999))
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    kind = draw(st.sampled_from(["normal", "equals", "alike", "large", "zeros", "left out"]))
    made = {"normal": normal * 3, "equals": (normal * 2).round(), "alike": torch.full_like(normal, -1.5), "large": normal * 300,
            "zeros": torch.where(normal > 0, 0.0, -0.0), "left out": torch.where(normal > 0.3, normal, -math.inf)}[kind]
    if kind == "left out":
        made[seed % count] = 1.0
    return made.to(draw(st.sampled_from(HALVES)))


def by_transformers(logits: torch.Tensor, odds: Odds) -> torch.Tensor:
    chosen = [transformers.TemperatureLogitsWarper(odds.temperature)]
    chosen += [transformers.TopKLogitsWarper(odds.top_k)] if odds.top_k else []
    chosen += [transformers.TopPLogitsWarper(odds.top_p)] if odds.top_p < 1.0 else []
    chosen += [transformers.MinPLogitsWarper(odds.min_p)] if odds.min_p > 0.0 else []
    return transformers.LogitsProcessorList(chosen)(torch.zeros(1, 1, dtype=torch.int64), logits.float()[None])[0]


def near_the_share(logits: torch.Tensor, odds: Odds) -> bool:
    """Whether some token lies so near to top_p, or to min_p, that two orders of one sum may decide differently."""
    if odds.top_p < 1.0:
        before = scores_of(logits, Odds(temperature=odds.temperature, top_k=odds.top_k))
        held = before.double().sort(stable=True).values.softmax(0).cumsum(0)
        if bool(((held - (1.0 - odds.top_p)).abs() < CLOSE)[:-1].any()):
            return True
    likely = (logits.double() / odds.temperature).softmax(0)
    return odds.min_p > 0.0 and bool(((likely / likely.max() - odds.min_p).abs() < CLOSE * odds.min_p)[likely < likely.max()].any())


@SETTINGS
@given(logits=logits_of(), odds=ODDS)
def test_what_odds_leave_is_what_transformers_processors_leave(logits: torch.Tensor, odds: Odds) -> None:
    found, wanted = scores_of(logits, odds), by_transformers(logits, odds)
    if not near_the_share(logits, odds):
        # Which of equals are kept, the order of a sort decides; transformers' is stable on a device alone.
        assert torch.equal(found.sort().values, wanted.sort().values)


@SETTINGS
@given(logits=logits_of(), odds=ODDS, seed=st.integers(0, 99))
def test_exactly_the_tokens_that_are_left_can_be_drawn(drawing: Drawing, logits: torch.Tensor, odds: Odds, seed: int) -> None:
    """A token whose clock rings at once is drawn if it is left, and any other one if not."""
    scores = scores_of(logits, odds)
    if near_the_share(logits, odds):
        return
    there, count = logits.to(place(drawing)), len(logits)
    likely = scores.softmax(0)
    tokens = (*torch.randint(count, (6,), generator=torch.Generator().manual_seed(seed)).tolist(), int(scores.argmax()))
    for token in dict.fromkeys(tokens):  # of few tokens some are drawn several times, and a draw of one and the same call is the same
        if 0 < float(likely[token]) < 1e-25:
            continue  # too unlikely for any clock
        clocks = torch.ones(count)
        clocks[token] = 1e-30
        found = drawing._drawn(there, odds, clocks.to(there.device))
        assert not bool(found[1])
        assert (int(found[0]) == token) == bool(likely[token] > 0) or count == 1


@SETTINGS
@given(logits=logits_of(), odds=ODDS, seed=st.integers(0, 2**31))
def test_the_first_clock_rings(drawing: Drawing, logits: torch.Tensor, odds: Odds, seed: int) -> None:
    clocks = torch.empty(len(logits)).exponential_(1, generator=torch.Generator().manual_seed(seed))
    ratios = scores_of(logits, odds).double().softmax(0) / clocks.double()
    best = ratios.topk(min(2, len(ratios))).values
    rounding = 1e-5 + 4e-7 * float(logits.float().abs().nan_to_num(0, 0, 0).max()) / odds.temperature  # of an exponent
    if near_the_share(logits, odds) or (len(best) > 1 and float(best[1]) > (1 - rounding) * float(best[0])):
        return
    there = logits.to(place(drawing))
    token, refused = drawing._drawn(there, odds, clocks.to(there.device))
    assert int(token) == int(ratios.argmax()) and not bool(refused)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("count", [1, 9, 300])
def test_what_is_no_probability_is_refused(drawing: Drawing, dtype: torch.dtype, bad: float, count: int) -> None:
    for at in {0, count // 2, count - 1}:
        logits = torch.linspace(-1, 1, count).to(dtype)
        logits[at] = bad
        there = logits.to(place(drawing))
        token, refused = drawing._drawn(there, Odds(top_k=5, top_p=0.9), torch.ones(count, device=there.device))
        assert bool(refused) and 0 <= int(token) < count
    nothing = torch.full((count,), -math.inf, dtype=dtype, device=place(drawing))
    token, refused = drawing._drawn(nothing, Odds(), torch.ones(count, device=nothing.device))
    assert bool(refused) and 0 <= int(token) < count


def test_equals_ring_in_the_order_of_their_indices(drawing: Drawing) -> None:
    logits, clocks = torch.zeros(600, dtype=torch.float16, device=place(drawing)), torch.ones(600, device=place(drawing))
    assert int(drawing._drawn(logits, Odds(), clocks)[0]) == 0
    assert int(drawing._drawn(logits, Odds(top_p=0.25), clocks)[0]) == 450, "the later ones are kept"


def test_equals_are_kept_from_the_end_over_more_blocks_than_a_block_has_threads(drawing: Drawing) -> None:
    count = THREADS * BLOCK_ELEMENTS + 3 * BLOCK_ELEMENTS // 2
    logits, clocks = torch.zeros(count, dtype=torch.float16, device=place(drawing)), torch.ones(count, device=place(drawing))
    for kept in (1, BLOCK_ELEMENTS // 2, BLOCK_ELEMENTS // 2 + 5, count - BLOCK_ELEMENTS - 7):
        logits[:] = 0.0
        logits[0] = 1.0  # the likeliest, which is kept as well
        mass = float(logits.double().softmax(0)[0])
        odds = Odds(top_p=mass + (1.0 - mass) * (kept - 0.5) / (count - 1))
        clocks[:] = 1.0
        clocks[0] = 1e30
        assert int(drawing._drawn(logits, odds, clocks)[0]) == count - kept


def test_it_is_compared_once_for_each_kind_of_odds(drawing: Drawing, monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.randn(97, generator=torch.Generator().manual_seed(1)).half().to(place(drawing))
    clocks, mine = torch.ones(97, device=there.device), Drawing(drawing._kernels.backend, drawing._kernels._target, lambda: False)
    drawn, calls = mine._drawn, list[Odds]()
    monkeypatch.setattr(mine, "_drawn", lambda logits, odds, clocks: calls.append(odds) or drawn(logits, odds, clocks))
    for odds, tried in ((Odds(top_k=3), True), (Odds(top_k=9, temperature=2.0), False), (Odds(top_p=0.5), True), (Odds(top_p=0.4), False)):
        calls.clear()
        assert mine(there, odds, clocks) is not None and (len(calls) > 1) is tried


WRONG = {  # what a kernel may do and still draw the likeliest token of peaked scores
    "top-k of one more": lambda odds: evolve(odds, top_k=odds.top_k + 1), "no top-k": lambda odds: evolve(odds, top_k=0),
    "another top-p": lambda odds: evolve(odds, top_p=odds.top_p / 2), "no top-p": lambda odds: evolve(odds, top_p=1.0),
    "no min-p": lambda odds: evolve(odds, min_p=0.0), "another temperature": lambda odds: evolve(odds, temperature=odds.temperature / 2)}


@pytest.mark.parametrize("wrong", [*WRONG, "the likeliest", "nothing is refused", "raises"])
@pytest.mark.parametrize("kind", ["peaked", "no numbers"])
def test_what_draws_otherwise_is_left_alone_whatever_the_call_that_tries_it(
        drawing: Drawing, wrong: str, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    count = 300
    logits = torch.full((count,), -9.0, dtype=torch.float16) if kind == "peaked" else torch.full((count,), math.nan, dtype=torch.float16)
    logits[7] = 9.0
    there, clocks = logits.to(place(drawing)), torch.ones(count, device=place(drawing))
    odds = {"no min-p": Odds(min_p=0.2), "no top-k": Odds(top_k=20), "top-k of one more": Odds(top_k=20)}.get(wrong, Odds(top_p=0.8))
    mine = Drawing(drawing._kernels.backend, drawing._kernels._target, lambda: False)
    drawn = mine._drawn

    def otherwise(logits: torch.Tensor, odds: Odds, clocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if wrong == "raises":
            raise ContractError("a value does not fit its argument")
        if wrong in WRONG:
            return drawn(logits, WRONG[wrong](odds), clocks)
        token, refused = drawn(logits, odds, clocks)
        return (logits.float().argmax().view(1), refused) if wrong == "the likeliest" else (token, refused & False)

    monkeypatch.setattr(mine, "_drawn", otherwise)
    with caplog.at_level(logging.WARNING):
        assert mine(there, odds, clocks) is None and mine(there, odds, clocks) is None
    assert caplog.text.count("are not used for") == 1


def test_want_of_memory_is_no_verdict(drawing: Drawing, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, logits = Drawing(drawing._kernels.backend, drawing._kernels._target, lambda: False), torch.randn(64).half().to(place(drawing))

    def full(*given: object) -> str:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(mine, "_difference", full)
        assert mine(logits, Odds(), torch.ones(64, device=logits.device)) is None
    assert mine(logits, Odds(), torch.ones(64, device=logits.device)) is not None


@pytest.mark.parametrize("top_k", [9, 10, 1 << 31, (1 << 32) + 1, 1 << 70])
def test_more_than_there_are_is_all(drawing: Drawing, top_k: int) -> None:
    """One more than a thread takes at a time; each token is a draw, and the first of them compares."""
    logits = torch.randn(9, generator=torch.Generator().manual_seed(2)).half().to(place(drawing))
    for token in range(9):
        clocks = torch.ones(9, device=logits.device)
        clocks[token] = 1e-30
        assert int(drawing(logits, Odds(top_k=top_k), clocks)[0]) == token


@pytest.mark.parametrize("top_p", [0.99999, 0.999999, 1.0 - 1e-7, 0.99999998])
def test_a_share_near_all_is_the_one_that_transformers_compares_with(drawing: Drawing, top_p: float) -> None:
    """In fp32, 1 - top_p keeps digits that top_p itself loses."""
    for gap in (10.0, 11.5, 13.8, 16.0, 17.0):
        logits = torch.tensor([0.0, -gap], dtype=torch.float16)
        kept = bool(by_transformers(logits, Odds(top_p=top_p))[1] > -math.inf)
        tail = float(logits.double().softmax(0)[1])
        if abs(tail - (1.0 - top_p)) < 1e-2 * tail:
            continue
        found = drawing._drawn(logits.to(place(drawing)), Odds(top_p=top_p), torch.tensor([1.0, 1e-30], device=place(drawing)))
        assert (int(found[0]) == 1) is kept


@pytest.mark.parametrize("change", ["float32", "two rows", "a slice", "cold", "hot", "clocks of another type", "clocks of another length"])
def test_what_it_does_not_serve_is_the_processors(drawing: Drawing, change: str) -> None:
    logits, clocks, odds = torch.randn(64).half(), torch.ones(64), Odds()
    given_ = {"float32": (logits.float(), odds, clocks), "two rows": (logits.view(2, 32), odds, clocks.view(2, 32)),
              "a slice": (logits[::2], odds, clocks[:32]), "cold": (logits, Odds(temperature=1e-6), clocks),
              "hot": (logits, Odds(temperature=1e9), clocks), "clocks of another type": (logits, odds, clocks.double()),
              "clocks of another length": (logits, odds, clocks[:9])}[change]
    assert drawing(*given_) is None  # type: ignore[arg-type]


def test_nothing_is_tried_while_something_is_captured(drawing: Drawing) -> None:
    busy = Drawing(drawing._kernels.backend, drawing._kernels._target, lambda: True)
    logits = torch.randn(64).half().to(place(drawing))
    assert busy(logits, Odds(), torch.ones(64, device=logits.device)) is None and not busy._served


@pytest.mark.compile
@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_it_builds_without_spills(name: str, dtype: DType) -> None:
    kernel = CudaBackend().build(source(dtype), preset(name))
    assert kernel.resources.spill_bytes == 0 and kernel.resources.registers <= 64
