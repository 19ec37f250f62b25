"""Plugin: greedy token selection on the device, as CUDA template family."""

from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import TemplateFamily

from .argmax import ArgmaxFamily

__all__ = ["ArgmaxFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The one family of this distribution."""
    return (ArgmaxFamily(),)
