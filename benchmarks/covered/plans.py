"""What plans would cover of a graph's bytes: captured and planned, nothing lowered, built or measured."""

from collections import Counter
from typing import Any

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.graph import Graph, GraphKind, GraphSet
from agentcompile_core.ir.plan import RegionPlan, Step
from agentcompile_core.ir.selection import SelectedStep, Selection
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.report.accounting import accounting
from agentcompile_core.runtime.make_program import make_program
from agentcompile_core.stages import analyze, plan
from agentcompile_core.store import Store


def context(target: str) -> Context:
    """Everything that planning needs for a preset target: generated kernels alone, no store, no worker."""
    catalog = load_catalog()
    return Context(catalog=catalog, target=catalog.targets[target], config=Config(origins=("generated",)), store=Store(None))


def planned(graphs: GraphSet, ctx: Context) -> dict[str, Any]:
    """The share of bytes of the decode step (or the one forward) behind generated kernels if every favourite plan were selected.

    Also: kernels by kind, and the operators that are left to the framework, by the bytes that they move.
    """
    plans = plan.run(analyze.run(graphs, ctx), ctx)
    graph = next(g for g in graphs.graphs if g.kind is not GraphKind.PREFILL)
    program = make_program(graph, tuple(p.region for p in plans), {p.signature: _favourite(p) for p in plans})
    found = accounting(program)
    kinds = Counter(segment.match.kind for segment in program.segments if segment.match is not None)
    left = Counter(program.framework_nodes() if hasattr(program, "framework_nodes") else ())
    return {"share": found["share"].get("generated", 0.0), "bytes": sum(found["bytes"].values()), "kernels": dict(kinds),
            "framework_operators": found["framework_operators"], "left": dict(left)}


def _favourite(found: RegionPlan) -> Selection:
    """The selection of the planner's favourite cover with the first schedule of whoever can serve each match."""
    cover = found.space.covers[0]
    steps = []
    for match_id in cover.matches:
        served = found.space.spaces_of(match_id)[0]
        match = found.region.match_by_id[match_id]
        step = Step(match_id=match_id, implementation=served.implementation, origin=served.origin, schedule=served.space.points[0])
        from agentcompile_core.ir.selection import Basis
        steps.append(SelectedStep(step=step, label=match.label, nodes=match.nodes, source=None, version=served.version, basis=Basis.PROVISIONAL))
    return Selection(signature=found.signature, region=found.region.name, cover=cover, steps=tuple(steps))
