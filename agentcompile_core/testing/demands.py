"""What all conformance kits share: saying what is wrong, and the questions that every offer is asked."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from ..errors import ContractError, Reject
from ..ir.graph import Graph
from ..ir.plan import Schedule, ScheduleSpace
from ..ir.region import Match
from ..ir.target import Target
from ..plugin.catalog import NAME, OFFERS, Catalog
from ..plugin.discovery import load_catalog
from ..plugin.interfaces import Implementation, Offer, TemplateFamily
from ..stages.plan import checked

SHORTEST_REASON = 10  # characters of a Reject that a person can act on
Case = tuple[Match, Graph]


def demand(holds: bool, message: str) -> None:
    """Raise AssertionError with ``message`` unless ``holds``."""
    if not holds:
        raise AssertionError(message)


def demand_identity(offer: Any, kind: type[Offer]) -> None:
    """It is an instance of ``kind`` with a lower_snake_case name and a version from 1."""
    what = kind.__name__
    demand(isinstance(offer, kind), f"this is a {type(offer).__name__}, not an instance of a {what}")
    name, version = getattr(offer, "name", None), offer.version
    demand(isinstance(name, str) and NAME.match(name) is not None, f"bad name {name!r}; use lower_snake_case")
    demand(type(version) is int and version >= 1, f"bad version {version!r}; use an int from 1")


def demand_answer(answer: Any, where: str) -> None:
    """``answer`` is True or a Reject whose reason a person can act on."""
    demand(answer is True or isinstance(answer, Reject), f"{where} returned {answer!r}; it must return True or a Reject")
    if answer is not True:
        demand(len(answer.reason) >= SHORTEST_REASON, f"{where}: the reason {answer.reason!r} says too little; say what is served")


def demand_accepts(offer: TemplateFamily | Implementation, served: Iterable[Match], refused: Iterable[Match], target: Target) -> None:
    """``accepts`` says True for all ``served``, and gives a reason for all ``refused``."""
    for match in served:
        answer = offer.accepts(match, target)
        demand(answer is True, f"{match.id} on {target.name}: accepts() returned {answer!r}, expected True")
    for match in refused:
        answer = offer.accepts(match, target)
        demand(isinstance(answer, Reject), f"{match.id} on {target.name}: accepts() returned {answer!r}, expected a Reject")
        demand_answer(answer, f"{match.id} on {target.name}: accepts()")


def space_of(offer: TemplateFamily | Implementation, match: Match, target: Target) -> ScheduleSpace:
    """The space of an accepted match: 1 to 256 different points inside its own parameters."""
    try:
        space = checked(offer.space(match, target))
    except ContractError as exc:
        raise AssertionError(f"{match.id}: {exc}") from exc
    if isinstance(space, Reject):
        raise AssertionError(f"{match.id}: {space.reason}, although accepts() returned True")
    return space


def sampled(space: ScheduleSpace, count: int) -> tuple[Schedule, ...]:
    """The best guess, the last schedule, and some between them."""
    points, count = space.points, min(count, len(space.points))
    return tuple(points[i * (len(points) - 1) // max(1, count - 1)] for i in range(count))


@cache
def installed() -> Catalog:
    """What is installed here, loaded once."""
    return load_catalog(strict=False)


def catalog_of(*offers: Offer) -> Catalog:
    """A catalog of these offers, and of the region rules that are installed beside them, for the kinds of their matches."""
    made = Catalog()
    made.offers["agentcompile_region_rules"].update(installed().region_rules)
    for offer in offers:
        hook = next(hook for hook, kind in OFFERS.items() if isinstance(offer, kind))
        made.offers[hook][f"conformance/{offer.name}"] = offer
    return made
