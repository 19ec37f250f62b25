"""Plugin: sums, extremes, products, norms and variances along any axes, as CUDA template family."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .reduction import ReductionFamily

__all__ = ["ReductionFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The one family of this distribution."""
    return (ReductionFamily(),)
