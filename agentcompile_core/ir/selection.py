"""Which plan each region got, and why."""

import enum

from attrs import field, frozen

from .candidate import StepSource
from .plan import Cover, Fusion, Origin, Step
from .record import Measurement
from .words import word


class Basis(enum.Enum):
    """The evidence a step was chosen on."""

    MEASURED = "measured"  # faster than the baseline beyond the noise
    CHAIN = "chain"  # judged inside the captured chain
    PROVISIONAL = "provisional"  # validated without its hardware; never used on it unmeasured
    FALLBACK = "fallback"  # the framework's operators


@frozen(kw_only=True)
class SelectedStep:
    """One step of a selection, with its source and its evidence."""

    step: Step
    label: str = field(converter=word)
    nodes: tuple[str, ...]  # region-local
    source: StepSource | None  # None for implementations that bind a callable
    version: int = 0  # of the family or implementation
    basis: Basis
    measurement: Measurement | None = None
    baseline: Measurement | None = None
    reason: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0


@frozen(kw_only=True)
class Selection:
    """The chosen cover of one region. Nodes that no step covers stay on the framework, ``fallback_reasons`` say why.

    ``start``: the position from which it holds, in place of the one of its region that begins before it; see ``ranges``.
    """

    signature: str
    region: str
    cover: Cover
    steps: tuple[SelectedStep, ...]
    fallback_reasons: tuple[tuple[str, str], ...] = ()  # what, why
    basis: Basis = Basis.FALLBACK
    region_us: float = 0.0
    baseline_us: float = 0.0
    start: int = 0

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Origin of each step."""
        return tuple(step.step.origin for step in self.steps)


def fallback(signature: str, region: str, reason: str) -> Selection:
    """The selection that keeps a whole region on the framework."""
    cover = Cover(matches=(), fusion=Fusion.FRAMEWORK, rank=0)
    return Selection(signature=signature, region=region, cover=cover, steps=(), fallback_reasons=((region, reason),))
