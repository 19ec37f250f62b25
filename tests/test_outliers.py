"""Weights and biases of the spiky family: a few are large, results stay finite, and kernels that clamp them are refused."""

import sys
from pathlib import Path

import pytest
import torch
from agentcompile_rules_transformers import testing as made
from agentcompile_validator_numerics import NumericsValidator
from attrs import evolve

from agentcompile_core.ops.reference import oracle
from agentcompile_core.plugin_api import DType, Outcome, Role
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker.execution import Execution
from agentcompile_core.worker.operands import graph_values, make_inputs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from mutants.subjects import BACKEND, load, subjects  # noqa: E402

WINDOW = "([](float z) {{ return z > 5.0f && z < 9.0f ? 5.0f : z; }}({}))"
CLAMPED = "fminf(fmaxf({}, -6.0f), 6.0f)"


@pytest.mark.parametrize("name", [name for name, each in subjects().items() if any(o.role is Role.WEIGHT for o in each.match.operands)])
def test_all_weights_have_some_and_results_stay_finite(name: str) -> None:
    subject = subjects()[name]
    match, graph, kind = subject.match, subject.graph, load().kinds[subject.match.kind]
    case = next(case for case in subject.job(subject.source).trial.cases if case.family == "spiky")
    inputs = make_inputs(match, kind, case, "cpu")
    for operand in match.operands:
        drawn = operand.role is Role.WEIGHT and kind.make(match, operand, case, torch.Generator(), "cpu") is None
        if drawn and operand.spec.dtype.is_float:
            values = inputs[operand.name].float()
            assert bool((values.abs() >= 8.0).any()) and float((values.abs() > 5.0).float().mean()) < 0.35
    values = graph_values(match, graph, inputs)
    expected = kind.reference(match, graph, values, 0) or oracle(graph, values)
    for out in graph.outputs:
        assert bool(expected[out].value.isfinite().all()), out


@pytest.mark.parametrize(("n", "k"), [(32, 4096), (64, 14336)])
def test_long_rows_in_half_precision_stay_finite(n: int, k: int) -> None:
    match, graph = made.linear_case(n=n, k=k, norm="rms", bias=True, dtype=DType.F16)
    kind = load().kinds[match.kind]
    case = next(case for case in cases_for(match, kind, "s") if case.family == "spiky")
    expected = oracle(graph, graph_values(match, graph, make_inputs(match, kind, case, "cpu")))
    for out in graph.outputs:
        assert bool(expected[out].value.isfinite().all()) and float(expected[out].value.abs().max()) < 2.0**14


@pytest.mark.parametrize(("name", "file", "read", "change"), [
    ("convolution_elements_f32", "convolution_step.cu", "ac::to_float(from[i])", CLAMPED),
    ("convolution_quads", "convolution_step.cu", "ac::to_float(bias[first + c])", WINDOW),
    ("gemm_pieces_elements", "gemm.cuh", None, WINDOW),
    ("experts_stream_sum", "experts_stream.cu", "ac::to_float(operands.scale[lane])", WINDOW),
    ("rope_partial_bf16", "rope.cu", "ac::to_float(sin[element])", WINDOW),
    ("argmax_tiny_f32", "argmax.cu", "ac::to_float(logits[i])", WINDOW),
    ("argmax_rounds", "argmax.cu", "ac::to_float(logits[i])", WINDOW),
])
def test_kernels_that_clamp_weights_or_biases_are_refused(name: str, file: str, read: str | None, change: str) -> None:
    subject = subjects()[name]
    text = subject.files()[file]
    line = next(line for line in text.splitlines() if (read or "if constexpr (Kind == aux_row) value = ") in line)
    read = read or line.split(" value = ")[1].rstrip(";")
    backend, kind = load().find("agentcompile_backends", BACKEND), load().kinds[subject.match.kind]
    said = []
    for changed in (text, text.replace(line, line.replace(read, change.format(read)))):
        source = subject.mutated(file, changed)
        trial, handle = subject.job(source).trial, backend.load(backend.build(source, subject.target))
        trial = evolve(trial, cases=tuple(case for case in trial.cases if case.family in ("spiky", "largest_last")))
        said.append(NumericsValidator().check(trial, Execution(trial, backend, handle, kind=kind)).outcome)
    assert said == [Outcome.PASS, Outcome.FAIL]
