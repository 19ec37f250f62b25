"""Runs a folder of task files in the form of KernelBench (Model, get_inputs, get_init_inputs) and reports correctness, speed and coverage.

Each task is compiled, compared on five fresh random inputs with the benchmark's tolerance and with ours (the error of the framework
against float64), and timed beside eager or torch.compile as the benchmark does, in a process of its own. The files are executed. What no
generated kernel runs in is a fallback: it counts as speed 1.0 and is shown as what it is.

    python benchmarks/kernelbench.py TASKS_FOLDER --level 1 --baseline compile --out kernelbench.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from kernelbench_run import scores, tasks

ANSWER = "kernelbench row: "
HEAD = ("level", "number", "name")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, help="a checkout, a folder of levels, or one level")
    made.add_argument("--level", default="", help="only this level")
    made.add_argument("--only", default="", help="numbers, ranges and names of tasks, by commas: 1,4-9,Softmax")
    made.add_argument("--baseline", default="eager", choices=("eager", "compile"))
    made.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    made.add_argument("--device", default="", choices=("", "cpu", "cuda"), help="default: cuda where there is one; on cpu nothing is timed")
    made.add_argument("--budget-s", type=float, default=60.0, help="search budget of each task")
    made.add_argument("--budget-plans", type=int, default=64, help="candidates of each task")
    made.add_argument("--timings", type=int, default=100, help="timed runs of each side")
    made.add_argument("--task-seconds", type=float, default=300.0, help="a task that takes longer is ended and has failed")
    made.add_argument("--cache", type=Path, help="the cache that all tasks share; default: a new one, removed afterwards")
    made.add_argument("--commit")
    made.add_argument("--out", type=Path, help="results as JSON; beside it a table (.md) and a picture (.svg)")
    made.add_argument("--resume", action="store_true", help="keep the rows of --out that have this commit and these terms")
    made.add_argument("--json", action="store_true", help="print the results as JSON and nothing else")
    made.add_argument("--gpus", type=int, default=1, help="tasks are dealt to this many GPUs, one at a time on each (default: %(default)s)")
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; 1 where a task is wrong or failed."""
    options = parser().parse_args(arguments)
    if options.child:
        return _child(Path(options.folder))
    chosen = tasks.find(options.folder, options.level, options.only)
    device = options.device or ("cuda" if _has_cuda() else "cpu")
    with tempfile.TemporaryDirectory(prefix="kernelbench-") as scratch:
        terms = {"device": device, "dtype": options.dtype, "baseline": options.baseline, "budget_s": options.budget_s,
                 "budget_plans": options.budget_plans, "timings": options.timings if device == "cuda" else 0,
                 "cache": str(options.cache or scratch)}
        rows = _known(chosen, terms, options)
        there = [_head(row) for row in rows]
        left = [task for task in chosen if _named(task) not in there]
        order = [_named(task) for task in chosen]

        def found(row: dict[str, Any]) -> None:
            rows.append(row)
            rows.sort(key=lambda one: order.index(_head(one)))
            if options.out:  # as they come: who ends a long run keeps what it has
                _write(options.out, _document(rows, terms, options))

        _Dealer(left, len(chosen), terms, options, found).run()
        document = _document(rows, terms, options)
    print(json.dumps(document, indent=1) if options.json else scores.markdown(rows) + "\n\n" + scores.sentence(document["summary"], terms))
    return 0 if all(scores.outcome(row) in ("right", "fallback") for row in rows) else 1


def _named(task: tasks.Task) -> dict[str, Any]:
    return {key: getattr(task, key) for key in HEAD}


def _head(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in HEAD}


def _known(chosen: list[tasks.Task], terms: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """With ``--resume`` the rows that ``--out`` holds of these tasks, measured on these terms at this commit."""
    if not (options.resume and options.out and options.out.exists()):
        return []
    found = json.loads(options.out.read_text())
    if found["commit"] != harness.commit(options.commit) or found["terms"] != _said_terms(terms):
        return []
    wanted = [_named(task) for task in chosen]
    return [row for row in found["rows"] if _head(row) in wanted]


def _said_terms(terms: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in terms.items() if key != "cache"}


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class _Dealer:
    """Tasks that are left, dealt to GPUs: one at a time on each, the process of the next one beside it."""

    def __init__(self, left: list[tasks.Task], count: int, terms: dict[str, Any], options: argparse.Namespace,
                 found: Callable[[dict[str, Any]], None]) -> None:
        self._left, self._count, self._terms, self._options, self._found = iter(left), count, terms, options, found
        self._begun, self._lock = count - len(left), threading.Lock()
        self._processes: list[_Waiting] = []
        self._is_over = False

    def run(self) -> None:
        """Run all of them; whoever interrupts this leaves no process behind."""
        gpus = self._options.gpus
        if gpus == 1:
            return self._serve(None)
        with ThreadPoolExecutor(gpus) as pool:
            try:
                for done in as_completed([pool.submit(self._serve, gpu) for gpu in range(gpus)]):
                    done.result()
            except BaseException:
                with self._lock:  # a task that is ended here has no row: it would stand in the results as one that failed
                    self._left, self._is_over = iter(()), True
                    for process in self._processes:
                        process.kill()
                raise

    def _serve(self, gpu: int | None) -> None:
        following = self._next(gpu)
        try:
            while following is not None:
                (place, task, process), following = following, self._next(gpu)
                row = _row(task, process, f"{place}/{self._count}", self._terms, self._options)
                with self._lock:
                    self._processes.remove(process)
                    if self._is_over:
                        return
                    self._found(row)
        finally:
            if following is not None:
                following[2].end()

    def _next(self, gpu: int | None) -> "tuple[int, tasks.Task, _Waiting] | None":
        with self._lock:
            task = next(self._left, None)
            if task is None:
                return None
            self._begun += 1
            self._processes.append(_Waiting(task, gpu))
            return self._begun, task, self._processes[-1]


class _Waiting:
    """The process of one task: it imports what it needs while the task before it runs, and begins when it is told its terms."""

    def __init__(self, task: tasks.Task, gpu: int | None) -> None:
        environment = os.environ if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        command = [sys.executable, str(Path(__file__).resolve()), str(task.path), "--child"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                         env=environment)

    def answer(self, terms: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The row that it finds within ``seconds``, or why there is none."""
        try:
            out, err = self._process.communicate(json.dumps(terms) + "\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            self.end()
            return {"error": f"it did not end within {seconds:g} s and was ended"}
        except BaseException:  # whoever interrupts this leaves no process behind
            self.end()
            raise
        return _said(out, err, self._process.returncode)

    def kill(self) -> None:
        """End it, begun or not; whoever waits for its answer goes on."""
        self._process.kill()

    def end(self) -> None:
        """End it, begun or not, and wait for that."""
        self.kill()
        self._process.communicate()


def _said(out: str, err: str, code: int) -> dict[str, Any]:
    for line in reversed(out.splitlines()):
        if line.startswith(ANSWER):
            answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return answer
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "no message")
    return {"error": f"its process ended with code {code}: {last[:300]}"}


def _row(task: tasks.Task, process: _Waiting, place: str, terms: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    row = {**_named(task), **process.answer(terms, options.task_seconds)}
    row["seconds"] = round(time.monotonic() - began, 1)
    if not options.json:
        print(f"[{place}] {task}: {scores.outcome(row)}, {row['seconds']:.0f} s {row.get('error', row.get('why', ''))[:200]}",
              file=sys.stderr, flush=True)
    return row


def _child(path: Path) -> int:
    from kernelbench_run import judge

    judge.prepared()
    said = sys.stdin.readline()
    if not said:  # nobody waits for an answer any more
        return 0
    try:
        terms = judge.Terms(**json.loads(said))
        row = judge.judged(path, terms)
        if terms.device == "cuda":
            row |= {"gpu_uuid": harness.machine()["gpu_uuid"]}
    except Exception as exc:  # one task says what happened, the others go on
        row = {"error": f"{type(exc).__name__}: {' '.join(str(exc).split())[:400]}"}
    print(ANSWER + json.dumps(row), flush=True)
    return 0


def _document(rows: list[dict[str, Any]], terms: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    here = harness.machine() if terms["device"] == "cuda" else {"gpu": "no GPU, generated kernels on the emulator", "driver": "none"}
    levels = sorted({row["level"] for row in rows})
    rows = [{"gpu_uuid": here["gpu_uuid"], **row} for row in rows] if "gpu_uuid" in here else rows
    made = {"versions": harness.versions(), "commit": harness.commit(options.commit), "date": time.strftime("%Y-%m-%d")}
    return {"schema": 1, **here, **made,
            "terms": _said_terms(terms), "summary": scores.summary(rows),
            "levels": {level: scores.summary([row for row in rows if row["level"] == level]) for level in levels}, "rows": rows}


def _write(out: Path, document: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(scores.markdown(document["rows"]) + "\n")
    out.with_suffix(".svg").write_text(scores.chart(document["rows"], document["terms"]["baseline"]))
    fresh = out.with_suffix(".new")
    fresh.write_text(json.dumps(document, indent=1) + "\n")
    fresh.replace(out)


if __name__ == "__main__":
    sys.exit(main())
