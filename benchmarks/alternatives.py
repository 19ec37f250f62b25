"""Steps by implementations that the search need not have selected: flash-attn's attention, norms and rotations in Triton.

They are put in place of nodes that the framework would run, match by match; the program is checked as a whole when it is installed.
"""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import frozen
from peers.child import PeerDied

from agentcompile_core.context import Context
from agentcompile_core.errors import VerificationError
from agentcompile_core.ir.plan import Schedule, Step
from agentcompile_core.ir.region import Match, Region
from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.plugin.interfaces import Implementation
from agentcompile_core.runtime.make_program import with_steps
from agentcompile_core.runtime.program import Program, Segment

MOST_REASONS = 3


@frozen
class Alternative:
    """Who serves a role: the entry point of a plugin, and the package that it needs."""

    plugin: str
    package: str


ALTERNATIVES = {"flash-attn": Alternative("flashattn", "flash_attn"), "Triton": Alternative("triton", "triton")}


def served(program: Program, regions: Iterable[Region], kind: str, context: Context, records: Sequence[Any] = ()) -> Program:
    """``program`` with every match that the implementations of ``kind`` serve in place of nodes of the framework, wide ones first.

    ``records``: of the search; where one of them timed the step, its fastest schedule is taken, else the best guess.

    Raises:
        PeerDied: its package or its plugin is not there, or nothing of the program is served; one sentence.
    """
    one = ALTERNATIVES[kind]
    if importlib.util.find_spec(one.package) is None:
        raise PeerDied(f"{kind}: the package {one.package} is not installed; install it, or name the folder that holds it by --peer-path")
    offers = {name: offer for name, offer in context.catalog.implementations.items() if name.partition("/")[0] == one.plugin}
    if not offers:
        raise PeerDied(f"{kind}: the plugin {one.plugin} is not installed")
    asked = _Asked(offers, context, records)
    added = [segment for region in regions for segment in _in_region(program, region, asked)]
    if not added:
        why = "; ".join(list(asked.reasons)[:MOST_REASONS]) or "no match is left to it"
        raise PeerDied(f"{kind}: none of the nodes that no other role's step takes in is served: {why}")
    try:
        return with_steps(program, added)
    except VerificationError as exc:
        raise PeerDied(f"{kind}: its steps do not fit between the others: {exc}") from exc


class _Asked:
    """The implementations of a plugin, and why they refused what."""

    def __init__(self, offers: dict[str, Implementation], context: Context, records: Sequence[Any]) -> None:
        self._offers, self._context, self._records = offers, context, records
        self.reasons: dict[str, None] = {}

    def step(self, region: Region, match: Match) -> tuple[Step, int] | None:
        """The step of a match and the version of who serves it; None: nobody does."""
        for name, offer in self._offers.items():
            answer = offer.accepts(match, self._context.target)
            if answer is not True:
                self.reasons[f"{name}: {answer.reason}"] = None
                continue
            points = offer.space(match, self._context.target).points
            schedule = self._fastest(region, match, name) or points[0]
            return Step(match_id=match.id, implementation=name, origin=offer.origin, schedule=schedule), offer.version
        return None

    def _fastest(self, region: Region, match: Match, name: str) -> Schedule | None:
        mine = [record for record in self._records if record.usable and record.signature == region.signature
                and (record.step.match_id, record.step.implementation) == (match.id, name)]
        return min(mine, key=lambda record: record.measurement.us).step.schedule if mine else None


def _in_region(program: Program, region: Region, asked: _Asked) -> Iterator[Segment]:
    """Segments in every instance: the same ones, since all instances of a region have the same steps."""
    known = program.graph.node_by_name
    if not all(node in known for instance in region.instances for _, node in instance.nodes):
        return
    local = {node: name for name, node in region.instances[0].nodes}
    deps = dependencies(region.graph)
    kept = [deps.mask(local[node] for node in segment.nodes if node in local) for segment in program.segments if segment.step is not None]
    masks = [mask for mask in kept if mask]
    for match in sorted(region.matches, key=lambda match: -len(match.nodes)):
        mask = deps.mask(match.nodes)
        if any(mask & other for other in masks) or not deps.is_schedulable([*masks, mask]):
            continue
        found = asked.step(region, match)
        if found is None:
            continue
        masks.append(mask)
        step, version = found
        for instance in region.instances:
            operands = tuple((o.name, tuple(instance.value[value] for value in o.values)) for o in match.operands)
            yield Segment(nodes=tuple(instance.node[node] for node in match.nodes), step=step, label=match.label, match=match,
                          operands=operands, version=version)
