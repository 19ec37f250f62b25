"""Error rules of norms by channel and of attention under masks: the framework is inside them, and what is wrong is not."""

import math

import pytest
import torch
from agentcompile_rules_transformers.kinds import KINDS
from agentcompile_rules_transformers.testing import batch_norm_case, channel_norm_case, masked_attention_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.verdict import Case
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import Bounded, oracle
from agentcompile_core.worker.operands import make_inputs

FEW = settings(max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
BY_NAME = {kind.name: kind for kind in KINDS}
DTYPES = st.sampled_from((DType.F32, DType.F16, DType.BF16))
FAMILIES = st.sampled_from(("normal", "normal_large", "spiky", "large_mean", "integers"))


def case_of(draw, dtype):
    # On processors torch keeps mean and root of an instance in the element type.
    what = draw(st.sampled_from(("group", "batch", "attention", *(("instance",) if dtype is DType.F32 else ()))))
    shape = (draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3)), *draw(st.sampled_from(((3,), (7, 5), (16, 16)))))
    if what == "batch":
        return batch_norm_case(shape=shape, dtype=dtype)
    if what != "attention":
        return channel_norm_case(shape=shape, groups=2 if what == "group" else 0, weight=draw(st.booleans()), dtype=dtype)
    rows, keys = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    mask = draw(st.sampled_from(((), (2, 1, 1, keys), (rows, keys), (1, 1, rows, 1))))
    return masked_attention_case(sizes=(2, 4, 2, rows, keys, 16), mask=mask, added=bool(mask) and draw(st.booleans()),
                                 causal=not mask and draw(st.booleans()), dtype=dtype)


def outside(found: torch.Tensor, bound: Bounded) -> int:
    error = (found.double() - bound.value.reshape(found.shape)).abs()
    return int((error > bound.error.reshape(found.shape)).sum())


@FEW
@given(data=st.data())
def test_the_framework_is_inside_and_a_shifted_element_is_not(data: st.DataObject) -> None:
    match, graph = case_of(data.draw, data.draw(DTYPES))
    given_values = make_inputs(match, BY_NAME[match.kind], Case(family=data.draw(FAMILIES), seed=data.draw(st.integers(1, 99))), "cpu")
    values = {value: given_values[o.name] for o in match.operands if o.name in given_values for value in o.values}
    found = compile_nodes(graph, device=torch.device("cpu")).run(dict(values))[graph.outputs[0]]
    bound = oracle(graph, values)[graph.outputs[0]]
    assert outside(found, bound) == 0
    known = bound.error.reshape(found.shape).isfinite() & (bound.value.reshape(found.shape).abs() > 1e-3)
    assert not known.any() or outside(torch.where(known, found * 1.06, found), bound) > 0


@pytest.mark.parametrize("put", [math.nan, math.inf])
def test_a_hidden_v_that_is_not_finite_is_left_open_and_a_seen_nan_is_demanded(put: float) -> None:
    match, graph = masked_attention_case(sizes=(1, 1, 1, 2, 3, 8), mask=(2, 3), dtype=DType.F32)
    values = {o.values[0]: torch.randn(o.spec.shape) for o in match.operands if o.name in ("q", "k", "v")}
    values[match.need("mask").values[0]] = torch.tensor([[True, True, False], [True, True, True]])
    values[match.need("v").values[0]].view(3, 8)[2] = put
    bound = oracle(graph, values)[graph.outputs[0]]
    first, second = bound.value.view(2, 8), bound.error.view(2, 8)
    assert bool(second[0].isinf().all()) and bool(first[0].isfinite().all())
    assert bool(first[1].isnan().all()) == math.isnan(put)
