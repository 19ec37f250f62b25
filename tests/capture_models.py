"""Tiny random models of many architectures, and an environment to interpret their graphs in; shared by the capture tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, Graph, GraphSet, Workload
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.stages.capture.comparison import weights_of

CONTEXT = 32
WORKLOAD = Workload(dtype=DType.F32, max_context=CONTEXT, prefill_chunks=(8,))
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}
TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
WINDOWED = {**SIZES, "sliding_window": 5}
GPT = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS}


def without(*names: str) -> dict[str, Any]:
    """SIZES without some of them."""
    return {key: value for key, value in SIZES.items() if key not in names}


def tiny(model_type: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model whose greedy tokens vary: matrices are scaled up, norm weights are not all one."""
    config = transformers.AutoConfig.for_model(model_type, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        for parameter in model.parameters():
            parameter.data.mul_(8.0) if parameter.dim() > 1 else parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def export_each_once(patch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Until ``patch`` is undone ``modules`` trace a model for the same arguments once: most of what a test compares with is traced by then.

    What a model calls without a trace is looked at once, too. Not for tests that change a model between captures.
    """
    seen: list[tuple[tuple[Any, ...], Any]] = []  # which keeps the models, so that no other takes the place of one in memory

    def once(before: Callable[..., Any]) -> Callable[..., Any]:
        def export(model: nn.Module, *rest: Any) -> Any:
            for (name, known, *others), program in seen:
                if name == before.__name__ and known is model and others == list(rest):
                    return program
            seen.append(((before.__name__, model, *rest), before(model, *rest)))
            return seen[-1][1]

        return export

    for module in modules:
        for name in ("export_decode", "export_prefill", "calls_of_decode", "calls_of_prefill"):
            if hasattr(module, name):
                patch.setattr(module, name, once(getattr(module, name)))


def greedy(model: nn.Module, prompt: Tensor, count: int) -> tuple[list[int], Tensor]:
    """``count`` greedy tokens by HuggingFace without any cache, and the logits [count, V] that they were taken from."""
    ids, rows = prompt, []
    for _ in range(count):
        rows.append(model(ids, use_cache=False).logits[:, -1])
        ids = torch.cat([ids, rows[-1].argmax(-1, keepdim=True)], 1)
    return ids[0, prompt.shape[1]:].tolist(), torch.cat(rows)


def environment(model: nn.Module, graphs: GraphSet, fill: float = 3.0) -> dict[str, Tensor]:
    """Weights, and session state of which every byte is garbage until a graph writes it."""
    env: dict[str, Tensor] = weights_of(model)
    kv = graphs.kv
    if kv is not None:
        for part, shapes in (("key", kv.key_shapes), ("value", kv.value_shapes)):
            for layer, shape in enumerate(shapes):
                env[f"kv.{part}.{layer}"] = torch.full(shape, fill, dtype=getattr(torch, kv.dtype.value))
        env["session.ids"] = torch.full((1, 1), 99)
        env["session.position"] = torch.full((1,), 7)
        env["session.history"] = torch.full((kv.capacity + 1,), -1)
    return env


def chunk(tokens: int, part: Tensor, start: int) -> dict[str, Tensor]:
    """The inputs of one prefill chunk, padded on the right."""
    prompt = torch.full((1, tokens), 5)
    prompt[:, : part.shape[1]] = part
    return {"prompt": prompt, "start": torch.tensor([start]), "length": torch.tensor([part.shape[1]])}


def graph_called(graphs: GraphSet, name: str) -> Graph:
    """The graph of that name."""
    return next(g for g in graphs.graphs if g.name == name)


def generate(model: nn.Module, graphs: GraphSet, prompt: Tensor, count: int) -> tuple[list[int], Tensor, dict[str, Tensor]]:
    """Interpret the prompt in chunks of 8 and decode: ``count`` tokens, their logits, and the environment left behind."""
    env = environment(model, graphs)
    for start in range(0, prompt.shape[1], 8):
        graph = graph_called(graphs, "prefill_8" if start else "prefill_8_fresh")
        results = compile_nodes(graph, device="cpu").run({**env, **chunk(8, prompt[:, start : start + 8], start)})
    rows = [results[graph.outputs[0]][0]]
    step = compile_nodes(graph_called(graphs, "decode"), device="cpu").bind(env)
    found = [int(env["session.ids"])]
    for _ in range(count - 1):
        rows.append(step()[0][0].clone())
        found.append(int(env["session.ids"]))
    return found, torch.cat(rows), env
