"""What a compiled model is made of."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakSet

from attrs import field, frozen

from ..context import Context
from ..installation import install
from ..ir.bundle import Bundle
from ..ir.graph import GraphSet
from ..pipeline import Compilation
from ..plugin.interfaces import LoadedModel

if TYPE_CHECKING:
    from ..stages.capture.identity import Identity


@frozen(kw_only=True)
class Parts:
    """Without a session it can be saved and not run.

    ``bundle`` makes what ``save`` writes; None: it was loaded from one.
    ``run_on``: as ``compile`` was asked. ``kin``: the sessions of all models that share these programs.
    """

    loaded: LoadedModel
    graphs: GraphSet
    context: Context
    session: install.AnySession | None = None
    bundle: Callable[[], Bundle] | None = None
    compilation: Compilation | None = None
    run_on: str = "auto"
    notes: tuple[str, ...] = ()
    kin: "WeakSet[install.AnySession]" = field(factory=WeakSet, repr=False)

    @cached_property
    def identity(self) -> "Identity":
        """That of the model when it was asked for first: every sibling is compared with it."""
        from ..stages.capture.identity import identity

        return identity(self.loaded)
