"""Plugin: one token of linear recurrences and of short causal convolutions, as CUDA template families."""

from agentcompile_core.plugin_api import TemplateFamily, hookimpl

from .convolution_step import ConvolutionStepFamily
from .recurrence_step import RecurrenceStepFamily

__all__ = ["ConvolutionStepFamily", "RecurrenceStepFamily", "agentcompile_template_families"]


@hookimpl
def agentcompile_template_families() -> tuple[TemplateFamily, ...]:
    """Both families of this distribution."""
    return (RecurrenceStepFamily(), ConvolutionStepFamily())
