"""A decode runtime that raises, or returns what is no step, costs its speed: the model is installed and says the same tokens."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from capture_models import TOKENS, tiny
from test_decode_runtime import Offers

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause, Reject, UsageError
from agentcompile_core.installation import runtimes
from agentcompile_core.installation.guarded_decode import GuardedDecode
from agentcompile_core.ir.graph import DType, GraphSet, Workload
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import DecodeRuntime
from agentcompile_core.runtime.bound_program import Piece
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.store import Store
from agentcompile_core.testing.targets import FAKE

MODEL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "num_hidden_layers": 2, "max_position_embeddings": 64, "initializer_range": 0.3, **TOKENS}


class Bad(DecodeRuntime):
    """Whatever ``how`` makes of ``prepare``, and ``here`` of ``available``."""

    name, preference, several_steps = "bad", 10, True

    def __init__(self, how: Callable[..., Any], here: Callable[[], Any] = lambda: True) -> None:
        self.how, self.here = how, here

    def available(self, device: str) -> Literal[True] | Reject:
        return self.here()

    def prepare(self, bound: Any, session: Any, steps: int = 1) -> Any:
        return self.how(bound, session, steps)


def raising(error: BaseException) -> Callable[..., Any]:
    def how(*given: Any) -> Any:
        raise error

    return how


def moves_and_raises(bound: Any, session: Any, steps: int) -> Any:
    session.position.add_(7)
    session.history.fill_(3)
    session.ids.fill_(5)
    raise RuntimeError("in the middle of it")


def moves(bound: Any, session: Any, steps: int) -> Any:
    bound.run()  # a warm-up, and nothing is put back
    return PythonLoop().prepare(bound, session, steps)


def only_one(bound: Any, session: Any, steps: int) -> Any:
    if steps > 1:
        raise RuntimeError("not several")
    return PythonLoop().prepare(bound, session, steps)


def context(runtime: DecodeRuntime, strict: bool = False, **options: Any) -> Context:
    catalog = load_catalog(only=(), strict=strict, extra=[("outside", Offers(runtimes=(runtime,)))])
    return Context(catalog=catalog, target=FAKE, config=Config(**options), store=Store(None))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", MODEL)


@pytest.fixture(scope="module")
def graphs(model: Any) -> GraphSet:
    found = capture_language_model(model, "tiny", Workload(dtype=DType.F32, max_context=48, prefill_chunks=(4, 8)))
    assert found.graphs and found.kv is not None, found.eager_reason
    return found


@pytest.fixture
def session(model: Any, graphs: GraphSet) -> Callable[[DecodeRuntime], Session]:
    def made(decode: DecodeRuntime) -> Session:
        assert graphs.kv is not None
        return Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu"), Executables(device="cpu"),
                       kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=decode, steps_per_graph=4)

    return made


WAYS: dict[str, tuple[Callable[..., Any], Cause | None, str]] = {
    "raises": (raising(RuntimeError("prepare is sad")), Cause.EXCEPTION, "prepare() raised RuntimeError: prepare is sad"),
    "exits": (raising(SystemExit(5)), Cause.EXCEPTION, "prepare() raised SystemExit: 5"),
    "nothing": (lambda *given: None, Cause.CONTRACT, "prepare() returned NoneType, not what makes a step"),
    "a number": (lambda *given: 3, Cause.CONTRACT, "prepare() returned int, not what makes a step"),
    "in the middle": (moves_and_raises, Cause.EXCEPTION, "prepare() raised RuntimeError: in the middle of it"),
    "only one": (only_one, Cause.EXCEPTION, "prepare() raised RuntimeError: not several"),
    "moves": (moves, None, "")}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens_come_from_a_python_loop(way: str, session: Callable[[DecodeRuntime], Session]) -> None:
    how, cause, why = WAYS[way]
    ctx, notes = context(Bad(how)), list[str]()
    one, wanted = session(GuardedDecode(Bad(how), ctx, notes)), session(PythonLoop())
    one.prepare()
    for tensor in (one.ids, one.position, one.history):
        assert not tensor.any(), "a run that only prepares leaves no trace"
    for length in (3, 9):
        prompt = torch.randint(3, 61, (1, length), generator=torch.Generator().manual_seed(length))
        assert torch.equal(one.generate(prompt, 13), wanted.generate(prompt, 13))
    assert [(f.plugin, f.cause, f.message) for f in ctx.failures] == ([("bad", cause, why)] if why else [])
    assert notes == ([f"decode: a Python loop where bad prepared nothing: {why}"] if why else [])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), UsageError("use a shorter context"), KeyboardInterrupt()], ids=repr)
def test_memory_that_is_not_there_and_the_users_wish_are_raised(error: BaseException, session: Callable[[DecodeRuntime], Session]) -> None:
    runtime = Bad(raising(error))
    with pytest.raises(type(error)):
        session(GuardedDecode(runtime, context(runtime), [])).prepare()


def test_what_the_program_raises_is_the_programs(session: Callable[[DecodeRuntime], Session]) -> None:
    runtime = Bad(moves)
    ctx = context(runtime)
    one = session(GuardedDecode(runtime, ctx, []))
    one.bound("prefill_8")._parts = (Piece(run=raising(RuntimeError("an operator failed"))),)
    with pytest.raises(RuntimeError, match="an operator failed"):
        one.step("prefill_8")
    assert not list(ctx.failures)


def test_strict_raises_what_a_runtime_raises(session: Callable[[DecodeRuntime], Session]) -> None:
    runtime = Bad(raising(RuntimeError("sad")))
    with pytest.raises(RuntimeError, match="sad"):
        session(GuardedDecode(runtime, context(runtime, strict=True), [])).prepare()


@pytest.mark.parametrize(("here", "message"), [
    (raising(RuntimeError("available is sad")), "RuntimeError: available is sad"), (raising(SystemExit(2)), "SystemExit: 2"),
    (lambda: None, "available() returned None; allowed are True and Reject(reason)"),
    (lambda: 1, "available() returned 1; allowed are True and Reject(reason)")])
@pytest.mark.parametrize("wanted", ["", "bad"])
def test_one_that_does_not_say_whether_it_works_here_is_not_used(here: Callable[[], Any], message: str, wanted: str) -> None:
    ctx, notes = context(Bad(moves, here), decode=wanted), list[str]()
    assert runtimes.decode_runtime(ctx, Executables(device="cpu"), notes).name == "python_loop"
    assert [(f.plugin, f.message) for f in ctx.failures] == [("bad", message)]
    assert notes == (["decode: a Python loop (bad does not say whether it works here)"] if wanted else [])


def test_one_that_works_is_guarded_and_one_that_rejects_by_name_is_refused() -> None:
    chosen = runtimes.decode_runtime(context(Bad(moves)), Executables(device="cpu"), [])
    assert isinstance(chosen, GuardedDecode) and (chosen.name, chosen.several_steps, chosen.needs_capture) == ("bad", True, False)
    with pytest.raises(UsageError, match="decode runtime 'bad' cannot run here: not in the mood"):
        runtimes.decode_runtime(context(Bad(moves, lambda: Reject("not in the mood")), decode="bad"), Executables(device="cpu"), [])
