"""Norms and rotations that models write out: each form is found, computes the same bits, and its near misses are left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers.elementwise import ElementwiseRule
from capture_models import SIZES, tiny, without
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_capture_normalize import forward_graph, kinds, run
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Workload
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.schema import argument
from agentcompile_core.stages.capture.comparison import weights_of
from agentcompile_core.stages.capture.export import export_decode
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.language_model import kv_spec
from agentcompile_core.stages.capture.normalize import normalize

FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, phases=(Phase.generate,))
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


SQUARES = {"pow": lambda x: x.pow(2), "square": torch.square, "product": lambda x: x * x}
ROOTS = {"rsqrt": torch.rsqrt, "power": lambda x: x.pow(-0.5)}


class Norm(nn.Module):
    """A norm in one of the ways that models write it; ``change`` makes it another function."""

    def __init__(self, form: str, width: int, change: str = "", square: str = "pow", root: str = "rsqrt", widened: bool = True,
                 cast: bool = True) -> None:
        super().__init__()
        self.form, self.change, self.widened, self.cast = form, change, widened, cast
        self.square, self.root = SQUARES[square], ROOTS[root]
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        weight = self.weight.float() if self.cast else self.weight
        if self.form == "layer":
            mean = wide.mean(-2 if self.change == "axis" else -1, keepdim=True)
            variance = (wide - (0 * mean if self.change == "raw" else mean)).pow(2).mean(-1, keepdim=True)
            wide = (wide - mean) * torch.rsqrt(variance + 1e-5)
            return (weight * wide).to(x.dtype)
        factor = self.root(self.square(wide).mean(-2 if self.change == "axis" else -1, keepdim=True) + 1e-5)
        wide = (wide if self.widened else x) * factor
        if self.form == "one_plus":
            return (wide * ((2.0 if self.change == "raw" else 1.0) + weight)).to(x.dtype)
        if self.form == "plain":
            return self.weight * (wide.to(x.dtype) if self.change != "raw" else (wide + 1).to(x.dtype))
        if self.form == "once":
            return (weight * (wide if self.change != "raw" else wide + 1)).to(x.dtype)
        return wide.to(x.dtype) if self.change != "raw" else (wide + 1).to(x.dtype)


FORMS = {"layer": "layer_norm", "one_plus": "rms_norm", "bare": "rms_norm", "plain": "rms_norm", "once": "rms_norm"}
WAYS = st.fixed_dictionaries({"square": st.sampled_from(sorted(SQUARES)), "root": st.sampled_from(sorted(ROOTS)), "widened": st.booleans(),
                              "cast": st.booleans()})


@pytest.mark.parametrize("form", FORMS)
@settings(FEW, max_examples=16)
@given(dtype=DTYPES, rows=st.integers(1, 4), width=st.integers(2, 9), seed=st.integers(0, 99), way=WAYS, wide_weight=st.booleans())
def test_a_norm_written_out_is_one_operator_with_the_same_bits(form: str, dtype: torch.dtype, rows: int, width: int, seed: int,
                                                               way: dict[str, Any], wide_weight: bool) -> None:
    """In every order of casts, however it is squared; a weight of another type where nothing is rounded before it."""
    torch.manual_seed(seed)
    module, x = Norm(form, width, **way).to(dtype), (torch.randn(rows, width) * 3).to(dtype)
    if wide_weight and form in ("once", "one_plus"):
        module = module.float()
    raw = forward_graph(module, x)
    graph = normalize(raw)
    assert torch.equal(run(graph, module, x), run(raw, module, x))
    if form == "one_plus" and module.weight.dtype is not torch.float32 and not way["cast"]:
        return  # 1 + w is rounded there
    assert kinds(graph) == {FORMS[form]: 1} and argument(graph.nodes[0], "eps") == 1e-5
    if form != "layer":
        assert argument(graph.nodes[0], "one_plus") is (form == "one_plus")
        assert argument(graph.nodes[0], "once") is (form == "once" and dtype is not torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", ["axis", "raw"])
def test_what_only_looks_like_a_norm_keeps_its_result(form: str, change: str) -> None:
    module, x = Norm(form, 4, change), torch.randn(4, 4)
    raw = forward_graph(module, x)
    graph = normalize(raw)
    assert change != "axis" or not {"rms_norm", "layer_norm"} & set(kinds(graph))
    assert torch.equal(run(graph, module, x), run(raw, module, x))


def _half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def _flipped(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((high, -low), -1)


def _interleaved(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _pairs(x: Tensor) -> Tensor:
    return torch.stack((x[..., 1::2], -x[..., 0::2]), -1).flatten(-2)


def _behind(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -2).flatten(-2)


class Rotation(nn.Module):
    """A rotation of the first channels of [1, H, T, D] with a swap of its own, by tables of its own or of positions.

    ``heads``: the axis of heads, 2 for [1, T, H, D]; ``cast``: computed in float32, to which it casts before or behind the swap.
    """

    def __init__(self, swap: Callable[[Tensor], Tensor], repeated: bool = False, heads: int = 1, cast: str = "") -> None:
        super().__init__()
        self.swap, self.repeated, self.heads, self.cast = swap, repeated, heads, cast

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(self.heads), sin.unsqueeze(self.heads)
        width = cos.shape[-1]
        if self.repeated:
            cos, sin = (t[..., : width // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
        part = x[..., :width]
        part = part.float() if self.cast == "before" else part
        swapped = self.swap(part)
        part, swapped = (part.float(), swapped.float()) if self.cast == "behind" else (part, swapped)
        turned = ((part * cos) + (swapped * sin)).to(x.dtype)
        return torch.cat((turned, x[..., width:]), -1) if width < x.shape[-1] else turned


@pytest.mark.parametrize("swap", [_half, _flipped, _interleaved, _pairs, _behind])
@FEW
@given(dtype=DTYPES, heads=st.integers(1, 3), tokens=st.integers(1, 2), width=st.sampled_from((2, 4, 8)), rest=st.sampled_from((0, 2)),
       cast=st.sampled_from(("", "before", "behind")))
def test_rotations_of_every_style_keep_their_bits(swap: Any, dtype: torch.dtype, heads: int, tokens: int, width: int, rest: int,
                                                  cast: str) -> None:
    torch.manual_seed(heads)
    inputs = [torch.randn(*shape).to(dtype) for shape in ((1, heads, tokens, width + rest), (1, tokens, width), (1, tokens, width))]
    rotation = Rotation(swap, cast=cast)
    raw = forward_graph(rotation, *inputs)
    graph = normalize(raw)
    assert torch.equal(run(graph, rotation, *inputs), run(raw, rotation, *inputs))
    found = {kind: count for kind, count in kinds(graph).items() if not cast or kind in ("rope", "neg", "add", "mul", "stack")}
    if swap in (_half, _flipped, _interleaved) and width > 2:
        assert found == ({"rope": 1} if swap is not _flipped else {"rope": 1, "neg": 1})
        assert argument(next(n for n in graph.nodes if n.kind == "rope"), "interleaved") is (swap is _interleaved)
    if swap in (_pairs, _behind) and width > 2:
        assert "rope" not in kinds(graph)


class Attending(nn.Module):
    """Attention of a chunk whose queries are rotated tokens first, and turned to heads then."""

    def __init__(self, swap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.turn = Rotation(swap, heads=2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cache, position = x.new_zeros(1, 5, x.shape[2], x.shape[3]), torch.zeros(1, dtype=torch.int64)
        q, k = self.turn(x, cos, sin).transpose(1, 2), x.transpose(1, 2)
        return torch.ops.agentcompile.attention(q, k, k, cache, cache.clone(), position, 0.5)


def given_to_attention(graph: Graph, *inputs: Tensor) -> list[Tensor]:
    """The queries, keys and values that the one call of attention is given."""
    names = [each.value for each in next(node for node in graph.nodes if node.kind == "attention").args[:3]]
    made = compile_nodes(graph, device="cpu", outputs=names).run(dict(zip(graph.inputs, inputs, strict=True)))
    return [made[name] for name in names]


@pytest.mark.parametrize("swap", [_half, _interleaved, _behind])
@pytest.mark.parametrize("way", [Attending, lambda swap: Rotation(swap, heads=2)], ids=["attention", "alone"])
@FEW
@given(dtype=DTYPES, heads=st.integers(1, 3), tokens=st.integers(1, 3), width=st.sampled_from((2, 4, 8)), rest=st.sampled_from((0, 2)))
def test_rotations_of_tokens_first_keep_their_bits(swap: Any, way: Any, dtype: torch.dtype, heads: int, tokens: int, width: int,
                                                   rest: int) -> None:
    """Where only attention reads them by heads they are rotated by heads, else only where elements lie alike."""
    torch.manual_seed(heads)
    inputs = [torch.randn(*shape).to(dtype) for shape in ((1, tokens, heads, width + rest), (1, tokens, width), (1, tokens, width))]
    module = way(swap)
    raw = forward_graph(module, *inputs)
    graph = normalize(raw)
    found, wanted = run(graph, module, *inputs), run(raw, module, *inputs)
    if way is Attending:  # which sums in an order that depends on where heads lie, on some processors: bits are those that it is given
        torch.testing.assert_close(found, wanted)
        assert all(map(torch.equal, given_to_attention(graph, *inputs), given_to_attention(raw, *inputs)))
    else:
        assert torch.equal(found, wanted)
    assert found.is_contiguous() == wanted.is_contiguous()
    if width > 2 and not rest and (way is Attending or 1 in (tokens, heads)):
        assert kinds(graph)["rope"] == (swap in (_half, _interleaved))
    for name in (name for node in graph.nodes if node.kind in ("rope", "view") for name in node.outputs):
        made = compile_nodes(graph, device="cpu", outputs=[name]).run(dict(zip(graph.inputs, inputs, strict=True)))[name]
        assert made.is_contiguous() if not graph.spec(name).strides else made.stride() == graph.spec(name).strides


def test_tables_of_another_number_of_rows_are_no_rotation_by_heads() -> None:
    """One row for all of [1, H, 1, D], where the axis behind the heads is that of tokens: its rows are no tokens."""
    inputs = [torch.randn(1, 3, 1, 8), torch.randn(1, 1, 8), torch.randn(1, 1, 8)]
    module = Rotation(_half, heads=2)
    raw = forward_graph(module, *inputs)
    assert torch.equal(run(normalize(raw), module, *inputs), run(raw, module, *inputs))


class Tables(nn.Module):
    """Two rotations by one table of positions, of which only a half is used, each element twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(torch.linspace(1.0, 0.1, 2))
        self.turn = Rotation(_interleaved, repeated=True)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = torch.ops.agentcompile.rotary_embedding(positions, self.inv_freq, 1.5, x.dtype)
        return self.turn(self.turn(x, cos, sin), cos, sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tables_that_are_interleaved_later_are_made_so_once(dtype: torch.dtype) -> None:
    module, x, positions = Tables(), torch.randn(1, 2, 3, 6).to(dtype), torch.tensor([[0, 7, 9000]])
    raw = forward_graph(module, x, positions)
    graph = normalize(raw)
    assert kinds(graph) == {"rotary_embedding": 1, "rope": 2}
    assert torch.equal(run(graph, module, x, positions), run(raw, module, x, positions))


MODELS = {"cohere": without("head_dim"), "ernie4_5": SIZES, "glm": SIZES, "nanochat": without("head_dim"),
          "gemma4_text": {**SIZES, "global_head_dim": 8, "hidden_size_per_layer_input": 0}}  # rotates tokens first


@pytest.mark.parametrize("model_type", MODELS)
def test_models_in_half_precision_keep_their_bits(model_type: str) -> None:
    model = tiny(model_type, MODELS[model_type], torch.bfloat16)
    kv = kv_spec(model, Workload(dtype=DType.BF16, max_context=16))
    raw = import_program(export_decode(model, kv), "decode", GraphKind.DECODE)
    graph = normalize(raw)
    assert kinds(graph)["rope"] == 4 and not {"mean", "stack", "neg"} & (set(kinds(graph)) - {"neg"})
    env = {**weights_of(model), "session.ids": torch.tensor([[7]]),
           "session.position": torch.tensor([6]), "session.history": torch.zeros(17, dtype=torch.int64)}
    for i in range(2 * kv.layers):
        shape = (1, kv.capacity, kv.kv_heads, kv.head_dim)
        env[f"kv.{'key' if i < kv.layers else 'value'}.{i % kv.layers}"] = torch.randn(shape, generator=torch.manual_seed(i)).bfloat16()
    logits = [compile_nodes(one, device="cpu").run({name: t.clone() for name, t in env.items()})[one.outputs[0]] for one in (raw, graph)]
    assert torch.equal(*logits)


class Lookup(nn.Module):
    """Rows of a table by indices that a caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.randn(5, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


def test_indices_of_a_caller_may_be_negative_and_stay_an_index() -> None:
    ids = torch.tensor([[-1, 2]])
    graph = normalize(forward_graph(Lookup(), ids))
    assert kinds(graph) == {"index": 1}
    module = Lookup()
    assert torch.equal(run(graph, module, ids), module.table[ids])


class Interleaved(nn.Module):
    """Norms of the parts that every head holds side by side, as fused Q, K and V are cut in one of several ways."""

    def __init__(self, way: str, width: int) -> None:
        super().__init__()
        self.way, self.norm = way, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        width = self.norm.normalized_shape[0]
        heads = x.shape[-1] // (3 * width)
        if self.way == "select":
            whole = x.view(1, 1, heads, 3, width)
            return tuple(self.norm(whole[..., i, :]) for i in range(3))
        whole = x.view(1, 1, heads, 3 * width).transpose(1, 2)
        if self.way == "reshaped":
            return tuple(self.norm(part.reshape(1, heads, 1, 1, width)) for part in whole.split(width, -1))
        return tuple(self.norm(part) for part in whole.chunk(3, -1))


@pytest.mark.parametrize("way", ["select", "chunk", "reshaped"])
@FEW
@given(heads=st.integers(2, 4), width=st.integers(2, 5), dtype=DTYPES)
def test_parts_that_lie_apart_are_packed_once_each_and_keep_their_bits(way: str, heads: int, width: int, dtype: torch.dtype) -> None:
    module, x = Interleaved(way, width).to(dtype), torch.randn(1, 1, heads * 3 * width).to(dtype)
    raw = forward_graph(module, x)
    graph = normalize(raw)
    assert kinds(graph)["copy"] == 3 and "chunk" not in {node.op.split(".")[1] for node in graph.nodes}
    env = {**weights_of(module), "input.0": x}
    found, wanted = (compile_nodes(one, device="cpu").run(env) for one in (graph, raw))
    assert all(torch.equal(found[a], wanted[b]) for a, b in zip(graph.outputs, raw.outputs, strict=True))
    matches = [m for m in ElementwiseRule().find(graph, PRESETS["h200"]) if m.text("broadcast0") == "strided"]
    assert len(matches) == 3
    for match in matches:  # what the attributes say of the part is what the framework copies
        source = compile_nodes(graph, device="cpu", outputs=[match.need("in0").values[0]]).run(env)[match.need("in0").values[0]]
        shape, strides = ([match.integer(f"{name}{i}") for i in range(4)] for name in ("extent", "stride"))
        part = source.as_strided(shape, strides, match.integer("offset"))
        out = match.need("out").values[0]
        assert torch.equal(part.flatten(), compile_nodes(graph, device="cpu", outputs=[out]).run(env)[out].flatten())
