"""A plugin object that offers the targets and backends it is given."""

from typing import Any

from agentcompile_core.plugin.hookspecs import hookimpl


class Offers:
    """What a distribution's entry point would be."""

    def __init__(self, targets: tuple[Any, ...] = (), backends: tuple[Any, ...] = ()) -> None:
        self.targets, self.backends = targets, backends

    @hookimpl
    def agentcompile_targets(self) -> Any:
        """The targets."""
        return self.targets

    @hookimpl
    def agentcompile_backends(self) -> Any:
        """The backends."""
        return self.backends
