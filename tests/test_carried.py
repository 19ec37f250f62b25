"""Every operand's NaN is seen alone: no other hides it, it lies in what is read, and kernels that swallow it are refused."""

import sys
from pathlib import Path

import pytest
import torch
from agentcompile_rules_transformers import testing as made
from agentcompile_validator_numerics import NumericsValidator
from attrs import evolve

from agentcompile_core.ops.reference import Bounded, oracle
from agentcompile_core.plugin_api import Outcome, Role, same_bits
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker.execution import Execution
from agentcompile_core.worker.operands import graph_values, make_inputs
from agentcompile_core.worker.shared_weights import SharedWeights

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from mutants.subjects import BACKEND, Subject, load, subjects  # noqa: E402

NOBODY = "nobody"


def reference(subject: Subject, inputs: dict[str, torch.Tensor]) -> dict[str, Bounded]:
    kind, values = load().kinds[subject.match.kind], graph_values(subject.match, subject.graph, inputs)
    return kind.reference(subject.match, subject.graph, values, 0) or oracle(subject.graph, values)


@pytest.mark.parametrize("family", sorted({subject.family for subject in subjects().values()}))
def test_every_operand_that_is_read_has_a_nan_that_reaches_a_result(family: str) -> None:
    for subject in (each for each in subjects().values() if each.family == family):
        match, kind = subject.match, load().kinds[subject.match.kind]
        cases = {case.carrier: case for case in subject.job(subject.source).trial.cases if case.carrier and not case.misaligned}
        read = {o.values for o in match.operands if o.access.value != "write" and o.spec.dtype.is_float and o.role is not Role.WORKSPACE}
        assert {match.need(name).values for name in cases} == read
        for name, case in cases.items():
            inputs, plain = (make_inputs(match, kind, each, "cpu") for each in (case, evolve(case, carrier=NOBODY)))
            beside = (other for other in inputs if match.need(other).values != match.need(name).values)
            assert all(same_bits(inputs[other], plain[other]) for other in beside)
            found, without = reference(subject, inputs), reference(subject, plain)
            moved = [not same_bits(found[out].value, without[out].value) or bool((found[out].error != without[out].error).any())
                     for out in subject.graph.outputs]
            assert any(moved), (subject.name, name)


@pytest.mark.parametrize(("name", "file", "read", "operand"), [
    ("experts_sum", "experts.cu", "ac::to_float(operands.scale[slot])", "scale"),
    ("elementwise_parts_of_heads", "strided_copy.cu", "ac::to_float(in[place])", "in0"),
    ("recurrence_rows_alone", "recurrence_step.cu", "ac::to_float(aux0[row])", "aux0"),
    ("gemv_combined", "gemv_common.cuh", "ac::to_float(given.first)", "aux0"),
])
def test_kernels_that_swallow_the_nan_of_one_operand_are_refused(name: str, file: str, read: str, operand: str) -> None:
    subject = subjects()[name]
    text = subject.files()[file]
    assert text.count(read) == 1
    swallowed = text.replace(read, f"([](float z) {{ return z == z ? z : 0.0f; }}({read}))")
    backend, kind = load().find("agentcompile_backends", BACKEND), load().kinds[subject.match.kind]
    said = []
    for changed in (text, swallowed):
        source = subject.mutated(file, changed)
        trial, handle = subject.job(source).trial, backend.load(backend.build(source, subject.target))
        trial = evolve(trial, cases=tuple(case for case in trial.cases if case.family == "nan"))
        said.append(NumericsValidator().check(trial, Execution(trial, backend, handle, kind=kind)))
    assert said[0].outcome is Outcome.PASS
    assert said[1].outcome is Outcome.FAIL and f" of {operand}: " in said[1].message


def test_operands_of_one_value_carry_it_together_and_states_where_they_hold_something() -> None:
    match, _ = made.attention_case(heads=(2, 1), head_dim=16, capacity=40)
    kind = load().kinds[match.kind]
    case = next(case for case in cases_for(match, kind, "s", emulated=True) if case.carrier == "v_cache")
    cache = make_inputs(match, kind, case, "cpu")["v_cache"]
    assert case.position > 0 and int(cache[:, case.position - 1].isnan().sum()) == 1
    assert not cache[:, : case.position - 1].isnan().any() and cache[:, case.position :].isnan().all()
    assert not make_inputs(match, kind, evolve(case, carrier="q"), "cpu")["v_cache"][:, : case.position].isnan().any()
    one = evolve(match, operands=tuple(evolve(o, values=match.need("k").values) if o.name == "v" else o for o in match.operands))
    carriers = [case.carrier for case in cases_for(one, kind, "s", emulated=True)]
    assert carriers.count("k") == 1 and "v" not in carriers
    both = make_inputs(one, kind, evolve(case, carrier="k"), "cpu")
    assert both["k"].isnan().any() and same_bits(both["k"], both["v"])


def test_weights_that_cases_share_stay_as_they_are() -> None:
    match, _ = made.linear_case(n=64, k=64, bias=True)
    kind, kept = load().kinds[match.kind], SharedWeights()
    cases = [evolve(case, weights_seed=7) for case in cases_for(match, kind, "s", emulated=True)]
    for case in cases:
        weight = make_inputs(match, kind, case, "cpu", shared=kept)["weight"]
        assert same_bits(weight, make_inputs(match, kind, case, "cpu")["weight"])
        assert int(weight.isnan().sum()) == (64 if case.carrier == "weight" else 0)
    assert cases[-1].misaligned and not cases[-1].carrier and not cases[0].carrier  # what validators of winners run


@pytest.mark.parametrize("n", [7, 64, 4100])
def test_the_main_operand_carries_one_in_the_last_element_of_a_row_too(n: int) -> None:
    match, _ = made.argmax_case(n=n)
    kind = load().kinds[match.kind]
    (case,) = (case for case in cases_for(match, kind, "s", emulated=True) if case.carrier and case.misaligned)
    assert make_inputs(match, kind, case, "cpu")["logits"].reshape(-1).isnan().nonzero().tolist() == [[n - 1]]


@pytest.mark.parametrize("name", ["elementwise_turned_part", "elementwise_parts_of_heads", "rope_heads_shared", "rope_heads"])
def test_it_lies_in_the_part_that_is_read(name: str) -> None:
    subject = subjects()[name]
    kind = load().kinds[subject.match.kind]
    case = next(case for case in subject.job(subject.source).trial.cases if case.carrier)
    for seed in range(40):
        found = reference(subject, make_inputs(subject.match, kind, evolve(case, seed=seed), "cpu"))
        assert found[subject.graph.outputs[0]].value.isnan().any()
