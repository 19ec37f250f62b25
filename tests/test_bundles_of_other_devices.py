"""Bundles of graphs that were captured on another device, or on none: honest ones load, others are refused all the same."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

from agentcompile_core import api
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.frequencies import Frequencies
from agentcompile_core.ir.graph import DType, GraphSet, ModelInfo, Workload
from agentcompile_core.ir.graph_difference import unlike_graphs
from agentcompile_core.store import Store

MODULE = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).view(1, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 5, 32))

def get_inputs(): return (torch.randn(1, 5, 32),)
def get_init_inputs(): return ()
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A module file, and its bundle made without weights, on the device meta."""
    folder = tmp_path_factory.mktemp("meta")
    path = folder / "model.py"
    path.write_text(MODULE)
    made = api.compile(str(path), meta=True, run_on="nothing", store=Store(None), budget_s=2.0, budget_plans=2)
    return path, made.save(folder / "b")


def load(path: Path, folder: Path, **options: Any) -> Any:
    return api.load(folder, str(path), device="cpu", run_on="framework", store=Store(None), **options)


def test_graphs_captured_without_data_are_those_of_the_module(bundle: tuple[Path, Path]) -> None:
    """How attention lays out its results is another matter on each device."""
    loaded, x = load(*bundle), torch.randn(1, 5, 32)
    assert torch.allclose(loaded(x), loaded.loaded.module(x), atol=1e-6)


def test_others_are_refused_also_where_the_device_is_another_one(bundle: tuple[Path, Path], tmp_path: Path) -> None:
    path, folder = bundle
    text = (folder / "graphs.json").read_text()
    manifest = json.loads((folder / "manifest.json").read_text())
    graphs = json.loads(text)
    node = next(n for n in graphs["graphs"][0]["nodes"] if "transpose" in n["op"] or "permute" in n["op"])
    node["name"] = "another"
    programs = [{"graph": g["name"], "segments": [{"nodes": [n["name"] for n in g["nodes"]]}], "sources": []} for g in graphs["graphs"]]
    for name, document in (("graphs.json", graphs), ("programs.json", programs)):
        (folder / name).write_text(json.dumps(document))
        next(e for e in manifest["files"] if e["path"] == name)["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="are not what is captured"):
        load(path, folder)


def test_frequencies_are_alike_but_for_their_last_bits() -> None:
    info = ModelInfo(name="m", model_type="m", config_json="{}", digest="0", parameter_bytes=4, vocab_size=9)
    turned = Frequencies(source="inv_freq", limit=8, near=(1.0, 0.1), far=(0.5, 0.05), rereads=False)
    graphs = GraphSet(model=info, workload=Workload(dtype=DType("float32"), max_context=16), graphs=(), frequencies=(turned,))
    bits, others = (evolve(graphs, frequencies=(evolve(turned, far=(0.5 * factor, 0.05)),)) for factor in (1.0 + 2.0**-22, 1.25))
    assert unlike_graphs(graphs, bits) == "" and unlike_graphs(graphs, others)


def test_module_copies_have_the_devices_data() -> None:
    from agentcompile_core.stages.capture.elsewhere import copies
    from agentcompile_core.stages.capture.modules import LoadedModule

    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    (copied,) = copies(LoadedModule(module=tied, name="m", example_inputs=(torch.ones(2, 4),)))
    assert all(p.is_meta for p in copied.module.parameters()) and copied.module[1].weight is copied.module[0].weight
    assert copied.example_inputs[0].is_meta and not tied[0].weight.is_meta
