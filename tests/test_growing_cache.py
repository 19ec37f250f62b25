"""Sessions over a cache whose memory comes as requests need it: nothing is written that is not held, and tokens are the same."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agentcompile_runtime_cudagraph import CudaGraphRuntime
from agentcompile_runtime_flashkv import growing
from agentcompile_runtime_flashkv.growing import GrowingKVCacheManager
from attrs import evolve
from capture_models import TOKENS, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import Reject, UsageError
from agentcompile_core.installation import program_check
from agentcompile_core.ir.graph import DType, GraphSet, Workload
from agentcompile_core.runtime import holding
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.generation.request import Asked, request
from agentcompile_core.runtime.generation.serve import custom_loop, serve
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.testing.doubles import ReplayingBackend
from agentcompile_core.testing.reserving import HostReserved

CONTEXT, CHUNKS, STARTS = 96, (4, 8), (20, 40)
MODEL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "num_hidden_layers": 2, "max_position_embeddings": 128, "initializer_range": 0.3, **TOKENS}
ROW = 8 * 4  # bytes of one position of one range: one head of 8 fp32
POSITION = 4 * ROW


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", MODEL)


@pytest.fixture(scope="module")
def graphs(model: Any) -> GraphSet:
    found = capture_language_model(model, "tiny", Workload(dtype=DType.F32, max_context=CONTEXT, prefill_chunks=CHUNKS))
    assert found.graphs and found.kv is not None, found.eager_reason
    return found


class Grown:
    """A session over a growing cache, the reservation below it, and the same session over a whole one."""

    def __init__(self, model: Any, graphs: GraphSet, *, limit: int | None = None, captured: bool = False, steps: int = 1) -> None:
        assert graphs.kv is not None
        self.model, self.graphs, self.weights = model, graphs, WeightStore(model, "cpu")
        base = {g.name: framework_program(g) for g in graphs.graphs}
        self.programs = {**base, **{p.name: p for p in (evolve(base["decode"], start=start) for start in STARTS)}}
        executables = Executables(device="cpu", backend=ReplayingBackend() if captured else None)

        def reserve(nbytes: Sequence[int]) -> HostReserved:
            self.reserved = HostReserved(nbytes, ROW, None if limit is None else limit * POSITION)
            return self.reserved

        kv = graphs.kv
        self.cache = GrowingKVCacheManager(reserve, layers=kv.layers, kv_heads=kv.kv_heads, head_dim=kv.head_dim, capacity=kv.capacity,
                                           dtype=torch.float32, device="cpu")
        self.session, self.whole = (
            Session(graphs, self.programs, self.weights, executables, kv_state=state, steps_per_graph=steps,
                    decode=CudaGraphRuntime() if captured else PythonLoop())
            for state in (self.cache, PlainKVCache().allocate(kv, "cpu")))

    def served(self, session: Session, prompts: Any, count: int, **options: Any) -> torch.Tensor:
        asked = request(self.model, Asked(input_ids=prompts, max_new_tokens=count, options={"eos_token_id": None, **options}), self.graphs)
        torch.manual_seed(3)
        return serve(self.model, session, asked, seed=None, streamer=None, say=lambda line: None)


@pytest.fixture
def grown(model: Any, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Grown]:
    def made(ahead: int = 0, **named: Any) -> Grown:
        monkeypatch.setattr(growing, "STEP", 1)
        monkeypatch.setattr(holding, "AHEAD", ahead)  # nothing to hide behind
        return Grown(model, graphs, **named)

    return made


def prompt_of(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(length))


ASKED = st.tuples(st.integers(1, 60), st.integers(1, 36))


@settings(derandomize=True, database=None, deadline=None, max_examples=10, suppress_health_check=["function_scoped_fixture"])
@given(asked=st.lists(ASKED, min_size=1, max_size=3))
@pytest.mark.parametrize("way", ["loop", "captured", "four steps"])
def test_any_requests_in_any_order(grown: Callable[..., Grown], way: str, asked: list[tuple[int, int]]) -> None:
    one = grown() if way == "loop" else grown(holding.AHEAD or 8, captured=True, steps=4 if way == "four steps" else 1)
    places, most = [t.data_ptr() for t in one.cache.keys], one.cache.held
    for length, count in asked:
        prompt = prompt_of(length)
        assert torch.equal(one.session.generate(prompt, count), one.whole.generate(prompt, count))
        one.reserved.check()
        assert one.cache.held >= max(most, length + count) and [t.data_ptr() for t in one.cache.keys] == places
        most = one.cache.held
        if way == "loop":
            assert most <= max(max(n + m, min(CONTEXT, -(-n // 4) * 4 + 4)) for n, m in asked), "no more than asked, or padding writes"


WAYS: list[dict[str, Any]] = [
    {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"do_sample": True, "num_return_sequences": 2}, {"no_repeat_ngram_size": 2},
    {"return_dict_in_generate": True, "output_scores": True}, {"num_beams": 2, "do_sample": True}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_transformers_loops_find_memory_before_they_begin(grown: Callable[..., Grown], options: dict[str, Any], rows: int) -> None:
    one, prompt = grown(), prompt_of(13, rows)
    grew: list[int] = []
    hold = one.cache.hold
    one.cache.hold = lambda positions: (grew.append(positions), hold(positions))[1]  # type: ignore[method-assign]
    found, wanted = (one.served(session, prompt, 20, pad_token_id=0, **options) for session in (one.session, one.whole))
    tokens = [made if isinstance(made, torch.Tensor) else made["sequences"] for made in (found, wanted)]
    assert torch.equal(*tokens) and grew == [33]
    one.reserved.check()


def test_a_padded_prompt_needs_memory_for_its_tokens(grown: Callable[..., Grown]) -> None:
    one = grown()
    prompts = [[0] * 6 + prompt_of(7)[0].tolist(), prompt_of(13)[0].tolist()]
    assert torch.equal(*(one.served(session, prompts, 12, pad_token_id=0) for session in (one.session, one.whole)))
    one.reserved.check()


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"do_sample": True, "return_dict_in_generate": True}], ids=str)
def test_custom_generate(grown: Callable[..., Grown], options: dict[str, Any]) -> None:
    one, found = grown(), []
    for session in (one.session, one.whole):
        torch.manual_seed(5)
        made = one.model.generate(prompt_of(11), max_new_tokens=17, eos_token_id=None, pad_token_id=0,
                                  custom_generate=custom_loop(session, lambda line: None), **options)
        found.append(made if isinstance(made, torch.Tensor) else made["sequences"])
    assert torch.equal(*found) and one.cache.held >= 28 and len([asked for asked in one.reserved.asked if asked[0] >= 28 * ROW]) == 1
    one.reserved.check()


def test_teacher_forcing_and_the_checks_of_programs(grown: Callable[..., Grown]) -> None:
    one, tokens = grown(), prompt_of(30)
    assert torch.equal(one.session.teacher_forced(tokens), one.whole.teacher_forced(tokens))
    one.reserved.check()
    again = grown()
    notes: list[str] = []
    assert program_check.difference(again.session, again.programs, again.weights, None, notes) == "" and notes == []  # type: ignore[arg-type]
    again.reserved.check()
    assert again.cache.held <= 4, "what steps at high positions needed is given back"
    assert max(asked[0] for asked in again.reserved.asked) >= (STARTS[-1] + 1) * ROW
    assert program_check.difference_of_prompts(again.session, again.programs, again.weights) == ""
    again.reserved.check()


def test_a_step_at_a_position_without_memory_is_not_compared_and_that_is_said(grown: Callable[..., Grown]) -> None:
    one, notes = grown(limit=30), []
    assert program_check.difference(one.session, one.programs, one.weights, None, notes) == ""  # type: ignore[arg-type]
    (note,) = notes
    assert note.startswith("decode_from_40 was not compared with the framework's operators, for lack of memory: 42 positions of the KV ")


def test_single_reads_hold_what_they_write(grown: Callable[..., Grown]) -> None:
    one, prompt, logits = grown(), prompt_of(24), []
    for session in (one.session, one.whole):
        with torch.inference_mode():
            found = [session.read(prompt[:, :3]), session.read_chunk("prefill_8", prompt[:, :11], 3)]
            found += [session.read_next(token, 11 + i) for i, token in enumerate(prompt[0, 11:].tolist())]
        logits.append(torch.stack(found))
    assert torch.equal(*logits) and one.cache.held == 24
    one.reserved.check()


def test_preparing_holds_what_warm_ups_write(grown: Callable[..., Grown]) -> None:
    one = grown(8, captured=True)
    one.session.prepare()
    one.reserved.check()
    assert max(CHUNKS) <= one.cache.held <= max(CHUNKS) + 8
    one.session.generate(prompt_of(9), 11)
    late = grown(8, captured=True)
    late.session.generate(prompt_of(9), 40)
    late.session._steps.clear()
    with torch.inference_mode():
        late.session.prepare()  # where the last request ended
    late.reserved.check()


class Heard:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("options", [None, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_a_request_beyond_the_memory_changes_nothing_and_a_smaller_one_is_served(grown: Callable[..., Grown],
                                                                                 options: dict[str, Any] | None) -> None:
    one, prompt, heard = grown(limit=40), prompt_of(20), Heard()
    first = one.session.generate(prompt_of(5), 7)
    states = {name: tensor.clone() for name, tensor in one.session.states.items()}
    held = one.cache.held
    with pytest.raises(UsageError, match=r"^41 positions of the KV cache need \S+ MiB more than it holds, and \d+ bytes are free; use a "):
        if options is None:
            one.session.generate(prompt, 21, streamer=heard)
        else:
            one.served(one.session, prompt, 21, **options)
    assert heard.tokens == [] and one.cache.held == held
    assert all(torch.equal(tensor, states[name]) for name, tensor in one.session.states.items())
    assert torch.equal(one.session.generate(prompt, 20), one.whole.generate(prompt, 20))
    assert torch.equal(one.session.generate(prompt_of(5), 7), first)
    one.reserved.check()


def test_a_request_that_fits_what_is_there_asks_for_nothing(grown: Callable[..., Grown]) -> None:
    one = grown()
    one.session.generate(prompt_of(20), 21)
    asked = len(one.reserved.asked)
    for length, count in ((20, 21), (1, 40), (33, 3)):
        one.session.generate(prompt_of(length), count)
    assert len(one.reserved.asked) == asked


@pytest.mark.parametrize("way", ["loop", "captured", "four steps"])
def test_what_is_given_back_comes_again_and_nothing_is_captured_for_it(grown: Callable[..., Grown], way: str) -> None:
    one = grown() if way == "loop" else grown(holding.AHEAD or 8, captured=True, steps=4 if way == "four steps" else 1)
    one.session.prepare()
    wanted = {count: one.whole.generate(prompt_of(20), count) for count in (30, 4)}
    assert torch.equal(one.session.generate(prompt_of(20), 30), wanted[30])
    places, steps = [t.data_ptr() for t in (*one.cache.keys, *one.cache.values)], dict(one.session._steps)
    for count in (30, 4, 30):
        one.session.give_back()
        assert one.cache.held == 0 and one.reserved.held_bytes == 0
        one.session.ready(20, count)
        held, asked = one.cache.held, len(one.reserved.asked)
        assert torch.equal(one.session.generate(prompt_of(20), count), wanted[count])
        assert one.cache.held == held >= 20 + count and len(one.reserved.asked) == asked, "made ready before, a request takes no memory"
        one.reserved.check()
    assert [t.data_ptr() for t in (*one.cache.keys, *one.cache.values)] == places
    assert {name: one.session._steps[name] for name in steps} == steps
    one.session.give_back()
    assert torch.equal(one.session.teacher_forced(prompt_of(30)), one.whole.teacher_forced(prompt_of(30)))
    one.whole.give_back()  # a cache that is all there stays
    assert torch.equal(one.whole.generate(prompt_of(20), 4), wanted[4])


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_loops_of_transformers_find_again_what_was_given_back(grown: Callable[..., Grown], options: dict[str, Any]) -> None:
    one, prompt = grown(), prompt_of(13)
    made = [one.served(session, prompt, 20, pad_token_id=0, **options) for session in (one.whole, one.session)]
    one.session.give_back()
    made.append(one.served(one.session, prompt, 20, pad_token_id=0, **options))
    first, *others = [found if isinstance(found, torch.Tensor) else found["sequences"] for found in made]
    assert all(torch.equal(first, found) for found in others)
    one.reserved.check()


def test_a_running_request_keeps_its_memory(grown: Callable[..., Grown]) -> None:
    one, refused = grown(), []

    class Greedy(Heard):
        def put(self, tokens: torch.Tensor) -> None:
            with pytest.raises(UsageError, match="busy with another request"):
                one.session.give_back()
            refused.append(one.cache.held)

    one.session.generate(prompt_of(9), 5, streamer=Greedy())
    assert len(refused) == 6 and min(refused) >= 14
    one.session.give_back()
    assert one.cache.held == 0


class OldCache(PlainKVCache):
    """A plugin of before: it allocates, and knows nothing of growing."""

    name = "old"
    preference = 50


def test_installing_asks_the_backend_and_an_old_plugin_is_served_as_before(
        model: Any, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_runtime_flashkv import FlashKVRuntime

    from agentcompile_core.installation.runtimes import kv_state

    class Reserving(ReplayingBackend):
        answers: Any = None

        def reserve(self, nbytes: Sequence[int]) -> Any:
            return self.answers if self.answers is not None else HostReserved(nbytes)

    class Guarding:
        def guard(self, call: Callable[[], Any], **named: Any) -> Any:
            return call()

    class Chosen:
        catalog, config = Guarding(), None

    monkeypatch.setattr("agentcompile_runtime_flashkv.SMALL_BYTES", 0)
    monkeypatch.setattr("agentcompile_runtime_flashkv.SMALL_RANGE_BYTES", 0)
    runtime: Any = FlashKVRuntime()
    monkeypatch.setattr("agentcompile_core.installation.runtimes._kv_runtime", lambda ctx, notes: runtime)
    backend, notes, ctx = Reserving(), list[str](), Chosen()
    assert graphs.kv is not None

    def state() -> Any:
        return kv_state(graphs.kv, Executables(device="cpu", backend=backend), ctx, notes)  # type: ignore[arg-type]

    assert isinstance(state(), GrowingKVCacheManager) and state().held_bytes <= graphs.kv.nbytes and notes == []
    backend.answers = Reject("there is no room")
    assert state().held == CONTEXT and notes == [f"KV cache: memory for all {CONTEXT} positions is taken at once: there is no room"]
    runtime = OldCache()
    old = state()
    assert holding.held(old) == CONTEXT and holding.held_bytes(old) == graphs.kv.nbytes
    holding.hold(old, CONTEXT + 5)
    holding.give_back(old, 0)
