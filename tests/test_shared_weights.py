"""Layers that are run again, with other weights beside theirs: nothing is matched that wants one weight in two places."""

from typing import Any

import torch
import torch.nn.functional as F
from agentcompile_cuda_kit.targets import preset
from capture_models import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.graph import DType, Graph, Workload
from agentcompile_core.ir.region import Match, Region, Role
from agentcompile_core.ops.aliasing import alias_roots
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.report.accounting import accounting
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages import analyze
from agentcompile_core.stages.capture.modules import capture_module, load_module
from agentcompile_core.store import Store

WIDTH = 16
CONTEXT = Context(catalog=load_catalog(), target=preset("h200"), config=Config(), store=Store(None))
ZAMBA2: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "num_mem_blocks": 1,
    "mamba_d_state": 8, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 4, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 4, "adapter_rank": 4, "use_mem_rope": False, "max_position_embeddings": 64, "chunk_size": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2}


class Places(nn.Module):
    """Blocks of three products of one row, each of weights that ``picks`` names, between which other operators may stand."""

    def __init__(self, picks: list[tuple[int, int, int]], bounded: list[bool]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(1 + max(map(max, picks)))])
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in picks])
        self.picks, self.bounded = picks, bounded

    def forward(self, x: Tensor) -> Tensor:
        for picks, norm, bounded in zip(self.picks, self.norms, self.bounded, strict=True):
            h = F.rms_norm(x, (WIDTH,), norm)
            gate, up, beside = (F.linear(h, self.weights[i]) for i in picks)
            x = x + F.silu(gate) * up + (beside.tanh() if bounded else beside)
        return x


def groups(graph: Graph, region: Region, match: Match, instance: int) -> list[tuple[str, ...]]:
    roots, value = alias_roots(graph), region.instances[instance].value
    return [tuple(graph.by_name[roots[value[v]]].source for v in o.values) for o in match.operands if o.role is Role.WEIGHT]


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(data=st.data())
def test_whatever_is_selected_can_be_laid_out(data: st.DataObject) -> None:
    """In every instance of every region, any selection of its matches that do not overlap; the same one in all instances."""
    count, kinds = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    picks = data.draw(st.lists(st.tuples(*[st.integers(0, kinds - 1)] * 3), min_size=count, max_size=count))
    module = Places(picks, data.draw(st.lists(st.booleans(), min_size=count, max_size=count))).eval()
    loaded = load_module(module, (torch.randn(1, WIDTH),), dtype=None, device="cpu")
    graph, = capture_module(loaded, Workload(dtype=DType.F32, max_context=16)).graphs
    wanted: list[tuple[str, ...]] = []
    for region in analyze.analyze(graph, CONTEXT).regions:
        taken: set[str] = set()
        for match in data.draw(st.permutations(region.matches)):
            if taken.isdisjoint(match.nodes):
                taken.update(match.nodes)
                wanted += [group for i in range(len(region.instances)) for group in groups(graph, region, match, i)]
    before = [parameter.detach().clone() for parameter in module.parameters()]
    WeightStore(module, "cpu").arrange(wanted)
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


def together(picks: list[tuple[int, int, int]]) -> list[int]:
    """How many weights matches read as one matrix, of each block the most."""
    loaded = load_module(Places(picks, [False] * len(picks)).eval(), (torch.randn(1, WIDTH),), dtype=None, device="cpu")
    graph, = capture_module(loaded, Workload(dtype=DType.F32, max_context=16)).graphs
    found = [sorted(len(group) for match in region.matches for group in groups(graph, region, match, 0) if node.name in match.nodes)
             for region in analyze.analyze(graph, CONTEXT).regions for node in region.graph.nodes if node.op == "aten.linear.default"]
    return [max(sizes) for sizes in found]


def test_weights_of_their_own_and_layers_run_again_whole_are_still_one_matrix() -> None:
    assert together([(0, 1, 2), (3, 4, 5)]) == [2] * 6
    assert together([(0, 1, 2), (0, 1, 2)]) == [2, 2, 1, 2, 2, 1], "in one order"
    assert together([(0, 1, 2), (3, 1, 4)])[:3] == [2, 2, 2]


def test_a_model_of_shared_layers_and_adapters_runs_on_its_kernels() -> None:
    """Zamba2's feed-forward layer is the same in all its places, and has an adapter for each."""
    model = tiny("zamba2", ZAMBA2)
    mine = ac.compile(model, max_context=48, target="h200", run_on="emulation", store=Store(None), validators=("numerics",),
                      config=Config(budget_plans=40, budget_s=60.0, rounds=1, origins=("generated",)))
    assert mine.graphs.kv is not None and mine.notes == () and accounting(mine.compilation.programs["decode"])["share"]["generated"] > 0.9
    prompt = torch.arange(3, 11).view(1, -1)
    wanted = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(mine.generate(prompt, 8, eos_token_id=None), wanted)
