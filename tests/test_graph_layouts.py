"""Graphs that were captured on one device and are checked without data: their results lie as they did where they were captured."""

import pytest
import torch
from attrs import evolve
from torch import nn

import agentcompile_core as ac
from agentcompile_core.errors import VerificationError
from agentcompile_core.ir.graph import DType, GraphKind, GraphSet, ModelInfo, Workload
from agentcompile_core.ops import graph_check
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.normalize import normalize
from agentcompile_core.store import Store


class Viewing(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).view(24)


def viewed(inputs: tuple[int, ...], result: tuple[int, ...]) -> GraphSet:
    """A sum of inputs with some strides, whose result lies as ``result`` says, and a view of it that only one layout allows."""
    x = torch.zeros(4, 6)
    graph = normalize(import_program(export_forward(Viewing().eval(), (x, x)), "forward", GraphKind.FORWARD))
    (node,) = (n for n in graph.nodes if n.op.startswith("aten.add"))
    laid_out = {**dict.fromkeys(graph.inputs, inputs), **dict.fromkeys(node.outputs, result)}
    values = tuple(evolve(v, spec=evolve(v.spec, strides=laid_out.get(v.name, v.spec.strides))) for v in graph.values)
    info = ModelInfo(name="m", model_type="m", config_json="{}", digest="0", parameter_bytes=0)
    return GraphSet(model=info, workload=Workload(dtype=DType.F32, max_context=8), graphs=(evolve(graph, values=values),))


@pytest.mark.parametrize("inputs", [(), (1, 4)])
def test_results_lie_as_the_device_that_captured_them_laid_them_out(inputs: tuple[int, ...]) -> None:
    """On CUDA attention lays its result out otherwise than without data, and a graph with a view of it could not be opened."""
    assert graph_check.check_graphs(viewed(inputs, ()))
    with pytest.raises(VerificationError, match="cannot be called so"):
        graph_check.check_graphs(viewed(inputs, (1, 4)))


def test_what_no_bundle_could_be_opened_with_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM on CUDA is traced with another shape of its state than it has."""
    def refuses(graphs: GraphSet) -> GraphSet:
        raise VerificationError("graph forward: node lstm makes [2, 2, 12] float32, and the graph says [2, 1, 2, 12] float32")

    monkeypatch.setattr(graph_check, "check_graphs", refuses)
    module, x = nn.LSTM(8, 12, num_layers=2, batch_first=True).eval(), torch.randn(2, 5, 8)
    mine = ac.compile(module, example_inputs=(x,), device="cpu", run_on="framework", store=Store(None), validators=[], origins=[])
    assert "runs on the framework: what was captured cannot be read again (graph forward: node lstm" in mine.graphs.eager_reason
    with torch.inference_mode():
        assert not mine.graphs.graphs and torch.equal(mine(x)[0], module(x)[0])
