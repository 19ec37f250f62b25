"""A plugin's code that runs on is stopped; nobody else is, and what comes back in time is as if there were no limit."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from agentcompile_core.errors import Cause, Failure, StageName
from agentcompile_core.installation import trust
from agentcompile_core.ir.target import NO_TARGET
from agentcompile_core.plugin import catalog as catalogs
from agentcompile_core.plugin import time_limit
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.time_limit import OutOfTime, within

AS_IT_IS = time_limit.LOOK_S


@pytest.fixture(autouse=True)
def _looked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the next look burns a processor meanwhile, and says nothing by that."""
    monkeypatch.setattr(time_limit, "LOOK_S", 0.05)


def test_nobody_waits_long_for_a_look() -> None:
    """Limits are seconds; who looks later than that makes them longer."""
    assert 0 < AS_IT_IS <= 1


def runs_on() -> None:
    while True:
        pass


def until(end: float) -> int:
    while time.monotonic() < end:
        pass
    return 1


def swallows() -> int:
    try:
        runs_on()
    except BaseException:
        return 7
    return 0


def in_many_tries() -> None:
    while True:
        try:
            time.sleep(0.001)
        except Exception:
            continue


def nobody_watches() -> bool:
    """Within ten seconds."""
    end = time.monotonic() + 10.0
    while any(thread.name == "plugin calls" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.05)
    return time.monotonic() < end


def takes_everything() -> None:
    count = 0
    while True:
        try:
            count += 1
        except:  # noqa: E722 - what a plugin should not write
            count = 0


class Dying:
    def __del__(self) -> None:
        sum(range(20))


def with_finalizers() -> None:
    while True:
        Dying()  # an exception in __del__ is printed, and gone


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", [runs_on, swallows, in_many_tries, takes_everything, with_finalizers])
def test_python_that_runs_on_is_stopped_and_named(call: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with pytest.raises(OutOfTime, match=r"acme did not come back within 0\.1 s"):
        within(0.1, "acme", call)
    assert time.monotonic() - began < 60.0
    while "acme has not come back after 0.1 s" not in caplog.text:  # told behind the stop
        assert time.monotonic() - began < 90.0
        time.sleep(0.01)
    assert within(5.0, "acme", lambda: 3) == 3, "nothing is left behind"


def test_only_the_inner_of_two_calls_is_stopped() -> None:
    def outer() -> str:
        with pytest.raises(OutOfTime, match="inner"):
            within(0.05, "inner", runs_on)
        return "went on"

    assert within(30.0, "outer", outer) == "went on"


def test_an_outer_call_is_stopped_within_an_inner_one() -> None:
    with pytest.raises(OutOfTime, match="outer"):
        within(0.05, "outer", lambda: within(30.0, "inner", runs_on))


def test_calls_that_end_as_they_are_stopped_leave_no_exception_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ends at about the limit: each call has its value or is out of time, and whoever called goes on undisturbed."""
    monkeypatch.setattr(time_limit, "LOOK_S", 0.0005)
    values = late = 0
    for i in range(300):
        end = time.monotonic() + (0.1 if i % 50 == 49 else 0.0002 * (i % 30))
        try:
            values += within(0.003, "acme", lambda end=end: until(end))  # type: ignore[misc]
        except OutOfTime:
            late += 1
        for _ in range(1000):
            pass
    assert values + late == 300 and values and late


def test_nested_calls_that_end_together_leave_no_exception_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LOOK_S", 0.002)
    late = 0
    for i in range(40):
        try:
            inner_s = 0.01 + 0.0002 * (i % 5)
            within(0.01, "outer", partial(within, inner_s, "inner", lambda: until(time.monotonic() + 0.02)))
        except OutOfTime:
            late += 1
        for _ in range(20_000):
            pass
    assert late


class Handler(logging.Handler):
    def __init__(self, emit: Callable[[Any], None]) -> None:
        super().__init__()
        self.emit = emit  # type: ignore[method-assign]


def raises(record: Any) -> None:
    raise OSError("no space for my log")


@pytest.mark.parametrize("emit", [raises, lambda record: time.sleep(0.5)])
def test_a_log_that_raises_or_waits_stops_nobody_else(emit: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LOOK_S", 0.01)
    handler = Handler(emit)
    time_limit.log.addHandler(handler)
    try:
        for _ in range(2):
            with pytest.raises(OutOfTime):
                within(0.05, "acme", runs_on)
            until(time.monotonic() + 0.05)
    finally:
        time_limit.log.removeHandler(handler)
    with pytest.raises(OutOfTime):
        within(0.05, "acme", runs_on)


def test_where_no_thread_can_be_started_a_call_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    assert nobody_watches()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot)
        assert within(0.05, "acme", lambda: until(time.monotonic() + 0.2)) == 1
    with pytest.raises(OutOfTime):
        within(0.05, "acme", runs_on)


def in_a_child(call: Callable[[], int]) -> int:
    """The number that ``call`` returns in a fork of this process, whose main thread this one is there; what it raises is 96."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 96
    try:
        code = call()
    finally:
        os._exit(code)


def interrupted_by_signals() -> int:
    """1: a Ctrl-C was seen, 2: a call was stopped; no other exception, or it is raised."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    seen = 0
    for i in range(60):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0102 + 0.0001 * (i % 20 - 10) + (0.0, 0.02, -0.005)[i % 3])
            within(0.01, "acme", lambda: until(time.monotonic() + 0.05))
        except KeyboardInterrupt:
            seen |= 1
        except OutOfTime:
            seen |= 2
        try:
            until(time.monotonic() + 0.025)  # the last signal comes 0.0212 s behind the limit
        except KeyboardInterrupt:
            seen |= 1
    return seen


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_ctrl_c_while_a_call_is_stopped_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """However near to each other they come: no other exception, and none left behind."""
    monkeypatch.setattr(time_limit, "LOOK_S", 0.001)
    assert in_a_child(interrupted_by_signals) == 3


def test_threads_are_stopped_each_by_itself() -> None:
    found: dict[str, str] = {}

    def run(name: str, call: Callable[[], Any]) -> None:
        try:
            found[name] = str(within(0.3, name, call))
        except OutOfTime as exc:
            found[name] = type(exc).__name__

    threads = [threading.Thread(target=run, args=(f"t{i}", runs_on if i % 2 else (lambda: 5))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert found == {f"t{i}": "OutOfTime" if i % 2 else "5" for i in range(6)}


def test_what_a_plugin_raises_comes_through_and_a_user_may_interrupt() -> None:
    def interrupts() -> None:
        raise KeyboardInterrupt

    for exc, call in ((KeyboardInterrupt, interrupts), (ZeroDivisionError, lambda: 1 / 0)):
        with pytest.raises(exc):
            within(5.0, "acme", call)


def test_a_plugin_that_did_not_come_back_is_not_asked_again_in_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogs, "CALL_S", 0.05)
    whole = Catalog()
    catalog = whole.for_one_run()
    asked = []

    def ask(plugin: str, call: Callable[[], Any]) -> Any:
        asked.append(plugin)
        return catalog.guard(call, stage=StageName.PLAN, plugin=plugin, subject="match")

    assert ask("acme/slow", runs_on) is None and ask("acme/slow", lambda: asked.append("called")) is None
    assert ask("acme/other", lambda: 5) == 5 and "called" not in asked
    assert {(f.cause, f.plugin) for f in catalog.failures} == {(Cause.TIMEOUT, "acme/slow")}
    again = whole.for_one_run()
    assert again.guard(lambda: 6, stage=StageName.PLAN, plugin="acme/slow", subject="match") == 6
    # Outside of runs nothing is remembered.
    assert whole.guard(runs_on, stage=StageName.PLAN, plugin="acme/slow", subject="match") is None
    assert whole.guard(lambda: 6, stage=StageName.PLAN, plugin="acme/slow", subject="match") == 6


def test_a_family_that_does_not_come_back_as_a_bundle_is_opened_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogs, "CALL_S", 0.05)
    catalog = Catalog().for_one_run()
    catalog.offers["agentcompile_template_families"]["acme/slow"] = SimpleNamespace(name="slow", lower=lambda *given: runs_on())
    recorded: list[Failure] = []
    ctx: Any = SimpleNamespace(catalog=catalog, fail=recorded.append, store=SimpleNamespace(knows=lambda *given: False),
                               config=SimpleNamespace(trust_kernels=False))
    step, source, target = SimpleNamespace(implementation="acme/slow", schedule=None), SimpleNamespace(), NO_TARGET
    segment: Any = SimpleNamespace(step=step, match=SimpleNamespace())
    assert trust._verdict(source, None, [segment], target, ctx) == "refused"  # type: ignore[arg-type]
    assert [(one.cause, one.plugin) for one in recorded] == [(Cause.TIMEOUT, "acme/slow")]


def test_nobody_watches_where_nothing_is_asked() -> None:
    within(5.0, "acme", lambda: None)
    assert nobody_watches()
    with pytest.raises(OutOfTime):
        within(0.05, "acme", runs_on)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_of_a_fork_has_a_watch_of_its_own() -> None:
    def stopped() -> int:
        with pytest.raises(OutOfTime):
            within(0.05, "acme", runs_on)
        return 7

    assert within(60.0, "outer", lambda: in_a_child(stopped)) == 7
