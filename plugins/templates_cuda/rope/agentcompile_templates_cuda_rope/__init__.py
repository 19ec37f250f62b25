"""Plugin: rotary position embedding and its tables, as CUDA template families."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .rope import RopeFamily
from .rope_table import RopeTableFamily

__all__ = ["RopeFamily", "RopeTableFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The families of this distribution."""
    return (RopeFamily(), RopeTableFamily(),)
