"""A made-up accelerator from outside: its target, its backend and two families of kernels in plain C."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import Backend, Target, TemplateFamily, hookimpl


@hookimpl
def agentcompile_targets() -> Iterable[Target]:
    """The accelerator."""
    from .backend import ACME_ONE

    return (ACME_ONE,)


@hookimpl
def agentcompile_backends() -> Iterable[Backend]:
    """What builds and runs kernels for it."""
    from .backend import AcmeBackend

    return (AcmeBackend(),)


@hookimpl
def agentcompile_template_families() -> Iterable[TemplateFamily]:
    """Its kernels."""
    from .families import ElementwiseInC, LinearInC

    return (LinearInC(), ElementwiseInC())
