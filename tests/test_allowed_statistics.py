"""Norms over the statistics of their input: pure without running ones, refused where they would write those."""

import pytest
import torch
from torch import nn

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import DType, GraphKind, GraphSet, ModelInfo, Workload
from agentcompile_core.ops.graph_check import check_graphs
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.normalize import normalize
from agentcompile_core.store import Store

IMAGE = torch.linspace(-1.0, 2.0, 2 * 4 * 3 * 3).view(2, 4, 3, 3)


def compiled(module: nn.Module) -> CompiledModel:
    return ac.compile(module, example_inputs=(IMAGE,), device="cpu", run_on="framework", store=Store(None), validators=[], origins=[])


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class OwnStatistics(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


class WritesStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.instance_norm(x, None, None, self.mean, self.var, True, 0.1, 1e-5, False)


@pytest.mark.parametrize("module", [nn.InstanceNorm2d(4), OwnStatistics()])
def test_statistics_of_the_input_alone_survive_a_bundle(module: nn.Module, tmp_path) -> None:
    mine = compiled(module.eval())
    again = ac.load(mine.save(tmp_path / "b"), module, example_inputs=(IMAGE,), device="cpu", run_on="framework", store=Store(None))
    assert mine.graphs.graphs and torch.equal(again(IMAGE), module(IMAGE))


def test_running_statistics_that_are_written_are_refused() -> None:
    module = WritesStatistics().eval()
    mine = compiled(module)
    before = module.mean.clone()
    mine(IMAGE)
    wanted = WritesStatistics().eval()
    wanted(IMAGE)
    assert mine.graphs.eager_reason.endswith("its instance_norm is called as in training")
    assert torch.equal(module.mean, wanted.mean) and not torch.equal(module.mean, before)


def test_what_draws_numbers_when_evaluating_runs_as_it_is() -> None:
    mine = compiled(Dropping().eval())
    assert mine.graphs.eager_reason.endswith("its dropout is called as in training")
    assert not torch.equal(mine(IMAGE), mine(IMAGE))


def test_a_stored_graph_that_writes_statistics_is_refused() -> None:
    graph = normalize(import_program(export_forward(WritesStatistics().eval(), (IMAGE,)), "forward", GraphKind.FORWARD))
    info = ModelInfo(name="m", model_type="m", config_json="{}", digest="0", parameter_bytes=0)
    with pytest.raises(UsageError, match="as in training"):
        check_graphs(GraphSet(model=info, workload=Workload(dtype=DType.F32, max_context=8), graphs=(graph,)))
