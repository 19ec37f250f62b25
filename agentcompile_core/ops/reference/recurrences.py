"""Error rules of recurrences over tokens and of the short convolutions before them.

A sum over the terms of a state forgets errors that are independent of each other faster than one that all terms share. Shared are the
error of a factor that all terms have, of the decay it is made from, and of what is added to a row. What they do to the sums of their
own token is known exactly, sign by sign; to those of later tokens they are propagated as if they never cancelled.
"""

import torch
from attrs import frozen
from torch import Tensor

from ...errors import AgentCompileError
from ...ir.graph import DType, Ref
from ..schema import argument
from . import pointwise
from .bounded import U32, Bounded, computed, consumed, overflow_limit, rounded, times
from .calls import Call
from .reductions import matmul

ALIKE = 1 / 3  # roundoffs per term of a sum of terms that are all one: the mean of the powers of two below its partial sums
HALF = (DType.F16, DType.BF16)
VANISHED = -1000.0  # of this and of anything below the exponential is zero in float64 as well
_LIMIT = overflow_limit(torch.float32)


@frozen(kw_only=True, eq=False)
class _Factor:
    """What a token's decay makes of each term [H, 1, N or 1]: ``own`` are errors independent of each other; ``common``, with a sign,
    is what the one error of the whole head may do."""

    value: Tensor
    own: Tensor
    common: Tensor


@frozen(kw_only=True, eq=False)
class _State:
    """A state [H, P, N] with errors that are independent of each other, ``own``, and those that terms share, ``common``; ``turned``,
    with a sign: what the one error of each head's last factor may do."""

    value: Tensor
    own: Tensor
    common: Tensor
    turned: Tensor


def recurrence(call: Call) -> tuple[Bounded, ...]:
    """y [1, T, H, P] and the last state [1, H, P, N], token by token; nothing is demanded beside infinities, whichever way they came."""
    _check_all_tokens(call)
    x, keys, queries = (_finite(call.bounded(name)) for name in ("x", "keys", "queries"))
    _, tokens, heads, rows = x.value.shape
    shared, terms = heads // keys.value.shape[2], keys.value.shape[3]
    x = rounded(x.value, x.error, call.dtype)
    zeros = torch.zeros(heads, rows, terms, dtype=torch.float64, device=x.value.device)
    given = Bounded(zeros, zeros) if call["state"] is None else _first(_finite(call.bounded("state")))
    state, out = _State(value=given.value, own=given.error, common=zeros, turned=zeros), []
    for t in range(tokens):
        factor = _factor(call, t, of_nothing=call["state"] is None and t == 0)
        key, query = (_of_heads(one, t, shared) for one in (keys, queries))
        state = _decayed(state, factor)
        added = _added(call, t, _token(x, t), state, key)
        state = _moved(state, added, key)
        read = _read(call, state, query)
        y = Bounded(read.value, read.error + times((key.value * query.value).sum(1).abs(), added.error))
        if call["skip"] is not None:
            y = pointwise.add(y, _product(_column(_finite(call.bounded("skip"))), _token(x, t)))
        out.append(_finite(y))
        common = state.common + state.turned.abs() + _outer(added.error, key.value.abs())
        state = _State(value=state.value, own=state.own, common=common, turned=zeros)
    y = Bounded(torch.stack([one.value for one in out])[None], torch.stack([one.error for one in out])[None])
    return y, Bounded(state.value[None], (state.own + state.common)[None])


def causal_convolution(call: Call) -> tuple[Bounded, ...]:
    """[1, C, T]: sums of K products, rounded to the type of the weight before the bias and silu; the last columns [1, C, K] as they are."""
    _check_all_tokens(call)
    state, x, weight, bias = call.bounded("state"), call.bounded("x"), call.bounded("weight"), call["bias"]
    joined = _joined(state, x)
    kept, tokens = state.value.shape[-1], x.value.shape[-1]
    last = Bounded(joined.value[..., tokens:], joined.error[..., tokens:])
    element = _element(call, "weight")
    columns = Bounded(joined.value[0, :, 1:], joined.error[0, :, 1:])
    if {_element(call, "state"), _element(call, "x")} != {element}:
        columns = consumed(rounded(columns.value, columns.error, element), element)
    windows = Bounded(columns.value.unfold(-1, kept, 1), columns.error.unfold(-1, kept, 1))
    total = _sums(windows, weight, call.length(kept))
    if bias is not None:  # a term like the others, which may come first; or torch adds it when cuDNN has stored the sum
        off = _halved(total, element).error - total.error
        ones = torch.ones_like(windows.value[..., :1])
        joint = (_joined(windows, Bounded(ones, torch.zeros_like(ones))), _joined(weight, _column(bias)))
        total = _sums(*joint, call.length(kept + 1))
        total = Bounded(total.value, total.error + off)
    if call["silu"]:
        total = pointwise.unary("silu", _halved(total, element))
    out = total if call.dtype is element else _halved(total, element)
    return Bounded(out.value[None], out.error[None]), last


def _joined(*parts: Bounded) -> Bounded:
    """Side by side along the last axis."""
    return Bounded(torch.cat([x.value for x in parts], -1), torch.cat([x.error for x in parts], -1))


def _sums(windows: Bounded, weight: Bounded, depth: int) -> Bounded:
    """[C, T]: of windows [C, T, K] with weights [C, K]."""
    return matmul(windows, weight, depth, lambda a, b: (a * b.unsqueeze(1)).sum(-1))


def _halved(x: Bounded, element: DType) -> Bounded:
    """``x`` as it is read after the framework has stored it in half precision, which a kernel need not do; other types: as it is."""
    return consumed(rounded(x.value, x.error, element), element) if element in HALF else x


def _check_all_tokens(call: Call) -> None:
    if call["valid"] is not None:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} with padding; regions with it stay on the framework")


def _element(call: Call, name: str) -> DType:
    """The type of an operand."""
    given = argument(call.node, name)
    return call.graph.spec(given.value).dtype if isinstance(given, Ref) else call.dtype


def _finite(x: Bounded) -> Bounded:
    """``x``, of which nothing is known where it is infinite or may be in float32; NaN stays."""
    lost = x.value.abs() + x.error >= _LIMIT
    return Bounded(torch.where(x.value.isinf(), 0.0, x.value), torch.where(lost, torch.inf, x.error))


def _first(x: Bounded) -> Bounded:
    return Bounded(x.value[0], x.error[0])


def _token(x: Bounded, t: int) -> Bounded:
    return Bounded(x.value[0, t], x.error[0, t])


def _column(x: Bounded) -> Bounded:
    return Bounded(x.value.unsqueeze(-1), x.error.unsqueeze(-1))


def _of_heads(x: Bounded, t: int, shared: int) -> Bounded:
    """Token ``t`` of keys or queries [1, T, G, N] as a column for each head [H, N, 1]."""
    one = _column(_token(x, t))
    return Bounded(one.value.repeat_interleave(shared, dim=0), one.error.repeat_interleave(shared, dim=0))


def _product(a: Bounded, b: Bounded) -> Bounded:
    """Single roundings to half precision, such as a cast before leaves, come close to their bounds together, unlike errors of sums."""
    return pointwise.mul(a, b, DType.BF16)


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    """[H, P, N] of [H, P] and [H, N, 1]."""
    return rows.unsqueeze(-1) * columns.transpose(1, 2)


def _factor(call: Call, t: int, of_nothing: bool) -> _Factor:
    """``of_nothing``: of a state that is not there, which may be left as it is where the factor is NaN."""
    decay, rates = _token(call.bounded("decay"), t), call["rates"]
    of_terms = decay.value.dim() == 2
    steps = decay if of_terms else _column(decay)
    power, shift = steps, torch.zeros_like(steps.value)
    if rates is not None:
        product = pointwise.mul(Bounded(steps.value, shift), rates)
        power, shift = Bounded(product.value, product.error + times(steps.error, rates.error)), times(rates.value, steps.error)
    # What the rule of exponentials allows one that vanishes grows with its operand.
    found = pointwise.unary("exp", Bounded(power.value.clamp_min(VANISHED), torch.zeros_like(power.error)))
    error = found.error + times(found.value, (power.error + shift.abs()).expm1())
    alike = not of_terms and found.value.shape[-1] == 1
    common = error if alike else found.value * shift
    own = torch.zeros_like(error) if alike else error - common.abs()
    unknown = (found.value.abs() + error >= _LIMIT) | (found.value.isnan() & of_nothing)
    return _Factor(value=torch.where(unknown, found.value.nan_to_num(nan=0.0, posinf=0.0), found.value).unsqueeze(1),
                   own=own.masked_fill(unknown, torch.inf).unsqueeze(1), common=common.unsqueeze(1))


def _decayed(state: _State, factor: _Factor) -> _State:
    value = state.value * factor.value
    size = factor.value.abs() + factor.own + factor.common.abs()
    own = computed(value, times(size, state.own) + state.value.abs() * factor.own, 1.0)
    return _held(value, own, times(size, state.common), state.value * factor.common, value.abs())


def _held(value: Tensor, own: Tensor, common: Tensor, turned: Tensor, size: Tensor) -> _State:
    """A state, of which nothing is known where numbers of that ``size`` may leave float32."""
    lost = size + own + common >= _LIMIT
    return _State(value=torch.where(value.isinf(), 0.0, value), own=own.masked_fill(lost, torch.inf), common=common, turned=turned)


def _added(call: Call, t: int, x: Bounded, state: _State, key: Bounded) -> Bounded:
    """What token ``t`` adds to each row [H, P], times its key."""
    rows = x
    if call["scaled"]:
        rows = _finite(_product(x, _column(_finite(_token(call.bounded("decay"), t)))))
    if call["strength"] is None:
        return rows
    difference = _finite(pointwise.add(rows, _read(call, state, key), -1.0))
    return _finite(_product(_column(_finite(_token(call.bounded("strength"), t))), difference))


def _moved(state: _State, added: Bounded, key: Bounded) -> _State:
    outer = _outer(added.value, key.value)
    value = state.value + outer
    own = state.own + _outer(added.value.abs() + added.error, key.error) + U32 * (outer.abs() + value.abs())
    return _held(value, own, state.common, state.turned, torch.maximum(torch.maximum(state.value.abs(), outer.abs()), value.abs()))


def _read(call: Call, state: _State, column: Bounded) -> Bounded:
    """The sums over the terms of a state with ``column`` [H, N, 1]: [H, P].

    While a sum of terms that are all one stays between two powers of two, all its additions round to the same side.
    """
    terms = state.value.shape[-1]
    depth = call.length(terms)
    read = matmul(Bounded(state.value, state.own), column, depth)
    squares = state.value.square() @ column.value.square()
    alike = (read.value.square() / (terms * squares)).nan_to_num(nan=0.0, posinf=0.0).clamp_max(1.0)  # 1 where all terms are one
    error = read.error + alike.square() * ALIKE * depth * U32 * read.value.abs()
    error = error + state.common @ column.value.abs() + (state.turned @ column.value).abs()
    return _finite(Bounded(read.value.squeeze(-1), error.squeeze(-1)))
