"""What could not be captured runs as it is: HuggingFace's own ``generate`` for language models, the module's own call otherwise."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..ir.graph import GraphSet
from .calls import by_name
from .device import at_any_length
from .generation.framework_loop import by_framework
from .generation.request import Asked
from .generation.settings import eos_of, new_tokens, padding_of, settings, with_eos
from .prompts import Prompts, check_length, prompts_of
from .rows_choice import RowsChoice

if TYPE_CHECKING:
    import torch

    from ..plugin.interfaces import Backend


class EagerSession:
    """Runs requests through ``module.generate`` of transformers: its loop, its caches, its ``generation_config``."""

    def __init__(self, module: "torch.nn.Module", graphs: GraphSet, device: str, backend: "Backend | None" = None) -> None:
        """``backend``: whose libraries the module calls on the device."""
        self.module, self.graphs, self.device, self.backend = module.to(device), graphs, device, backend
        self._lock = threading.Lock()
        self.rows = RowsChoice("transformers runs all rows of a batch at once: nothing of this model was captured")

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation, in tokens; 0 where the model has no limit of its own."""
        return self.graphs.workload.max_context if self.graphs.model.limit else 0

    def prepare(self, report: Any = None) -> None:
        """Nothing to prepare."""

    def give_back(self) -> None:
        """As Session.give_back: nothing, since a cache of transformers ends with its request."""

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """As Session.exclusive."""
        if not self._lock.acquire(blocking=False):
            raise UsageError("this session is busy with another request; one request at a time per session")
        try:
            yield
        finally:
            self._lock.release()

    def generate(self, asked: Asked, *, streamer: Any = None, seed: int | None = None) -> Any:
        """What ``module.generate(inputs, ...)`` returns; tensors on the device of ``module``.

        Args:
            asked: the model's main input: token ids of one prompt or several; for an encoder-decoder model those of the encoder, and
                the result holds the decoder's tokens; for another main input (Whisper's input_features) a tensor [rows, ...] as
                the model takes it. At most so many new tokens; None: what ``generation_config`` says, else 128. And anything that
                transformers' ``generate`` takes by name.

        Raises:
            UsageError: the input is wrong or too long, transformers refuses the request, or another one is running.
        """
        asked = asked.named
        options = with_eos(asked.options)
        found = self._inputs(asked, options)
        inputs = found.ids if isinstance(found, Prompts) else found  # None: transformers makes them of other arguments
        if isinstance(found, Prompts) and found.mask is not None:
            options["attention_mask"] = found.mask
        elif asked.attention_mask is not None:
            options["attention_mask"] = asked.attention_mask
        count = self._count(inputs, asked.max_new_tokens, options)
        with self.exclusive(), at_any_length(self.backend):
            return by_framework(self.module, None if inputs is None else inputs.to(self.device), count, options, seed=seed,
                                streamer=streamer)

    @property
    def _decodes_apart(self) -> bool:
        """Whether prompt and new tokens do not share positions: an encoder reads the one, a decoder writes the other."""
        return bool(getattr(getattr(self.module, "config", None), "is_encoder_decoder", False))

    def _inputs(self, asked: Asked, options: Mapping[str, Any]) -> "torch.Tensor | Prompts | None":
        import torch

        given = asked.input_ids
        if given is None:
            return None
        if getattr(self.module, "main_input_name", "input_ids") == "input_ids":
            own = getattr(self.module, "generation_config", None)
            pad = options.get("pad_token_id", getattr(own, "pad_token_id", None))
            _, padding = padding_of(pad, eos_of(getattr(own, "eos_token_id", None)))
            return prompts_of(given, self.graphs.model.vocab_size, mask=asked.attention_mask, padding=padding)
        if not isinstance(given, torch.Tensor) or given.dim() < 2 or given.numel() == 0:
            what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
            raise UsageError(f"{what} was given; {self.graphs.model.name} takes {self.module.main_input_name}, "
                             "a tensor of shape [rows, ...]")
        return given

    def _count(self, inputs: "torch.Tensor | None", wanted: int | None, options: Mapping[str, Any]) -> int | None:
        """How many new tokens; None where ``max_length`` says it, which a decoder's own prompt counts in."""
        known = {name: value for name, value in options.items() if name in ("max_length", "max_new_tokens")}
        length = 1 if self._decodes_apart or inputs is None else inputs.shape[-1]
        config = settings(self.module, known, options.get("generation_config"))
        count = new_tokens(wanted, config, length, self.max_context)
        if self.max_context:
            check_length(length, count, self.max_context)
            if self._decodes_apart and inputs is not None and inputs.dim() == 2:
                check_length(inputs.shape[-1] - 1, 1, self.max_context)
        return None if self._decodes_apart and wanted is None and config.max_new_tokens is None and config.max_length is not None else count


class EagerModule:
    """A plain module that could not be captured: called as it is."""

    def __init__(self, module: "torch.nn.Module", graphs: GraphSet, device: str) -> None:
        import torch

        self.module, self.graphs, self.device = module.to(device), graphs, device
        self._torch, self._place = torch, torch.empty(0, device=device).device  # with its number, as tensors have it

    @property
    def runs_itself(self) -> bool:
        """Always."""
        return True

    def prepare(self, report: Any = None) -> None:
        """Nothing to prepare."""

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """What the module returns, without gradients."""
        if keywords or not all(isinstance(one, self._torch.Tensor) and one.device == self._place for one in inputs):
            from torch.utils import _pytree as pytree

            inputs, keywords = pytree.tree_map_only(self._torch.Tensor, lambda tensor: tensor.to(self.device), (inputs, keywords))
        inputs, keywords = by_name(self.module, inputs, keywords)
        with self._torch.no_grad():  # what the module keeps must serve elsewhere too; within it may ask for gradients of its own
            return self.module(*inputs, **keywords)
