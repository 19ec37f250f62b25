"""Mistakes planted into attention with slopes and with a V of another width: the checks refuse each, and the kernel as it is passes."""

import sys
from pathlib import Path

import pytest
from attrs import evolve

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from mutants.subjects import Subject, subjects  # noqa: E402

from agentcompile_core.plugin.discovery import load_catalog  # noqa: E402
from agentcompile_core.worker.evaluate import Evaluation, WorkerState  # noqa: E402

FEW = 3  # cases: the first ones are drawn, not made for this
LANES, TENSOR = ("lanes_slopes", "attention.cu"), ("tensor_slopes", "attention_tensor.cu")
MISTAKES = {
    "no mistake, lanes": (*LANES, "", ""),
    "no mistake, tensor": (*TENSOR, "", ""),
    "scores rise with distance": (*LANES, "scores[u][g] += Alibi", "scores[u][g] -= Alibi"),
    "slopes of the first KV head": (*LANES, "Alibi::slope(share.first_head() + g)", "Alibi::slope(g)"),
    "rows of V as wide as those of K": (LANES[0], "decode_attention.cuh", "(kv_heads) * value_dim;", "(kv_heads) * head_dim;"),
    "one slope for a group": (*TENSOR, "share.first_head() + row, row < group", "share.first_head(), row < group"),
    "one distance for a step": (TENSOR[0], "tensor_steps.cuh", " + position_in_step(i, column) - position", " - position"),
}


@pytest.fixture(scope="module")
def session() -> WorkerState:
    return WorkerState(load_catalog(only=("emulation", "numerics", "attention", "transformers_rules"), strict=True))


def judged(session: WorkerState, subject: Subject, file: str, before: str, after: str) -> Evaluation:
    text = subject.files()[file]
    assert text.count(before) == 1 or not before
    source = subject.mutated(file, text.replace(before, after) if before else text)
    job = subject.job(source)
    job = evolve(job, trial=evolve(job.trial, cases=job.trial.cases[:FEW]))
    kernel = session.build(job)
    assert not isinstance(kernel, Evaluation), kernel
    return session.evaluate(job, kernel, lambda phase: None)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(session: WorkerState, name: str) -> None:
    subject, file, before, after = MISTAKES[name]
    found = judged(session, subjects()[subject], file, before, after)
    passed = bool(found.verdicts) and all(verdict.passed for verdict in found.verdicts)
    assert passed is not bool(before), found.message
