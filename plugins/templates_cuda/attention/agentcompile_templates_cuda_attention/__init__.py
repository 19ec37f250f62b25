"""Plugin: decode attention with KV append, split over the cache, as CUDA template family."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .attention import AttentionFamily

__all__ = ["AttentionFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The one family of this distribution."""
    return (AttentionFamily(),)
