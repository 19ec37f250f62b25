"""The checked source of one step: what a family lowers, or the name of what an implementation binds."""

from typing import TYPE_CHECKING

from ..errors import ContractError
from ..ir import serial
from ..ir.candidate import CALLABLE, StepSource
from ..ir.plan import Step
from ..ir.region import Match
from ..ir.source_check import check_source
from ..ir.target import Target
from ..plugin.settings import identity
from .executables import call_key

if TYPE_CHECKING:
    from ..plugin.catalog import Catalog


def source_of(step: Step, match: Match, catalog: "Catalog", target: Target) -> StepSource:
    """The checked source of one step.

    Raises:
        ContractError: the implementation is unknown, returned something else, or its source does not fit the match.
        OutOfTime: it did not come back.
    """
    family = catalog.template_families.get(step.implementation)
    if family is None:
        return _callable_source(step, match, catalog)
    source = catalog.limited(lambda: family.lower(match, step.schedule, target), plugin=step.implementation)
    if not isinstance(source, StepSource):
        raise ContractError(f"{step.implementation} lowered to {type(source).__name__}, not StepSource")
    if source.language not in target.languages:
        raise ContractError(f"{step.implementation} lowered to {source.language}; {target.name} runs {', '.join(target.languages)}; "
                            "a family names the language of its sources")
    check_source(match, source, target)
    backend = catalog.backend_of(target)
    if backend is not None:
        catalog.limited(lambda: backend.check(source, target), plugin=backend.name)
    return source


def _callable_source(step: Step, match: Match, catalog: "Catalog") -> StepSource:
    """No text, nothing to build: the digest says which implementation, version, settings, schedule and match are judged."""
    digest = call_key(step, version_of(step, catalog), match)
    settings = identity(catalog.implementations[step.implementation])
    digest = serial.digest(digest, settings) if settings else digest
    return StepSource(language=CALLABLE, digest=digest, code="", launches=(), reduction_depth=0)


def version_of(step: Step, catalog: "Catalog") -> int:
    """The installed version of what serves a step.

    Raises:
        ContractError: no plugin offers it.
    """
    offer = catalog.template_families.get(step.implementation) or catalog.implementations.get(step.implementation)
    if offer is None:
        raise ContractError(f"no plugin offers {step.implementation}")
    return offer.version
