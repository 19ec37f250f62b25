"""What identifies a model, and the workload it gets when none is asked for, without importing torch before it is used."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...ir.graph import ModelInfo, Workload
    from ...plugin.interfaces import LoadedModel


def model_info(loaded: "LoadedModel") -> "ModelInfo":
    """What identifies ``loaded`` without its weights; equal for the same model with, without and with random weights."""
    from .describe import describe

    return describe(loaded)


def default_workload(loaded: "LoadedModel") -> "Workload":
    """Batch 1, the element type of the model, a context of min(the model's limit, 8192)."""
    from .describe import default_workload as of_module

    return of_module(loaded.module)
