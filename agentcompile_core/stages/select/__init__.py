"""Stage select: by isolated timings; where there is a device, then by the captured chain, and last by the whole step.

What nothing beats stays on the framework. Sources and kernels are those that validation judged; nothing is lowered again.
"""

from attrs import frozen

from ...context import Context
from ...ir.decisions import ChainLog
from ...ir.evaluated import Evaluated
from ...ir.graph import Graph
from ...ir.plan import RegionPlan
from ...ir.selection import Selection, fallback
from ...plugin.events import RegionSelected
from . import chain, ranges
from .isolated import Taken, best_alone

__all__ = ["Selected", "run"]


@frozen(kw_only=True)
class Selected:
    """A selection per region, behind them those of later ranges of positions; microseconds of the chain's shortened step with the first
    ones and on the framework (0: not measured), and the logs of both."""

    selections: tuple[Selection, ...]
    step_us: tuple[float, float] = (0.0, 0.0)
    chain: ChainLog | None = None
    ranges: tuple[ChainLog, ...] = ()


def run(plans: tuple[RegionPlan, ...], found: Evaluated, ctx: Context, graph: Graph | None = None) -> Selected:
    """Select a cover and its steps for every region. ``graph`` is the step whose chain judges them, where there is a device for it.

    A measured step is taken if it beats its baseline by ``config.margin`` beyond both spreads; the fastest one in any case where
    the framework is not among the allowed origins. Where nothing could be timed, the first validated step in planner
    order is taken, as provisional.
    """
    selected = _by_chain(plans, found, ctx, graph) if graph is not None and chain.possible(ctx) else None
    if selected is None:
        selected = Selected(selections=best_alone(plans, found, ctx, Taken.FASTER))
    for selection in selected.selections:
        ctx.emit(RegionSelected(region=selection.region, signature=selection.signature, basis=selection.basis.value,
                                steps=tuple(str(s.step) for s in selection.steps), us=selection.region_us,
                                baseline_us=selection.baseline_us))
    return selected


def _by_chain(plans: tuple[RegionPlan, ...], found: Evaluated, ctx: Context, graph: Graph) -> Selected | None:
    """What the captured chain selects, if the whole step is faster than the framework's; None where it could not be asked."""
    if not any(r.usable for r in found.records):
        return None
    # Beside fallbacks there is no PDL, so the chain starts with every step at its best isolated candidate, also those that lost alone.
    started = best_alone(plans, found, ctx, Taken.BEST)
    judged, answer = chain.run(graph, plans, started, found, ctx)
    if answer is None:
        return None
    slower = answer.us * (1 + ctx.config.margin) >= answer.framework_us
    if ctx.config.framework_competes and answer.framework_us and slower:
        why = f"the whole step takes {answer.us:.1f} us with kernels and {answer.framework_us:.1f} us on the framework"
        judged = tuple(fallback(s.signature, s.region, why) for s in judged)
    log = ChainLog(started=tuple((s.signature, x.step) for s in started for x in s.steps), trials=answer.trials)
    ctx.budget.done("chain")
    later = ranges.later(graph, plans, judged, found, ctx, answer.trials) if ranges.possible(graph) else ranges.Later()
    return Selected(selections=(*judged, *later.selections), step_us=(answer.us, answer.framework_us), chain=log, ranges=later.logs)
