"""Norms whose results are gated in float32: the gate and all casts are the norm's tail, as long as nothing else reads what is between."""

import pytest
import torch
from agentcompile_rules_transformers.draft import Draft
from agentcompile_rules_transformers.norm import NormRule

from agentcompile_core.plugin_api import DType, Graph, Ref, evaluate
from agentcompile_core.testing.targets import FAKE

BF16, F32, SHAPE = DType.BF16, DType.F32, (16, 64)


def gated(*, shown: str = "", gate_type: DType = BF16) -> Graph:
    draft, named = Draft(), dict[str, Ref]()
    normed = draft.norm("norm", draft.given("x", SHAPE, BF16), "rms", SHAPE, BF16)
    z = draft.given("z", SHAPE, gate_type)
    named["wide"] = draft.cast(normed, SHAPE, F32)
    named["silu"] = draft.one("aten.silu.default", (draft.cast(z, SHAPE, F32) if gate_type is not F32 else z,), SHAPE, F32)
    named["product"] = draft.one("aten.mul.Tensor", (named["wide"], named["silu"]), SHAPE, F32)
    out = draft.cast(named["product"], SHAPE, BF16)
    return draft.graph(out, *([named[shown]] if shown else []))


def widest(graph: Graph) -> tuple[str, ...]:
    return max((match.nodes for match in NormRule().find(graph, FAKE)), key=len)


def test_the_gate_is_the_tail_of_the_norm() -> None:
    graph = gated()
    match = max(NormRule().find(graph, FAKE), key=lambda one: len(one.nodes))
    assert len(match.nodes) == len(graph.nodes) and match.need("aux0").values == ("z",) and match.epilogue is not None
    normed, gate = torch.randn(9), torch.randn(9)
    assert torch.equal(evaluate(match.epilogue, {"acc0": normed, "aux0": gate}), normed * torch.nn.functional.silu(gate))


@pytest.mark.parametrize("shown", ["wide", "silu", "product"])
def test_what_others_read_stays_outside(shown: str) -> None:
    graph = gated(shown=shown)
    made = graph.producer[graph.outputs[1]].name
    assert made not in widest(graph)


def test_a_gate_of_another_type_is_no_operand_of_the_norm() -> None:
    assert len(widest(gated(gate_type=F32))) < len(gated(gate_type=F32).nodes)
