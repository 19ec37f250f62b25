"""Plugin: mixtures of experts for one token, as CUDA template families: the router, and the linear layers of the chosen experts."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .experts import ExpertsFamily
from .router import RouterFamily

__all__ = ["ExpertsFamily", "RouterFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The two families of this distribution."""
    return (ExpertsFamily(), RouterFamily())
