"""Several greedy steps at once: the tokens of single steps, in as few calls as can be, whatever ends a request and where."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, GraphKind, GraphSet, Workload
from agentcompile_core.plugin.interfaces import DecodeRuntime
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.sampling import Pick
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore

VOCABULARY, CONTEXT, STEPS = 61, 40, 4
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def following(read: list[int]) -> int:
    """The token behind ``read``: it depends on every one of them and on where it is."""
    return sum((7 * place + 3) * (token + place) for place, token in enumerate(read)) % VOCABULARY


def expected(prompt: list[int], count: int, eos: frozenset[int] = frozenset()) -> list[int]:
    found: list[int] = []
    while len(found) < count and (not found or found[-1] not in eos):
        found.append(following([*prompt, *found]))
    return found


class Runtime(DecodeRuntime):
    """Makes steps of a model without weights, which keeps the tokens themselves as keys, and notes what it is asked for and what runs."""

    name, several_steps = "noting", True

    def __init__(self, fails_at: int = -1) -> None:
        self.prepared, self.ran = list[tuple[str, int]](), list[tuple[str, int, int]]()
        self.reasons: dict[int, str] = {}
        self.fails_at = fails_at  # the position that a step fails to read

    def available(self, device: str) -> Literal[True]:
        return True

    def prepare(self, bound: Any, session: Any, steps: int = 1) -> Callable[[], None]:
        self.prepared.append((bound.program.name, steps))
        bound.environment[bound.graph.outputs[0]] = torch.zeros(1, 1, VOCABULARY)  # as a graph of its own has a place of its own
        return Step(self, bound, session, steps)


class Step:
    def __init__(self, runtime: Runtime, bound: Any, session: Any, steps: int) -> None:
        self.runtime, self.bound, self.session, self.steps = runtime, bound, session, steps
        self.reason = runtime.reasons.get(steps, "")
        self.logits = bound.environment[bound.graph.outputs[0]]

    def __call__(self) -> None:
        if self.bound.graph.kind is GraphKind.PREFILL:
            tokens, start, length = (self.bound.environment[name] for name in self.bound.graph.inputs)
            self.read(int(start), tokens[0, : int(length)].tolist())
            return
        self.runtime.ran.append((self.bound.program.name, int(self.session.position), self.steps))
        for _ in range(self.steps):
            self.read(int(self.session.position), [int(self.session.ids)])

    def read(self, start: int, tokens: list[int]) -> None:
        session, place = self.session, self.session.kv.keys[0]
        end = start + len(tokens)
        if start <= self.runtime.fails_at < end:
            raise RuntimeError("the device fell over")
        place[0, start:end, 0, 0] = torch.tensor(tokens, dtype=place.dtype)
        token = following([int(read) for read in place[0, :end, 0, 0].tolist()])
        self.logits.zero_()[0, 0, token] = 1.0
        session.ids.fill_(token)
        session.position.fill_(end)
        session.history[end] = token


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def graphs(model: Any) -> GraphSet:
    from agentcompile_core.stages.capture.language_model import capture_language_model

    return capture_language_model(model, "tiny", Workload(dtype=DType.F32, max_context=CONTEXT, prefill_chunks=(4, 8)))


@pytest.fixture(scope="module")
def made(model: Any, graphs: GraphSet) -> Callable[..., Session]:
    def session(runtime: DecodeRuntime, starts: tuple[int, ...] = (), **attributes: Any) -> Session:
        base = {g.name: framework_program(g) for g in graphs.graphs}
        programs = {**base, **{p.name: p for p in (evolve(base["decode"], start=start) for start in starts)}}
        found = Session(graphs, programs, WeightStore(model, "cpu"), Executables(device="cpu"),
                        kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=runtime,  # type: ignore[arg-type]
                        steps_per_graph=STEPS)
        for name, value in attributes.items():
            setattr(found, name, value)
        return found

    return session


def calls(start: int, steps: int, bounds: list[int], at_once: int) -> list[tuple[str, int, int]]:
    """Program, first position and steps of every call that makes ``steps`` steps from ``start`` on."""
    found, position, end = [], start, start + steps
    while position < end:
        first = max(bound for bound in bounds if bound <= position)
        behind = min([bound for bound in bounds if bound > position] + [CONTEXT])
        size = at_once if at_once <= min(end, behind) - position else 1
        found.append(("decode" if not first else f"decode_from_{first}", position, size))
        position += size
    return found


def prompt_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


REQUEST = st.tuples(st.integers(1, 20), st.integers(1, 20), st.one_of(st.none(), st.integers(0, 19)))  # prompt, count, index of an end


@SETTINGS
@given(requests=st.lists(REQUEST, min_size=1, max_size=3), starts=st.lists(st.integers(1, 39), max_size=3, unique=True),
       at_once=st.sampled_from([1, 2, STEPS, STEPS, 7]), early=st.booleans())
def test_tokens_and_what_follows_are_those_of_single_steps(made: Any, requests: list[tuple[int, int, int | None]], starts: list[int],
                                                          at_once: int, early: bool) -> None:
    runtime = Runtime()
    session = made(runtime, tuple(starts), steps_per_graph=at_once)
    if early:
        session.prepare()
    for seed, (length, count, ends) in enumerate(requests):
        prompt = prompt_of(length, seed)
        everything = expected(prompt[0].tolist(), count)
        eos = everything[ends] if ends is not None and ends < count else None
        wanted = expected(prompt[0].tolist(), count, frozenset() if eos is None else frozenset([eos]))
        del runtime.ran[:]
        found = session.generate(prompt, count, eos_token_id=eos)
        assert found[0, length:].tolist() == wanted
        # A group begins as long as no end was seen, so what ran is the shortest beginning that makes the tokens.
        decoded = [call for call in runtime.ran if call[1] >= length]
        whole = calls(length, count - 1, [0, *starts], at_once)
        assert decoded == whole[: len(decoded)]
        made_by = [0, *(sum(size for _, _, size in whole[: n + 1]) for n in range(len(whole)))]
        assert made_by[len(decoded)] >= len(wanted) - 1 and (not decoded or made_by[len(decoded) - 1] < len(wanted) - 1)
        last = length + len(wanted) - 1
        assert (int(session.position), int(session.ids), session._tokens.at) == (last, wanted[-1], last)
        assert session.history[length : last + 1].tolist() == wanted
        assert session.kv.keys[0][0, :last, 0, 0].tolist() == [*prompt[0].tolist(), *wanted[:-1]]


def test_nothing_is_prepared_within_a_request(made: Any) -> None:
    runtime = Runtime()
    session = made(runtime, (9, 13, 15))
    session.prepare()
    several = [name for name, steps in runtime.prepared if steps > 1]
    assert several == ["decode", "decode_from_15", "decode_from_9"], "two positions hold no four steps"
    assert [steps for _, steps in runtime.prepared if steps > 1] == [STEPS] * 3
    before = list(runtime.prepared)
    session.generate(prompt_of(3, 0), 30)
    assert runtime.prepared == before and {size for _, _, size in runtime.ran} == {1, STEPS}


def test_one_step_per_graph_prepares_and_runs_nothing_else(made: Any) -> None:
    runtime = Runtime()
    session = made(runtime, steps_per_graph=1)
    session.prepare()
    session.generate(prompt_of(3, 0), 20)
    assert {size for *_, size in runtime.ran} == {1} == {size for _, size in runtime.prepared}


def test_both_ways_alternate_in_one_session(made: Any) -> None:
    runtime = Runtime()
    session, prompt = made(runtime), prompt_of(5, 0)
    session.prepare()
    counts = []
    for steps in (STEPS, 1, STEPS, 1):
        session.steps_per_graph = steps
        del runtime.ran[:]
        assert session.generate(prompt, 18)[0, 5:].tolist() == expected(prompt[0].tolist(), 18)
        counts.append(len([call for call in runtime.ran if call[1] >= 5]))
    assert counts == [5, 17, 5, 17]


def test_a_runtime_that_says_nothing_of_several_steps_is_never_given_any(made: Any) -> None:
    class Before(Runtime):
        several_steps = False

        def prepare(self, bound: Any, session: Any) -> Callable[[], None]:  # type: ignore[override]
            return super().prepare(bound, session)

    assert not DecodeRuntime.several_steps and not PythonLoop.several_steps
    runtime = Before()
    session = made(runtime)
    session.prepare()
    assert session.generate(prompt_of(5, 0), 18)[0, 5:].tolist() == expected(prompt_of(5, 0)[0].tolist(), 18)
    assert {size for *_, size in runtime.ran} == {1}


@pytest.mark.parametrize("steps", [1, STEPS])
def test_what_a_runtime_could_not_capture_is_made_one_by_one(made: Any, steps: int) -> None:
    runtime = Runtime()
    runtime.reasons[steps] = "out of memory"
    session = made(runtime)
    session.prepare()
    assert session.generate(prompt_of(5, 0), 18)[0, 5:].tolist() == expected(prompt_of(5, 0)[0].tolist(), 18)
    assert {size for *_, size in runtime.ran} == {1}
    assert sorted(size for name, size in runtime.prepared if name == "decode") == ([1] if steps == 1 else [1, STEPS]), "nor tried again"


def test_a_program_in_pieces_is_captured_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.runtime.bound_program import BoundProgram

    runtime = Runtime()
    monkeypatch.setattr(BoundProgram, "uncapturable", ("asks the host",))
    made(runtime).generate(prompt_of(5, 0), 18)
    assert {size for *_, size in runtime.ran} == {1}


@pytest.mark.parametrize("alone", [False, True])
def test_where_somebody_has_a_say_every_step_is_alone_and_its_logits_are_read(made: Any, alone: bool) -> None:
    from agentcompile_core.runtime.generation.on_scores import alone as on_scores

    runtime, prompt = Runtime(), prompt_of(5, 0)
    session = made(runtime)
    session.prepare()
    session.generate(prompt, 12)
    del runtime.ran[:]
    pick = Pick(processors=lambda ids, scores: scores, stops=lambda ids, scores: torch.tensor([False]),
                alone=on_scores([], frozenset()) if alone else None)
    with torch.inference_mode():
        assert list(session.picking(prompt, 12, pick)) == expected(prompt[0].tolist(), 12)
    assert {size for *_, size in runtime.ran} == {1}


@pytest.mark.parametrize("early", [True, False])
def test_logits_of_single_steps_are_read_where_they_are_left(made: Any, early: bool) -> None:
    session, tokens = made(Runtime()), prompt_of(7, 0)
    if early:
        session.prepare()
    session.teacher_forced(tokens[:, :2])
    session.generate(prompt_of(5, 1), 12)
    wanted = [following(tokens[0, : n + 1].tolist()) for n in range(7)]
    assert session.teacher_forced(tokens).argmax(-1).tolist() == wanted


class Leaves:
    def __init__(self, after: int) -> None:
        self.heard, self.after = list[int](), after

    def put(self, tokens: torch.Tensor) -> None:
        self.heard += tokens.flatten().tolist()
        if len(self.heard) > self.after:
            raise ValueError("enough")

    def end(self) -> None:
        raise AssertionError("nobody listens to the end")


@pytest.mark.parametrize("after", range(5, 16))
def test_a_streamer_that_leaves_in_the_middle_of_a_group_leaves_a_session_that_serves(made: Any, after: int) -> None:
    session, prompt = made(Runtime()), prompt_of(5, 0)
    streamer, wanted = Leaves(after), expected(prompt[0].tolist(), 18)
    with pytest.raises(ValueError, match="enough"):
        session.generate(prompt, 18, streamer=streamer)
    heard = streamer.heard[5:]
    assert heard == wanted[: len(heard)] and len(heard) == after - 4
    assert (int(session.position), int(session.ids)) == (5 + len(heard) - 1, heard[-1])
    assert session.generate(prompt, 18)[0, 5:].tolist() == wanted


@pytest.mark.parametrize("position", range(5, 23))
def test_a_step_that_fails_says_so_and_the_next_request_is_served(made: Any, position: int) -> None:
    runtime, prompt = Runtime(fails_at=position), prompt_of(5, 0)
    session = made(runtime)
    with pytest.raises(RuntimeError, match="the device fell over"):
        session.generate(prompt, 19)
    runtime.fails_at = -1
    assert session.generate(prompt, 19)[0, 5:].tolist() == expected(prompt[0].tolist(), 19)


def test_the_python_loop_makes_as_many_steps_as_it_is_asked_for() -> None:
    ran: list[int] = []
    bound: Any = type("Bound", (), {"run": lambda self: ran.append(1)})()
    loop: Any = PythonLoop()
    for steps in (1, 3):
        del ran[:]
        loop.prepare(bound, None, steps)()
        assert len(ran) == steps
