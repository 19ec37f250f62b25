"""A Gemma 3n as deep as the real one, and narrow: streams, shared K and V, sparsity and embeddings of layers, against its module."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from attrs import evolve
from capture_models import WORKLOAD, tiny
from torch import nn
from transformers import Gemma3nTextConfig

from agentcompile_core.ir.graph import DType, Graph, GraphSet
from agentcompile_core.ops.aliasing import written_in_place
from agentcompile_core.stages.capture import comparison_run
from agentcompile_core.stages.capture.comparison import weights_of
from agentcompile_core.stages.capture.comparison_exact import EXACT, WIDE, Call, Trial, difference
from agentcompile_core.stages.capture.language_model import capture_language_model

WIDTHS: dict[str, Any] = {
    "vocab_size": 256, "vocab_size_per_layer_input": 256, "hidden_size": 64, "hidden_size_per_layer_input": 8, "intermediate_size": 96,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "laurel_rank": 8, "sliding_window": 6,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}
TRIED: dict[str, Any] = {"first": 5, "second": 4, "steps": 4, "chunks": (8,), "device": torch.device("cpu")}


@cache
def captured() -> tuple[nn.Module, GraphSet]:
    model = tiny("gemma3n_text", WIDTHS, torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.mul_(0.125 if parameter.dim() > 1 else 1.0)  # matrices as they were drawn
    graphs = capture_language_model(model, "gemma3n", evolve(WORKLOAD, dtype=DType.BF16))
    assert not graphs.eager_reason
    return model, graphs


def called(graphs: GraphSet, draw: int) -> Iterator[Call]:
    """Logits behind two chunks of a prompt and behind four steps."""
    model, _ = captured()
    tokens = torch.randint(3, 256, (1, 13), generator=torch.Generator().manual_seed(draw))
    trial = comparison_run.Trial(tokens=tokens, **TRIED)
    run = comparison_run.GraphRun(graphs, weights_of(model), trial.device, None, {})
    found = torch.stack(run.logits(trial, 8))
    yield Call((found,), (torch.stack(comparison_run.reference(model, trial)),), run.wrong_state)


def differs(graphs: GraphSet) -> str:
    """How graphs in bfloat16 compute something else than their module in float64, or round more than it does.

    As it is 35 random layers magnify roundings to the size of the results, of any two right ways to compute them.
    """
    model, _ = captured()

    def drawn(draw: int) -> Trial:
        return Trial(calls=lambda: called(graphs, draw), count=1, given=[*model.parameters(), *model.buffers()],
                     matrices=[one for one in model.parameters() if one.dim() > 1])

    with torch.inference_mode():
        return difference(drawn, EXACT, (WIDE,))


def with_number(graph: Graph, change: Callable[[float], float]) -> Graph:
    """``graph`` whose first quotient by a number, of all its layers, has another one."""
    at, node = next((at, node) for at, node in enumerate(graph.nodes) if node.op == "aten.div.Tensor" and isinstance(node.args[1], float))
    changed = evolve(node, args=(node.args[0], change(float(node.args[1]))))  # type: ignore[arg-type]
    return evolve(graph, nodes=(*graph.nodes[:at], changed, *graph.nodes[at + 1:]))


def test_it_is_as_deep_as_the_default_configuration_and_nothing_is_written_in_place() -> None:
    model, graphs = captured()
    default = Gemma3nTextConfig()
    for name in ("num_hidden_layers", "num_kv_shared_layers", "layer_types", "activation_sparsity_pattern", "altup_num_inputs"):
        assert getattr(model.config, name) == getattr(default, name)
    assert not any(graph.spec(name).shape for graph in graphs.graphs for name in written_in_place(graph))  # but for thresholds


def test_prompts_and_steps_in_bfloat16_are_the_modules() -> None:
    assert not differs(captured()[1])


def test_a_number_that_was_rounded_to_the_models_type_is_seen() -> None:
    _, graphs = captured()
    wrong = tuple(with_number(graph, lambda number: float(torch.tensor(number, dtype=torch.bfloat16))) for graph in graphs.graphs)
    assert "in float64" in differs(evolve(graphs, graphs=wrong))
