"""The kernels. Importing this module imports Triton, so that only ``bind`` of an implementation does.

Operands are contiguous; what is read is widened to fp32, what is written is rounded once to the type of its operand, to the nearest.
Tuples of operands keep parameter lists short; an operand that a match does not have is None, and what it would need is not compiled.
"""

import triton
import triton.language as tl


# RMS norm of rows, with the addition before it where there is a residual.
#
# reads: x [rows, columns], residual like x or None, weight [columns] or None; writes: out like x, residual_out like x or None. The sum
# is rounded to the type of x before it is squared, as the framework's own addition rounds it, and written where residual_out is.
# NORM: rms (the normalized row is rounded, then multiplied), rms_once (multiplied in fp32), rms_one_plus (by 1 + weight in fp32).
# One program per row, which stays in the registers of its warps: memory is read once. BLOCK is the power of two at or above columns;
# what lies beyond a row is masked. Wins over the framework's six or seven operators; beside a linear layer that takes the norm into
# its own kernel it costs a launch and a pass over the row.
@triton.jit
def rms_norm(reads, writes, columns, eps, NORM: tl.constexpr, BLOCK: tl.constexpr):
    x, residual, weight = reads
    out, residual_out = writes
    column = tl.arange(0, BLOCK)
    inside = column < columns
    place = tl.program_id(0).to(tl.int64) * columns + column
    row = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        summed = (row + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        if residual_out is not None:
            tl.store(residual_out + place, summed, mask=inside)
        row = summed.to(tl.float32)
    normal = row * tl.rsqrt(tl.sum(row * row, axis=0) / columns + eps)
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if NORM == "rms":
            normal = normal.to(x.dtype.element_ty).to(tl.float32)
        if NORM == "rms_one_plus":
            factor = factor + 1.0
        normal = normal * factor
    tl.store(out + place, normal.to(out.dtype.element_ty), mask=inside)


# Heads of one position with rotated channels and others that are copied.
#
# reads: x, heads of rotated channels, head h from element x_first + h * x_step on, the others from rest_first + h * rest_step on; cos and
# sin [rotary_dim], by channel; out [heads, head_dim]. head: (heads, head_dim, rotary_dim, first), the rotated channels being
# first .. first + rotary_dim; places: (x_first, x_step, rest_first, rest_step). Channel i turns with channel i + rotary_dim / 2, or,
# INTERLEAVED, 2i with 2i + 1. Products and sum in fp32, rounded once.
# One element of out per lane, BLOCK of them per program; what lies beyond out is masked. Wins over the framework's five operators where
# attention does not rotate queries and keys itself.
@triton.jit
def rotate(reads, out, head, places, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    x, cos, sin = reads
    heads, head_dim, rotary_dim, first = head
    x_first, x_step, rest_first, rest_step = places
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < heads * head_dim
    number = i // head_dim
    channel = i % head_dim - first
    turns = inside & (channel >= 0) & (channel < rotary_dim)
    if INTERLEAVED:
        is_second = channel % 2 == 1
        partner = tl.where(is_second, channel - 1, channel + 1)
    else:
        is_second = channel >= rotary_dim // 2
        partner = tl.where(is_second, channel - rotary_dim // 2, channel + rotary_dim // 2)
    turned = x_first + number * x_step
    value = tl.load(x + turned + channel, mask=turns, other=0.0).to(tl.float32)
    other = tl.load(x + turned + partner, mask=turns, other=0.0).to(tl.float32)
    c = tl.load(cos + channel, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + channel, mask=turns, other=0.0).to(tl.float32)
    rotated = value * c + tl.where(is_second, other, -other) * s
    beside = rest_first + number * rest_step + tl.where(channel < 0, channel + first, channel + first - rotary_dim)
    kept = tl.load(x + beside, mask=inside & ((channel < 0) | (channel >= rotary_dim)), other=0.0).to(tl.float32)
    tl.store(out + i, tl.where(turns, rotated, kept).to(out.dtype.element_ty), mask=inside)


# An activation, times a second input where there is one: the middle of SwiGLU and GeGLU.
#
# x, other (or None) and out have count elements of one type. KIND: silu, gelu (by erf), gelu_tanh, relu or sigmoid, as torch defines them;
# NaN goes through. ROUNDED: the activation is rounded to the type of out before it is multiplied, where the framework rounds it.
# BLOCK elements per program; what lies beyond count is masked. Wins over the framework's two operators; a linear layer that activates and
# multiplies behind its own sums needs no kernel for it.
@triton.jit
def activate(x, other, out, count, KIND: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    given = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == "relu":
        made = tl.where(given < 0.0, 0.0, given)
    elif KIND == "gelu":
        made = 0.5 * given * (1.0 + tl.math.erf(given * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # x (1 + tanh(u)) / 2 = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        made = given / (1.0 + tl.exp(-1.5957691216057308 * (given + 0.044715 * given * given * given)))
    elif KIND == "sigmoid":
        made = 1.0 / (1.0 + tl.exp(-given))
    else:
        tl.static_assert(KIND == "silu")
        made = given / (1.0 + tl.exp(-given))
    if ROUNDED:
        made = made.to(out.dtype.element_ty).to(tl.float32)
    if other is not None:
        made = made * tl.load(other + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, made.to(out.dtype.element_ty), mask=inside)
