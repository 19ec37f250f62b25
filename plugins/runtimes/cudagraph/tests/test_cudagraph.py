"""The cudagraph runtime: state is preserved, replays are counted, what cannot be captured runs from Python and says so.

Without a GPU, the backend is a double that does what CUDA does: it runs the warm-ups, runs nothing while it captures, and
repeats the captured runs at each replay.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from agentcompile_runtime_cudagraph import CudaGraphRuntime, GraphStep, agentcompile_runtimes
from attrs import evolve

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import (
    Backend,
    DType,
    Graph,
    GraphKind,
    Reject,
    TensorSpec,
    UsageError,
    Value,
    ValueKind,
    VerificationError,
)
from agentcompile_core.runtime.bound_program import Piece
from agentcompile_core.testing.doubles import ReplayingBackend

CAPACITY, LAYERS = 12, 2


def cuda_backend() -> Backend:
    """The installed backend of CUDA devices: asked for by name, since a runtime depends on no other plugin."""
    backend: Backend = load_catalog(only=("cuda",)).find("agentcompile_backends", "cuda")
    return backend


class Session:
    """What the runtime uses of a session."""

    def __init__(self, device: str = "cpu", refuses: str = "") -> None:
        shape = (1, CAPACITY, 1, 2)
        self.backend = ReplayingBackend(refuses) if device == "cpu" else cuda_backend()
        self.generation = 0
        self.ids = torch.tensor([[7]], device=device)
        self.position = torch.tensor([3], device=device)
        self.history = torch.arange(CAPACITY + 1, device=device)
        self.kv = SimpleNamespace(capacity=CAPACITY, keys=tuple(torch.randn(shape, device=device) for _ in range(LAYERS)),
                                  values=tuple(torch.randn(shape, device=device) for _ in range(LAYERS)))

    def capture(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1) -> Callable[[], None] | Reject:
        return self.backend.capture(run, warm_ups=warm_ups, runs=runs, owner=self)

    def state(self) -> list[torch.Tensor]:
        return [t.clone() for t in (self.ids, self.position, self.history, *self.kv.keys, *self.kv.values)]


class Bound:
    """A program that, like a decode step, appends to the KV cache and advances; or, like a prompt chunk, writes T rows."""

    def __init__(self, session: Session, kind: GraphKind = GraphKind.DECODE, tokens: int = 1) -> None:
        inputs = ("prompt", "start", "length") if kind is GraphKind.PREFILL else ()
        graph = Graph(name=kind.value, kind=kind, tokens=tokens, values=(), nodes=(), inputs=inputs, outputs=())
        self.graph = graph
        device = session.ids.device
        self.environment = {
            "prompt": torch.full((1, tokens), 5, device=device), "start": torch.tensor([0], device=device),
            "length": torch.tensor([0], device=device),
        } if inputs else {}
        self.capturable = (True,)
        self.session, self.runs = session, 0
        self.device = device.type

    @property
    def uncapturable(self) -> tuple[str, ...]:
        return tuple(f"part {i}" for i, capturable in enumerate(self.capturable) if not capturable)

    def pieces(self) -> tuple[Piece, ...]:
        """The last piece does the work, those before it nothing."""
        runs = [lambda: None] * (len(self.capturable) - 1) + [lambda: self.run()]
        return tuple(Piece(run=run, capturable=capturable) for run, capturable in zip(runs, self.capturable, strict=True))

    def run(self) -> None:
        self.runs += 1
        session, graph = self.session, self.graph
        if graph.kind is GraphKind.DECODE:
            rows, count = session.position.clone(), 1
        else:
            rows, count = self.environment["start"] + torch.arange(graph.tokens, device=self.device), graph.tokens
            if self.device == "cpu":
                assert int(self.environment["length"]) >= 1, "row -1 of a chunk would be read"
                rows = rows[rows < CAPACITY]
                count = len(rows)
        if self.device == "cpu":
            assert int(rows.max()) < CAPACITY, "wrote beyond the cache"
        for tensor in (*session.kv.keys, *session.kv.values):
            tensor.index_copy_(1, rows, torch.full((1, count, 1, 2), 99.0, device=self.device))
        session.ids.add_(1)
        session.position.add_(1) if graph.kind is GraphKind.DECODE else session.position.copy_(
            self.environment["start"] + self.environment["length"])
        session.history.index_copy_(0, session.position, session.ids[0])


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("position", [0, 3, CAPACITY - 2, CAPACITY - 1, CAPACITY])
def test_preparing_leaves_the_state_as_it_was(position: int) -> None:
    session = Session()
    session.position.fill_(position)
    bound, before = Bound(session), session.state()
    step = CudaGraphRuntime().prepare(bound, session)
    assert step.captured and bound.runs == 1
    assert_same(session.state(), before)


@pytest.mark.parametrize("tokens", [1, 4, CAPACITY, CAPACITY + 5])
@pytest.mark.parametrize("position", [0, 3, CAPACITY])
def test_preparing_a_prompt_chunk_leaves_state_and_inputs_as_they_were(tokens: int, position: int) -> None:
    session = Session()
    session.position.fill_(position)
    bound = Bound(session, GraphKind.PREFILL, tokens)
    before, inputs = session.state(), [t.clone() for t in bound.environment.values()]
    CudaGraphRuntime().prepare(bound, session)
    assert_same(session.state(), before)
    assert_same(list(bound.environment.values()), inputs)


@pytest.mark.parametrize("kind", [GraphKind.DECODE, GraphKind.PREFILL])
def test_preparing_leaves_states_of_fixed_size_as_they_were(kind: GraphKind) -> None:
    session = Session()
    bound = Bound(session, kind, 1)
    spec = TensorSpec(shape=(1, 4, 3), dtype=DType.F32)
    kept = Value(name="s", spec=spec, kind=ValueKind.STATE, source="state.conv.0.0")
    bound.graph = evolve(bound.graph, values=(kept, evolve(kept, name="k", source="kv.key.0")))
    bound.environment["s"] = torch.randn(spec.shape)
    before, advance = bound.environment["s"].clone(), bound.run

    def run() -> None:
        advance()
        bound.environment["s"].add_(1.0)

    bound.run = run  # type: ignore[method-assign]
    CudaGraphRuntime().prepare(bound, session)
    assert bound.runs == 1 and torch.equal(bound.environment["s"], before)


def test_a_step_is_one_replay() -> None:
    session = Session()
    bound = Bound(session)
    step = CudaGraphRuntime().prepare(bound, session)
    step()
    assert (bound.runs, int(session.position), int(session.ids)) == (2, 4, 8)
    assert float(session.kv.keys[0][0, 3, 0, 0]) == 99.0 != float(session.kv.keys[0][0, 4, 0, 0])


def test_several_steps_in_one_graph() -> None:
    session = Session()
    step = CudaGraphRuntime().prepare(Bound(session), session, steps=4)
    step()
    assert (int(session.position), int(session.ids)) == (7, 11)
    with pytest.raises(UsageError, match="0 steps in one graph; at least 1"):
        CudaGraphRuntime().prepare(Bound(session), session, steps=0)


def test_replaying_after_the_buffers_moved_is_refused() -> None:
    session = Session()
    step = CudaGraphRuntime().prepare(Bound(session), session)
    session.generation += 1
    with pytest.raises(VerificationError, match=r"captured for generation 0 .* at 1 now; prepare the program again"):
        step()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_capture_that_fails_runs_from_python_with_a_reason(caplog: pytest.LogCaptureFixture, steps: int) -> None:
    session = Session(refuses="RuntimeError: not while capturing")
    bound, before = Bound(session), session.state()
    with caplog.at_level("WARNING"):
        step = CudaGraphRuntime().prepare(bound, session, steps)
    assert not step.captured and step.reason == "RuntimeError: not while capturing"
    assert "decode runs from Python" in caplog.text
    assert_same(session.state(), before)
    step()
    assert int(session.position) == 3 + steps


def test_segments_known_not_to_be_capturable_are_not_tried() -> None:
    session = Session()
    bound = Bound(session)
    bound.capturable = (False,)
    step = CudaGraphRuntime().prepare(bound, session)
    assert step.reason == "part 0 cannot be captured" and session.backend.owners == [] and bound.runs == 0
    step()
    assert bound.runs == 1


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("capturable", [(True, False, True), (False, True), (True, False), (True, False, True, False, True)])
def test_a_part_that_no_graph_may_hold_runs_between_two_graphs(capturable: tuple[bool, ...], steps: int) -> None:
    session, whole = Session(), Session()
    bound, before = Bound(session), session.state()
    bound.capturable = capturable
    step = CudaGraphRuntime().prepare(bound, session, steps)
    assert session.backend.owners == [session] * sum(capturable), "one graph per part that can be captured, all of one owner"
    assert step.captured and step.outside == bound.uncapturable
    assert_same(session.state(), before)
    step()
    for _ in range(steps):
        Bound(whole).run()
    assert (int(session.position), int(session.ids)) == (int(whole.position), int(whole.ids))


def test_a_part_that_fails_to_be_captured_brings_everything_to_python() -> None:
    session = Session(refuses="RuntimeError: not while capturing")
    bound, before = Bound(session), session.state()
    bound.capturable = (True, False, True)
    step = CudaGraphRuntime().prepare(bound, session)
    assert not step.captured and step.outside == ()
    assert_same(session.state(), before)
    step()
    assert int(session.position) == 4


def test_an_error_of_the_program_itself_is_not_hidden() -> None:
    session = Session()
    bound = Bound(session)
    bound.run = lambda: (_ for _ in ()).throw(RuntimeError("a defect"))  # type: ignore[method-assign]
    before = session.state()
    with pytest.raises(RuntimeError, match="a defect"):
        CudaGraphRuntime().prepare(bound, session)
    assert_same(session.state(), before)


def test_it_is_asked_only_where_a_backend_captures() -> None:
    (runtime,) = agentcompile_runtimes()
    assert (runtime.name, runtime.role, runtime.needs_capture) == ("cudagraph", "decode", True)


@pytest.mark.device
@pytest.mark.parametrize("steps", [1, 3])
def test_captured_steps_compute_what_python_does(steps: int) -> None:
    expected, session = Session("cuda"), Session("cuda")
    for name in ("keys", "values"):
        for mine, theirs in zip(getattr(session.kv, name), getattr(expected.kv, name), strict=True):
            theirs.copy_(mine)
    before = session.state()
    bound, reference = Bound(session), Bound(expected)
    step = CudaGraphRuntime().prepare(bound, session, steps)
    torch.cuda.synchronize()
    assert step.captured, step.reason
    assert_same(session.state(), before)
    for _ in range(2):
        step()
        for _ in range(steps):
            reference.run()
    torch.cuda.synchronize()
    assert_same(session.state(), expected.state())
    assert bound.runs == 1 + steps, "a replay must not run Python"


@pytest.mark.device
@pytest.mark.parametrize("steps", [1, 3])
def test_graphs_on_both_sides_of_a_synchronizing_part_compute_what_python_does(steps: int) -> None:
    expected, session = Session("cuda"), Session("cuda")
    bound = Bound(session)
    host: list[int] = []
    (last,) = bound.pieces()
    middle = Piece(run=lambda: host.append(int(session.position)), capturable=False, names=("asks the host",))
    counter = torch.zeros(1, device="cuda").add_(1.0)  # loaded before the capture, as a warm-up would
    first = Piece(run=lambda: counter.add_(1.0))  # type: ignore[arg-type,return-value]
    bound.pieces = lambda: (first, middle, last)  # type: ignore[method-assign]
    bound.capturable = (True, False, True)
    step = CudaGraphRuntime().prepare(bound, session, steps)
    assert step.captured, step.reason
    host.clear()
    counter.zero_()
    for _ in range(2):
        step()
    for _ in range(2 * steps):
        Bound(expected).run()
    torch.cuda.synchronize()
    assert_same([session.ids, session.position], [expected.ids, expected.position])
    assert host == [3 + i for i in range(2 * steps)] and float(counter) == 2 * steps


@pytest.mark.device
def test_a_synchronizing_program_runs_from_python_and_the_device_stays_usable() -> None:
    session = Session("cuda")
    bound = Bound(session)
    inner = bound.run
    bound.run = lambda: (inner(), torch.cuda.synchronize())  # type: ignore[method-assign,assignment]
    before = session.state()
    step = CudaGraphRuntime().prepare(bound, session)
    assert isinstance(step, GraphStep) and not step.captured and step.reason
    assert_same(session.state(), before)
    step()
    assert int(session.position) == 4


@pytest.mark.device
def test_graphs_of_one_session_share_a_pool_and_do_not_disturb_each_other() -> None:
    session, runtime = Session("cuda"), CudaGraphRuntime()
    chunk, decode = Bound(session, GraphKind.PREFILL, 4), Bound(session)
    first, second = runtime.prepare(chunk, session), runtime.prepare(decode, session)
    chunk.environment["length"].fill_(4)
    first()
    assert int(session.position) == 4
    second()
    second()
    assert int(session.position) == 6
    chunk.environment["start"].fill_(1)
    first()
    assert int(session.position) == 5
