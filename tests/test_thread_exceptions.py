"""An exception waits for a thread that is in foreign code; every other thread goes on as if there were none, profiled or not."""

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import agentcompile_core as ac
from agentcompile_core.plugin import thread_exceptions
from agentcompile_core.plugin.discovery import load_catalog


class Stop(BaseException):
    pass


@contextmanager
def waiting(longest_s: float) -> Iterator[tuple[threading.Thread, threading.Lock, list[str]]]:
    """A thread that waits in foreign code for the lock, and says how it went on."""
    lock, began, ends = threading.Lock(), threading.Event(), []

    def wait() -> None:
        try:
            began.set()
            lock.acquire(timeout=longest_s)
            ends.append("went on")
        except Stop:
            ends.append("stopped")

    lock.acquire()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    began.wait()
    time.sleep(0.05)
    yield thread, lock, ends
    if lock.locked():
        lock.release()
    thread.join()


def profiled() -> int:
    calls = []
    sys.setprofile(lambda frame, event, what: calls.append(event))
    try:
        time.monotonic()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_thread_in_foreign_code_gets_it_when_it_returns_and_nobody_else_waits() -> None:
    with waiting(20.0) as (thread, lock, ends):
        thread_exceptions.put(thread, Stop)
        assert profiled() and thread.is_alive() and not ends
        lock.release()
        thread.join(5.0)
        assert ends == ["stopped"]


def test_a_loop_in_python_ends() -> None:
    ends = []

    def loop() -> None:
        try:
            while True:
                pass
        except Stop:
            ends.append("stopped")

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    thread_exceptions.put(thread, Stop)
    thread.join(5.0)
    assert ends == ["stopped"]


@pytest.mark.parametrize("begun", [False, True])
def test_one_that_has_ended_or_not_begun_is_left_alone(begun: bool) -> None:
    thread = threading.Thread(target=lambda: None)
    if begun:
        thread.start()
        thread.join()
    thread_exceptions.put(thread, Stop)
    assert profiled()


def test_a_module_is_compiled_while_an_exception_of_somebody_else_waits() -> None:
    with waiting(20.0) as (thread, _, ends):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stop))
        module, x = nn.ReLU(), torch.randn(4)
        made = ac.compile(module, example_inputs=(x,), device="cpu", catalog=load_catalog(only=("rules_transformers",)))
        assert torch.equal(made(x), module(x)) and thread.is_alive() and not ends
