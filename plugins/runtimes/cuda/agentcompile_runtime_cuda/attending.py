"""Attention of prompt chunks: by a kernel of our own where it serves, else by two libraries behind torch, with its logsumexp.

The kernel (``own_attention``) attends over everything cached in one launch. Of the libraries, cuDNN has large chunks and flash the others.
Layout: as ``Backend.attend``. K and V may be slices of a cache; their heads are never repeated. cuDNN prepares itself for every
length, which takes a while; flash does not. So a chunk over itself, which has one length, is cuDNN's from where it is faster (H100:
8.0 us at 128 rows where flash takes 8.3, 9.7 and 11.3 at 256, 12.8 and 20.0 at 512), and a history from about a thousand rows on,
where it is twice as fast and has few lengths.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from agentcompile_core.plugin_api import AgentCompileError

from .own_attention import SHAPES, OwnAttention

if TYPE_CHECKING:
    import torch

    from .own_attention import Operands

    Found = tuple[torch.Tensor, torch.Tensor]

log = logging.getLogger("agentcompile.runtime.cuda")

LARGE = 1024  # rows from which on cuDNN is asked
SQUARE = 256  # rows of a chunk over itself from which on it is
WIDEST = 256  # channels of a head
TRIED_ROWS, TRIED_KEYS = 192, 320
OUT_OFF, SUM_OFF = 2e-2, 2e-2  # how far two libraries may be apart on random numbers in bfloat16; a wrong mask or unit is far beyond


class Attending:
    """Which library serves what; what one refused, or computed otherwise than the other, it is not asked again."""

    def __init__(self, own: OwnAttention) -> None:
        self._own = own
        self._over: dict[Any, bool] = {}
        self._flash: dict[Any, bool] = {}
        self._cudnn: dict[Any, bool] = {}

    def over_all(self, operands: "Operands", scale: float) -> bool:
        """See ``Backend.attend_cached``."""
        q, k = operands[:2]
        if not self._own.takes(operands, scale) or not self._own.wins(q, k):
            return False
        if not self._serves(self._over, (q.dtype, q.shape[1], k.shape[1], q.shape[3], q.device), q, partial(_own_agrees, self._own)):
            return False
        self._own(operands, scale)
        return True

    def __call__(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", *, causal: bool, scale: float) -> "Found | None":
        """See ``Backend.attend``."""
        import torch

        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[3]
        halves = (torch.float16, torch.bfloat16)
        if q.dtype not in halves or heads % kv_heads or v.shape[3] != dim or dim % 8 or dim > WIDEST:
            return None
        key = (q.dtype, heads, kv_heads, dim)
        if not self._serves(self._flash, key, q, _flash_serves):
            return None
        if q.shape[2] >= (SQUARE if causal else LARGE) and self._serves(self._cudnn, key, q, _cudnn_agrees):
            return _by_cudnn(q, k, v, causal, scale)
        return _by_flash(q, k, v, causal, scale)

    @staticmethod
    def _serves(known: dict[Any, bool], key: Any, q: "torch.Tensor", tried: Any) -> bool:
        import torch

        if key not in known:
            if torch.cuda.is_current_stream_capturing():
                return False  # nothing can be tried now; who captures warms up first
            known[key] = tried(key, q.device)
        return known[key]


def _by_flash(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool, scale: float) -> "Found":
    import torch

    found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _by_cudnn(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool, scale: float) -> "Found":
    import torch

    found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _random(key: Any, device: "torch.device", causal: bool) -> "tuple[torch.Tensor, ...]":
    """Queries and, as slices of a longer cache, keys and values."""
    import torch

    dtype, heads, kv_heads, dim = key[:4]
    keys, generator = TRIED_ROWS if causal else TRIED_KEYS, torch.Generator(device).manual_seed(3)
    q = torch.randn(1, heads, TRIED_ROWS, dim, dtype=dtype, device=device, generator=generator)
    caches = torch.randn(2, 1, TRIED_KEYS + 64, kv_heads, dim, dtype=dtype, device=device, generator=generator)
    return (q, *(cache[:, 32 : 32 + keys].transpose(1, 2) for cache in caches))


def _formula(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", seen: "torch.Tensor") -> "Found":
    """Attention in float32 and its logsumexp, where a row sees the keys that ``seen`` [T, L] says."""
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.float().repeat_interleave(group, 1).transpose(2, 3) * 0.1
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v.float().repeat_interleave(group, 1), scores.logsumexp(-1)


def _flash_serves(key: Any, device: "torch.device") -> bool:
    """Whether flash attention gives what float32 gives, with and without the mask; whatever it raises is a no."""
    import torch

    try:
        for causal in (False, True):
            q, k, v = _random(key, device, causal)
            out, sums = _by_flash(q, k, v, causal, 0.1)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=device)
            if not _near((out, sums), _formula(q, k, v, seen.tril() if causal else seen)):
                raise RuntimeError("its results are beyond rounding")
    except RuntimeError as exc:
        log.info("flash attention does not serve %s: %s", key, _line(exc))
        return False
    return True


def _own_agrees(own: OwnAttention, key: Any, device: "torch.device") -> bool:
    """Whether our kernel gives what float32 gives, over a history and the chunk itself; whatever it raises is a no."""
    import torch

    try:
        q, k, v = _random(key, device, causal=False)
        ahead = torch.arange(TRIED_KEYS, device=device) - torch.arange(TRIED_KEYS - TRIED_ROWS, TRIED_KEYS, device=device)[:, None]
        wanted, _ = _formula(q, k, v, ahead <= 0)
        for _, shape in SHAPES[key[3]]:
            out = torch.full_like(q.transpose(1, 2), float("nan")).transpose(1, 2)
            own((q, k, v, out), 0.1, shape)
            if not _close(out, wanted):
                raise RuntimeError("its results are beyond rounding")
    except (RuntimeError, AgentCompileError) as exc:
        log.info("the kernel of attend.cu does not serve %s: %s", key, _line(exc))
        return False
    return True


def _cudnn_agrees(key: Any, device: "torch.device") -> bool:
    """Whether cuDNN gives what flash attention gives; whatever it raises is a no."""
    try:
        for causal in (False, True):
            q, k, v = _random(key, device, causal)
            if not _near(_by_cudnn(q, k, v, causal, 0.1), _by_flash(q, k, v, causal, 0.1)):
                raise RuntimeError("its results are beyond rounding")
    except RuntimeError as exc:
        log.info("cuDNN's attention does not serve %s: %s", key, _line(exc))
        return False
    return True


def _near(found: "Found", wanted: "Found") -> bool:
    sums = float((found[1].reshape(-1) - wanted[1].reshape(-1)).abs().max())
    return _close(found[0], wanted[0]) and sums <= SUM_OFF


def _close(found: "torch.Tensor", wanted: "torch.Tensor") -> bool:
    return float((found.float() - wanted.float()).abs().max()) <= OUT_OFF


def _line(exc: BaseException) -> str:
    return next(iter(str(exc).splitlines()), type(exc).__name__)
