"""Whole generations of several lengths: ours, eager, torch.compile and vLLM in turns on one GPU, each peer in a process of its own.

Rows are written as they come into benchmarks/results/<gpu>/sweep.json. The same command again measures what is missing there; rows of
another commit are refused. A peer that does not start, or dies, costs its own rows, which say why.

    python benchmarks/sweep.py qwen3-1.7b --workloads 128/128,2048/512 --peer-path ~/peers/vllm_site --budget-s 540
"""

import argparse
import gc
import json
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

sys.path.insert(0, str(Path(__file__).parent))
import harness
from full_models import accuracy_row, compiled_model
from peers import results
from peers.rounds import OURS, OutOfTime, Terms, Workload, measured
from peers.systems import NAMES, Asked, Peers, ours, prompts

from agentcompile_core.report.accounting import step_bytes
from agentcompile_core.store import Store

WORKLOADS = "128/128,2048/512,8192/4096,12288/8192,20480/16384"  # the paper's
SYSTEMS = (OURS, "eager", "torch_compile_loop", "vllm")
MOST_ERROR = 1.25  # times the framework's own error of logits, both against fp32
SPARE_S = 60.0  # a model is begun if that is left beyond its search
Row = dict[str, Any]


@frozen(kw_only=True)
class Command:
    """One command: what was asked, its name in rows, and how many seconds are left."""

    options: argparse.Namespace
    run: str
    commit: str
    ceiling_gbps: float
    left_s: Callable[[], float]

    @property
    def path(self) -> Path:
        """The results file."""
        return self.options.out / "sweep.json"

    def known(self) -> list[Row]:
        """Rows that are there."""
        return results.known(self.path, self.commit, harness.versions())

    def add(self, rows: list[Row]) -> None:
        """Write rows."""
        results.add(rows, self.options.out, "sweep", self.ceiling_gbps, self.commit)


@frozen(kw_only=True)
class Subject:
    """One model that is being measured: compiled, beside its peers."""

    name: str
    model: Any
    peers: Peers
    logit_rms_ratio: float | None

    def row(self, row: Row, workload: Workload, command: Command) -> Row:
        """What ``measured`` found, with what it was measured on."""
        floor_ms = step_bytes(self.model.graphs, workload.input + workload.output // 2) / command.ceiling_gbps / 1e6
        whose = {"logit_rms_ratio": self.logit_rms_ratio} if row["system"] == OURS else self.peers.facts.get(row["system"], {})
        return {"model": self.name, "dtype": command.options.dtype, "workload": str(workload), **row, "floor_step_ms": floor_ms,
                "context": command.options.context, "run": command.run, **whose}


def workloads_of(text: str) -> tuple[Workload, ...]:
    """``128/128,2048/512``: prompts and new tokens.

    Raises:
        SystemExit: it is no such text.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"[1-9]\d*/[1-9]\d*", part) and not part.endswith("/1") for part in parts):
        raise SystemExit(f"--workloads {text}: allowed are tokens of the prompt / new tokens (2 at least), by commas: 128/128,2048/512")
    return tuple(Workload(*(int(number) for number in part.split("/"))) for part in parts)


def open_work(command: Command, name: str) -> list[tuple[Workload, list[str]]]:
    """Workloads of a model with the systems that have no time yet."""
    rows, found = command.known(), []
    for workload in command.options.workloads:
        lacking = results.missing(rows, {"model": name, "dtype": command.options.dtype, "workload": str(workload)}, command.options.systems)
        if lacking:
            found.append((workload, lacking))
    return found


def sweep_model(command: Command, name: str) -> bool:
    """Measure what is missing of one model; whether the time sufficed."""
    work, options = open_work(command, name), command.options
    if not work:
        print(f"{name}: every row is there", flush=True)
        return True
    if command.left_s() < options.budget_s + SPARE_S:
        return False
    wanted = [system for system in options.systems if system != OURS and any(system in systems for _, systems in work)]
    asked = Asked(model=harness.CONFIGS / name, dtype=options.dtype, device=options.device, context=options.context,
                  inputs=tuple(workload.input for workload, _ in work), paths=tuple(options.peer_path), vllm=options.vllm,
                  start_s=min(options.peer_start_s, command.left_s()), answer_s=options.peer_answer_s)
    with Peers(wanted, asked) as peers, tempfile.TemporaryDirectory() as scratch:
        for why in peers.dead.values():
            print(f"{name}: {why}", flush=True)
        print(f"{name}: {', '.join(peers.facts) or 'no peer'} started, {command.left_s():.0f} s left", flush=True)
        model, compile_s = compiled_model(name, options, Store(options.cache or Path(scratch)))
        print(f"{name}: compiled in {compile_s:.0f} s, {command.left_s():.0f} s left", flush=True)
        model.context.close()
        if model.graphs.kv is None:
            raise SystemExit(f"{name} was not captured, so there is nothing of ours to time: {'; '.join(model.notes)}")
        accuracy = accuracy_row(name, model, options.positions) if options.positions else None
        subject = Subject(name=name, model=model, peers=peers, logit_rms_ratio=accuracy and accuracy["rms_ratio"])
        return _all_measured(command, subject, work)


def _all_measured(command: Command, subject: Subject, work: list[tuple[Workload, list[str]]]) -> bool:
    options = command.options
    if subject.logit_rms_ratio is not None and subject.logit_rms_ratio > MOST_ERROR:
        why = (f"refused: the logits err {subject.logit_rms_ratio:.2f} times as much as the framework's, more than {MOST_ERROR} times")
        untimed = dict.fromkeys(("e2e_ms", "prefill_ms", "step_ms", "spread_ms"))
        row = {"system": OURS, **untimed, "repetitions": 0, "estimated": False, "why": why}
        command.add([subject.row(row, workload, command) for workload, _ in work])
        print(f"{subject.name}: {why}", flush=True)
        return True
    prompt_of = prompts(subject.model.graphs.model.vocab_size)
    terms = Terms(repetitions=options.repetitions, estimate_over_ms=options.estimate_over_s * 1e3, left_s=command.left_s)
    for workload, lacking in work:  # ours is measured beside whatever is missing, so that every ratio is of one command
        asks = {system: subject.peers.ask(system, prompt_of, workload.positions) for system in lacking if system != OURS}
        asks[OURS] = ours(subject.model, prompt_of)

        def written(rows: list[Row], workload: Workload = workload) -> None:
            command.add([subject.row(row, workload, command) for row in rows])

        try:
            rows = measured(asks, workload, terms, written, alone=OURS in lacking)
        except OutOfTime:
            return False
        written(rows)
        for row in rows:
            print(f"{subject.name} {workload!s:>12}: {_said(row)}", flush=True)
    return True


def _said(row: Row) -> str:
    if row["why"]:
        return f"{row['system']:>18}: {row['why']}"
    return (f"{row['system']:>18}: {row['e2e_ms']:10.1f} ms, first token {row['prefill_ms']:8.2f}, {row['step_ms']:7.3f} ms/token, "
            f"{'estimated' if row['estimated'] else 'whole'}, {row['repetitions']} runs")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="+", choices=harness.MODELS, metavar="MODEL")
    made.add_argument("--workloads", default=WORKLOADS, help="tokens of the prompt / new tokens, by commas; default: %(default)s")
    made.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(NAMES)}, by commas; default: %(default)s")
    made.add_argument("--peer-path", type=Path, action="append", default=[], help="an environment that holds peers (vllm); may be repeated")
    made.add_argument("--budget-s", dest="seconds", type=float, default=float("inf"), help="seconds of this command; then it ends, and the "
                      "same command goes on where it ended")
    made.add_argument("--repetitions", type=int, default=10)
    made.add_argument("--estimate-over-s", type=float, default=60.0, help="baselines that take longer are estimated from short requests")
    made.add_argument("--context", type=int, help="positions ours and vLLM are made for; default: what the longest workload needs")
    made.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    made.add_argument("--device", default="cuda", help="of the framework's systems")
    made.add_argument("--positions", type=int, default=256, help="tokens whose logits are compared before anything is timed; 0: none")
    made.add_argument("--peer-start-s", type=float, default=240.0, help="a peer that takes longer to start is ended")
    made.add_argument("--peer-answer-s", type=float, default=600.0, help="a peer that takes longer for one request is ended")
    made.add_argument("--vllm", type=json.loads, default={}, metavar="JSON", help="arguments of vllm.LLM in place of those chosen here")
    made.add_argument("--advisor", default="heuristic")
    made.add_argument("--search-s", dest="budget_s", type=float, default=150.0, help="the search's budget of compile()")
    made.add_argument("--search-plans", dest="budget_plans", type=int, default=400)
    made.add_argument("--rounds", type=int, default=2, help="of the search")
    made.add_argument("--log")
    made.add_argument("--commit", help="the commit that is measured, where there is no git")
    made.add_argument("--cache", type=Path, help="the store to compile into, kept; default: a new one, removed afterwards")
    made.add_argument("--out", type=Path, default=harness.RESULTS / "h200")
    return made


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options with workloads, systems and context as values.

    Raises:
        SystemExit: something asked for is not possible; the message says what is.
    """
    options.workloads = workloads_of(options.workloads)
    options.systems = tuple(dict.fromkeys(part.strip() for part in options.systems.split(",") if part.strip()))
    unknown = [system for system in options.systems if system not in NAMES]
    if unknown or not options.systems:
        raise SystemExit(f"--systems {', '.join(unknown) or 'none'}: allowed are {', '.join(NAMES)}")
    needed = max(workload.positions for workload in options.workloads)
    options.context = options.context or -(-needed // 256) * 256
    if options.context < needed:
        raise SystemExit(f"--context {options.context}: the longest workload needs {needed} positions")
    if options.repetitions < 1:
        raise SystemExit(f"--repetitions {options.repetitions}: at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, until the time is over."""
    options = checked(parser().parse_args(arguments))
    began, commit = time.monotonic(), harness.commit(options.commit)
    results.known(options.out / "sweep.json", commit, harness.versions())  # refused before anything takes time
    command = Command(options=options, run=f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}-{secrets.token_hex(2)}", commit=commit,
                      ceiling_gbps=harness.read_ceiling_gbps(), left_s=lambda: options.seconds - (time.monotonic() - began))
    print(f"read ceiling {command.ceiling_gbps:.0f} GB/s, run {command.run}", flush=True)
    for name in options.models:
        if not sweep_model(command, name):
            break
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    left = [f"{name} {workload}" for name in options.models for workload, _ in open_work(command, name)]
    if left:
        print(f"not complete: {', '.join(left)}; the same command again measures what is missing", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
