"""Attention of prompt chunks: by a kernel of our own where it serves, else by two libraries behind torch, with its logsumexp.

The kernel (``own_attention``) attends over everything cached in one launch. Of the libraries, cuDNN has large chunks and flash the others.
Layout: as ``Backend.attend``. K and V may be slices of a cache; their heads are never repeated. cuDNN prepares itself for every
length, which takes a while; flash does not. So a chunk over itself, which has one length, is cuDNN's from where it is faster (H100:
8.0 us at 128 rows where flash takes 8.3, 9.7 and 11.3 at 256, 12.8 and 20.0 at 512), and a history from about a thousand rows on,
where it is twice as fast and has few lengths.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from agentcompile_core.plugin_api import AgentCompileError

from .own_attention import DeviceScoring, OwnAttention

if TYPE_CHECKING:
    import torch

    from .own_attention import Operands

    Found = tuple[torch.Tensor, torch.Tensor]

log = logging.getLogger("agentcompile.runtime.cuda")

LARGE = 1024  # rows from which on cuDNN is asked
SQUARE = 256  # rows of a chunk over itself from which on it is
WIDEST = 256  # channels of a head
TRIED_ROWS, TRIED_KEYS, TRIED_SCALE = 192, 320, 0.1
PLAIN = DeviceScoring(scale=TRIED_SCALE)
OUT_OFF, SUM_OFF = 2e-2, 2e-2  # how far two libraries may be apart on random numbers in bfloat16; a wrong mask or unit is far beyond


@frozen(kw_only=True)
class AlikeCalls:
    """Calls that are tried once: alike in everything but their lengths, and in what is no more than a number to a kernel."""

    device: "torch.device"
    dtype: "torch.dtype"
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    windowed: bool
    capped: bool
    sinks: bool
    slopes: bool

    @classmethod
    def of(cls, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", scores: DeviceScoring = PLAIN) -> "AlikeCalls":
        """That of one call."""
        return cls(device=q.device, dtype=q.dtype, heads=q.shape[1], kv_heads=k.shape[1], dim=q.shape[3], value_dim=v.shape[3],
                   windowed=bool(scores.window), capped=bool(scores.softcap), sinks=scores.sinks is not None,
                   slopes=scores.slopes is not None)

    def scores(self) -> DeviceScoring:
        """Those of the call by which it is tried."""
        import torch

        sinks = torch.linspace(-2, 2, self.heads, dtype=self.dtype, device=self.device) if self.sinks else None
        slopes = torch.linspace(0.01, 0.5, self.heads, device=self.device) if self.slopes else None
        window, softcap = TRIED_KEYS // 3 if self.windowed else 0, 0.7 if self.capped else 0.0
        return DeviceScoring(scale=TRIED_SCALE, window=window, softcap=softcap, sinks=sinks, slopes=slopes)


class Attending:
    """Which library serves what; what one refused, or computed otherwise than the other, it is not asked again."""

    def __init__(self, own: OwnAttention) -> None:
        self._own = own
        self._over: dict[AlikeCalls, bool] = {}
        self._slopes: dict[tuple[tuple[float, ...], torch.device], torch.Tensor] = {}
        self._flash: dict[AlikeCalls, bool] = {}
        self._cudnn: dict[AlikeCalls, bool] = {}

    def slopes(self, given: "Sequence[float]", like: "torch.Tensor") -> "torch.Tensor | None":
        """Those of a call on the device of ``like``, made once; None: they cannot be made now."""
        import torch

        key = tuple(given), like.device
        if key not in self._slopes:
            if torch.cuda.is_current_stream_capturing():
                return None  # nothing is copied from the host now; who captures warms up first
            self._slopes[key] = torch.tensor(given, dtype=torch.float32, device=like.device)
        return self._slopes[key]

    def over_all(self, operands: "Operands", scores: DeviceScoring) -> bool:
        """See ``Backend.attend_cached``."""
        q, k, v, _ = operands
        if not self._own.takes(operands, scores) or not self._own.wins(q, k, v, scores):
            return False
        if not self._serves(self._over, AlikeCalls.of(q, k, v, scores), partial(_own_agrees, self._own)):
            return False
        self._own(operands, scores)
        return True

    def __call__(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", *, causal: bool, scale: float) -> "Found | None":
        """See ``Backend.attend``."""
        import torch

        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[3]
        halves = (torch.float16, torch.bfloat16)
        if q.dtype not in halves or heads % kv_heads or v.shape[3] != dim or dim % 8 or dim > WIDEST:
            return None
        calls = AlikeCalls.of(q, k, v)
        if not self._serves(self._flash, calls, _flash_serves):
            return None
        if q.shape[2] >= (SQUARE if causal else LARGE) and self._serves(self._cudnn, calls, _cudnn_agrees):
            return _by_cudnn(q, k, v, causal, scale)
        return _by_flash(q, k, v, causal, scale)

    @staticmethod
    def _serves(known: "dict[AlikeCalls, bool]", calls: "AlikeCalls", tried: "Callable[[AlikeCalls], bool]") -> bool:
        import torch

        if calls not in known:
            if torch.cuda.is_current_stream_capturing():
                return False  # nothing can be tried now; who captures warms up first
            known[calls] = tried(calls)
        return known[calls]


def _by_flash(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool, scale: float) -> "Found":
    import torch

    found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _by_cudnn(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool, scale: float) -> "Found":
    import torch

    found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _random(calls: AlikeCalls, causal: bool) -> "tuple[torch.Tensor, ...]":
    """Queries and, as slices of a longer cache, keys and values."""
    import torch

    keys, generator = TRIED_ROWS if causal else TRIED_KEYS, torch.Generator(calls.device).manual_seed(3)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=calls.dtype, device=calls.device, generator=generator)

    q = normal(1, calls.heads, TRIED_ROWS, calls.dim)
    caches = (normal(1, TRIED_KEYS + 64, calls.kv_heads, dim) for dim in (calls.dim, calls.value_dim))
    return (q, *(cache[:, 32 : 32 + keys].transpose(1, 2) for cache in caches))


def _formula(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool, scores: DeviceScoring) -> "Found":
    """Attention in float32 and its logsumexp; ``causal``: rows are the last ones of the keys and see none behind them."""
    import torch

    group = q.shape[1] // k.shape[1]
    found = q.float() @ k.float().repeat_interleave(group, 1).transpose(2, 3) * scores.scale
    if scores.softcap:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    ahead = torch.arange(k.shape[2], device=q.device) - torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    if scores.slopes is not None:
        found = found + scores.slopes[:, None, None] * ahead
    hidden = (ahead > 0) | (ahead <= -scores.window) if scores.window else ahead > 0
    found = found.masked_fill(hidden, float("-inf")) if causal else found
    sums = found.logsumexp(-1)
    if scores.sinks is not None:
        sums = torch.logaddexp(sums, scores.sinks.float()[:, None])
    return (found - sums[..., None]).exp() @ v.float().repeat_interleave(group, 1), sums


def _flash_serves(calls: AlikeCalls) -> bool:
    """Whether flash attention gives what float32 gives, with and without the mask; whatever it raises is a no."""
    try:
        for causal in (False, True):
            q, k, v = _random(calls, causal)
            if not _near(_by_flash(q, k, v, causal, TRIED_SCALE), _formula(q, k, v, causal, PLAIN)):
                raise RuntimeError("its results are beyond rounding")
    except RuntimeError as exc:
        log.info("flash attention does not serve %s: %s", calls, _line(exc))
        return False
    return True


def _own_agrees(own: OwnAttention, calls: AlikeCalls) -> bool:
    """Whether our kernel gives what float32 gives, over a history and the chunk itself; whatever it raises is a no."""
    try:
        q, k, v = _random(calls, causal=False)
        scores = calls.scores()
        wanted, _ = _formula(q, k, v, True, scores)
        for shape in own.shapes(q, v, scores):
            out = q.new_full((1, TRIED_ROWS, calls.heads, calls.value_dim), float("nan")).transpose(1, 2)
            own((q, k, v, out), scores, shape)
            if not _close(out, wanted):
                raise RuntimeError("its results are beyond rounding")
    except (RuntimeError, AgentCompileError) as exc:
        log.info("the kernel of attend.cu does not serve %s: %s", calls, _line(exc))
        return False
    return True


def _cudnn_agrees(calls: AlikeCalls) -> bool:
    """Whether cuDNN gives what flash attention gives; whatever it raises is a no."""
    try:
        for causal in (False, True):
            q, k, v = _random(calls, causal)
            if not _near(_by_cudnn(q, k, v, causal, TRIED_SCALE), _by_flash(q, k, v, causal, TRIED_SCALE)):
                raise RuntimeError("its results are beyond rounding")
    except RuntimeError as exc:
        log.info("cuDNN's attention does not serve %s: %s", calls, _line(exc))
        return False
    return True


def _near(found: "Found", wanted: "Found") -> bool:
    sums = float((found[1].reshape(-1) - wanted[1].reshape(-1)).abs().max())
    return _close(found[0], wanted[0]) and sums <= SUM_OFF


def _close(found: "torch.Tensor", wanted: "torch.Tensor") -> bool:
    return float((found.float() - wanted.float()).abs().max()) <= OUT_OFF


def _line(exc: BaseException) -> str:
    return next(iter(str(exc).splitlines()), type(exc).__name__)
