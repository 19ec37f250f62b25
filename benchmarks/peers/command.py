"""What commands that time whole generations share: arguments, resuming, a model beside its peers, the loop over workloads."""

import argparse
import json
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from attrs import frozen
from full_models import accuracy_row, compiled_model

from agentcompile_core.errors import UsageError
from agentcompile_core.report.accounting import step_bytes
from agentcompile_core.runtime.device import release_cache
from agentcompile_core.store import Store
from peers import results
from peers.estimate import Ask
from peers.rounds import OURS, OutOfTime, Terms, Workload, measured, untimed
from peers.systems import Asked, Peers, Prompts, ours, prompts

WORKLOADS = "128/128,2048/512,8192/4096,12288/8192,20480/16384"  # the paper's
MOST_ERROR = 1.25  # times the framework's own error of logits, both against fp32
SPARE_S = 60.0  # a model is begun if that is left beyond its search
Row = dict[str, Any]


class Entrants:
    """The systems of one model: ours, and peers in processes of their own."""

    def __init__(self, model: Any, peers: Peers) -> None:
        self.model, self.peers = model, peers

    def ask(self, system: str, prompt_of: Prompts, workload: Workload) -> Ask:
        """A system at a workload."""
        return ours(self.model, prompt_of) if system == OURS else self.peers.ask(system, prompt_of, workload.positions)

    def facts(self, system: str) -> Row:
        """What rows of a system say besides times."""
        return self.peers.facts.get(system, {})


@frozen(kw_only=True)
class Command:
    """One command: what was asked, its name in rows, how many seconds are left. ``name``: of the results file.

    ``together``: where one system has no time, all are measured again, since each is compared with the one before it.
    """

    name: str
    options: argparse.Namespace
    run: str
    commit: str
    ceiling_gbps: float
    left_s: Callable[[], float]
    together: bool = False

    def known(self) -> list[Row]:
        """Rows that are there."""
        return results.known(self.options.out / f"{self.name}.json", self.commit, harness.versions())

    def open_work(self, model: str) -> list[tuple[Workload, list[str]]]:
        """Workloads of a model with the systems that have no time yet."""
        rows, found = self.known(), []
        for workload in self.options.workloads:
            key = {"model": model, "dtype": self.options.dtype, "workload": str(workload)}
            lacking = results.missing(rows, key, self.options.systems)
            if lacking:
                found.append((workload, list(self.options.systems) if self.together else lacking))
        return found

    def measure(self, name: str, outside: tuple[str, ...], entrants: Callable[[Any, Peers], Entrants]) -> bool:
        """Measure what is missing of one model, with those of ``outside`` as peers; whether the time sufficed."""
        work, options = self.open_work(name), self.options
        if not work:
            print(f"{name}: every row is there", flush=True)
            return True
        if self.left_s() < options.budget_s + SPARE_S:
            return False
        wanted = [system for system in outside if any(system in systems for _, systems in work)]
        asked = Asked(model=harness.CONFIGS / name, dtype=options.dtype, device=options.device, context=options.context,
                      inputs=tuple(workload.input for workload, _ in work), paths=tuple(options.peer_path), vllm=options.vllm,
                      start_s=min(options.peer_start_s, self.left_s()), answer_s=options.peer_answer_s, cache=options.cache,
                      search_s=options.budget_s)
        with Peers(wanted, asked) as peers, tempfile.TemporaryDirectory() as scratch:
            for why in peers.dead.values():
                print(f"{name}: {why}", flush=True)
            print(f"{name}: {', '.join(peers.facts) or 'no peer'} started, {self.left_s():.0f} s left", flush=True)
            model, compile_s = compiled_model(name, options, Store(options.cache or Path(scratch)))
            print(f"{name}: compiled in {compile_s:.0f} s, {self.left_s():.0f} s left", flush=True)
            model.context.close()
            if model.graphs.kv is None:
                raise SystemExit(f"{name} was not captured, so there is nothing of ours to time: {'; '.join(model.notes)}")
            positions = min(options.positions, options.context)
            accuracy = accuracy_row(name, model, positions) if positions else None
            return self._workloads(name, entrants(model, peers), accuracy, work)

    def _workloads(self, name: str, entrants: Entrants, accuracy: Row | None, work: list[tuple[Workload, list[str]]]) -> bool:
        options, model = self.options, entrants.model
        error = accuracy and accuracy["rms_ratio"]
        terms = Terms(repetitions=options.repetitions, estimate_over_ms=options.estimate_over_s * 1e3, left_s=self.left_s)
        prompt_of = prompts(model.graphs.model.vocab_size)
        for workload, lacking in work:  # ours is measured beside whatever is missing, so that every ratio is of one command

            def written(rows: list[Row], workload: Workload = workload) -> None:
                positions = workload.input + workload.output // 2
                floor_ms = step_bytes(model.graphs, positions) / self.ceiling_gbps / 1e6
                common = {"model": name, "dtype": options.dtype, "workload": str(workload)}
                where = {"floor_step_ms": floor_ms, "context": options.context, "run": self.run}
                of = {OURS: {"logit_rms_ratio": error}}
                found = [{**common, **row, **where, **of.get(row["system"], {}), **entrants.facts(row["system"])} for row in rows]
                results.add(found, options.out, self.name, self.ceiling_gbps, self.commit)

            if error is not None and error > MOST_ERROR:
                why = f"refused: the logits err {error:.2f} times as much as the framework's, more than {MOST_ERROR} times"
                rows = [untimed(OURS, why)]
            else:
                asks = {system: entrants.ask(system, prompt_of, workload) for system in [s for s in lacking if s != OURS] + [OURS]}
                try:
                    rows = measured(asks, workload, terms, written, alone=OURS in lacking)
                except OutOfTime:
                    return False
            written(rows)
            for row in rows:
                print(f"{name} {workload!s:>12}: {_said(row)}", flush=True)
        return True

    def finish(self) -> None:
        """Say what is missing."""
        left = [f"{name} {workload}" for name in self.options.models for workload, _ in self.open_work(name)]
        if left:
            print(f"not complete: {', '.join(left)}; the same command again measures what is missing", flush=True)


def _said(row: Row) -> str:
    if row["why"]:
        return f"{row['system']:>18}: {row['why']}"
    return (f"{row['system']:>18}: {row['e2e_ms']:10.1f} ms, first token {row['prefill_ms']:8.2f}, {row['step_ms']:7.3f} ms/token, "
            f"{'estimated' if row['estimated'] else 'whole'}, {row['repetitions']} runs")


def workloads_of(text: str) -> tuple[Workload, ...]:
    """``128/128,2048/512``: prompts and new tokens.

    Raises:
        SystemExit: it is no such text.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"[1-9]\d*/[1-9]\d*", part) and not part.endswith("/1") for part in parts):
        raise SystemExit(f"--workloads {text}: allowed are tokens of the prompt / new tokens (2 at least), by commas: 128/128,2048/512")
    return tuple(Workload(*(int(number) for number in part.split("/"))) for part in parts)


def parser(doc: str, systems: tuple[str, ...], estimate_over_s: float) -> argparse.ArgumentParser:
    """The arguments that these commands share."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="+", choices=harness.MODELS, metavar="MODEL")
    made.add_argument("--workloads", default=WORKLOADS, help="tokens of the prompt / new tokens, by commas; default: %(default)s")
    made.add_argument("--systems", default=",".join(systems), help="some of the systems, by commas; default: %(default)s")
    made.add_argument("--peer-path", type=Path, action="append", default=[], help="a folder that holds peers (vllm, or what "
                      "this command says); may be repeated")
    made.add_argument("--budget-s", dest="seconds", type=float, default=float("inf"), help="seconds of this command; then it ends, and the "
                      "same command goes on where it ended")
    made.add_argument("--repetitions", type=int, default=10)
    made.add_argument("--estimate-over-s", type=float, default=estimate_over_s, help="what takes longer, and is not ours as a whole, is "
                      "estimated from short requests; default: %(default)s")
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
    made.add_argument("--out", type=Path, help="folder of results (default: benchmarks/results/, by the name of the GPU)")
    return made


def checked(options: argparse.Namespace, names: tuple[str, ...]) -> argparse.Namespace:
    """The options with workloads, systems (some of ``names``) and context as values.

    Raises:
        SystemExit: something asked for is not possible; the message says what is.
    """
    options.workloads = workloads_of(options.workloads)
    options.systems = tuple(dict.fromkeys(part.strip() for part in options.systems.split(",") if part.strip()))
    unknown = [system for system in options.systems if system not in names]
    if unknown or not options.systems:
        raise SystemExit(f"--systems {', '.join(unknown) or 'none'}: allowed are {', '.join(names)}")
    needed = max(workload.positions for workload in options.workloads)
    options.context = options.context or -(-needed // 256) * 256
    if options.context < needed:
        raise SystemExit(f"--context {options.context}: the longest workload needs {needed} positions")
    if options.repetitions < 1:
        raise SystemExit(f"--repetitions {options.repetitions}: at least 1")
    return options


def begun(name: str, options: argparse.Namespace, together: bool = False) -> Command:
    """The command that fills ``name``.json.

    Raises:
        SystemExit: the file holds rows that these may not stand beside, or there is no GPU; nothing has taken time yet.
    """
    began, commit = time.monotonic(), harness.commit(options.commit)
    options.out = options.out or harness.gpu_folder()
    results.known(options.out / f"{name}.json", commit, harness.versions())
    run = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime())}-{secrets.token_hex(2)}"
    try:
        ceiling = harness.read_ceiling_gbps()
    except UsageError as exc:
        raise SystemExit(str(exc)) from exc
    release_cache()  # the buffer that was read
    print(f"read ceiling {ceiling:.0f} GB/s, run {run}", flush=True)
    return Command(name=name, options=options, run=run, commit=commit, ceiling_gbps=ceiling, together=together,
                   left_s=lambda: options.seconds - (time.monotonic() - began))
