"""What code written for HuggingFace's models reads of a model: its configuration, device and type, and a few verbs that do nothing here."""

from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..plugin.interfaces import LoadedModel

if TYPE_CHECKING:
    import torch


class HuggingFaceManners:
    """So that transformers' ``pipeline("text-generation", model=compiled, tokenizer=...)`` and its like take a compiled model.

    What is not here is looked up nowhere else: ``loaded.module`` is HuggingFace's model itself.
    """

    loaded: LoadedModel
    session: Any

    input_modalities = ("text",)
    output_modalities = ("text",)

    @property
    def config(self) -> Any:
        """HuggingFace's configuration of the model.

        Raises:
            AttributeError: a plain module has none.
        """
        return self.loaded.module.config

    @property
    def generation_config(self) -> Any:
        """The settings that hold for every request; assign another GenerationConfig, or change a field.

        Raises:
            AttributeError: a plain module has none.
        """
        return self.loaded.module.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.loaded.module.generation_config = value

    @property
    def main_input_name(self) -> str:
        """What the model reads: ``input_ids``, mostly."""
        return getattr(self.loaded.module, "main_input_name", "input_ids")

    @property
    def device(self) -> "torch.device":
        """Where it runs; "meta" where it cannot run."""
        import torch

        return torch.device(getattr(self.session, "device", "meta"))

    @property
    def dtype(self) -> "torch.dtype":
        """Of the model's parameters."""
        import torch

        return next((p.dtype for p in self.loaded.module.parameters() if p.is_floating_point()), torch.float32)

    def can_generate(self) -> bool:
        """Whether it is a language model with a session."""
        return hasattr(self.session, "max_context")

    def to(self, *given: Any, **named: Any) -> "HuggingFaceManners":
        """Itself, if that is where it is and its type.

        Raises:
            UsageError: another device or type; a program is bound to its own.
        """
        import torch

        for wanted in (*given, *named.values()):
            if isinstance(wanted, torch.dtype) and wanted != self.dtype:
                raise UsageError(f"this model was compiled in {self.dtype} and cannot become {wanted}; compile it with that dtype")
            if isinstance(wanted, str | int | torch.device) and not isinstance(wanted, bool) and not self._is_here(torch.device(wanted)):
                raise UsageError(f"this model was compiled for {self.device} and cannot move to {wanted}; compile it with that device")
        return self

    def _is_here(self, device: "torch.device") -> bool:
        return device.type == self.device.type and (device.index or 0) == (self.device.index or 0)

    def pipeline(self, task: str = "text-generation", **options: Any) -> Any:
        """transformers' ``pipeline`` over this model, its tokenizer and its device; ``options`` are those of transformers.

        Raises:
            UsageError: it has no tokenizer and ``options`` name none, or another task.
        """
        from .text_pipeline import text_pipeline

        tokenizer = options.pop("tokenizer", None) or self.loaded.tokenizer
        if task != "text-generation" or tokenizer is None:
            raise UsageError(f"a pipeline for {task!r} with the tokenizer {tokenizer}; a compiled model serves 'text-generation', "
                             "with its own tokenizer or one that is passed")
        return text_pipeline(self, tokenizer, {"device": self.device, **options})

    def eval(self) -> "HuggingFaceManners":
        """Itself: it only infers."""
        return self
