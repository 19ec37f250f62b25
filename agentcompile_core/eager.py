"""Generation for models that could not be captured: the framework's own forward and cache, in a plain loop."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .graph import GraphSet
from .sampling import Sampling, sample

if TYPE_CHECKING:
    import torch


class EagerSession:
    """Runs requests through ``module.forward`` with whatever cache the model makes for itself. Correct, not fast."""

    def __init__(self, module: "torch.nn.Module", graphs: GraphSet, device: str) -> None:
        self.module, self.graphs, self.device = module.to(device), graphs, device
        self._lock = threading.Lock()

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation, in tokens."""
        return self.graphs.workload.max_context

    def prepare(self, report: Any = None) -> None:
        """Nothing to prepare."""

    def generate(self, input_ids: "torch.Tensor", max_new_tokens: int, *, eos_token_id: int | Sequence[int] | None = None,
                 streamer: Any = None, sampling: Sampling | None = None) -> "torch.Tensor":
        """As Session.generate."""
        import torch

        n = input_ids.shape[-1]
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or n == 0:
            raise UsageError(f"input_ids of shape {tuple(input_ids.shape)}; expected one prompt of shape [1, n]")
        if n + max_new_tokens > self.max_context:
            raise UsageError(f"{n} prompt tokens + {max_new_tokens} new tokens exceed the context of {self.max_context}")
        if not self._lock.acquire(blocking=False):
            raise UsageError("this session is busy with another request; one request at a time per session")
        try:
            with torch.inference_mode():
                return self._generate(input_ids.to(self.device), max_new_tokens, eos_token_id, streamer, sampling)
        finally:
            self._lock.release()

    def _generate(self, prompt: "torch.Tensor", count: int, eos_token_id: int | Sequence[int] | None, streamer: Any,
                  sampling: Sampling | None) -> "torch.Tensor":
        import torch

        eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
        generator = sampling.generator(self.device) if sampling else None
        if streamer is not None:
            streamer.put(prompt.cpu())
        found, ids = prompt, prompt
        cache: dict[str, Any] = {}
        for _ in range(count):
            # Models differ in what they call their cache; what forward returned goes back in under the same name.
            answer = self.module(input_ids=ids, use_cache=True, **cache)
            cache = {k: answer[k] for k in ("past_key_values", "cache_params", "state") if k in answer and answer[k] is not None}
            logits = answer.logits[0, -1]
            token = sample(logits, sampling, generator) if sampling else logits.argmax().view(1)
            found = torch.cat([found, token.view(1, 1)], dim=1)
            ids = token.view(1, 1) if cache else found
            if streamer is not None:
                streamer.put(token.cpu())
            if int(token) in eos:
                break
        if streamer is not None:
            streamer.end()
        return found.cpu()


class EagerModule:
    """A plain module that could not be captured: called as it is."""

    def __init__(self, module: "torch.nn.Module", graphs: GraphSet, device: str) -> None:
        self.module, self.graphs, self.device = module.to(device), graphs, device

    def prepare(self, report: Any = None) -> None:
        """Nothing to prepare."""

    def __call__(self, *inputs: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
        """Call the module without gradients; one tensor becomes a tuple of one."""
        import torch

        with torch.inference_mode():
            found = self.module(*(tensor.to(self.device) for tensor in inputs))
        return found if isinstance(found, tuple) else (found,)
