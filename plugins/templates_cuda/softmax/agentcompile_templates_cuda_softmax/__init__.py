"""Plugin: softmax and log-softmax along any axis, as CUDA template family."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .softmax import SoftmaxFamily

__all__ = ["SoftmaxFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """The one family of this distribution."""
    return (SoftmaxFamily(),)
