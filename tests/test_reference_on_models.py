"""On the graphs that are really captured: the framework's own results of every match pass the budget on every case."""

from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.ir.region import Role
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages import analyze
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.store import Store
from agentcompile_core.worker.operands import graph_values, make_inputs

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"


@pytest.fixture(scope="module", params=["F16", "F32"])
def regions(request: pytest.FixtureRequest):
    catalog = load_catalog(only=("transformers_rules",), strict=True)
    frontend = next(f for f in catalog.frontends.values() if f.accepts(str(TINY)))
    loaded = frontend.load(str(TINY), {})
    dtype = DType[request.param]
    loaded.module.to(getattr(torch, dtype.value))
    graphs = frontend.capture(loaded, Workload(dtype=dtype, max_context=64, prefill_chunks=(16,)))
    context = Context(catalog=catalog, target=PRESETS["h200"], config=Config(), store=Store(None))
    return [region for analysis in analyze.run(graphs, context) for region in analysis.regions], catalog.kinds


def test_the_framework_passes_every_case_of_every_match(regions):
    seen = set()
    regions, kinds = regions
    for region in regions:
        for match in region.matches:
            outputs = tuple(v for o in match.operands if o.role is Role.OUTPUT for v in o.values)
            graph = region.graph.sub(match.nodes, match.id, outputs)
            for case in cases_for(match, kinds[match.kind], "framework", emulated=True):
                inputs = make_inputs(match, kinds[match.kind], case, "cpu")
                values = graph_values(match, graph, inputs)
                expected = oracle(graph, {name: tensor.clone() for name, tensor in values.items()})
                results = {**values, **compile_nodes(graph, device="cpu").run(values)}
                for name, bound in expected.items():
                    check = compare(results[name], bound)
                    assert check.ok, f"{match.id} {case}: {name}: {check.detail}"
            seen.add(match.kind)
    assert seen >= {"linear", "norm", "attention", "rope", "elementwise", "gather", "argmax"}
