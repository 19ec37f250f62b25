"""Products of parts of one tensor: a match reads the whole of it only where nobody else reads the other parts."""

import pytest
import torch
from agentcompile_rules_transformers.matmul import MatmulRule
from test_capture_normalize import forward_graph
from torch import Tensor, nn

from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.stages.analyze.checking import normalized, problem
from agentcompile_core.stages.capture.normalize import normalize
from agentcompile_core.testing.targets import FAKE


class Parts(nn.Module):
    """K and V of one product of the last of three parts; MiniMax multiplies the parts of one projection step by step."""

    def __init__(self, shown: bool) -> None:
        super().__init__()
        self.shown = shown

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = torch.split(x, 8, dim=3)
        product = k.transpose(1, 2).transpose(-1, -2) @ v.transpose(1, 2)
        return (product, q.exp()) if self.shown else (product,)


@pytest.mark.parametrize("shown", [False, True])
def test_no_match_hides_a_part_that_others_read(shown: bool) -> None:
    graph = normalize(forward_graph(Parts(shown), torch.randn(1, 5, 2, 24)))
    deps = dependencies(graph)
    for match in MatmulRule().find(graph, FAKE):
        assert problem(normalized(match, deps, "tried/matmul"), graph, deps) == ""
