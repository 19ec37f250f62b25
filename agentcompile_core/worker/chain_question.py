"""What the captured chain is asked and what it answers; selections with another way to do one of their steps."""

from attrs import evolve, field, frozen

from ..ir.candidate import Kernel
from ..ir.decisions import ChainTrial
from ..ir.graph import Graph
from ..ir.plan import Step
from ..ir.region import Region
from ..ir.selection import SelectedStep, Selection
from ..ir.serial import UNSAID
from ..ir.target import Target

Selections = tuple[Selection, ...]


@frozen(kw_only=True)
class Alternative:
    """Another way to do one step of one region: what would be selected instead (None: the framework).

    ``later``: it is tried behind all that are not.
    """

    signature: str
    match_id: str
    selected: SelectedStep | None
    later: bool = field(default=False, metadata={UNSAID: True})

    def __str__(self) -> str:
        return str(self.selected.step) if self.selected else f"framework on {self.match_id}"

    @property
    def place(self) -> tuple[str, str]:
        """The step that it is another way of: signature and match."""
        return self.signature, self.match_id

    @property
    def step(self) -> Step | None:
        """What would run; None: the framework's operators."""
        return self.selected.step if self.selected else None


@frozen(kw_only=True)
class ChainQuestion:
    """What the chain is asked: which of ``alternatives`` to take in place of what ``selections`` hold.

    ``covers``: other covers of their regions, each with the best step alone of every match; one takes the place of another as a whole.
    ``earlier``: positions before ``position``, from low to high, at which what wins is compared with ``selections`` too.
    """

    graph: Graph
    regions: tuple[Region, ...]
    selections: Selections
    alternatives: tuple[Alternative, ...]
    covers: Selections = field(default=(), metadata={UNSAID: True})
    target: Target
    backend: str
    position: int
    earlier: tuple[int, ...] = field(default=(), metadata={UNSAID: True})
    margin: float
    budget_s: float
    with_framework: bool = True  # whether the step on the framework is timed as well
    kernels: tuple[Kernel, ...] = field(default=(), repr=False)  # of the sources in it, as they were validated


@frozen(kw_only=True)
class ChainAnswer:
    """The selections that won, what the shortened step takes with them and on the framework alone, in microseconds.

    ``refused``: of each step that was not taken since the whole step was wrong with it, region, match, the step in words, and why.
    ``trials``: what led there, in order; who makes it again from ``question.selections`` gets ``selections``. What a second descent
    tried on its way is not among them, its end is. ``tried``: how many of them change one step. ``earlier``: earlier positions, nearest
    first, each with what the step takes there over what the question held, up to the first at which it is slower; none if nothing else
    was selected, or a step was taken out.
    """

    selections: Selections
    us: float
    first_us: float
    framework_us: float
    tried: int
    accepted: int
    refused: tuple[tuple[str, str, str, str], ...] = ()
    trials: tuple[ChainTrial, ...] = ()
    earlier: tuple[tuple[int, float], ...] = field(default=(), metadata={UNSAID: True})


def holds(selections: Selections, alternative: Alternative) -> bool:
    """Whether the alternative is what is selected already (or would remove a step that is gone)."""
    steps = [s.step for sel in selections if sel.signature == alternative.signature for s in sel.steps
             if s.step.match_id == alternative.match_id]
    return alternative.step in steps if alternative.selected is not None else not steps


def replaced(selections: Selections, alternative: Alternative) -> Selections:
    """The selections with it in place of what they hold for its match."""
    def steps(selection: Selection) -> tuple[SelectedStep, ...]:
        others = [s for s in selection.steps if s.step.match_id != alternative.match_id]
        return (*others, alternative.selected) if alternative.selected else tuple(others)

    return tuple(evolve(s, steps=steps(s)) if s.signature == alternative.signature else s for s in selections)


def matches_of(selections: Selections, signature: str) -> frozenset[str]:
    """The matches of a region that ``selections`` have a step for."""
    return frozenset(s.step.match_id for selection in selections if selection.signature == signature for s in selection.steps)


def toward(selections: Selections, cover: Selection) -> tuple[Alternative, ...]:
    """What makes ``cover`` of what is held of its region: first its steps for matches that nothing is held for, then those that go."""
    held = matches_of(selections, cover.signature)
    mine = {s.step.match_id: s for s in cover.steps}
    return (*(Alternative(signature=cover.signature, match_id=m, selected=s) for m, s in mine.items() if m not in held),
            *(Alternative(signature=cover.signature, match_id=m, selected=None) for m in sorted(held - set(mine))))


def changes(before: Selections, after: Selections) -> tuple[Alternative, ...]:
    """What makes ``after`` of ``before``, selections of the same regions: first the steps that are others, then those that go."""
    others, gone = list[Alternative](), list[Alternative]()
    for old, new in zip(before, after, strict=True):
        was, now = ({s.step.match_id: s for s in selection.steps} for selection in (old, new))
        others += [Alternative(signature=new.signature, match_id=m, selected=s) for m, s in now.items()
                   if m not in was or was[m].step != s.step]
        gone += [Alternative(signature=new.signature, match_id=m, selected=None) for m in was if m not in now]
    return (*others, *gone)
