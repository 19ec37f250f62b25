"""Plugin: decode attention with KV append, split over the cache, as CUDA template family."""

from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import TemplateFamily

from .attention import AttentionFamily

__all__ = ["AttentionFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The one family of this distribution."""
    return (AttentionFamily(),)
