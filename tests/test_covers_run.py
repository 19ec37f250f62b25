"""Every cover the planner offers, run as a program, computes what the framework computes.

Steps are callables that do what their match promises and know nothing of the nodes behind it, so matches, covers, program order,
buffer planning, side-by-side outputs and aliases are checked together, without a compiler.
"""

import agentcompile_rules_transformers as rules
import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from attrs import evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.graph import DType, GraphSet, ModelInfo, ValueKind, Workload
from agentcompile_core.ir.plan import Origin, Schedule, ScheduleSpace, Step
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.interfaces import Implementation
from agentcompile_core.runtime.binder import bind
from agentcompile_core.runtime.executables import BoundCall, Executables, call_key
from agentcompile_core.runtime.make_program import make_program
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages import analyze, plan

MODELS = {
    "qwen3": {},
    "qwen2": {"qk_norm": False, "bias": True},
    "gemma3": {"norm": "rms_one_plus", "act": "gelu_tanh", "sandwich": True, "cap": 30.0, "window": 4},
    "phi3": {"qk_norm": False, "fused": True},
    "partial_rope": {"qk_norm": False, "rotary_dim": 4, "norm": "layer", "bias": True, "act": "gelu"},
}


class Meaning(Implementation):
    """Serves every match with what its kind means."""

    name = "meaning"
    origin = Origin.HANDWRITTEN

    def __init__(self, means):
        self.means = means

    def accepts(self, match, target):
        return True

    def space(self, match, target):
        return ScheduleSpace(parameters=(), points=(Schedule({}),))

    def bind(self, match, schedule, target):
        written = [o.name for o in match.operands if o.access.value != "read"]

        def run(**operands):
            found = self.means[match.kind](match, operands)
            for name in written:
                operands[name].copy_(found[name].reshape(operands[name].shape))

        return run


def planned(graph, implementation):
    catalog = Catalog(strict=True)
    catalog.region_rules.update({f"core/{rule.name}": rule for rule in rules.agentcompile_region_rules()})
    catalog.implementations["test/meaning"] = implementation
    ctx = Context(catalog=catalog, target=preset("h200"), config=Config(), store=None)
    model = ModelInfo(name="m", model_type="m", config_json="{}", digest="0", parameter_bytes=0)
    graphs = GraphSet(model=model, workload=Workload(dtype=DType.F32, max_context=16), graphs=(graph,))
    analyses = analyze.run(graphs, ctx)
    return analyses[0].regions, [one.space for one in plan.run(analyses, ctx)]


def step_of(space, match_id):
    found = space.spaces_of(match_id)[0]
    return Step(match_id=match_id, implementation=found.implementation, origin=found.origin, schedule=found.space.points[0])


def selection(region, space, cover):
    steps = tuple(SelectedStep(step=step_of(space, m), label=region.match_by_id[m].label, nodes=region.match_by_id[m].nodes, source=None,
                               basis=Basis.MEASURED) for m in cover.matches)
    return Selection(signature=region.signature, region=region.name, cover=cover, steps=steps)


def executables(implementation, regions, chosen):
    found = [(x, r.match_by_id[x.step.match_id]) for r in regions for x in chosen[r.signature].steps]
    calls = {call_key(x.step, x.version, match): BoundCall(run=implementation.bind(match, x.step.schedule, None)) for x, match in found}
    return Executables(device="cpu", calls=calls)


@pytest.mark.parametrize("model", MODELS)
def test_every_cover_computes_what_the_framework_computes(decode_graphs, model):
    builder, graph = decode_graphs.transformer(layers=2, **MODELS[model])
    implementation = Meaning(decode_graphs.MEANING)
    regions, spaces = planned(graph, implementation)
    by_kind = {kind: [v.name for v in graph.values if v.kind is kind] for kind in ValueKind}
    fixed = {name: builder.tensors[name] for kind in (ValueKind.WEIGHT, ValueKind.CONSTANT) for name in by_kind[kind]}
    wanted_states = {name: builder.tensors[name].clone() for name in by_kind[ValueKind.STATE]}
    wanted = compile_nodes(graph, device="cpu").run({**fixed, **wanted_states})
    for rank in range(max(len(space.covers) for space in spaces)):
        covers = [space.covers[min(rank, len(space.covers) - 1)] for space in spaces]
        chosen = {r.signature: selection(r, s, c) for r, s, c in zip(regions, spaces, covers, strict=True)}
        program = make_program(graph, regions, chosen)
        runs_on = executables(implementation, regions, chosen)
        states = {name: builder.tensors[name].clone() for name in by_kind[ValueKind.STATE]}
        weights = WeightStore.from_tensors({name: tensor.clone() for name, tensor in fixed.items()}, "cpu")
        bound = bind(program, weights, states, {}, runs_on)
        bound.run()
        got = {name: bound.output(index) for index, name in enumerate(graph.outputs)} | states
        for name, tensor in ({**wanted, **wanted_states}).items():
            assert torch.allclose(got[name].float(), tensor.float(), rtol=1e-4, atol=1e-4), (rank, name)


def test_the_favourite_program_has_no_framework_segment(decode_graphs):
    _, graph = decode_graphs.transformer(layers=3)
    regions, spaces = planned(graph, Meaning(decode_graphs.MEANING))
    chosen = {r.signature: selection(r, s, s.covers[0]) for r, s in zip(regions, spaces, strict=True)}
    program = make_program(graph, regions, chosen)
    assert [s.nodes for s in program.segments if s.step is None] == []
    assert len(program.segments) == 2 + 3 * 5 + 2


def test_an_untrue_meaning_is_noticed(decode_graphs):
    """The check above can fail: a linear that forgets its epilogue is seen."""
    means = {**decode_graphs.MEANING, "linear": lambda m, t: decode_graphs.MEANING["linear"](evolve(m, epilogue=None), t)}
    builder, graph = decode_graphs.transformer(layers=1)
    implementation = Meaning(means)
    regions, spaces = planned(graph, implementation)
    chosen = {r.signature: selection(r, s, s.covers[0]) for r, s in zip(regions, spaces, strict=True)}
    runs_on = executables(implementation, regions, chosen)
    states = {v.name: builder.tensors[v.name].clone() for v in graph.values if v.kind is ValueKind.STATE}
    weights = WeightStore.from_tensors(dict(builder.tensors), "cpu")
    bound = bind(make_program(graph, regions, chosen), weights, states, {}, runs_on)
    bound.run()
    assert not torch.allclose(bound.output(0), builder.results[graph.outputs[0]], atol=1e-3)
