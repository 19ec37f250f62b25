"""The child's loop: read requests, build ahead in threads, evaluate one candidate at a time, answer on a private pipe."""

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from attrs import evolve

from ..errors import Cause, UsageError
from ..ir import serial
from ..ir.candidate import Kernel
from ..plugin.settings import from_document
from .causes import cause_of
from .evaluate import WorkerState
from .protocol import CATALOG, Evaluation, Job

_PR_SET_PDEATHSIG = 1
Request = tuple[int, str, Any, "Future[Any] | None"]


class Channel:
    """Writes one JSON object per line; safe to use from several threads."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Write one message."""
        line = json.dumps(message, separators=(",", ":"))
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()


class Server:
    """Reads requests on a thread of its own, so that builds start while another candidate runs."""

    def __init__(self, state: WorkerState, channel: Channel, builders: int) -> None:
        self.state, self.channel = state, channel
        self._requests: queue.Queue[Request | None] = queue.Queue()
        self._pool = ThreadPoolExecutor(builders, thread_name_prefix="build")

    def read(self) -> None:
        """Take requests from standard input until it ends."""
        for line in sys.stdin:
            message = json.loads(line)
            number, method, params = int(message["id"]), str(message["method"]), message["params"]
            future = None
            if method == "prepare":
                self._pool.submit(self._prepare, str(message["params"]))
                continue
            if method == "evaluate":
                try:
                    params = serial.structure(params, Job)
                    future = self._pool.submit(self._build, number, params)
                except UsageError as exc:
                    method, params = "refuse", str(exc)
            self._requests.put((number, method, params, future))
        self._requests.put(None)

    def _prepare(self, backend: str) -> None:
        with contextlib.suppress(Exception, SystemExit):  # builds will say what is wrong
            self.state.catalog.find("agentcompile_backends", backend).prepare()  # type: ignore[attr-defined]

    def _build(self, number: int, job: Job) -> Kernel | Evaluation | None:
        kernel = self.state.build(job)
        if isinstance(kernel, Kernel) and job.kernel is None:
            self.channel.send({"id": number, "kernel": serial.unstructure(kernel)})
        return kernel

    def serve(self) -> None:
        """Answer requests in order until there are no more."""
        while (request := self._requests.get()) is not None:
            number, method, params, future = request
            if method == "evaluate":
                self._evaluate(number, params, future)
            elif method == "call":
                self._call(number, params)
            else:
                self._answer(number, Evaluation(failure=Cause.CONTRACT, message=str(params)[:2000]), lost=False)

    def _evaluate(self, number: int, job: Job, future: "Future[Any] | None") -> None:
        assert future is not None
        self._phase(number, "build")
        kernel = future.result()
        if isinstance(kernel, Evaluation):
            self._answer(number, kernel, lost=False)
            return
        self._phase(number, "load")
        evaluation = self.state.evaluate(job, kernel, lambda phase: self._phase(number, phase))
        lost = self.state.backend(job.backend).is_lost() if evaluation.failure else False
        self._answer(number, evolve(evaluation, kernel=None), lost)

    def _phase(self, number: int, phase: str) -> None:
        self.channel.send({"id": number, "phase": phase})

    def _answer(self, number: int, evaluation: Evaluation, lost: bool) -> None:
        self.channel.send({"id": number, "result": serial.unstructure(evaluation), "lost": lost})

    def _call(self, number: int, params: dict[str, Any]) -> None:
        """Run ``function(argument, state, phase)`` of a module of the core; plain JSON in and out."""
        self._phase(number, "call")
        try:
            module, _, name = str(params["function"]).partition(":")
            if not module.startswith("agentcompile_core."):
                raise UsageError(f"the worker calls functions of agentcompile_core only, not {module!r}")
            function = getattr(importlib.import_module(module), name)
            result = function(params["argument"], self.state, lambda phase: self._phase(number, phase))
            self.channel.send({"id": number, "result": result, "lost": False})
        except (Exception, SystemExit) as exc:
            backend = self.state.used
            error = {"cause": cause_of(exc, backend).value, "message": f"{type(exc).__name__}: {exc}"[:2000]}
            sys.stderr.write(traceback.format_exc(limit=-6))
            self.channel.send({"id": number, "error": error, "lost": backend is not None and backend.is_lost()})


def main(arguments: list[str]) -> None:
    """Serve requests on standard input and output until the parent closes them."""
    parser = argparse.ArgumentParser(prog="agentcompile_core.worker")
    parser.add_argument("--catalog", default=CATALOG, help="module:function that returns the catalog")
    parser.add_argument("--builders", type=int, default=1)
    options = parser.parse_args(arguments)
    _die_with_parent()
    # Whatever plugins and compilers print must not be taken for an answer.
    channel = Channel(os.dup(1))
    os.dup2(2, 1)
    try:
        module, _, name = options.catalog.partition(":")
        make: Callable[[], Any] = getattr(importlib.import_module(module), name)
        settings = json.loads(sys.stdin.readline() or "{}").get("settings", {})
        state = WorkerState(from_document(make(), settings))
    except (Exception, SystemExit) as exc:
        channel.send({"error": f"{type(exc).__name__}: {exc}"})
        raise SystemExit(3) from exc
    gc.collect()
    gc.freeze()  # captures of graphs collect garbage; what was imported never is any
    server = Server(state, channel, options.builders)
    threading.Thread(target=server.read, name="reader", daemon=True).start()
    channel.send({"hello": os.getpid()})
    server.serve()
    os._exit(0)  # builds that nobody waits for any more do not hold the process


def _die_with_parent() -> None:
    """A child that hangs in a kernel never reads the end of its input; the kernel (Linux) ends it with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
