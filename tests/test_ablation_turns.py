"""What the variants of the ablation have of a device: memory while it is their turn, and the chunks of their prompts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.runtime.chunks import plan_chunks


class Holding:
    """A variant that says what happens to it; ``needed`` is memory that it must have before a clock starts."""

    def __init__(self, name: str, log: list[tuple[str, str]], held: dict[str, int]) -> None:
        self.name, self.log, self.held, self.session = name, log, held, self
        held[name] = 8192  # what installing captured

    def ready(self, given: int, new: int) -> None:
        self.log.append((self.name, "ready"))
        self.held[self.name] = max(self.held[self.name], given + new)

    def give_back(self) -> None:
        self.held[self.name] = 0

    def generate(self, ids: torch.Tensor, count: int, **how: Any) -> None:
        assert self.held[self.name] >= ids.shape[1] + count
        assert [name for name, positions in self.held.items() if positions] == [self.name], "all others have given theirs back"
        self.log.append((self.name, "run"))


def test_only_the_variant_whose_turn_it_is_has_memory_and_before_the_clock_starts(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    roles, rounds = bench("roles"), bench("peers.rounds")
    log: list[tuple[str, str]] = []
    held: dict[str, int] = {}

    class Eager:
        facts, dead = {"eager": {}}, dict[str, str]()

        def ask(self, name: str, prompt_of: Any, positions: int) -> Any:
            def ask(given: int, new: int) -> float:
                assert not any(held.values()), "a peer has a process of its own"
                log.append((name, "run"))
                return 1.0

            return ask

    def timed(call: Any) -> float:
        log.append(("", "clock"))
        call()
        return 1.0

    monkeypatch.setattr(roles, "installed", lambda model, variant, lengths: Holding(variant.name, log, held))
    monkeypatch.setattr(bench("peers.systems").bench, "timed", timed)
    workload = rounds.Workload(20_480, 16_384)
    entrants = roles.Roles(Holding("agentcompile", log, held), Eager(), (workload, rounds.Workload(6, 4)))
    assert entrants._lengths == (6, 20_480, 28_639, 36_799)
    prompt_of = lambda length: torch.zeros(1, length, dtype=torch.int64)  # noqa: E731
    asks = {name: entrants.ask(name, prompt_of, workload) for name in ("eager", "kv_cache", "linear", "agentcompile")}
    rows = rounds.measured(asks, workload, rounds.Terms(repetitions=3, estimate_over_ms=60_000.0, left_s=lambda: 1e9), lambda rows: None)
    assert [row["repetitions"] for row in rows] == [3] * 4 and {name for name, _ in log} == {"", *asks}
    ours = [entry for entry in log if entry[0] != "eager"]
    assert all(ours[i : i + 3] == [(name, "ready"), ("", "clock"), (name, "run")] for i in range(0, len(ours), 3) for name in [ours[i][0]])


CAPACITY = 36_864
EVERY_SIZE = (128, 256, 512, 1024, 2048, 4096, 8192)


def cutting(every: tuple[int, ...], capacity: int) -> Any:
    return SimpleNamespace(chunk_sizes=every, chunks=lambda length, sizes: plan_chunks(length, sizes, capacity))


@settings(max_examples=200)
@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=6), sizes=st.sets(st.sampled_from(EVERY_SIZE), min_size=1))
def test_a_variant_reads_its_prompts_in_the_chunks_of_ours(bench: Any, lengths: list[int], sizes: set[int]) -> None:
    every = tuple(sorted(sizes))
    session = cutting(every, CAPACITY)
    kept = bench("roles").chunks_of(session, lengths)
    assert set(kept) <= sizes and kept
    assert all(session.chunks(length, kept) == session.chunks(length, every) for length in lengths)


def test_a_workload_needs_few_sizes_of_chunks(bench: Any) -> None:
    roles, rounds = bench("roles"), bench("peers.rounds")
    session = cutting(EVERY_SIZE, CAPACITY)
    for asked, sizes in (((128, 128), (128,)), ((2048, 512), (256, 512, 2048)), ((20_480, 16_384), (4096, 8192))):
        assert roles.chunks_of(session, rounds.prompt_lengths(rounds.Workload(*asked))) == sizes
    assert roles.chunks_of(session, ()) == EVERY_SIZE
