"""One observer hears typed events; progress makes counts, totals and time left of them; an interrupt says what is kept."""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from agentcompile_core.cli import interrupt
from agentcompile_core.cli.progress import Progress
from agentcompile_core.errors import Cause, Failure, StageName
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.plugin import events
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles


def record(us: float = 3.0, failure: Cause | None = None) -> TuningRecord:
    step = Step(match_id="linear:a+1:a", implementation="gemv/gemv", origin=Origin.GENERATED, schedule=Schedule({"tile": 4}))
    return TuningRecord(key="k", signature="s", step=step, source_digest="d", failure=failure, measurement=doubles.measurement(us),
                        verdict=Verdict(validator="v", outcome=Outcome.FAIL if failure else Outcome.PASS))


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(stream: io.StringIO, total: int = 40, seconds_each: float = 1.0) -> tuple[Progress, list[str]]:
    """Progress over a search of ``total`` candidates, one in four of which fails, and what it wrote."""
    clock = Clock()
    progress = Progress(stream=stream, clock=clock)
    progress(events.SearchStarted(total=total, cached=0, left_s=1000.0))
    for index in range(total):
        clock.now += seconds_each
        progress(events.CandidateFinished(record=record(failure=Cause.TOLERANCE if index % 4 == 3 else None), cached=False))
    return progress, stream.getvalue().replace("\r\033[K", "\n").splitlines()


def test_off_a_terminal_counts_and_totals_come_every_few_seconds() -> None:
    _, lines = watched(io.StringIO())
    assert lines[0].endswith("validate: 40 candidates, 0 of them in the cache; at most 1000 s")
    assert len(lines) == 5, "a line in ten seconds, not one per candidate"
    assert lines[1].endswith("validate: 10 of 40 candidates, 8 passed, 2 failed, about 30 s left")


def test_on_a_terminal_every_candidate_changes_the_line() -> None:
    _, lines = watched(Screen())
    assert len([line for line in lines if " of 40 candidates" in line]) == 40
    assert "gemv/gemv on linear:a+1:a: pass 3.00 us" in lines[-2] and "40 of 40" in lines[-1]


def test_the_time_left_is_no_more_than_the_budget() -> None:
    clock = Clock()
    stream = Screen()
    progress = Progress(stream=stream, clock=clock)
    progress(events.SearchStarted(total=1000, cached=0, left_s=60.0))
    clock.now = 20.0
    progress(events.CandidateFinished(record=record(), cached=False))
    assert "about 40 s left" in stream.getvalue()


def test_a_repeated_failure_is_said_once_and_never_cut() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    message = "the service said no. " * 40 + "Ask again."
    failure = Failure(stage=StageName.PLAN, cause=Cause.EXCEPTION, plugin="p", subject="s", message=message)
    for first in (True, False, False):
        progress(events.FailureRecorded(failure=failure, first=first))
    assert stream.getvalue().count(message) == 1


def test_every_event_is_frozen_and_only_events_are_sent() -> None:
    kinds = [k for k in vars(events).values() if isinstance(k, type) and issubclass(k, events.Event)]
    assert len(kinds) > 12
    for kind in kinds:
        assert attrs.has(kind) and kind.__setattr__ is not object.__setattr__
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        events.StageStarted(stage="plan").stage = "x"  # type: ignore[misc]


def test_the_observer_and_the_hook_hear_an_event_once() -> None:
    heard: list[object] = []

    @hookimpl
    def agentcompile_stage_finished(stage: str, facts: dict[str, int]) -> None:
        heard.append((stage, facts))

    catalog = load_catalog(only=(), extra=[("l", SimpleNamespace(agentcompile_stage_finished=agentcompile_stage_finished))])
    seen: list[events.Event] = []
    sent = events.StageFinished(stage="plan", seconds=1.0, facts={"covers": 3})
    catalog.for_one_run(seen.append).emit(sent)
    assert heard == [("plan", {"covers": 3})] and seen == [sent]


def test_an_observer_that_raises_costs_nothing() -> None:
    def broken(event: events.Event) -> None:
        raise OSError("the terminal is gone")

    Catalog().for_one_run(broken).emit(events.StageStarted(stage="plan"))


def test_a_cache_that_cannot_be_used_is_said_in_text_and_json(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("AGENTCOMPILE_CACHE_DIR", str(blocked / "cache"))
    monkeypatch.setenv("AGENTCOMPILE_PLUGINS", "numerics")  # no emulation, which builds itself anew for another folder
    model = tmp_path / "relu.py"
    model.write_text("import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n\n"
                     "def get_inputs():\n    return [torch.randn(16)]\n\ndef get_init_inputs():\n    return []\n")
    arguments = ("compile", model, "--device", "cpu", "--budget-plans", 1, "--rounds", 1, "--budget-s", 0.01)
    code, out, err = cli(*arguments)
    assert code == 0 and "warning: the cache folder" in err and "note: the cache folder" in out
    code, out, _ = cli(*arguments, "--json")
    assert code == 0 and any("the cache folder" in note for note in json.loads(out)["notes"])


@pytest.mark.parametrize(("options", "evaluated", "warned", "expected"), [
    ({}, 7, False, "the 7 candidates that were evaluated are kept in the cache"),
    ({"no_cache": True}, 7, False, "the 7 candidates that were evaluated are not kept, because of --no-cache"),
    ({"out": "b"}, 0, False, "interrupted before a candidate was evaluated; no bundle was written"),
    ({}, 7, True, "they may not be kept"),
])
def test_an_interrupt_says_what_is_kept(options: dict, evaluated: int, warned: bool, expected: str) -> None:
    progress = Progress(quiet=True)
    progress.evaluated, progress.warned = evaluated, warned
    assert expected in interrupt.what_is_kept(argparse.Namespace(**options), progress)
    assert interrupt.what_is_kept(argparse.Namespace(**options), None) == "interrupted"


HANGS = """
import sys, time
from agentcompile_core.cli import commands, main
def slow(options):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(CLEANING)
commands.COMMANDS["doctor"] = slow
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_ends_in_order_and_a_second_one_at_once(twice: bool) -> None:
    code = HANGS.replace("CLEANING", "60" if twice else "0.1")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGINT)
    assert child.stdout.readline() == "cleaning\n"
    if twice:
        os.kill(child.pid, signal.SIGINT)
    began = time.monotonic()
    status = child.wait(timeout=30)
    assert time.monotonic() - began < 20
    assert status == (-signal.SIGINT if twice else 130)
    assert twice or "agentcompile: interrupted" in child.stderr.read()
    child.stdout.close()
    child.stderr.close()


def test_the_store_says_itself_why_it_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    assert Store(tmp_path / "f" / "cache").warnings
