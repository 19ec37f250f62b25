"""The loop over new tokens: as many steps as tokens need, whatever the host's way to look at them; a moved cache is told."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, GraphSet, ModelInfo, Workload
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.sampling import Pick
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.token_loop import LAG, Afterwards, AtOnce, Lagging, Picking, token_groups, token_stream
from agentcompile_core.runtime.trailing import Trailing

STEPS = 4  # of a group
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=60)
REQUESTS = given(made=st.lists(st.integers(0, 9), min_size=1, max_size=12), eos=st.frozensets(st.integers(0, 9), max_size=3))


class Device:
    """A session whose n-th step makes the n-th of ``made``; the prompt [5, 5] made the first."""

    def __init__(self, made: list[int]) -> None:
        self.made, self.steps = made, 0
        self.ids = torch.tensor([[made[0]]])
        self.history = torch.zeros(len(made) + 2, dtype=torch.int64)
        self.history[2] = made[0]
        self.position = torch.tensor([2])

    def step(self) -> None:
        self.steps += 1
        self.position += 1
        self.ids.fill_(self.made[self.steps])
        self.history[2 + self.steps] = self.made[self.steps]

    def logits(self) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(self.made[self.steps]), 10).float()


def until(made: list[int], eos: frozenset[int]) -> list[int]:
    end = next((i for i, token in enumerate(made) if token in eos), len(made) - 1)
    return made[: end + 1]


def without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a lagging look needs of one, as stand-ins; one entry in the list for each wait for all that is enqueued."""
    zeros, waited = torch.zeros, list[int]()
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **options: zeros(*shape, **options))
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: SimpleNamespace(synchronize=lambda: waited.append(1)))
    return waited


@SETTINGS
@REQUESTS
def test_looking_at_once_ends_with_the_first_end_token_and_makes_no_step_beyond_it(made: list[int], eos: frozenset[int]) -> None:
    device = Device(made)
    found = list(token_stream(len(made), device.step, AtOnce(device.history, 2, eos)))
    assert found == until(made, eos) and device.steps == len(found) - 1


@SETTINGS
@REQUESTS
def test_picking_sees_all_tokens_so_far_and_leaves_its_choice_to_the_next_step(made: list[int], eos: frozenset[int]) -> None:
    device, seen = Device(made), []

    def stops(ids: torch.Tensor, _: object) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return torch.tensor([int(ids[0, -1]) in eos])

    pick = Pick(processors=lambda ids, scores: scores, stops=stops)
    found = list(token_stream(len(made), device.step, Picking(pick, torch.tensor([[5, 5]]), len(made), device, device.logits)))
    assert found == until(made, eos) and device.steps == len(found) - 1
    assert seen == [[5, 5, *found[: i + 1]] for i in range(len(found))]
    assert device.history[2 : 2 + len(found)].tolist() == found and int(device.ids) == found[-1]


@SETTINGS
@REQUESTS
def test_what_nobody_watches_is_read_after_the_last_step(made: list[int], eos: frozenset[int]) -> None:
    device = Device(made)
    stream: Iterator[int] = token_stream(len(made), device.step, Afterwards(device.history, 2, len(made)))
    assert next(stream) == made[0] and device.steps == len(made) - 1
    assert [made[0], *stream] == made


@pytest.mark.parametrize(("count", "eos"), [(1, 99), (3, 99), (12, 99), (12, 2), (12, 9)])
def test_a_lagging_look_gives_the_same_tokens_while_the_device_runs_ahead(count: int, eos: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = without_an_accelerator(monkeypatch)
    device, made = Device(list(range(count))), list(range(count))
    found = list(token_stream(count, device.step, Lagging(device.history, 2, count, frozenset([eos]))))
    assert found == until(made, frozenset([eos]))
    assert device.steps == min(count - 1, found[-1] + LAG), "four steps ahead, never beyond the count"
    assert not waited, "nobody waits for the steps beyond the end"


@SETTINGS
@given(groups=st.lists(st.integers(1, 4), max_size=9), eos=st.integers(0, 40))
def test_groups_of_steps_give_the_same_tokens_and_the_device_is_a_group_ahead(groups: list[int], eos: int) -> None:
    count = 1 + sum(groups)
    for look in ("lagging", "at once", "afterwards"):
        with pytest.MonkeyPatch.context() as patched:
            waited = without_an_accelerator(patched)
            device, sizes, given_up, ahead = Device(list(range(count))), list(groups), frozenset([eos]), list[int]()

            def advance(left: int, device: Device = device, sizes: list[int] = sizes) -> int:
                assert left == sum(sizes), "what is left is said"
                for _ in range(sizes[0]):
                    device.step()
                return sizes.pop(0)

            looks = {"lagging": Lagging(device.history, 2, count, given_up), "at once": AtOnce(device.history, 2, given_up),
                     "afterwards": Afterwards(device.history, 2, count)}
            found = []
            for token in token_groups(count, advance, looks[look]):
                found.append(token)
                ahead.append(device.steps - token)
        assert found == until(list(range(count)), frozenset() if look == "afterwards" else given_up)
        if look == "lagging":
            assert not waited and max(ahead) <= 3 * STEPS - 1
            assert all(steps >= min(LAG, count - 1 - token) for token, steps in enumerate(ahead)), "the device never waits"
            if set(groups) == {STEPS}:
                assert max(ahead) <= 2 * STEPS - 1  # behind the last token of those that landed together a whole group runs
        if look == "at once":
            assert device.steps == count - 1 - sum(sizes) and device.steps - found[-1] < STEPS, "no group beyond the one that ended"


class Stream:
    """Work of a device in the order in which it is enqueued; equal to itself alone."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def synchronize(self) -> None:
        self.done.append("all")

    def wait_event(self, event: Any) -> None:
        self.done.append(event)


def test_what_trails_behind_a_request_is_waited_for_by_the_next_one_and_by_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    home, other, current = Stream(), Stream(), list[Stream]()

    class Event:
        def __init__(self, device: str) -> None:
            self.device = device

        def record(self, stream: Stream) -> None:
            assert stream is current[-1]

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[-1])
    current.append(home)
    trailing = Trailing(torch.device("cuda:1"))
    with trailing.behind():
        pass
    assert home.done == []
    current.append(other)
    for _ in range(2):  # the first may enqueue nothing: the second waits as well
        with pytest.raises(KeyError), trailing.behind():
            first = other.done[0]
            raise KeyError
    assert isinstance(first, Event) and first.device == "cuda"
    assert [isinstance(one, Event) for one in other.done] == [True, False, True, False], "memory of the session belongs to another stream"
    current.append(home)
    with trailing.behind():
        pass
    assert len(home.done) == 1 and isinstance(home.done[0], Event)
    current.append(other)
    trailing.allocated()
    current.append(home)
    with trailing.behind():
        assert home.done[1:] != ["all"]
    assert home.done[-1] == "all", "some memory is the other stream's"


def test_a_host_leaves_nothing_behind() -> None:
    trailing = Trailing(torch.device("cpu"))
    trailing.allocated()
    with trailing.behind():
        pass


@pytest.mark.parametrize("counted", [{}, {"generation": 0}])
def test_graphs_are_void_when_the_cache_has_moved(counted: dict[str, int]) -> None:
    cache = SimpleNamespace(keys=(), values=(), capacity=8, **counted)
    model = ModelInfo(name="m", model_type="m", config_json="{}", digest="0", parameter_bytes=0)
    graphs = GraphSet(model=model, workload=Workload(dtype=DType.F32, max_context=8), graphs=())
    session = Session(graphs, {}, None, Executables(device="cpu"), kv_state=cache, decode=None)  # type: ignore[arg-type]
    assert session.generation == 0
    cache.generation = 3
    assert session.generation == 3
