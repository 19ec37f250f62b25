"""What advice was worth: how soon each advisor's search met what was fastest, from the records of bundles of one model.

Bundles are compared that differ in their advisor alone (and in chance): the same model, workload, target and budget. A candidate's time
is the median over the bundles that timed it, and the best known candidate of a match is the fastest of all bundles, so that advisors are
held to one ruler. Intervals are 95 % of resamplings of the matches (Efron, 1979), which advisors share.
"""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from ..errors import UsageError
from ..ir.bundle import Manifest
from ..ir.decisions import Decisions
from ..ir.plan import Origin, Step
from ..ir.record import TuningRecord
from .tables import table

NEAR = (0.02, 0.05)  # of the best known time: how near is near
RESAMPLED, LEVEL = 1000, 0.95
Place = tuple[str, str]  # signature of the region, id of the match


@frozen(kw_only=True)
class Search:
    """One bundle's search. ``met``: the candidates of every match in the order in which they were evaluated; ``us``: of those that passed
    and were timed; ``instances``: how often a region is in the model."""

    name: str
    advisor: str
    met: Mapping[Place, tuple[Step, ...]]
    us: Mapping[tuple[Place, Step], float]
    instances: Mapping[str, int]
    answers: int  # of the advisor that came
    unanswered: int
    accepted: int  # items of its answers
    refused: int
    tokens: int
    seconds: float  # that its answers took


def search_of(name: str, records: Iterable[TuningRecord], decisions: Decisions) -> Search:
    """The search of one bundle; ``name``: what it is called in messages."""
    met: dict[Place, list[Step]] = defaultdict(list)  # records are in the order in which candidates were evaluated
    us: dict[tuple[Place, Step], float] = {}
    for record, place in zip(records, decisions.places, strict=False):
        if place < 0 or record.step.origin is Origin.FRAMEWORK:
            continue
        where = (record.signature, record.step.match_id)
        met[where].append(record.step)
        if record.usable and record.passed and record.measurement is not None:
            us[where, record.step] = record.measurement.us
    told = [one for one in decisions.advice if one.error or one.accepted != type(one.accepted)() or one.rejected or one.seconds]
    accepted = sum(_items(one.accepted) for one in told)
    return Search(name=name, advisor=decisions.advisor, met={where: tuple(steps) for where, steps in met.items()}, us=us,
                  instances={region.signature: region.instances for region in decisions.regions},
                  answers=sum(not one.error for one in told), unanswered=sum(bool(one.error) for one in told), accepted=accepted,
                  refused=sum(len(one.rejected) for one in told), tokens=sum(one.tokens for one in told),
                  seconds=sum(one.seconds for one in told))


def _items(advice: Any) -> int:
    lists = (advice.order, advice.cover_order, advice.hints, advice.risks, advice.diagnoses)
    return sum(map(len, lists)) + (advice.label is not None)


def check_alike(manifests: Mapping[str, Manifest]) -> None:
    """Refuse bundles that differ in more than their advisor.

    Raises:
        UsageError: two are of different models, workloads or targets.
    """
    (first, known), *others = manifests.items()
    for name, other in others:
        for what, one, two in (("model", known.model, other.model), ("workload", known.workload, other.workload),
                               ("target", known.target.name, other.target.name)):
            if one != two:
                raise UsageError(f"{first} and {name} are of different {what}s, so their searches cannot be compared; compile one model "
                                 "for one workload and target with each advisor")


def document_of(searches: Sequence[Search]) -> dict[str, Any]:
    """Bundles, and a row per advisor: see ``text_of``. Times are in microseconds, shares between 0 and 1; None: nothing to tell from."""
    us, best = _times(searches)
    arms: dict[str, list[Search]] = defaultdict(list)
    for search in searches:
        arms[search.advisor].append(search)
    rows = [_row(advisor, mine, us, best) for advisor, mine in arms.items()]
    return {"bundles": [{"name": s.name, "advisor": s.advisor, "evaluated": sum(map(len, s.met.values())), "timed": len(s.us)}
                        for s in searches],
            "matches": len(best), "candidates_timed": len(us), "advisors": rows}


def _times(searches: Sequence[Search]) -> tuple[dict[tuple[Place, Step], float], dict[Place, float]]:
    """Median microseconds of each candidate over the bundles, and of each match the least of these."""
    every: dict[tuple[Place, Step], list[float]] = defaultdict(list)
    for search in searches:
        for key, value in search.us.items():
            every[key].append(value)
    us = {key: statistics.median(values) for key, values in every.items()}
    best: dict[Place, float] = {}
    for (place, _), value in us.items():
        best[place] = min(value, best.get(place, math.inf))
    return us, best


def _row(advisor: str, mine: Sequence[Search], us: Mapping[tuple[Place, Step], float], best: Mapping[Place, float]) -> dict[str, Any]:
    places = [place for place in best if any(place in search.met for search in mine)]

    def over(value: Callable[[Search, Place], float | None], summed: Callable[[list[float]], float] = statistics.fmean) -> Any:
        found = {place: [v for v in (value(search, place) for search in mine) if v is not None] for place in places}
        return interval([values for values in found.values() if values], summed)

    def soon(near: float) -> Callable[[Search, Place], float]:
        return lambda search, place: until(search.met.get(place, ()), place, us, best, near)

    def never(near: float) -> Callable[[Search, Place], float]:
        return lambda search, place: float(math.isinf(soon(near)(search, place)))

    said = sum(s.accepted + s.refused for s in mine)
    return {
        "advisor": advisor, "bundles": len(mine), "matches": len(places),
        "evaluated": statistics.fmean(sum(map(len, search.met.values())) for search in mine),
        "order_correlation": over(lambda search, place: kendall(_in_order(search, place, us))),
        "until_near": {f"{near:g}": over(soon(near), statistics.median) for near in NEAR},
        "never_near": {f"{near:g}": over(never(near)) for near in NEAR},
        "behind_best": _behind(mine, us, best),
        "answers": sum(s.answers for s in mine), "unanswered": sum(s.unanswered for s in mine),
        "refused_share": sum(s.refused for s in mine) / said if said else None,
        "tokens": sum(s.tokens for s in mine), "seconds": sum(s.seconds for s in mine),
    }


def _in_order(search: Search, place: Place, us: Mapping[tuple[Place, Step], float]) -> list[float]:
    return [us[place, step] for step in search.met.get(place, ()) if (place, step) in us]


def until(met: Sequence[Step], place: Place, us: Mapping[tuple[Place, Step], float], best: Mapping[Place, float], near: float) -> float:
    """Evaluations of one match up to the first candidate that takes at most ``1 + near`` times the best known; infinite: there was none."""
    for count, step in enumerate(met, 1):
        if us.get((place, step), math.inf) <= (1 + near) * best[place]:
            return float(count)
    return math.inf


def _behind(mine: Sequence[Search], us: Mapping[tuple[Place, Step], float], best: Mapping[Place, float]) -> float | None:
    """How much longer a token takes with the best of each match that these searches met than with the best known, as a share: steps that
    occur often weigh as often. The mean over bundles; None where a match was never met."""
    shares = []
    for search in mine:
        found = {place: min(_in_order(search, place, us), default=math.inf) for place in best if place in search.met}
        known = sum(best[place] * search.instances.get(place[0], 1) for place in found)
        taken = sum(value * search.instances.get(place[0], 1) for place, value in found.items())
        if not known or math.isinf(taken):
            return None
        shares.append(taken / known - 1.0)
    return statistics.fmean(shares) if shares else None


def kendall(values: Sequence[float]) -> float | None:
    """Kendall's tau-b between the order of ``values`` and their size (Kendall, 1945): 1 where the least comes first and so on, -1 where the
    largest does; None for fewer than two different values."""
    pairs = [(values[j] > values[i]) - (values[j] < values[i]) for i in range(len(values)) for j in range(i + 1, len(values))]
    untied = sum(1 for pair in pairs if pair)
    return sum(pairs) / math.sqrt(len(pairs) * untied) if untied else None


def interval(groups: Sequence[Sequence[float]], summed: Callable[[list[float]], float]) -> dict[str, float | None]:
    """``summed`` of all values, and the ends of its interval over resamplings of the groups; ends are None of fewer than two groups."""
    if not groups:
        return {"value": None, "low": None, "high": None}
    value = summed([v for group in groups for v in group])
    if len(groups) < 2:
        return {"value": _finite(value), "low": None, "high": None}
    draw = random.Random(0)
    drawn = sorted(summed([v for group in draw.choices(groups, k=len(groups)) for v in group]) for _ in range(RESAMPLED))
    cut = int(RESAMPLED * (1 - LEVEL) / 2)
    return {"value": _finite(value), "low": _finite(drawn[cut]), "high": _finite(drawn[-1 - cut])}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


HEAD = ("advisor", "bundles", "evaluated", "order and time", "until within 2 %", "never", "until within 5 %", "never", "behind the best",
        "refused", "unanswered", "tokens", "advice s")


def text_of(document: Mapping[str, Any]) -> str:
    """The document as a table with what its columns mean."""
    if not document["candidates_timed"]:
        return ("nothing was timed in these bundles, so nothing tells which advice was worth more; compile where the hardware is\n"
                + table([(b["name"], b["advisor"], b["evaluated"]) for b in document["bundles"]], ("bundle", "advisor", "evaluated")))
    rows = []
    for row in document["advisors"]:
        near = [cell for name in row["until_near"] for cell in (_ranged(row["until_near"][name], ".0f", "never"),
                                                               _ranged(row["never_near"][name], ".0%"))]
        rows.append((row["advisor"], row["bundles"], f"{row['evaluated']:.0f}", _ranged(row["order_correlation"], ".2f"), *near,
                     "-" if row["behind_best"] is None else f"{row['behind_best']:.1%}",
                     "-" if row["refused_share"] is None else f"{row['refused_share']:.0%}", row["unanswered"], row["tokens"],
                     f"{row['seconds']:.1f}"))
    return "\n".join([table(rows, HEAD), "", *EXPLAINED.format(**document).splitlines()])


EXPLAINED = """\
{candidates_timed} candidates of {matches} matches were timed; in brackets 95 % of resamplings of the matches.
order and time: Kendall's tau between the order of evaluation and time, 1 where the fastest came first.
until within: evaluations of a match up to one as near to the best known, median; never: the share of matches without.
behind the best: how much longer a token takes by what was met than by the best known of all bundles, each step by itself."""


def _ranged(cell: Mapping[str, float | None], form: str, beyond: str = "-") -> str:
    value, low, high = (cell[key] for key in ("value", "low", "high"))
    said = beyond if value is None else f"{value:{form}}"
    return said if low is None or high is None or low == high else f"{said} [{low:{form}}, {high:{form}}]"
