"""Plugin: greedy token selection on the device, as CUDA template family."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .argmax import ArgmaxFamily

__all__ = ["ArgmaxFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The one family of this distribution."""
    return (ArgmaxFamily(),)
