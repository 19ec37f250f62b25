"""States that are written part by part: once as a whole, where nothing tells the difference."""

import pytest
import torch
from attrs import evolve
from capture_models import tiny
from test_states import SHORT, captured, check_requests
from torch import nn

from agentcompile_core.ir.graph import GraphKind, ValueKind
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.filled import write_once
from agentcompile_core.stages.capture.importer import import_program


class Heads(nn.Module):
    """Two heads of a state, advanced one after the other as Zamba does; ``change`` is what it does otherwise."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.seen, self.change = nn.Buffer(torch.randn(1, 2, 3)), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for head in range(1 if self.change == "one head" else 2):
            part = self.seen[:, head]
            results.append(part * x)
            if self.change == "by parts":
                self.seen[:, head, :2].copy_(part[:, :2] + x[:, :2])
            else:
                part.copy_(part + x)
            if self.change == "read again":
                results.append(part + 1)
            if self.change == "read as a whole":
                results.append(self.seen.sum(dim=1))
        return torch.stack(results)


@pytest.mark.parametrize("change", ["", "one head", "by parts", "read again", "read as a whole"])
def test_heads_that_are_written_one_by_one_are_written_once(change: str) -> None:
    module, x = Heads(change), torch.randn(1, 3)
    traced = import_program(export_forward(module.eval(), (x,)), "step", GraphKind.FORWARD)
    name = next(value.name for value in traced.values if value.source == "seen")
    values = tuple(evolve(v, kind=ValueKind.STATE, source="state.own.0.0") if v.name == name else v for v in traced.values)
    graph = write_once(evolve(traced, values=values)).verify()
    assert (sum(bool(node.mutates) for node in graph.nodes) == 1) is (change in ("", "one head"))
    given = {value.name: x.clone() if value.kind is ValueKind.INPUT else module.seen.clone()
             for value in graph.values if value.kind in (ValueKind.INPUT, ValueKind.STATE)}
    found = compile_nodes(graph, device="cpu").run(given)[graph.outputs[0]]
    torch.testing.assert_close(found, module(x))
    torch.testing.assert_close(given[name], module.seen)


def test_zamba_is_captured_with_heads_of_its_states() -> None:
    model = tiny("zamba", {**{k: v for k, v in SHORT.items() if k != "block_auto_adjust_ff_dim"}, "num_hidden_layers": 4,
                           "num_key_value_heads": 2, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2, "mamba_dt_rank": 2,
                           "attention_hidden_size": 32, "attention_head_dim": 16, "mamba_d_state": 4, "pad_token_id": 0})
    check_requests(model, captured(model), [1, 9])
