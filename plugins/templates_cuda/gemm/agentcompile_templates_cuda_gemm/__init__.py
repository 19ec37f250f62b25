"""Plugin: products of matrices, as CUDA template family."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .gemm import GemmFamily

__all__ = ["GemmFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The one family of this distribution."""
    return (GemmFamily(),)
