"""What the prompts of a model need that no search chooses, begun on a thread of its own while the caller captures and plans."""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentcompile_core.plugin_api import Backend, Kernel, OwnBuild, StepSource, Target

if TYPE_CHECKING:
    import torch

log = logging.getLogger("agentcompile.runtime.cuda")
ROWS, WIDTH = 64, 128  # of the tensors by which libraries are used a first time


class Ahead:
    """Of one backend. What fails here is told to whoever needs it, and in the log."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._build: OwnBuild | None = None
        self._thread: threading.Thread | None = None

    def begin(self, dtype: "torch.dtype", build: OwnBuild, start: "Callable[[torch.Tensor], None]") -> None:
        """Use torch's libraries once on the current device, and have ``start`` begin to build, by ``build``, for elements of ``dtype``."""
        import torch

        device = torch.device(self._backend.device, torch.cuda.current_device()) if self._backend.device == "cuda" else torch.device("cpu")
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                start(torch.empty(0, dtype=dtype, device=device))
            except Exception as exc:
                log.info("kernels of prompts are not built ahead: %s", exc)
            try:
                use_libraries(dtype, device)
            except Exception as exc:
                log.info("libraries are not used ahead: %s", exc)

        self._build = build
        thread = threading.Thread(target=run, name="what prompts need")  # no daemon: Python must not end within a call of torch's
        thread.start()
        self._thread = thread

    def wait(self) -> None:
        """Until nothing of this uses the device: a capture drops the workspaces of cuBLAS, of which one may be in use."""
        thread = self._thread
        if thread is not None:
            thread.join()
            if self._thread is thread:
                self._thread = None

    def build(self, source: StepSource, target: Target) -> Kernel:
        """A kernel of the backend's own, as ``begin`` was told; before, by the backend. Raises BuildError."""
        return self._backend.build(source, target) if self._build is None else self._build(self._backend, source, target)


def use_libraries(dtype: "torch.dtype", device: "torch.device") -> None:
    """What torch, cuBLAS and the driver do once in a process: 0.3 s of handles and modules of kernels that decoders of today call."""
    import torch
    from torch.nn import functional

    with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        at = torch.zeros(1, ROWS, dtype=torch.int64, device=device)
        weights = torch.zeros(WIDTH, WIDTH, dtype=dtype, device=device)
        x = functional.embedding(at, weights)
        for rows in (1, ROWS):
            gate, up = functional.linear(x[:, :rows], weights), functional.linear(x[:, :rows], weights)
            functional.linear(functional.silu(gate) * up + x[:, :rows], weights).argmax(-1)
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype) * weights[0]
        angles = torch.outer(torch.arange(ROWS, device=device).float(), wide[0, 0])
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        turned = normed * cos + torch.cat((-normed[..., WIDTH // 2:], normed[..., : WIDTH // 2]), dim=-1) * sin
        heads = turned[:, None]
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        scores = wide[:, None] @ wide[:, None].transpose(2, 3)  # what own kernels are compared with
        scores = scores.masked_fill(torch.ones(ROWS, ROWS, dtype=torch.bool, device=device).triu(1), float("-inf"))
        weighed = (scores - scores.logsumexp(-1)[..., None]).exp() @ wide[:, None].repeat_interleave(1, 1)
        (weighed.nan_to_num() - wide[:, None]).abs().max().isfinite().all()
