"""The match kinds of the core's own rules: operand names, roles and attributes. Families and rules meet here.

All are single-token (decode) matches. ``T`` is the element type of the model. Optional operands are simply absent.

linear       y = epilogue(acc, aux), acc[p][i] = sum_k weight[p*n + i, k] * prologue(x)[k]
    operands   x INPUT [.., k] T; weight WEIGHT [pair*n, k] T (several values: concatenated rows);
               norm_weight, norm_bias WEIGHT [k] (prologue); aux0, aux1: WEIGHT (bias, [n]) or INPUT (residual, [.., n]);
               out OUTPUT [.., n] (several values: side by side)
    attributes n, k, pair (1, or 2: gate rows then up rows), norm ("none", "rms", "rms_one_plus", "layer"), norm_eps
    epilogue   over acc0 (acc1 if pair is 2), aux0, aux1; None: acc0
norm         out = norm(x [+ residual])
    operands   x INPUT [.., columns]; residual INPUT; weight, bias WEIGHT [columns]; out OUTPUT; residual_out OUTPUT
    attributes rows, columns, norm ("rms", "rms_one_plus", "layer"), norm_eps
rope         out = x rotated
    operands   x INPUT [.., heads, .., head_dim]; cos, sin INPUT [.., rotary_dim]; out OUTPUT
    attributes heads, head_dim, rotary_dim, style ("half", "interleaved")
rope_table   cos, sin of one position
    operands   position LENGTH [1] i64; inv_freq CONSTANT [half] f32; cos, sin OUTPUT [.., 2*half]
    attributes half, attention_scaling
attention    append K, V at position; softmax(q K^T * scale) V over positions 0..position
    operands   q INPUT [H*D]; k, v INPUT [KV*D]; q_norm, k_norm WEIGHT [D]; cos, sin INPUT [D];
               k_cache, v_cache STATE [1, S, KV, D]; position LENGTH [1] i64; sinks WEIGHT [H]; out OUTPUT [H*D]
    attributes heads, kv_heads, head_dim, capacity, scale, window (0: none), softcap (0: none), qk_norm, rope (bools),
               norm_eps, state_bytes (KV bytes read at half the capacity, at most 512 positions: where single requests spend
               most of their steps)
elementwise  out[i] = epilogue(in0[i], in1[i], ...); each input full or a scalar or one row
    operands   in0.. INPUT or WEIGHT; out OUTPUT
    attributes count, columns, broadcast0.. ("full", "row", "scalar")
gather       out = table[ids]
    operands   ids INPUT i64 [rows]; table WEIGHT [vocabulary, columns]; out OUTPUT
    attributes rows, columns, unread_bytes (of the table's other rows)
argmax       token = first index of the maximum; with ``advance`` the decode state moves on as well
    operands   logits INPUT [.., n]; token OUTPUT i64 [1]; ids, position, history STATE i64 (advance)
    attributes n, advance (bool)
"""

LINEAR = "linear"
NORM = "norm"
ROPE = "rope"
ROPE_TABLE = "rope_table"
ATTENTION = "attention"
ELEMENTWISE = "elementwise"
GATHER = "gather"
ARGMAX = "argmax"

CORE_KINDS = (LINEAR, NORM, ROPE, ROPE_TABLE, ATTENTION, ELEMENTWISE, GATHER, ARGMAX)
