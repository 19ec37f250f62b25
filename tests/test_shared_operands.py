"""A value that a match reads through two operands (``linear(x) + x``, ``a * a``) is one value in trials too."""

import pytest
import torch
from agentcompile_rules_transformers.testing import Draft
from attrs import evolve

from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.verdict import Case, InputFamily
from agentcompile_core.testing import doubles
from agentcompile_core.testing.matching import matched
from agentcompile_core.worker.operands import graph_values, make_inputs


@pytest.mark.parametrize("family", [InputFamily.NORMAL, InputFamily.NORMAL_LARGE, InputFamily.INTEGERS, InputFamily.SPIKY])
@pytest.mark.parametrize("shared", [True, False])
def test_operands_of_one_value_hold_the_same(family: InputFamily, shared: bool) -> None:
    match, _ = doubles.fake_match()
    if shared:
        match = evolve(match, operands=tuple(evolve(o, values=("a",)) if o.name == "in1" else o for o in match.operands))
    made = make_inputs(match, doubles.FAKE_KIND, Case(family=family, seed=7), "cpu")
    assert torch.equal(made["in0"], made["in1"]) == shared
    assert made["in0"].data_ptr() != made["in1"].data_ptr()


def test_a_residual_that_is_the_input_itself() -> None:
    from agentcompile_rules_transformers.linear import LinearRule

    draft = Draft()
    x, weight = draft.given("x", (1, 1, 16), DType.F32), draft.weight("w", 16, 16, dtype=DType.F32)
    product = draft.one("aten.linear.default", (x, weight), (1, 1, 16), DType.F32)
    match, graph = matched(LinearRule(), draft.graph(draft.one("aten.add.Tensor", (product, x), (1, 1, 16), DType.F32)))
    kind = next(kind for kind in LinearRule.kinds if kind.name == match.kind)
    tensors = make_inputs(match, kind, Case(family=InputFamily.NORMAL, seed=3), "cpu")
    assert match.operand("aux0") is not None
    for name in ("x", "aux0"):
        assert torch.equal(graph_values(match, graph, tensors)["x"].reshape(-1), tensors[name].reshape(-1))
