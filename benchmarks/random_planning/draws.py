"""Random matches of every kind: sizes from 1 to what a GPU holds, whole, ragged and unaligned; every type; every form that a rule knows.

No tensor is made, so sizes cost nothing. A draw may be one that no rule or family serves: whoever refuses it says why.
"""

import random
from collections.abc import Callable

import agentcompile_rules_transformers.testing as made
from agentcompile_rules_transformers.testing import Pair

from agentcompile_core.plugin_api import DType

TYPES = (DType.F16, DType.BF16, DType.F32)
NORMS = ("none", "rms", "rms_one_plus", "layer")
ACTIVATIONS = ("", "silu", "gelu", "relu", "tanh", "sigmoid")
POINTWISE = ("add", "sub", "mul", "div", "silu", "gelu", "relu", "tanh", "sigmoid", "exp", "neg", "sqrt", "rsqrt", "abs")
REDUCTIONS = ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default", "aten.prod.dim_int",
              "aten.linalg_vector_norm.default", "aten.std.dim", "aten.var.dim", "aten.max.dim", "aten.min.dim", "aten.argmax.default",
              "aten.argmin.default", "aten.logsumexp.default")
Draw = random.Random


def size(draw: Draw, low: int, high: int) -> int:
    """A size between the two, small ones as often as large ones: a multiple of 64 or of 8, or any number."""
    found = round(low * (high / low) ** draw.random())
    step = draw.choice((64, 8, 1))
    return max(low, min(high, found // step * step or found))


def _type(draw: Draw) -> DType:
    return draw.choice(TYPES)


def _linear(draw: Draw) -> Pair:
    several = draw.random() < 0.25
    n: int | list[int] = [size(draw, 1, 16384) for _ in range(draw.choice((2, 3)))] if several else size(draw, 1, 200000)
    tail = {} if several else {"activation": draw.choice(ACTIVATIONS), "residual": draw.random() < 0.4}
    return made.linear_case(n=n, k=size(draw, 1, 60000), norm=draw.choice(NORMS), bias=draw.random() < 0.4, dtype=_type(draw), **tail)


def _gated(draw: Draw) -> Pair:
    return made.gated_case(n=size(draw, 1, 60000), k=size(draw, 1, 30000), norm=draw.choice(NORMS), activation=draw.choice(ACTIVATIONS[1:]),
                           dtype=_type(draw))


def _rows(draw: Draw) -> Pair:
    rows = [size(draw, 1, 8192) for _ in range(draw.choice((1, 2)))]
    return made.rows_case(rows=rows, n=size(draw, 1, 32768), k=size(draw, 1, 32768), bias=draw.random() < 0.4,
                          activation=draw.choice(ACTIVATIONS), residual=draw.random() < 0.4, dtype=_type(draw))


def _matmul(draw: Draw) -> Pair:
    batch = tuple(size(draw, 1, 64) for _ in range(draw.choice((0, 0, 1, 2))))
    m, n, k = (size(draw, 1, 8192) for _ in range(3))
    turned = draw.choice(("", "a", "b", "ab"))
    a, b = ((k, m) if "a" in turned else (m, k)), ((n, k) if "b" in turned else (k, n))
    shared = draw.random() < 0.3  # one factor for the whole batch
    return made.matmul_case(shapes=((*batch, *a), b if shared else (*batch, *b)), turned=turned, weight=shared and draw.random() < 0.5,
                            bias=(n,) if draw.random() < 0.3 else (), activation=draw.choice(ACTIVATIONS), residual=draw.random() < 0.3,
                            dtype=_type(draw))


def _heads(draw: Draw) -> tuple[tuple[int, int], int, int]:
    kv_heads = draw.choice((1, 2, 4, 5, 8, 16, 32))
    group = draw.choice((1, 2, 3, 4, 6, 7, 8, 12, 16))
    width = draw.choice((16, 32, 64, 72, 80, 96, 112, 128, 160, 192, 256, size(draw, 8, 576)))
    return (kv_heads * group, kv_heads), width, size(draw, 1, 131072)


def _attention(draw: Draw) -> Pair:
    heads, width, capacity = _heads(draw)
    return made.attention_case(heads=heads, head_dim=width, capacity=capacity, rope=draw.choice(("", "none", "rms", "rms_one_plus")),
                               window=draw.choice((0, 0, size(draw, 1, 8192))), softcap=draw.choice((0.0, 50.0)), dtype=_type(draw))


def _chunked(draw: Draw) -> Pair:
    heads, width, capacity = _heads(draw)
    return made.chunked_case(heads=heads, head_dim=width, capacity=capacity, chunk=size(draw, 1, 8192), dtype=_type(draw))


def _sloped(draw: Draw) -> Pair:
    heads, width, capacity = _heads(draw)
    slopes = [2.0 ** -(1 + i / 4) for i in range(heads[0])] if draw.random() < 0.5 else ()
    return made.sloped_case(heads=heads, head_dim=width, capacity=capacity, slopes=slopes, value_dim=draw.choice((0, 64, 128, 40, 512)),
                            window=draw.choice((0, 256)), dtype=_type(draw))


def _norm(draw: Draw) -> Pair:
    return made.norm_case(columns=size(draw, 1, 32768), rows=size(draw, 1, 65536), norm=draw.choice(NORMS[1:]),
                          residual=draw.random() < 0.4, dtype=_type(draw))


def _elementwise(draw: Draw) -> Pair:
    operators = [draw.choice(POINTWISE) for _ in range(draw.randint(1, 7))]
    return made.elementwise_case(columns=size(draw, 1, 200000), rows=size(draw, 1, 8192), operators=operators, dtype=_type(draw))


def _part(draw: Draw) -> Pair:
    return made.part_case(heads=size(draw, 1, 4096), width=size(draw, 1, 4096), parts=draw.randint(2, 5), dtype=_type(draw))


def _shape(draw: Draw) -> tuple[tuple[int, ...], int]:
    shape = tuple(size(draw, 1, 8192) for _ in range(draw.randint(1, 3)))
    if draw.random() < 0.3:
        shape = (*shape[:-1], size(draw, 8192, 300000))
    return shape, draw.randrange(len(shape))


def _softmax(draw: Draw) -> Pair:
    shape, axis = _shape(draw)
    return made.softmax_case(shape=shape, axis=draw.choice((-1, -1, axis)), log=draw.random() < 0.4, scale=draw.choice((1.0, 8.0)),
                             mask=draw.choice(((), shape[-1:], shape)), wide=draw.random() < 0.3, dtype=_type(draw))


def _reduction(draw: Draw) -> Pair:
    shape, axis = _shape(draw)
    op, dtype = draw.choice(REDUCTIONS), _type(draw)
    arguments = (draw.choice((1, 2)),) if "vector_norm" in op else ()
    return made.reduction_case(shape=shape, op=op, dim=draw.choice((-1, axis)), keepdim=draw.random() < 0.5, arguments=arguments,
                               before=draw.choice(((), ("mul",), ("exp",), ("sub", "abs"))), dtype=dtype)


def _scan(draw: Draw) -> Pair:
    shape, axis = _shape(draw)
    return made.scan_case(shape=shape, axis=draw.choice((-1, axis)), product=draw.random() < 0.2, reverse=draw.random() < 0.4,
                          before=draw.choice(((), ("mul",), ("sub", "abs"))), dtype=_type(draw))


def _pool(draw: Draw) -> Pair:
    windows = [(w, draw.randint(1, w), draw.randint(0, w // 2)) for w in (draw.randint(1, 7) for _ in range(draw.randint(1, 3)))]
    shape = (size(draw, 1, 256), *(size(draw, window[0], 512) for window in windows))
    return made.pool_case(shape=shape, windows=windows, op=draw.choice(("largest", "mean", "inside")), dtype=_type(draw))


def _cross_entropy(draw: Draw) -> Pair:
    return made.cross_entropy_case(rows=size(draw, 1, 8192), columns=size(draw, 1, 300000), dtype=_type(draw),
                                   reduction=draw.choice(("mean", "sum", "none")), before=draw.choice(("", "tanh")))


def _argmax(draw: Draw) -> Pair:
    return made.argmax_case(n=size(draw, 1, 300000), advance=draw.random() < 0.5, dtype=_type(draw))


def _gather(draw: Draw) -> Pair:
    return made.gather_case(columns=size(draw, 1, 16384), vocabulary=size(draw, 1, 300000), rows=size(draw, 1, 8192), dtype=_type(draw))


def _rope(draw: Draw) -> Pair:
    width = size(draw, 2, 576)
    return made.rope_case(heads=size(draw, 1, 128), head_dim=width, rotary_dim=draw.choice((0, width // 2 // 2 * 2)),
                          interleaved=draw.random() < 0.4, dtype=_type(draw))


def _rope_table(draw: Draw) -> Pair:
    return made.rope_table_case(half=size(draw, 1, 288), interleaved=draw.random() < 0.4, dtype=_type(draw))


def _experts(draw: Draw) -> Pair:
    count = size(draw, 1, 256)
    sizes = (count, min(count, size(draw, 1, 32)), size(draw, 1, 16384), size(draw, 1, 16384))
    lies = [word for word in ("columns", "interleaved") if draw.random() < 0.4]
    return made.experts_case(sizes=sizes, down=draw.random() < 0.5, activation=draw.choice(("silu", "gelu", "")), bias=draw.random() < 0.4,
                             lies=lies, wide=draw.random() < 0.3, dtype=_type(draw))


def _router(draw: Draw) -> Pair:
    experts = size(draw, 1, 1024)
    return made.router_case(experts=experts, slots=min(experts, size(draw, 1, 32)), after=draw.random() < 0.4,
                            normalized=draw.random() < 0.4, narrow=draw.random() < 0.5, dtype=_type(draw))


def _masked_attention(draw: Draw) -> Pair:
    kv_heads, rows, keys = draw.choice((1, 2, 8)), size(draw, 1, 4096), size(draw, 1, 8192)
    sizes = (size(draw, 1, 16), kv_heads * draw.choice((1, 2, 4)), kv_heads, rows, keys, size(draw, 1, 256))
    return made.masked_attention_case(sizes=sizes, value_dim=draw.choice((0, 0, 64, 33)), mask=draw.choice(((), (rows, keys), (keys,))),
                                      added=draw.random() < 0.5, causal=draw.random() < 0.3, turned=draw.random() < 0.7, dtype=_type(draw))


def _recurrence_step(draw: Draw) -> Pair:
    groups, terms = draw.choice((1, 1, 2, 8)), draw.choice((16, 64, 128, 256, size(draw, 1, 300)))
    width = draw.choice((1, 64, 128, size(draw, 1, 300)))
    return made.recurrence_step_case(heads=groups * size(draw, 1, 512), width=width, terms=terms, groups=groups, gated=draw.random() < 0.4,
                                     form=draw.choice(("bare", "scan", "delta")), dtype=_type(draw))


def _convolution_step(draw: Draw) -> Pair:
    return made.convolution_step_case(channels=size(draw, 1, 30000), width=draw.choice((2, 3, 4, 4, 8, size(draw, 1, 100))),
                                      silu=draw.random() < 0.5, bias=draw.random() < 0.5, dtype=_type(draw))


# Kinds with more forms and paths come more often.
MAKERS: tuple[Callable[[Draw], Pair], ...] = (
    _linear, _matmul, _attention, _reduction, _softmax, _gated, _rows, _sloped, _chunked, _norm, _elementwise, _experts, _linear, _matmul,
    _attention, _reduction, _softmax, _argmax, _gather, _rope, _rope_table, _router, _part, _rows, _experts,
    *((_masked_attention,) if hasattr(made, "masked_attention_case") else ()),
    *((_scan, _pool, _cross_entropy) if hasattr(made, "cross_entropy_case") else ()),
    *((_recurrence_step, _convolution_step) if hasattr(made, "recurrence_step_case") else ()),
)


def match_of(draw: Draw, turn: int) -> tuple[str, Pair]:
    """The name of what is drawn at this ``turn``, and a match of it.

    Raises:
        UsageError: no rule serves what was drawn.
    """
    maker = MAKERS[turn % len(MAKERS)]
    return maker.__name__.lstrip("_"), maker(draw)
