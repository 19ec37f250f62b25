"""What code written for HuggingFace's models reads of a model: its configuration, device and type, and a few verbs that do nothing here."""

from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..plugin.interfaces import LoadedModel

if TYPE_CHECKING:
    import torch


_OF_TO = ("device", "dtype", "tensor", "non_blocking", "copy", "memory_format")


def _device(wanted: "str | int | torch.device") -> "torch.device":
    import torch

    if isinstance(wanted, int):  # an accelerator by its number, whether this machine has one or none
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if found is None or wanted < 0:
            raise UsageError(f"to({wanted}) names an accelerator, and this machine has {'none of that number' if found else 'none'}; "
                             "name a device, as 'cpu'")
        return torch.device(found.type, wanted)
    try:
        return torch.device(wanted)
    except RuntimeError as exc:
        raise UsageError(f"to({wanted!r}) names no device of torch; name one as 'cpu' or 'cpu:0'") from exc


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
        """Itself, if that is where it is and its type: those that are named, or those of a tensor.

        Raises:
            UsageError: another device or type, a program is bound to its own; or neither of them.
        """
        import torch

        unknown = next((name for name in named if name not in _OF_TO), None)
        if unknown is not None:
            raise UsageError(f"to takes no {unknown!r}; it takes {', '.join(_OF_TO)}, as that of torch's modules")
        for wanted in (*given, *named.values()):
            if isinstance(wanted, torch.Tensor):
                self.to(wanted.device, wanted.dtype)
            elif isinstance(wanted, torch.dtype):
                if wanted != self.dtype:
                    raise UsageError(f"this model was compiled in {self.dtype} and cannot become {wanted}; compile it with that dtype")
            elif isinstance(wanted, str | int | torch.device) and not isinstance(wanted, bool):
                if not self._is_here(_device(wanted)):
                    raise UsageError(f"this model was compiled for {self.device} and cannot move to {wanted}; compile it with that device")
            elif wanted is not None and not isinstance(wanted, bool | torch.memory_format):
                raise UsageError(f"to was given a {type(wanted).__name__}; it takes a device, a dtype or a tensor of both, "
                                 f"and returns this model where that is {self.device} and {self.dtype}")
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
