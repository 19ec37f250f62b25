"""Plugin: pointwise expressions and embedding lookup, as CUDA template families."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .elementwise import ElementwiseFamily
from .gather import GatherFamily

__all__ = ["ElementwiseFamily", "GatherFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The families of this distribution."""
    return (ElementwiseFamily(), GatherFamily(),)
