"""Each pass keeps results bitwise, finds what it should, and leaves alone what only looks like it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_models import GPT, SIZES, WINDOWED, chunk, tiny, without
from torch import Tensor, nn

from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import DType, Graph, GraphKind, Symbol, ValueKind, Workload
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.schema import argument
from agentcompile_core.stages.capture.collapse_activations import collapse_activations
from agentcompile_core.stages.capture.collapse_norms import collapse_norms
from agentcompile_core.stages.capture.collapse_rope import collapse_rope
from agentcompile_core.stages.capture.comparison import weights_of
from agentcompile_core.stages.capture.export import export_decode, export_forward, export_prefill
from agentcompile_core.stages.capture.importer import import_program, layer_of
from agentcompile_core.stages.capture.language_model import kv_spec
from agentcompile_core.stages.capture.normalize import PASSES, drop_noise, normalize
from agentcompile_core.stages.capture.rewrite import eliminate_dead_code


def forward_graph(module: nn.Module, *inputs: Any) -> Graph:
    return import_program(export_forward(module.eval(), inputs), "forward", GraphKind.FORWARD)


def run(graph: Graph, module: nn.Module, *inputs: Tensor) -> Tensor:
    env = {**weights_of(module), **{f"input.{i}": x for i, x in enumerate(inputs)}}
    return compile_nodes(graph, device="cpu").run(env)[graph.outputs[0]]


def kinds(graph: Graph) -> Counter[str]:
    return Counter(node.kind for node in graph.nodes)


MODELS = {
    "qwen3": SIZES, "gemma3_text": WINDOWED, "phi": without("head_dim"), "gpt2": GPT,
    "gpt_neox": without("num_key_value_heads", "head_dim"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("model_type", MODELS)
def test_every_pass_keeps_the_results_bitwise(model_type: str, dtype: torch.dtype) -> None:
    model = tiny(model_type, MODELS[model_type], dtype)
    kv = kv_spec(model, Workload(dtype=DType.F32, max_context=16))
    torch.manual_seed(3)
    env: dict[str, Tensor] = weights_of(model)
    for name in (f"kv.{part}.{i}" for part in ("key", "value") for i in range(kv.layers)):
        env[name] = torch.randn(1, kv.capacity, kv.kv_heads, kv.head_dim).to(dtype)
    env |= {"session.ids": torch.tensor([[7]]), "session.position": torch.tensor([6])}
    env["session.history"] = torch.zeros(17, dtype=torch.int64)
    env |= chunk(4, torch.tensor([[3, 9, 4]]), 6)
    graphs = (import_program(export_decode(model, kv), "decode", GraphKind.DECODE),
              import_program(export_prefill(model, kv, 4), "prefill_4", GraphKind.PREFILL, 4))

    def results(graph: Graph) -> tuple[Tensor, ...]:
        own = {name: t.clone() for name, t in env.items()}
        logits = compile_nodes(graph, device="cpu").run(own)[graph.outputs[0]]
        return (logits, *(own[name] for name in sorted(own) if name.startswith(("kv.", "session."))))

    for graph in graphs:
        want = results(graph)
        for one in PASSES:
            graph = one(graph).verify()
            for got, expected in zip(results(graph), want, strict=True):
                if one is collapse_activations and model_type in ("gpt2", "phi"):  # it is rounded once; what follows is compared to that
                    torch.testing.assert_close(got, expected, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
                else:
                    assert torch.equal(got, expected), one.__name__
            want = results(graph)
            assert all(graph.spec(o).shape for o in graph.outputs)


@pytest.mark.parametrize("model_type", ["qwen3", "phi"])
def test_recorded_strides_are_those_of_the_run(model_type: str) -> None:
    """Layouts in the IR are facts that kernels rely on; the fused operators must reproduce the originals' layouts."""
    model = tiny(model_type, MODELS[model_type])
    kv = kv_spec(model, Workload(dtype=DType.F32, max_context=16))
    graph = normalize(import_program(export_prefill(model, kv, 4), "prefill_4", GraphKind.PREFILL, 4))
    env: dict[str, Tensor] = {**weights_of(model), **chunk(4, torch.tensor([[3, 9, 4]]), 0)}
    env |= {v.name: torch.zeros(v.spec.shape, dtype=getattr(torch, v.spec.dtype.value)) for v in graph.values if v.kind is ValueKind.STATE}
    made = [v.name for v in graph.values if v.kind is ValueKind.INTERMEDIATE]
    for name, tensor in compile_nodes(graph, device="cpu", outputs=made).run(env).items():
        spec = graph.spec(name)
        assert tuple(tensor.shape) == spec.shape and str(tensor.dtype) == f"torch.{spec.dtype.value}", name
        assert (tuple(tensor.stride()) == spec.strides) if spec.strides else tensor.is_contiguous(), name


class Norm(nn.Module):
    """A norm as Llama writes it, with one thing changed at a time."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        dim = -2 if self.change == "other axis" else -1
        wide = x.to(torch.float32)
        mean = wide.pow(3 if self.change == "cube" else 2).mean(dim, keepdim=True)
        unit = wide * torch.rsqrt(mean + 1e-5)
        out = self.weight * (unit if self.change == "late rounding" else unit.to(x.dtype))
        if self.change == "late rounding":
            out = (out + unit).to(x.dtype)
        return (out, unit) if self.change == "unit is read" else out


def test_rms_norm_is_found() -> None:
    module = Norm().half()
    graph = collapse_norms(drop_noise(forward_graph(module, torch.randn(8, 8).half())))
    assert kinds(graph) == {"rms_norm": 1} and [argument(graph.nodes[0], name) for name in ("eps", "one_plus")] == [1e-5, False]


@pytest.mark.parametrize("change", ["other axis", "cube", "late rounding", "unit is read"])
def test_what_only_looks_like_rms_norm_is_left(change: str) -> None:
    module = Norm(change).half()
    x = torch.randn(8, 8).abs().half()
    raw = forward_graph(module, x)
    graph = normalize(raw)
    assert "rms_norm" not in kinds(graph)
    assert torch.equal(run(graph, module, x), run(raw, module, x))


class Rotation(nn.Module):
    """RoPE in half style on [1, H, T, D], with one thing changed at a time."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        rotary_dim = cos.shape[-1]
        part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        half = rotary_dim // 2 + (1 if self.change == "uneven" else 0)
        low, high = part[..., :half], part[..., half:]
        swapped = torch.cat((low, -high) if self.change == "order" else (-high, low), dim=-1)
        turned = part * cos + swapped * sin
        return torch.cat((rest, turned) if self.change == "rest first" else (turned, rest), dim=-1) if rest.shape[-1] else turned


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rope_is_found_whole_and_partial(rotary_dim: int) -> None:
    module = Rotation()
    inputs = torch.randn(1, 2, 3, 8), torch.randn(1, 3, rotary_dim), torch.randn(1, 3, rotary_dim)
    raw = forward_graph(module, *inputs)
    graph = collapse_rope(drop_noise(raw))
    assert kinds(graph) == {"rope": 1}
    assert torch.equal(run(graph, module, *inputs), run(raw, module, *inputs))


@pytest.mark.parametrize("change", ["order", "uneven", "rest first"])
def test_what_only_looks_like_rope_keeps_its_result(change: str) -> None:
    module = Rotation(change)
    inputs = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    raw = forward_graph(module, *inputs)
    graph = normalize(raw)
    assert kinds(graph)["rope"] == (1 if change == "rest first" else 0)
    assert torch.equal(run(graph, module, *inputs), run(raw, module, *inputs))


def test_noise_is_dropped_but_copies_that_are_written_stay() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.dropout(x.to(torch.float32), 0.5, self.training)[:, :].contiguous()
            return y.reshape(2, 4).view(2, 4) + 1

    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y.mul_(2)
            return x + y

    assert kinds(normalize(forward_graph(Noisy(), torch.randn(2, 4)))) == {"add": 1}
    x = torch.randn(2, 4)
    graph = normalize(forward_graph(Written(), x))
    assert torch.equal(run(graph, Written(), x), x + 2 * x)


@pytest.mark.parametrize("copy", [
    lambda t: t.clone(), lambda t: torch.cat([t, t[:0]]), lambda t: t * 1.0, lambda t: nn.functional.pad(t, (0, 0)),
    lambda t: t.masked_fill(torch.zeros(3, dtype=torch.bool), 9.0),
], ids=["clone", "cat", "mul", "pad", "masked_fill"])
@pytest.mark.parametrize("when", ["read behind the write", "read before it", "written itself"])
def test_a_copy_of_what_is_written_later_is_what_it_was(copy: Callable[[Tensor], Tensor], when: str) -> None:
    """ZAYA keeps values of the last token: a step reads the old ones behind its write, by a copy that a concatenation with nothing made."""
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Buffer(torch.arange(3.0))

        def forward(self, x: Tensor) -> Tensor:
            before = copy(self.seen.view(3))
            if when == "read before it":
                before = before + x
            if when == "written itself":
                before.add_(1)
            else:
                self.seen.copy_(x)
            return before.exp() if when == "read before it" else before.exp() + self.seen

    module, x = Kept(), torch.randn(3)
    graph = normalize(forward_graph(module, x))
    if when == "read before it":
        assert [node.op.split(".")[1] for node in graph.nodes] == ["add", "copy_", "exp"]  # nothing is left of the copy
    assert torch.equal(run(graph, Kept(), x), Kept()(x))


def test_dead_code_goes_and_effects_stay() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Buffer(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            torch.exp(x)
            self.seen.add_(x)
            return x * 2

    graph = eliminate_dead_code(forward_graph(Dead(), torch.ones(3)))
    assert [n.op for n in graph.nodes] == ["aten.add_.Tensor", "aten.mul.Tensor"]
    assert graph.nodes[0].mutates == ("seen",)


def test_literals_survive_json() -> None:
    class Literals(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.full((4,), float("-inf"), dtype=torch.float32, device=x.device)
            return torch.where(x > 0, x, mask) + torch.tensor(2.0)

    x = torch.tensor([1.0, -1.0, 2.0, -2.0])
    graph = normalize(forward_graph(Literals(), x))
    assert graph == serial.loads(serial.dumps(graph), Graph)
    assert any(a == Symbol("float", "-inf") for n in graph.nodes for a in n.args)
    assert run(graph, Literals(), x).tolist() == [3.0, float("-inf"), 4.0, float("-inf")]


def test_layer_index_is_that_of_the_repeated_list() -> None:
    assert layer_of("model.layers.3.mlp.experts.7") == 3 and layer_of("transformer.h.11.attn") == 11
    assert layer_of("model.embed_tokens") == -1 and layer_of("") == -1


def test_concatenation_with_nothing_is_dropped() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((x.relu(), x[..., x.shape[-1]:]), dim=-1)

    raw = forward_graph(Joined(), torch.randn(2, 4))
    assert kinds(raw)["cat"] == 1 and kinds(eliminate_dead_code(drop_noise(raw))) == {"relu": 1}
    x = torch.randn(2, 4)
    assert torch.equal(run(drop_noise(raw), Joined(), x), run(raw, Joined(), x))
