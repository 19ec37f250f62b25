"""Plugin: RMS and layer norm of rows, as CUDA template family."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .norm import NormFamily

__all__ = ["NormFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The one family of this distribution."""
    return (NormFamily(),)
