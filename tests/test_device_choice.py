"""Tokens chosen on the device: those that the host would have chosen, from as many random numbers, with no wait in between."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from processor_cases import CHOSEN, PROMPT, SETTINGS, VOCABULARY, processors

from agentcompile_core.errors import Reject, UsageError
from agentcompile_core.ops.odds import Odds, scores_of
from agentcompile_core.runtime import device_choice
from agentcompile_core.runtime.device_choice import DeviceChoice, DeviceChoices
from agentcompile_core.runtime.generation.on_scores import alone
from agentcompile_core.runtime.sampling import Pick
from agentcompile_core.runtime.token_loop import LAG, Afterwards, AtOnce, Picking, collected, token_stream

CAPACITY = 24


class Session:
    """Whose step makes the logits of the token that is there, at the position that is there; it captures by calling."""

    def __init__(self, prompt: list[int], *, refuses: str = "", seed: int = 3) -> None:
        self.table = torch.randn(CAPACITY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
        self.ids, self.position = torch.zeros((1, 1), dtype=torch.int64), torch.tensor([len(prompt)])
        self.history = torch.zeros(CAPACITY + 1, dtype=torch.int64)
        self.logits, self.generation, self.captures, self.refuses = torch.zeros(VOCABULARY), 0, 0, refuses
        self.prompt, self.steps = prompt, 0
        self.behind_prompt = self.table[len(prompt), prompt[-1]].clone()

    def begin_again(self) -> None:
        self.steps = 0
        self.position.fill_(len(self.prompt))
        self.behind_prompt = self.table[len(self.prompt), self.prompt[-1]].clone()

    def step(self) -> None:
        self.steps += 1
        self.position += 1
        self.logits.copy_(self.table[int(self.position) % CAPACITY, int(self.ids)])
        self.ids.fill_(int(self.logits.argmax()))

    def step_aside(self) -> None:
        """A replay of which nothing is seen."""

    def last(self) -> torch.Tensor:
        return self.logits if self.steps else self.behind_prompt

    def capture(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1) -> Callable[[], None] | Reject:
        self.captures += 1
        for _ in range(warm_ups):
            run()
        return Reject(self.refuses) if self.refuses else run


def by_host(prompt: list[int], count: int, pick: Pick) -> list[int]:
    session = Session(prompt)
    return list(token_stream(count, session.step, Picking(pick, torch.tensor([prompt]), count, session, session.last)))


def begun(pick: Pick, choices: DeviceChoices, prompt: tuple[int, ...] = (1,)) -> DeviceChoice:
    assert pick.alone is not None
    return choices.begin(pick, pick.alone, torch.tensor([prompt]))


def by_device(prompt: list[int], count: int, pick: Pick, session: Session, choices: DeviceChoices) -> list[int]:
    assert pick.alone is not None
    choice = begun(pick, choices, tuple(prompt))
    return list(choice.tokens(count, session.step, AtOnce(session.history, len(prompt), pick.alone.eos), session.last))


def pick_of(chosen: tuple[tuple[str, Any], ...], eos: frozenset[int], do_sample: bool, length: int) -> Pick:
    made = processors(chosen)
    ends = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(length)])
    if eos:
        ends.append(transformers.EosTokenCriteria(sorted(eos)))
    return Pick(processors=made, stops=ends, do_sample=do_sample, alone=alone(made, eos))


@SETTINGS
@given(prompt=PROMPT, chosen=CHOSEN, count=st.integers(1, 12), do_sample=st.booleans(), seed=st.integers(0, 2**31),
       eos=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=5))
def test_the_device_chooses_what_the_host_does_and_draws_no_more(prompt, chosen, count, do_sample, seed, eos) -> None:
    pick = pick_of(chosen, eos, do_sample, len(prompt) + count)
    torch.manual_seed(seed)
    wanted = by_host(prompt, count, pick)
    after = torch.rand(1)
    session = Session(prompt)
    choices = DeviceChoices(session)
    torch.manual_seed(seed)
    found = by_device(prompt, count, pick, session, choices)
    assert found == wanted and torch.equal(torch.rand(1), after)
    assert session.history[len(prompt) : len(prompt) + len(found)].tolist() == found


@SETTINGS
@given(prompt=PROMPT, chosen=CHOSEN, count=st.integers(1, 12), taken=st.integers(0, 12), seed=st.integers(0, 99))
def test_who_stops_listening_leaves_the_random_numbers_behind_what_was_heard(prompt, chosen, count, taken, seed) -> None:
    """Also where the host hears of a token LAG steps after it was drawn."""
    class Late(AtOnce):
        def __init__(self) -> None:
            super().__init__(session.history, len(prompt), frozenset())
            self.made: list[int] = []

        def seen(self, index: int):
            self.made.append(int(session.ids))
            if len(self.made) > LAG:
                yield self.made[len(self.made) - LAG - 1]

        def left(self):
            yield from self.made[-LAG:]

    taken = min(taken, count)
    pick = pick_of(chosen, frozenset(), True, len(prompt) + count)
    torch.manual_seed(seed)
    wanted = by_host(prompt, taken, pick) if taken else []
    after = torch.rand(1)
    session = Session(prompt)
    torch.manual_seed(seed)
    choice = begun(pick, DeviceChoices(session), tuple(prompt))
    tokens = choice.tokens(count, session.step, Late(), session.last)
    assert [next(tokens) for _ in range(taken)] == wanted
    tokens.close()
    assert torch.equal(torch.rand(1), after)


@SETTINGS
@given(a=CHOSEN, b=CHOSEN)
def test_equal_settings_are_captured_once(a, b) -> None:
    session = Session([1])
    choices = DeviceChoices(session)
    for chosen in (a, b, a):
        by_device([1], 3, pick_of(chosen, frozenset(), True, 4), session, choices)
        session.begin_again()
    same = alone(processors(a), frozenset()).settings == alone(processors(b), frozenset()).settings
    assert session.captures == (1 if same else 2) and same == (a == b)


def test_only_so_many_settings_are_kept() -> None:
    session = Session([1])
    choices = DeviceChoices(session)
    for k in [*range(1, device_choice.KEPT + 2), 1]:
        session.begin_again()
        by_device([1], 3, pick_of((("TopKLogitsWarper", k),), frozenset(), True, 4), session, choices)
    assert session.captures == device_choice.KEPT + 2, "the first was dropped"


def test_what_was_captured_for_another_place_of_the_cache_is_captured_again() -> None:
    session, pick = Session([1]), pick_of((), frozenset(), True, 4)
    choices = DeviceChoices(session)
    for generation in (0, 1, 1):
        session.begin_again()
        session.generation = generation
        by_device([1], 3, pick, session, choices)
    assert session.captures == 2


@SETTINGS
@given(chosen=CHOSEN, places=st.integers(1, 12), do_sample=st.booleans(), seed=st.integers(0, 99))
def test_each_place_of_logits_is_captured_once_and_too_many_are_none(chosen, places: int, do_sample: bool, seed: int) -> None:
    """Programs of later ranges leave their logits elsewhere, in the middle of a request; where nothing is captured they never stay."""
    pick, prompt = pick_of(chosen, frozenset(), do_sample, 21), [3, 5]
    session = Session(prompt)
    where = [torch.zeros(VOCABULARY) for _ in range(places)]
    choices = DeviceChoices(session)

    def step() -> None:
        session.logits = where[session.steps // 2 % places]
        session.step()

    for _ in range(2):
        session.begin_again()
        torch.manual_seed(seed)
        wanted = by_host(prompt, 19, pick)
        after = torch.rand(1)
        torch.manual_seed(seed)
        found = list(begun(pick, choices, tuple(prompt)).tokens(19, step, AtOnce(session.history, len(prompt), frozenset()), session.last))
        assert found == wanted and torch.equal(torch.rand(1), after)
    assert session.captures == min(places, 9, device_choice.PLACES)


def test_what_cannot_be_captured_is_chosen_from_python() -> None:
    session, pick = Session([1], refuses="no backend captures here"), pick_of((), frozenset(), True, 8)
    choices = DeviceChoices(session)
    for _ in range(2):
        session.begin_again()
        torch.manual_seed(5)
        wanted = by_host([1], 6, pick)
        torch.manual_seed(5)
        assert by_device([1], 6, pick, session, choices) == wanted
    assert session.captures == 1, "it is not tried again"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 3])
def test_what_multinomial_refuses_is_refused(value: float, at: int) -> None:
    session, pick = Session([1]), pick_of((), frozenset(), True, 8)
    choices = DeviceChoices(session)
    choice = begun(pick, choices)

    def last() -> torch.Tensor:
        return session.last().fill_(value) if session.steps == at else session.last()

    with pytest.raises(UsageError, match="probabilities of a token contain inf, NaN"):
        list(choice.tokens(6, session.step, AtOnce(session.history, 1, frozenset()), last))
    session.begin_again()
    again = begun(pick, choices)
    assert len(list(again.tokens(6, session.step, AtOnce(session.history, 1, frozenset()), session.last))) == 6, "one request, not the next"


def test_what_ran_behind_the_end_of_a_request_is_nobodys_fault() -> None:
    """The host hears of an end LAG steps later, and what the device made of those may be anything."""
    pick = pick_of((), frozenset(), True, 12)
    session = Session([1])
    torch.manual_seed(4)
    wanted = by_host([1], 3, pick)

    class Late(Afterwards):
        def left(self):
            yield from session.history[1:4].tolist()

    def last() -> torch.Tensor:
        return session.last().fill_(float("nan")) if session.steps >= 3 else session.last()

    session.position.fill_(1)
    torch.manual_seed(4)
    assert list(begun(pick, DeviceChoices(session)).tokens(8, session.step, Late(session.history, 1, 8), last)) == wanted


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, UsageError])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_an_error_of_a_step_comes_through_and_draws_are_given_back(error: type[BaseException], at: int) -> None:
    """Nobody has heard of a token yet: all draws are given back, which are more than the host may be behind."""
    session, pick = Session([1]), pick_of((), frozenset(), True, 20)
    torch.manual_seed(8)
    after = torch.rand(1)

    def step() -> None:
        session.step()
        if session.steps > at:
            raise error("of the step")

    torch.manual_seed(8)
    with pytest.raises(error, match="of the step"):
        list(begun(pick, DeviceChoices(session)).tokens(18, step, Afterwards(session.history, 1, 18), session.last))
    assert torch.equal(torch.rand(1), after)


def test_a_streamer_that_raises_leaves_the_random_numbers_behind_what_it_heard() -> None:
    heard, made = list[int](), list[int]()

    class Streamer:
        def put(self, token: torch.Tensor) -> None:
            heard.append(int(token))
            if len(heard) == 3:
                raise ValueError("enough")

    session, pick = Session([1]), pick_of((), frozenset(), True, 12)

    class Late(AtOnce):
        def seen(self, index: int):
            made.append(int(session.ids))
            if len(made) > LAG:
                yield made[len(made) - LAG - 1]

    torch.manual_seed(6)
    wanted = by_host([1], 3, pick)
    after = torch.rand(1)
    torch.manual_seed(6)
    kept = None
    try:
        tokens = begun(pick, DeviceChoices(session)).tokens(11, session.step, Late(session.history, 1, frozenset()), session.last)
        collected(tokens, Streamer())
    except ValueError as exc:
        kept = exc  # with its traceback, which holds what was running
    assert kept is not None and heard == wanted and torch.equal(torch.rand(1), after)


def test_what_a_captured_choice_reads_stays_as_long_as_the_choice() -> None:
    """A graph holds addresses: the tensors of the processors that were captured outlive the request whose processors they were."""
    session = Session([1])
    session.capture = lambda run, **_: session.step_aside  # type: ignore[method-assign]  # as a graph: it does not hold what ran
    choices, pick = DeviceChoices(session), pick_of((("SuppressTokensLogitsProcessor", [3]),), frozenset(), True, 8)
    read = weakref.ref(pick.processors[0].suppress_tokens)
    list(begun(pick, choices).tokens(3, session.step, AtOnce(session.history, 1, frozenset()), session.last))
    del pick
    gc.collect()
    assert read() is not None
    session.generation += 1
    begun(pick_of((), frozenset(), True, 8), choices)
    gc.collect()
    assert read() is None, "nor longer"


@SETTINGS
@given(prompt=PROMPT, count=st.integers(1, 12), seed=st.integers(0, 2**31), top_k=st.integers(1, 30), serves=st.booleans())
def test_who_draws_in_its_own_way_gets_the_clocks_and_draws_the_same(prompt, count, seed, top_k, serves) -> None:
    pick = pick_of((("TemperatureLogitsWarper", 0.7), ("TopKLogitsWarper", top_k)), frozenset(), True, len(prompt) + count)
    session, asked = Session(prompt), list[Odds]()

    def draw(logits: torch.Tensor, odds: Odds, clocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        asked.append(odds)
        token = (scores_of(logits, odds).softmax(0) / clocks).argmax().view(1)
        return (token, torch.zeros(1, dtype=torch.bool)) if serves else None

    torch.manual_seed(seed)
    wanted = by_host(prompt, count, pick)
    after = torch.rand(1)
    torch.manual_seed(seed)
    assert by_device(prompt, count, pick, session, DeviceChoices(session, draw)) == wanted
    assert torch.equal(torch.rand(1), after) and set(asked) == {Odds(temperature=0.7, top_k=top_k)}
