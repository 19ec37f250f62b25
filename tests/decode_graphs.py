"""Hand-built decode graphs, made by running torch eagerly, and what every match kind is supposed to compute."""

import math

import torch
import torch.nn.functional as F

from agentcompile_core.ir.expression import PointwiseKind as K
from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, Symbol, TensorSpec, Value, ValueKind
from agentcompile_core.ops import operators as ops
from agentcompile_core.stages.capture.kinds import kind_of

ops.register()


def spec_of(tensor):
    strides = () if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorSpec(shape=tuple(tensor.shape), dtype=DType(str(tensor.dtype).removeprefix("torch.")), strides=strides)


class Builder:
    """Appends nodes by running them; ``tensors`` holds what was given, ``results`` every value."""

    def __init__(self, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.values, self.nodes, self.tensors, self.results = [], [], {}, {}
        self.module, self.layer = "", -1

    def given(self, name, tensor, kind):
        if name not in self.results:
            self.values.append(Value(name=name, spec=spec_of(tensor), kind=kind, source=name if kind is not ValueKind.INPUT else ""))
            self.tensors[name], self.results[name] = tensor, tensor.clone()
        return Ref(name)

    def randn(self, *shape, scale=1.0):
        return torch.randn(*shape, generator=self.random) * scale

    def weight(self, name, *shape):
        return self.given(name, self.randn(*shape, scale=1 / math.sqrt(shape[-1])), ValueKind.WEIGHT)

    def call(self, op, *args, mutates=(), **kwargs):
        def real(a):
            if isinstance(a, Ref):
                return self.results[a.value]
            return getattr(torch, a.name) if isinstance(a, Symbol) else [real(x) for x in a] if isinstance(a, tuple) else a

        namespace, name, overload = op.split(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        result = operator(*map(real, args), **{key: real(value) for key, value in kwargs.items()})
        results = tuple(result) if isinstance(result, tuple | list) else () if result is None else (result,)
        node = f"{name}_{len(self.nodes)}"
        names = (node,) if len(results) == 1 else tuple(f"{node}.{i}" for i in range(len(results)))
        first = next((self.results[a.value] for a in args if isinstance(a, Ref)), None)
        for out, tensor in zip(names, results, strict=True):
            self.results[out] = tensor
            self.values.append(Value(name=out, spec=spec_of(tensor)))
        self.nodes.append(Node(name=node, op=op, kind=kind_of(op, None if first is None else spec_of(first)), args=args,
                               kwargs=tuple(kwargs.items()), outputs=names, mutates=mutates, module=self.module, layer=self.layer))
        return Ref(names[0]) if len(names) == 1 else tuple(Ref(name) for name in names)

    def graph(self, *outputs, kind=GraphKind.DECODE):
        inputs = tuple(v.name for v in self.values if v.kind is ValueKind.INPUT)
        return Graph(name="decode", kind=kind, values=tuple(self.values), nodes=tuple(self.nodes), inputs=inputs,
                     outputs=tuple(out.value for out in outputs)).verify()

    # ---- the parts of a transformer, as capture leaves them

    def linear(self, name, x, n, bias=False):
        k = self.results[x.value].shape[-1]
        arguments = (x, self.weight(f"{name}.weight", n, k), *((self.weight(f"{name}.bias", n),) if bias else ()))
        return self.call("aten.linear.default", *arguments)

    def norm(self, name, x, kind="rms"):
        columns = self.results[x.value].shape[-1]
        weight = self.weight(f"{name}.weight", columns)
        if kind == "layer":
            return self.call("aten.layer_norm.default", x, (columns,), weight, self.weight(f"{name}.bias", columns), 1e-5)
        return self.call("agentcompile.rms_norm.default", x, weight, 1e-6, kind == "rms_one_plus")

    def add(self, a, b):
        return self.call("aten.add.Tensor", a, b)


def transformer(layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, inter=48, capacity=16, vocabulary=40, rotary_dim=0,
                qk_norm=True, bias=False, norm="rms", act="silu", sandwich=False, softcap=0.0, window=0, cap=0.0, fused=False, seed=0):
    """One decode step of a transformer: Qwen3 by default. Returns its Builder and its Graph.

    ``fused``: one matrix for q, k and v and one for gate and up, as Phi-3 has them.
    """
    b = Builder(seed)
    ids = b.given("session.ids", torch.tensor([[3]]), ValueKind.STATE)
    position = b.given("session.position", torch.tensor([5]), ValueKind.STATE)
    history = b.given("session.history", torch.zeros(capacity + 1, dtype=torch.int64), ValueKind.STATE)
    positions = b.call("aten.unsqueeze.default", position, 0)
    h = b.call("aten.embedding.default", b.weight("embed.weight", vocabulary, hidden), ids)
    inv_freq = b.given("inv_freq", torch.linspace(1.0, 0.1, (rotary_dim or head_dim) // 2), ValueKind.CONSTANT)
    cos, sin = b.call("agentcompile.rotary_embedding.default", positions, inv_freq, 1.0, Symbol("dtype", "float32"))
    for layer in range(layers):
        b.layer, path = layer, f"layers.{layer}"
        b.module = path
        x = b.norm(f"{path}.input_norm", h, norm)
        sides, first = [], 0
        whole = b.linear(f"{path}.qkv", x, (heads + 2 * kv_heads) * head_dim, bias) if fused else None
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            if whole:
                side = b.call("aten.slice.Tensor", whole, 2, first, first + count * head_dim)
                first += count * head_dim
            else:
                side = b.linear(f"{path}.{name}", x, count * head_dim, bias)
            side = b.call("aten.view.default", side, (1, 1, count, head_dim))
            if qk_norm and name != "v":
                side = b.norm(f"{path}.{name}_norm", side, norm)
            sides.append(b.call("aten.transpose.int", side, 1, 2))
        q, k, v = sides
        q, k = (b.call("agentcompile.rope.default", side, cos, sin) for side in (q, k))
        caches = [b.given(f"kv.{part}.{layer}", b.randn(1, capacity, kv_heads, head_dim), ValueKind.STATE) for part in ("key", "value")]
        options = (window, softcap) if window or softcap else ()
        out = b.call("agentcompile.attention.default", q, k, v, *caches, position, 0.3, *options, mutates=tuple(c.value for c in caches))
        out = b.linear(f"{path}.o", b.call("aten.reshape.default", out, (1, 1, -1)), hidden)
        if sandwich:
            out = b.norm(f"{path}.after_attention", out, norm)
        h = b.add(h, out)
        x = b.norm(f"{path}.post_norm", h, norm)
        if fused:
            gate, up = b.call("aten.chunk.default", b.linear(f"{path}.gate_up", x, 2 * inter), 2, -1)
        else:
            gate = b.linear(f"{path}.gate", x, inter, bias)
        gate = b.call("aten.gelu.default", gate, approximate="tanh") if act == "gelu_tanh" else b.call(f"aten.{act}.default", gate)
        up = up if fused else b.linear(f"{path}.up", x, inter, bias)
        out = b.linear(f"{path}.down", b.call("aten.mul.Tensor", gate, up), hidden)
        if sandwich:
            out = b.norm(f"{path}.after_mlp", out, norm)
        h = b.add(h, out)
    b.layer, b.module = -1, ""
    logits = b.linear("head", b.norm("final_norm", h, norm), vocabulary)
    if cap:
        logits = b.call("aten.mul.Tensor", b.call("aten.tanh.default", b.call("aten.div.Tensor", logits, cap)), cap)
    token = b.call("agentcompile.argmax.default", logits)
    b.call("agentcompile.advance.default", token, ids, position, history, mutates=("session.ids", "session.position", "session.history"))
    return b, b.graph(logits, token)


# ---- what a match promises, computed from its operands, attributes and epilogue alone

_SCALAR = {
    K.ADD: torch.add, K.SUB: torch.sub, K.MUL: torch.mul, K.DIV: torch.div, K.NEG: torch.neg, K.SILU: F.silu, K.GELU: F.gelu,
    K.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"), K.RELU: F.relu, K.SIGMOID: torch.sigmoid, K.TANH: torch.tanh,
    K.EXP: torch.exp, K.RSQRT: torch.rsqrt, K.ROUND: lambda x: x,
}


def evaluate(expression, arguments):
    """The result of an Expression over tensors by argument name; no expression: acc0."""
    if expression is None:
        return arguments["acc0"]
    results = []
    for op in expression.operations:
        read = [arguments[o] if isinstance(o, str) else results[o] if type(o) is int else torch.tensor(o) for o in op.operands]
        results.append(_SCALAR[op.kind](*read))
    return results[-1] if results else arguments[expression.arguments[0]]


def _normed(match, x, weight, bias=None, which=""):
    kind, eps = match.text(f"{which}norm"), match.number(f"{which}eps" if which else "norm_eps")
    if kind == "none":
        return x
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return ops.rms_norm(x, weight, eps, kind == "rms_one_plus", kind == "rms_once")


def _linear(match, t):
    k, n, pair = match.integer("k"), match.integer("n"), match.integer("pair")
    total = t["x"].reshape(k)
    if "residual" in t:
        total = t["residual"].reshape(k) + _normed(match, total, t.get("post_weight"), None, "post_")
    x = _normed(match, total, t.get("norm_weight"), t.get("norm_bias"))
    sums = (t["weight"].reshape(pair * n, k) @ x).reshape(pair, n)
    arguments = {f"acc{p}": sums[p] for p in range(pair)} | {name: t[name].reshape(n) for name in ("aux0", "aux1") if name in t}
    return {"out": evaluate(match.epilogue, arguments), "norm_out": x, "residual_out": total}


def _norm(match, t):
    x = t["x"].reshape(match.integer("rows"), match.integer("columns"))
    x = x + t["residual"].reshape(x.shape) if "residual" in t else x
    arguments = {name: t[name].reshape(x.shape) for name in ("aux0", "aux1") if name in t}
    arguments["acc0"] = _normed(match, x, t.get("weight"), t.get("bias"))
    found = {"out": evaluate(match.epilogue, arguments), "residual_out": x}
    if "x_beside" in t:
        beside = t["x_beside"].reshape(match.integer("rows_beside"), match.integer("columns_beside"))
        found["out_beside"] = _normed(match, beside, t.get("weight_beside"))
    return found


def _elementwise(match, t):
    count, columns = match.integer("count"), match.integer("columns")
    inner, place = match.integer("inner", 1), torch.arange(count)

    def read(name):
        """An input as large as the result, by how the match says that it is read."""
        flat, kind = t[name].reshape(-1), match.text(f"broadcast{name[2:]}")
        behind = {"channel": place // inner, "middle": place // (count * inner // flat.numel()) * inner + place % inner}.get(kind, place)
        return flat[behind % flat.numel()].reshape(count // columns, columns)

    inputs = {name: read(name) for name in t if name.startswith("in")}
    return {"out": evaluate(match.epilogue, inputs)}


def _attention(match, t):
    heads, kv_heads, d = match.integer("heads"), match.integer("kv_heads"), match.integer("head_dim")
    sides = {"q": t["q"].reshape(1, heads, 1, d), "k": t["k"].reshape(1, kv_heads, 1, d)}
    for name in sides:
        if match.flag("qk_norm"):
            sides[name] = _normed(match, sides[name], t[f"{name}_norm"])
        if match.flag("rope"):
            sides[name] = ops.rope(sides[name], t["cos"].reshape(1, 1, -1), t["sin"].reshape(1, 1, -1))
    k_cache, v_cache = t["k_cache"].clone(), t["v_cache"].clone()
    out = ops.attention(sides["q"], sides["k"], t["v"].reshape(1, kv_heads, 1, d), k_cache, v_cache, t["position"].reshape(1),
                        match.number("scale"), match.integer("window"), match.number("softcap"), t.get("sinks"))
    return {"out": out, "k_cache": k_cache, "v_cache": v_cache}


def _argmax(match, t):
    token = torch.argmax(t["logits"].reshape(-1)).reshape(1)
    if not match.flag("advance"):
        return {"token": token}
    history = t["history"].clone()
    history[int(t["position"]) + 1] = token[0]
    return {"token": token, "ids": token.reshape(1, 1), "position": t["position"] + 1, "history": history}


def _rope_table(match, t):
    angles = t["position"].reshape(1).float() * t["inv_freq"]
    both = torch.cat((angles, angles)) * 1.0
    return {"cos": both.cos() * match.number("attention_scaling"), "sin": both.sin() * match.number("attention_scaling")}


MEANING = {
    "linear": _linear,
    "norm": _norm,
    "elementwise": _elementwise,
    "attention": _attention,
    "argmax": _argmax,
    "rope_table": _rope_table,
    "rope": lambda m, t: {"out": ops.rope(t["x"].reshape(1, m.integer("heads"), 1, m.integer("head_dim")), t["cos"].reshape(1, 1, -1),
                                          t["sin"].reshape(1, 1, -1))},
    "gather": lambda m, t: {"out": t["table"][t["ids"].reshape(-1)]},
}


def promised(match, tensors):
    """What a match says it writes, by operand name, from tensors by value name. Several values are joined as the contract says."""
    given = {}
    for operand in match.operands:
        if operand.access.value != "write":
            parts = [tensors[value] for value in operand.values]
            given[operand.name] = parts[0] if len(parts) == 1 else torch.cat(parts, 0 if parts[0].dim() < 3 else -1)
    return MEANING[match.kind](match, given)
