"""What plans cover of a model at its real size: captured and planned without weights, nothing lowered, built or measured."""

import time
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from torch import nn

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.graph import DType, GraphKind, GraphSet, Workload
from agentcompile_core.ir.plan import Origin, RegionPlan, Step
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.report.accounting import accounting
from agentcompile_core.runtime.make_program import make_program
from agentcompile_core.stages import analyze, plan
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.store import Store

from . import models
from .judge import TooLong
from .special import SPECIAL

CONTEXT = 4096
STRUCTURE = ("is_decoder",)  # of what a tiny model of a type needs besides: what is no size
REAL: dict[str, dict[str, Any]] = {  # what the defaults of a class leave open
    "deepseek_v2": {"num_experts_per_tok": 6}, "hunyuan_v1_dense": {"head_dim": 128}, "hunyuan_v1_moe": {"head_dim": 128},
}
Row = dict[str, Any]


def context(target: str) -> Context:
    """Everything that planning needs for a preset target (``cuda/h200``): generated kernels alone, no store, no worker.

    Raises:
        SystemExit: no plugin knows such a target.
    """
    catalog = load_catalog()
    if target not in catalog.targets:
        raise SystemExit(f"--target {target}: known are {', '.join(catalog.targets)}")
    origins = (Origin.GENERATED.value,)
    return Context(catalog=catalog, target=catalog.targets[target], config=Config(origins=origins), store=Store(None))


def real(model_type: str) -> nn.Module:
    """A model of the class's default configuration, mostly the published one, in bfloat16 without weights."""
    wanted = {name: value for name, value in SPECIAL.get(model_type, {}).items() if name in STRUCTURE}
    config = transformers.CONFIG_MAPPING[model_type](**wanted, **REAL.get(model_type, {}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def context_of(config: Any) -> int:
    """The positions that are planned for: at most 4096, and what the configuration allows."""
    limits = [getattr(config, name, None) for name, tiny in models.TINY.items() if tiny == models.POSITIONS]
    return min([CONTEXT, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def row_of(model_type: str, ctx: Context) -> Row:
    """How much of the decode step of a type at its real size plans cover; why not, where nothing was captured or it raises."""
    began = time.monotonic()
    found: Row = {"name": model_type, "target": ctx.target.name, "share": 0.0, "reason": ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = real(model_type)
            found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
            workload = Workload(dtype=DType.BF16, max_context=context_of(model.config), prefill_chunks=())
            graphs = capture_language_model(model, model_type, workload)
            found |= planned(graphs, ctx) if graphs.graphs else {"reason": graphs.eager_reason.partition(" framework: ")[2]}
    except (Exception, TooLong) as exc:  # the sweep says what happened and goes on
        found["reason"] = f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def planned(graphs: GraphSet, ctx: Context) -> Row:
    """The share of bytes of the decode step (or the one forward) behind generated kernels if every favourite plan were selected.

    Also its kernels by kind, and the framework's operators that are left.
    """
    plans = plan.run(analyze.run(graphs, ctx), ctx)
    graph = next(g for g in graphs.graphs if g.kind is not GraphKind.PREFILL)
    program = make_program(graph, tuple(p.region for p in plans), {p.signature: _favourite(p) for p in plans})
    found = accounting(program)
    kinds = Counter(segment.match.kind for segment in program.segments if segment.match is not None)
    return {"share": found["share"].get(Origin.GENERATED.value, 0.0), "bytes": sum(found["bytes"].values()), "kernels": dict(kinds),
            "framework_operators": found["framework_operators"]}


def _favourite(found: RegionPlan) -> Selection:
    """The planner's favourite cover, each match with the first schedule of the first that serves it."""
    cover = found.space.covers[0]
    steps = []
    for match_id in cover.matches:
        served, match = found.space.spaces_of(match_id)[0], found.region.match_by_id[match_id]
        step = Step(match_id=match_id, implementation=served.implementation, origin=served.origin, schedule=served.space.points[0])
        steps.append(SelectedStep(step=step, label=match.label, nodes=match.nodes, source=None, version=served.version,
                                  basis=Basis.PROVISIONAL))
    return Selection(signature=found.signature, region=found.region.name, cover=cover, steps=tuple(steps))
