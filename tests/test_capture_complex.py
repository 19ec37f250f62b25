"""Complex numbers are written out in real ones, rotations by them become one operator each; what is not known is refused by its name."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from capture_models import SIZES, generate, greedy, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Workload
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.stages.capture.attention import Unsupported
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.normalize import normalize

FEW = settings(max_examples=9, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


class Of(nn.Module):
    """A module that is one function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def imported(function: Callable[..., Tensor], *inputs: Tensor) -> Graph:
    return import_program(export_forward(Of(function), inputs), "forward", GraphKind.FORWARD)


def run(graph: Graph, *inputs: Tensor) -> Tensor:
    return compile_nodes(graph, device="cpu").run({f"input.{i}": x for i, x in enumerate(inputs)})[graph.outputs[0]]


def view_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def rotated(x: Tensor, angles: Tensor, tokens_first: bool) -> Tensor:
    turns = torch.polar(torch.ones_like(angles), angles) * 1.0
    made = view_complex(x) * (turns[:, :, None, :] if tokens_first else turns.unsqueeze(1))
    return torch.view_as_real(made).flatten(3).type_as(x)


def apart(x: Tensor, angles: Tensor, tokens_first: bool) -> Tensor:
    axis = 2 if tokens_first else 1
    cos, sin, a, b = angles.cos().to(x.dtype).unsqueeze(axis), angles.sin().to(x.dtype).unsqueeze(axis), x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def halves(x: Tensor, angles: Tensor, tokens_first: bool) -> Tensor:
    axis = 2 if tokens_first else 1
    cos, sin, (a, b) = angles.cos().to(x.dtype).unsqueeze(axis), angles.sin().to(x.dtype).unsqueeze(axis), x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


@FEW
@given(form=st.sampled_from((rotated, apart, halves)), heads=st.integers(1, 3), tokens=st.integers(1, 4), half=st.integers(1, 5),
       tokens_first=st.booleans(), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_a_rotation_is_one_operator(form: Callable[..., Tensor], heads: int, tokens: int, half: int, tokens_first: bool,
                                    dtype: torch.dtype) -> None:
    shape = (1, tokens, heads, 2 * half) if tokens_first else (1, heads, tokens, 2 * half)
    x, angles = torch.randn(shape).to(dtype), 40.0 * torch.randn(1, tokens, half)
    raw = imported(lambda x, a: form(x, a, tokens_first), x, angles)
    graph = normalize(raw)
    found = Counter(node.kind for node in graph.nodes)
    assert found["rope"] == 1 and not {"sub", "stack"} & set(found) and found["add"] == 0
    assert torch.equal(run(graph, x, angles), run(raw, x, angles)), "the passes keep every bit"
    torch.testing.assert_close(run(graph, x, angles), form(x, angles, tokens_first), rtol=1e-6, atol=1e-6)


CLOSE_TO_ROTATIONS = {
    "another partner": lambda a, b, c, s: (a * c - b * s, b * s + b * c),
    "both are added": lambda a, b, c, s: (a * c + b * s, a * s + b * c),
    "turned back": lambda a, b, c, s: (a * c - b * s, a * s - b * c),
    "other tables": lambda a, b, c, s: (a * c - b * s, a * c + b * s),
    "the parts change places": lambda a, b, c, s: (b * c - a * s, b * s + a * c),
}


@pytest.mark.parametrize("what", CLOSE_TO_ROTATIONS)
def test_what_only_looks_like_a_rotation_is_none(what: str) -> None:
    def form(x: Tensor, angles: Tensor) -> Tensor:
        parts = CLOSE_TO_ROTATIONS[what](x[..., 0::2], x[..., 1::2], angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))
        return torch.stack(parts, -1).flatten(-2)

    x, angles = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 4)
    graph = normalize(imported(form, x, angles))
    assert all(node.kind != "rope" for node in graph.nodes)
    assert torch.equal(run(graph, x, angles), form(x, angles))


ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: a * b, "sum": lambda a, b: a + b, "difference": lambda a, b: a - b, "negative": lambda a, b: -a * b,
    "conjugate": lambda a, b: a.conj() * b, "scaled": lambda a, b: a * 2.5 + b, "by a real": lambda a, b: a * b.real,
    "by i": lambda a, b: a * 1j + b, "one more": lambda a, b: a + 1.0,
    "moved": lambda a, b: torch.cat((a[:, 1:], b[:, :1]), 1).transpose(0, 1),
    "picked": lambda a, b: torch.stack((a, b), 0)[1].unsqueeze(0).expand(2, -1, -1),
    "built": lambda a, b: torch.complex(a.imag, b.real) * a,
    "of a real": lambda a, b: (a * 1j) * 1j + b,
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_complex_arithmetic_is_that_of_its_parts(name: str) -> None:
    def form(x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(ARITHMETIC[name](view_complex(x), view_complex(y)).resolve_conj())

    x, y = torch.randn(3, 8), torch.randn(3, 8)
    graph = normalize(imported(form, x, y))
    assert all("complex" not in node.op for node in graph.nodes)
    torch.testing.assert_close(run(graph, x, y), form(x, y))


@pytest.mark.parametrize("function", [torch.angle, torch.linalg.inv, lambda x: torch.fft.fft(x).real])
def test_other_operators_are_refused_by_name(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Unsupported, match="complex"):
        imported(lambda x: torch.view_as_real(function(view_complex(x)) * view_complex(x)), torch.randn(3, 6))


def test_a_result_in_complex_numbers_is_refused() -> None:
    with pytest.raises(Unsupported, match="complex64"):
        imported(view_complex, torch.randn(2, 4))


LATENT = {**SIZES, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
          "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}


def test_latent_attention_that_rotates_in_complex_numbers_generates_as_the_model_does() -> None:
    scaled = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.7}
    model = tiny("deepseek_v2", {**LATENT, "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, **scaled}})
    graphs = capture_language_model(model, "latent", Workload(dtype=DType.F32, max_context=32, prefill_chunks=(8,))).verify()
    assert graphs.eager_reason == ""
    for graph in graphs.graphs:
        found = Counter(node.kind for node in graph.nodes)
        assert (found["rotary_embedding"], found["rope"]) == (1, 2 * model.config.num_hidden_layers)
    prompt = torch.tensor([[3, 17, 90, 4, 55, 21, 8, 100, 63, 2, 41]])
    want, logits = greedy(model, prompt, 8)
    tokens, seen, _ = generate(model, graphs, prompt, 8)
    assert tokens == want
    torch.testing.assert_close(seen, logits, rtol=1e-4, atol=1e-4 * float(logits.std()))
