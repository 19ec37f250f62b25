"""What the parts of a prompt cost alone: products one by one and causal attention at once, by libraries, and what is pointwise by bytes."""

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

LIBRARIES = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
WARM_UPS, RUNS = 2, 5
AHEAD_CYCLES = 1_000_000  # half a millisecond in which the device sleeps: what a call costs the host is no part of its time


def milliseconds(run: Callable[[], Any]) -> float:
    """The median of some calls, by the device's clock."""
    for _ in range(WARM_UPS):
        run()
    times = []
    for _ in range(RUNS):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def products_ms(module: nn.Module, length: int) -> float:
    """Every linear layer of the module but its head, over ``length`` rows."""
    head = module.get_output_embeddings()
    layers = [part for part in module.modules() if isinstance(part, nn.Linear) and part is not head]
    total, counts = 0.0, Counter(tuple(layer.weight.shape) for layer in layers)
    for shape, count in counts.items():
        weight = next(layer.weight for layer in layers if tuple(layer.weight.shape) == shape)
        x = torch.randn(length, shape[1], dtype=weight.dtype, device=weight.device)
        total += count * milliseconds(lambda x=x, weight=weight: linear(x, weight))  # type: ignore[misc]
    return total


def attention_ms(config: Any, kv: Any, length: int) -> float:
    """Causal attention of all layers, by the fastest library that serves it."""
    dtype = getattr(torch, kv.dtype.value)
    (_, _, kv_heads, width), heads = kv.key_shapes[0], config.num_attention_heads
    q, k, v = (torch.randn(1, count, length, width, dtype=dtype, device="cuda") for count in (heads, kv_heads, kv_heads))
    times = []
    for library in LIBRARIES:
        try:
            with sdpa_kernel(library):
                times.append(milliseconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)))
        except RuntimeError:  # it does not serve these heads
            continue
    return float(kv.layers * min(times))


def pointwise_ms(config: Any, kv: Any, length: int, gbps: float) -> float:
    """What norms, sums, rotations and gates of all layers move at least, at the read bandwidth: per row six of the hidden state, three of
    the gate's width, queries, keys and values twice."""
    (_, _, kv_heads, width), heads = kv.key_shapes[0], config.num_attention_heads
    elements = 6 * config.hidden_size + 3 * config.intermediate_size + 2 * (heads + 2 * kv_heads) * width
    return float(kv.layers * length * elements * kv.dtype.bytes / gbps / 1e6)


def parts_ms(model: Any, length: int, gbps: float) -> float:
    """All three, of a compiled model; ``gbps``: the read bandwidth of this GPU. The head, and whatever lies between, comes on top."""
    config, kv = model.loaded.module.config, model.graphs.kv
    with torch.inference_mode():
        return products_ms(model.loaded.module, length) + attention_ms(config, kv, length) + pointwise_ms(config, kv, length, gbps)
