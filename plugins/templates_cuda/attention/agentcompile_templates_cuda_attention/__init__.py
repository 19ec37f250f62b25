"""Plugin: decode attention with KV append, split over the cache, and attention of all rows of a module, as CUDA template families."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .attention import AttentionFamily
from .masked import MaskedAttentionFamily

__all__ = ["AttentionFamily", "MaskedAttentionFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The families of this distribution."""
    return (AttentionFamily(), MaskedAttentionFamily())
