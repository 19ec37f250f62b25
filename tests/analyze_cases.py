"""What tests of the analysis share: small graphs, graphs under other names, a context of the region rules."""

import agentcompile_rules_transformers as rules
from agentcompile_cuda_kit.targets import preset
from attrs import evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.graph import (
    DType,
    Graph,
    GraphKind,
    GraphSet,
    ModelInfo,
    Node,
    Ref,
    TensorSpec,
    Value,
    ValueKind,
    Workload,
    map_refs,
)
from agentcompile_core.plugin.catalog import Catalog

SPEC = TensorSpec(shape=(4,), dtype=DType.F32)


def context(*extra, strict=True):
    catalog = Catalog(strict=strict)
    for rule in (*rules.agentcompile_region_rules(), *extra):
        catalog.region_rules[f"test/{rule.name}"] = rule
    return Context(catalog=catalog, target=preset("h200"), config=Config(), store=None)


def graph_set(*graphs):
    model = ModelInfo(name="m", model_type="m", config_json="{}", digest="0", parameter_bytes=0)
    return GraphSet(model=model, workload=Workload(dtype=DType.F32, max_context=16), graphs=graphs)


def renamed(graph, salt):
    """The same graph under other names of values, nodes and modules."""
    values = {v.name: f"{salt}{i}" for i, v in enumerate(graph.values)}
    nodes = [evolve(n, name=f"{salt}_n{i}", module=f"{salt}.{n.module}", args=tuple(map_refs(a, values) for a in n.args),
                    kwargs=tuple((k, map_refs(a, values)) for k, a in n.kwargs), outputs=tuple(values[o] for o in n.outputs),
                    mutates=tuple(values[m] for m in n.mutates)) for i, n in enumerate(graph.nodes)]
    return evolve(graph, name=salt, values=tuple(evolve(v, name=values[v.name], source=salt) for v in graph.values), nodes=tuple(nodes),
                  inputs=tuple(values[i] for i in graph.inputs), outputs=tuple(values[o] for o in graph.outputs)).verify()


def chain(*nodes, outputs=("c",), given=("x",), spec=SPEC):
    """A graph from (name, op, kind, inputs, outputs) rows over vectors of four."""
    made = [Node(name=name, op=op, kind=kind, args=tuple(Ref(i) for i in ins), outputs=outs, **extra)
            for name, op, kind, ins, outs, extra in nodes]
    values = [Value(name=g, spec=spec, kind=ValueKind.INPUT) for g in given]
    values += [Value(name=out, spec=spec) for node in made for out in node.outputs]
    return Graph(name="g", kind=GraphKind.FORWARD, values=tuple(values), nodes=tuple(made), inputs=given, outputs=outputs).verify()


def relu(name, source, out, **extra):
    return (name, "aten.relu.default", "relu", (source,), (out,), extra)
