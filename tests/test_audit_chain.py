"""``agentcompile audit`` of runs whose steps the captured chain judged: by a real clock, and over generated times."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from faults.cheap import lenient, offers
from faults.seen import command
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_worker import Here
from test_chain_soundness import answered, selected

import agentcompile_core.worker
from agentcompile_core import api
from agentcompile_core.configuration import Config
from agentcompile_core.ir.decisions import ChainLog, ChainTrial
from agentcompile_core.ir.selection import Basis
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.report import audit, audit_chain
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.stages.emit import evidence
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import SimpleValidator
from agentcompile_core.worker import judge

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "hardware_plugin"))
from acme_hardware.backend import ACME_ONE, AcmeBackend  # noqa: E402
from acme_hardware.families import ElementwiseInC, LinearInC  # noqa: E402

MLP = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = torch.nn.Linear(64, 96), torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)
        self.out = torch.nn.Linear(64, 8)

    def forward(self, x):
        return self.out(x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))).tanh()

def get_inputs():
    return [torch.linspace(-1.0, 1.0, 64).reshape(1, 64)]

def get_init_inputs():
    return []
"""


class Capturing(AcmeBackend):
    """The accelerator of the example, which captures by remembering what to call."""

    captures = True

    def capture(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1, owner: object = None) -> Callable[[], None]:
        """Warm up now; a replay calls again."""
        for _ in range(warm_ups):
            run()
        return lambda: [run() for _ in range(runs)] and None


class Worker(Here):
    """The worker in this process, with its calls."""

    def call(self, function: str, argument: Any, *, deadline_s: float, progress: Any) -> Any:
        """The chain's judge, over JSON as from a child."""
        assert function == "agentcompile_core.worker.judge:judge"
        self.start()
        return json.loads(json.dumps(judge.judge(json.loads(json.dumps(argument)), self._state, progress)))


def catalog() -> Any:
    """The accelerator, its C kernels and a quick validator."""
    acme = [("acme", offers(targets=ACME_ONE, backends=Capturing(), validators=SimpleValidator())),
            ("linear", offers(template_families=LinearInC())), ("elementwise", offers(template_families=ElementwiseInC()))]
    return load_catalog(only=("transformers_rules",), extra=acme, strict=False)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of ``judged_by_the_clock``."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler called cc")
    return judged_by_the_clock(tmp_path_factory.mktemp("chain"))


def judged_by_the_clock(folder: Path) -> Path:
    """The bundle of a compile of a gated MLP in which the chain judged C kernels by the clock."""
    (folder / "mlp.py").write_text(MLP)
    settings = Config(target="acme_one", validators=("simple",), rounds=1, budget_plans=6, budget_s=60.0, margin=-0.6)
    real, agentcompile_core.worker.Worker = agentcompile_core.worker.Worker, lambda **_: Worker(catalog())
    try:
        with lenient():
            made = api.compile(str(folder / "mlp.py"), run_on="nothing", config=settings, catalog=catalog(), store=Store(None))
    finally:
        agentcompile_core.worker.Worker = real
    return made.save(folder / "b")


@pytest.fixture(scope="module")
def run(run_folder: Path) -> Any:
    """What the folder holds, read once."""
    return bundle_reader.read(run_folder), evidence.read(run_folder).decisions


def audited(run: Any, **changes: Any) -> tuple[audit.Decision, ...]:
    """The audit of a run, with parts of what it left replaced."""
    parts = {"selections": run[0].selections, "records": run[0].records, "decisions": run[1], **changes}
    return audit.audit(parts["selections"], parts["records"], parts["decisions"], run[0].programs)


def test_what_the_chain_decided_by_a_real_clock_follows(run_folder: Path, run: Any) -> None:
    log = run[1].chain
    assert log is not None and log.started and log.trials, "the chain judged nothing, so there is nothing to audit"
    assert any(s.basis is Basis.CHAIN for s in run[0].selections)
    code, out, _ = command("audit", run_folder, "--json")
    found = json.loads(out)
    assert (code, found["do_not_follow"]) == (0, 0), [row for row in found["decisions"] if row["problems"]]
    assert {row["kind"] for row in found["decisions"]} == {"advice", "region", "chain", "step", "program"}
    assert sum("alternatives tried" in line for row in found["decisions"] if row["kind"] == "chain" for line in row["evidence"]) >= 1


@given(data=st.data())
@settings(max_examples=20)
def test_a_decision_that_is_altered_does_not_follow(run: Any, data: st.DataObject) -> None:
    """One thing in the folder is changed, all else agrees with it as well as it can: the audit says so."""
    known = run[1]
    log, chosen = known.chain, run[0].selections
    what = data.draw(st.sampled_from(["taken", "ratio", "started", "dropped", "rival", "removed", "no log"]), label="what")
    number = data.draw(st.integers(0, len(log.trials) - 1), label="trial")
    trial = log.trials[number]

    def with_trial(*new: ChainTrial) -> Any:
        return evolve(known, chain=evolve(log, trials=(*log.trials[:number], *new, *log.trials[number + 1:])))

    if what == "taken":
        found = audited(run, decisions=with_trial(evolve(trial, taken=not trial.taken)))
    elif what == "ratio":
        found = audited(run, decisions=with_trial(evolve(trial, refused="", ratio=9.0 if trial.taken else 0.001)))
    elif what == "started":
        signature, step = data.draw(st.sampled_from(log.started), label="step")
        left = tuple(one for one in log.started if one != (signature, step))
        found = audited(run, decisions=evolve(known, chain=evolve(log, started=left)))
    elif what == "no log":
        found = audited(run, decisions=evolve(known, chain=None))
    else:
        selection = data.draw(st.sampled_from([s for s in chosen if s.steps]), label="region")
        step = data.draw(st.sampled_from(selection.steps), label="step")
        others = tuple(s for s in selection.steps if s is not step)
        if what == "rival":
            rivals = [r for r in run[0].records if r.usable and r.step.match_id == step.step.match_id
                      and r.signature == selection.signature and r.step not in (step.step,) and r.step.implementation != "framework"]
            if not rivals:
                return
            rival = data.draw(st.sampled_from(rivals), label="rival")
            others = (*others, evolve(step, step=rival.step, measurement=rival.measurement, source=None))
        changed = tuple(evolve(s, steps=others) if s is selection else s for s in chosen)
        found = audited(run, selections=changed)
    assert any(d.problems for d in found if d.kind in ("chain", "region")), what


@settings(max_examples=15)
@given(data=st.data())
def test_replaying_the_judges_log_gives_what_the_judge_selected(data: st.DataObject) -> None:
    """Over kernels that are honest, stop, or lie, in any order, with any times."""
    times_us = st.sampled_from([1.0, 2.0, 3.0, 4.0, 4.01, 9.0, 12.0])
    kernels = st.builds(selected, st.sampled_from(["honest", "honest", "stops", "lies"]), times_us)
    first, *others = data.draw(st.lists(kernels, min_size=1, max_size=5, unique_by=lambda one: str(one.step)))
    with pytest.MonkeyPatch.context() as patch:
        answer = answered(patch, first, *others)
    log = ChainLog(started=(("s1", first.step),), trials=answer.trials)
    replay = audit_chain.replayed(log, 0.01)  # the judge was given the chain's part of that
    assert replay.problems == ()
    assert list(replay.held.get("s1", {}).values()) == [x.step for s in answer.selections for x in s.steps]
    assert len([t for t in answer.trials if t.ratio or t.step is not None]) == answer.tried
