"""What routers of experts do beside products: groups of which all or some are kept, choices without an order, factors of one."""

from collections import Counter

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentcompile_core.ir.graph import Graph, GraphKind
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.normalize import normalize

FEW = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


class Router(nn.Module):
    """The ``slots`` best experts of the ``kept`` best groups, by sigmoid, and their scores times ``factor``."""

    def __init__(self, groups: int, kept: int, slots: int, factor: float, inverted: bool) -> None:
        super().__init__()
        self.groups, self.kept, self.slots, self.factor, self.inverted = groups, kept, slots, factor, inverted

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.float().sigmoid()
        best = scores.view(-1, self.groups, scores.shape[-1] // self.groups).topk(2, dim=-1)[0].sum(-1)
        mask = torch.zeros_like(best)
        mask.scatter_(1, torch.topk(best, k=self.kept, dim=-1, sorted=False)[1], 1)
        each = mask.unsqueeze(-1).expand(-1, self.groups, scores.shape[-1] // self.groups).reshape(scores.shape).bool()
        among = scores.masked_fill(each if self.inverted else ~each, float("-inf"))
        chosen = torch.topk(among, k=self.slots, dim=-1, sorted=False)[1]
        return (scores.gather(1, chosen) * self.factor).type_as(logits), chosen


def run(graph: Graph, x: Tensor) -> list[Tensor]:
    found = compile_nodes(graph, device="cpu").run({"input.0": x})
    return [found[name] for name in graph.outputs]


@FEW
@given(groups=st.integers(1, 3), kept=st.integers(1, 3), rows=st.integers(1, 2), factor=st.sampled_from((1.0, 2.5)), inverted=st.booleans(),
       dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_only_masks_that_hide_nothing_are_gone(groups: int, kept: int, rows: int, factor: float, inverted: bool,
                                               dtype: torch.dtype) -> None:
    kept = min(kept, groups)
    module = Router(groups, kept, 2, factor, inverted)
    x = torch.randn(rows, 4 * groups).to(dtype)
    raw = import_program(export_forward(module.eval(), (x,)), "forward", GraphKind.FORWARD)
    graph = normalize(raw)
    found = Counter(node.kind for node in graph.nodes)
    full = kept == groups and not inverted
    assert (found["masked_fill"], found["scatter"], found["scatter_"]) == ((0, 0, 0) if full else (1, 1, 0))
    assert found["mul"] == (factor != 1.0) and all(node.op != "aten.type_as.default" for node in graph.nodes)
    assert all(node.args[-1] is True for node in graph.nodes if node.kind == "topk" and len(node.args) == 5)
    if kept == groups and inverted:
        return  # every expert is hidden: which are chosen is anybody's guess
    (weights, chosen), (wanted, which) = run(graph, x), module(x)
    by_index = [(pair[0].gather(1, pair[1].argsort(-1)), pair[1].sort(-1).values) for pair in ((weights, chosen), (wanted, which))]
    assert torch.equal(by_index[0][0], by_index[1][0]) and torch.equal(by_index[0][1], by_index[1][1])


class Written(nn.Module):
    """A copy by a factor of one, and then a write to what was copied."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made = x + 1.0
        kept = made * 1.0
        filled = made.masked_fill(torch.zeros_like(mask).bool(), 3.0)
        made[:, :2].fill_(7.0)
        return kept + filled + made


def test_what_is_copied_before_it_is_written_stays_copied() -> None:
    x, mask = torch.randn(2, 4), torch.zeros(2, 4)
    graph = normalize(import_program(export_forward(Written().eval(), (x, mask)), "forward", GraphKind.FORWARD))
    found = compile_nodes(graph, device="cpu").run({"input.0": x, "input.1": mask})
    assert torch.equal(found[graph.outputs[0]], Written()(x, mask))
