"""Stand-ins for flash-attn and for Triton's kernels: what they compute, in torch's operators, for processors and for every element type."""

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from agentcompile_core.ops import operators
from agentcompile_core.plugin_api import DType

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu, "sigmoid": torch.sigmoid, "gelu": F.gelu}


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor,
                            softmax_scale: float, **more: Any) -> Tensor:
    """One row of q [1, 1, H, D] over the caches, to which K and V [1, 1, KV, D] are appended."""
    sides = (side.transpose(1, 2) for side in (q, k, v))
    return operators.attention(*sides, k_cache, v_cache, cache_seqlens.long(), softmax_scale).view_as(q)


class Kernel:
    """``kernel[grid](operands, ..., num_warps=4)`` calls ``act`` with the operands."""

    def __init__(self, act: Callable[..., None]) -> None:
        self.act, self.launches = act, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*operands: Any, num_warps: int, BLOCK: int, **constants: Any) -> None:
            assert num_warps in (1, 2, 4, 8, 16) and BLOCK & (BLOCK - 1) == 0 and grid[0] > 0
            self.launches += 1
            self.act(*operands, **constants)

        return launch


def rms_norm(reads: Any, writes: Any, columns: int, eps: float, NORM: str) -> None:
    x, residual, weight = reads
    out, residual_out = writes
    x = x if residual is None else x + residual
    if residual_out is not None:
        residual_out.copy_(x)
    out.copy_(operators.rms_norm(x.view(-1, columns), weight, eps, NORM == "rms_one_plus", NORM == "rms_once").view(out.shape))


def rotate(reads: Any, out: Tensor, head: tuple[int, ...], places: tuple[int, ...], INTERLEAVED: bool) -> None:
    x, cos, sin = reads
    heads, head_dim, rotary_dim, first = head
    assert places == (0, head_dim, rotary_dim, head_dim) and first == 0
    turned = operators.rope(x.view(1, heads, 1, head_dim), cos.view(1, 1, -1), sin.view(1, 1, -1), INTERLEAVED)
    out.copy_(turned.view(out.shape))


def activate(x: Tensor, other: Tensor | None, out: Tensor, count: int, KIND: str, ROUNDED: bool) -> None:
    made = FUNCTIONS[KIND](x)
    out.copy_((made if other is None else made * other.view(x.shape)).view(out.shape))


def put(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    """Both in place of what need not be installed; returns Triton's kernels by name."""
    from agentcompile_runtime_flashattn import attention
    from agentcompile_runtime_triton import package

    flash, triton, kernels = ModuleType("flash_attn"), ModuleType("triton"), ModuleType("agentcompile_runtime_triton.kernels")
    made = {act.__name__: Kernel(act) for act in (rms_norm, rotate, activate)}
    vars(kernels).update(made)
    flash.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    for module in (flash, triton, kernels):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for of in (attention, package):
        monkeypatch.setattr(of, "is_installed", lambda: True)
    monkeypatch.setattr(package, "has_device", lambda: True)
    monkeypatch.setattr(attention, "TYPES", (DType.F32,))  # that of the tiny bundle
    return made
