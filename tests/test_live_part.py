"""References of the part of a cache that a case fills are those of the whole, and nobody may write behind it."""

import pytest
import torch
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.verdict import Case, InputFamily
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.stages.validate.input_cases import SHARED_ELEMENTS, cases_for
from agentcompile_core.worker.live_part import UNTOUCHED, live_part
from agentcompile_core.worker.operands import graph_values, make_inputs
from agentcompile_core.worker.shared_weights import SharedWeights

BY_NAME = {kind.name: kind for kind in KINDS}
CAPACITY = 96


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, CAPACITY - 1), st.sampled_from(list(InputFamily)), st.sampled_from([DType.F16, DType.BF16, DType.F32]),
       st.sampled_from(["", "rms"]), st.integers(0, 99))
def test_the_live_part_has_the_reference_of_the_whole(position: int, family: str, dtype: DType, rope: str, seed: int):
    match, graph = cases.attention_case(heads=(4, 2), head_dim=16, capacity=CAPACITY, rope=rope, dtype=dtype)
    case = Case(family=family, seed=seed, position=position)
    values = graph_values(match, graph, make_inputs(match, BY_NAME[match.kind], case, "cpu"))
    live = live_part(match, graph, BY_NAME[match.kind], case)
    assert live is not None
    whole, part = oracle(graph, values), oracle(live.graph, live.narrowed(values))
    assert disagreement(live.graph, live.narrowed(values), part) == ""
    kept = live.compact(part, values)
    assert all(kept[name].value.shape[1] <= 2 * UNTOUCHED + 1 for name in live.lengths), "what inputs say is not kept"
    for found in (live.completed(part, values), live.completed(kept, values)):
        assert found.keys() == whole.keys()
        for name, bound in whole.items():
            first = 0 if found[name].before is None else found[name].before.numel()
            end = first + found[name].value.numel()
            for a, b in ((bound.value, found[name].value), (bound.error, found[name].error)):
                torch.testing.assert_close(a.reshape(-1)[first:end], b.reshape(-1), rtol=1e-12, atol=0, equal_nan=True)
            if name in values:
                assert compare(_result(bound.value, values[name]), found[name]).ok


def is_number(element: torch.Tensor) -> bool:
    return bool(element.isfinite())


def _result(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.where(value.isnan(), like, value.to(like.dtype))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, CAPACITY - 1), st.data())
def test_a_write_to_another_position_is_seen_wherever_it_lands(position: int, data: st.DataObject):
    match, graph = cases.attention_case(heads=(2, 1), head_dim=16, capacity=CAPACITY, rope="", dtype=DType.F16)
    kind, case = BY_NAME[match.kind], Case(family="normal", seed=1, position=position)
    values = graph_values(match, graph, make_inputs(match, kind, case, "cpu"))
    live = live_part(match, graph, kind, case)
    assert live is not None
    expected = live.completed(live.compact(oracle(live.graph, live.narrowed(values)), values), values)
    name = data.draw(st.sampled_from(sorted(live.lengths)))
    good = _result(oracle(graph, values)[name].value, values[name])
    assert compare(good, expected[name]).ok
    written, row = good.clone().reshape(-1), good[0, 0].numel()
    element = data.draw(st.integers(0, written.numel() - 1).filter(lambda i: i // row != position))  # its own it may write
    written[element] = written[element] + 1.0 if is_number(written[element]) else data.draw(st.sampled_from([0.0, 1.0, 777.0]))
    found = compare(written, expected[name])
    assert not found.ok
    assert "may not be written" in found.detail or f"element {element} is" in found.detail


def test_states_hold_data_below_the_position_and_nothing_behind_it():
    match, _ = cases.attention_case(heads=(2, 1), head_dim=16, capacity=CAPACITY, rope="", dtype=DType.F16)
    for position in (0, 1, 40, CAPACITY):
        made = make_inputs(match, BY_NAME[match.kind], Case(family="normal", seed=3, position=position), "cpu")
        for name in ("k_cache", "v_cache"):
            assert made[name][:, :position].isfinite().all() and made[name][:, position:].isnan().all()
            assert position < 2 or made[name][:, :position].float().std() > 0.5


@pytest.mark.parametrize(("n", "shared"), [(SHARED_ELEMENTS // 1024 + 1, True), (64, False)])
def test_cases_share_large_weights_under_emulation_only(n: int, shared: bool):
    match, _ = cases.linear_case(n=n, k=1024, dtype=DType.F16)
    kind, kept = BY_NAME[match.kind], SharedWeights()
    emulated = cases_for(match, kind, "s", emulated=True)
    assert {case.weights_seed > 0 for case in emulated} == {shared}
    assert all(case.weights_seed == 0 for case in cases_for(match, kind, "s"))
    plain = [c for c in emulated if c.family in ("normal", "large_mean", "one_huge")]
    drawn = [make_inputs(match, kind, case, "cpu", shared=kept) for case in plain]
    assert all(torch.equal(one["weight"], drawn[0]["weight"]) is shared for one in drawn[1:])
    assert not any(torch.equal(one["x"], drawn[0]["x"]) for one in drawn[1:])
    for case, one in zip(plain, drawn, strict=True):  # the same numbers, drawn alone
        assert torch.equal(one["weight"], make_inputs(match, kind, case, "cpu")["weight"])
    if shared:
        integers = make_inputs(match, kind, next(c for c in emulated if c.family == "integers"), "cpu", shared=kept)
        assert set(integers["weight"].unique().tolist()) == {-2.0, -1.0, 1.0, 2.0}
        spiky = make_inputs(match, kind, next(c for c in emulated if c.family == "spiky"), "cpu", shared=kept)
        assert float(spiky["weight"].max()) == 8.0 > float(drawn[0]["weight"].max())
        wide = kept.widened(drawn[0]["weight"])
        assert wide.dtype == torch.float64 and torch.equal(wide, drawn[0]["weight"].double())
        other = drawn[0]["weight"].clone()
        assert kept.widened(other) is other


def test_the_reference_of_widened_weights_is_the_same():
    match, graph = cases.gated_case(n=24, k=64, norm="rms", dtype=DType.BF16)
    values = graph_values(match, graph, make_inputs(match, BY_NAME[match.kind], Case(family="spiky", seed=5), "cpu"))
    wide = {name: tensor.double() if tensor.dim() == 2 else tensor for name, tensor in values.items()}
    for name, bound in oracle(graph, values).items():
        again = oracle(graph, wide)[name]
        assert torch.equal(again.value, bound.value) and torch.equal(again.error, evolve(bound).error)


@pytest.mark.parametrize("position", [3, 20, 31, 39])
def test_a_reference_of_its_own_in_another_shape_stays_as_it_is(position: int):
    match, graph = cases.attention_case(heads=(4, 2), head_dim=8, capacity=40, rope="", dtype=DType.F16)
    case = Case(family="normal", seed=1, position=position)
    values = graph_values(match, graph, make_inputs(match, BY_NAME[match.kind], case, "cpu"))
    live = live_part(match, graph, BY_NAME[match.kind], case)
    assert live is not None
    flat = {name: evolve(bound, value=bound.value.reshape(-1), error=bound.error.reshape(-1))
            for name, bound in oracle(graph, values).items()}
    for name, bound in live.completed(live.compact(flat, values), values).items():
        assert bound.value is flat[name].value and bound.before is None and bound.rest is None
