"""What programs run on besides weights and state: device, backend, built kernels, and the callables that implementations bind."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from ..errors import ContractError
from ..ir import serial
from ..ir.candidate import Kernel
from ..ir.plan import Step
from ..ir.region import Match
from ..ir.target import Target

if TYPE_CHECKING:
    from ..plugin.catalog import Catalog
    from ..plugin.interfaces import Backend


@frozen(kw_only=True)
class BoundCall:
    """What ``Implementation.bind`` returned, and whether a captured graph may hold it. ``run`` takes tensors by operand name."""

    run: Callable[..., None]
    capturable: bool = True


@frozen(kw_only=True)
class Executables:
    """Everything that runs, as one value: handed from installing (or the chain's judge) through sessions to the binder.

    ``device`` is a torch device type; ``backend`` launches kernels on it (None: the programs hold no kernels); ``kernels``
    are by digest of their source, ``calls`` by ``call_key``. ``prefill``: what prompt chunks attend over,
    ``live`` or ``capacity``.
    """

    device: str
    backend: "Backend | None" = None
    kernels: Mapping[str, Kernel] = field(factory=dict, repr=False)
    calls: Mapping[str, BoundCall] = field(factory=dict, repr=False)
    prefill: str = "live"


def call_key(step: Step, version: int, match: Match) -> str:
    """Names one bound callable: equal for all instances of a match, different for other shapes, schedules and versions."""
    return serial.digest(step, version, evolve(match, nodes=()))


def bind_call(step: Step, match: Match, catalog: "Catalog", target: Target, version: int | None = None) -> BoundCall:
    """Bind the implementation that ``step`` names; ``version`` is the one it was validated with (None: the installed one).

    Raises:
        ContractError: it is not installed, has another version, does not accept the match, or bound something else than a
            callable. Whatever the plugin's own code raises passes through.
    """
    implementation = catalog.implementations.get(step.implementation)
    wanted = "" if version is None else f" version {version}"
    if implementation is None:
        raise ContractError(f"{step.implementation}{wanted} is not installed")
    if version is not None and implementation.version != version:
        raise ContractError(f"{step.implementation} is installed as version {implementation.version}, version {version} was validated")
    answer = implementation.accepts(match, target)
    if answer is not True:
        raise ContractError(f"{step.implementation}{wanted} does not accept its match here: {getattr(answer, 'reason', repr(answer))}")
    run = implementation.bind(match, step.schedule, target)
    if not callable(run):
        raise ContractError(f"{step.implementation}: bind() returned {type(run).__name__}; it must return a callable run(**operands)")
    return BoundCall(run=run, capturable=bool(implementation.capturable))
