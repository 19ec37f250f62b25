"""The graphs of a deep model are those that torch.export would have made of it, wherever only its first layers were traced."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from capture_models import SIZES, TOKENS, WINDOWED, WORKLOAD, export_each_once, tiny
from test_capture_chunk_sizes import MODELS
from test_capture_models import CAPTURED, EXPERTS, WITHOUT_ITS_HELP
from torch import Tensor, nn

from agentcompile_core.ir.graph import GraphSet
from agentcompile_core.stages.capture import deep, language_model, layers
from agentcompile_core.stages.capture.deep import Deep
from agentcompile_core.stages.capture.export import export_decode
from agentcompile_core.stages.capture.language_model import capture_language_model, kv_spec
from agentcompile_core.stages.capture.layers import Depth, depth_of, pays
from agentcompile_core.stages.capture.states import held_by

ALL = {**CAPTURED, **EXPERTS, **WITHOUT_ITS_HELP}
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
DEEP = 4
# What these call cannot be told without a trace, or all their layers differ in a number.
WHOLE = {"falcon", "gpt_neo", "phimoe", "diffllama"}
KINDS = ["sliding_attention", "full_attention"]
SHORT: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "max_position_embeddings": 64, "block_auto_adjust_ff_dim": False, **TOKENS}
MAMBA2: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4, "num_heads": 4, "head_dim": 8,
                          "n_groups": 1, "chunk_size": 4, **TOKENS}
# Left to themselves the experts of six layers are a gigabyte.
FEW_EXPERTS = {"first_k_dense_replace": 1, "n_routed_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 2,
               "topk_group": 1}


@pytest.fixture(autouse=True)
def _whole_models_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was traced of the whole model is compared with that trace, one that was not with a trace of its own."""
    export_each_once(monkeypatch, deep, language_model)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Layers of a model that torch.export saw, and whether that came to the end, in order. Every model is deep enough."""
    seen: list[tuple[int, bool]] = []

    def counting(before: Callable[..., Any]) -> Callable[..., Any]:
        def counted(model: nn.Module, *rest: Any) -> Any:
            count = max(len(part) for part in model.modules() if isinstance(part, nn.ModuleList))
            seen.append((count, False))
            program = before(model, *rest)
            seen[-1] = (count, True)
            return program

        return counted

    for module in (deep, language_model):
        for name in ("export_decode", "export_prefill"):
            monkeypatch.setattr(module, name, counting(getattr(module, name)))
    monkeypatch.setattr(layers, "pays", lambda deep, shallow: deep > shallow)
    return seen


def captured(model: nn.Module, *sizes: int) -> GraphSet:
    graphs = capture_language_model(model, "m", evolve(WORKLOAD, prefill_chunks=sizes))
    assert not graphs.eager_reason
    return graphs


def exported(model: nn.Module, *sizes: int) -> GraphSet:
    """The same, all layers traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deep, "graph", lambda self, kv, tokens: None)
        return captured(model, *sizes)


def alternates(model_type: str) -> bool:
    """Whether its layers are of two kinds here, in turn."""
    return "sliding_window" in ALL[model_type] and model_type not in ("mistral", "starcoder2")


def deepened(model_type: str, count: int) -> nn.Module:
    options = {key: count if key in COUNTS else value for key, value in ALL[model_type].items()}
    if model_type == "gpt_neo":
        options |= {"num_layers": 6, "attention_types": [[["global", "local"], 3]]}
    elif alternates(model_type):
        options["layer_types"] = (KINDS * count)[count % 2 : count + count % 2]
    return tiny(model_type, {**options, **FEW_EXPERTS} if model_type == "deepseek_v3" else options)


def layers_of(model_type: str, odd: int) -> int:
    """Of alternating layers four or five are traced, of others two: these and one of each kind behind them, or two where there is one.

    Of DeepSeek's, whose first layer is of a kind of its own, three are traced.
    """
    return (6 if alternates(model_type) else 4 if model_type == "deepseek_v3" else 3) + odd


@pytest.mark.parametrize(("model_type", "count"), [(name, layers_of(name, i % 2)) for i, name in enumerate(MODELS)])
def test_graphs_are_the_exported_ones(model_type: str, count: int, traced: list[tuple[int, bool]]) -> None:
    model = deepened(model_type, count)
    found = captured(model, 3, 6, 10)
    whole = {seen for seen, ended in traced if ended and seen == (6 if model_type == "gpt_neo" else count)}
    assert bool(whole) is (model_type in WHOLE)
    assert found == exported(model, 3, 6, 10)


@pytest.mark.parametrize(("model_type", "options"), [
    ("lfm2", {**SHORT, "num_hidden_layers": 7, "layer_types": ["conv", *["conv", "conv", "full_attention"] * 2]}),
    ("lfm2", {**SHORT, "num_hidden_layers": 6, "layer_types": ["full_attention", "conv"] * 3}),
    ("mamba2", MAMBA2),
])
def test_graphs_with_states_are_the_exported_ones(model_type: str, options: dict[str, Any], traced: list[tuple[int, bool]]) -> None:
    model, pattern = tiny(model_type, options), options.get("layer_types", [])
    found = captured(model, 4, 8)
    repeats = len(pattern) != 7  # two periods of three behind the first layer are all there is
    assert ((options["num_hidden_layers"], True) in traced[:1]) is not repeats
    assert found == exported(model, 4, 8)


def test_a_model_of_few_layers_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pays(36, 2) and pays(26, 14) and not pays(2, 2) and not pays(6, 2) and not pays(20, 14)
    monkeypatch.setattr(deep, "first_layers", pytest.fail)
    captured(tiny("qwen3", {**SIZES, "num_hidden_layers": 6}), 4)


def llama(count: int = DEEP) -> Any:
    return tiny("llama", {**SIZES, "num_hidden_layers": count})


def replaced(part: nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Another forward, in an attribute of this module."""
    part.forward = change(part.forward)


def other_epsilon(parts: Any, at: int) -> None:
    parts[at].input_layernorm.variance_epsilon = 1e-3


def other_scale(parts: Any, at: int) -> None:
    parts[at].self_attn.scaling = 0.5


def other_activation(parts: Any, at: int) -> None:
    parts[at].mlp.act_fn = nn.GELU()


def shared_weight(parts: Any, at: int) -> None:
    parts[at].mlp.up_proj.weight = parts[at - 1].mlp.up_proj.weight


def foreign_weight(parts: Any, at: int) -> None:
    """Registered as ever, but another layer's is read."""
    replaced(parts[at].mlp.up_proj, lambda _: lambda x: nn.functional.linear(x, parts[at - 1].mlp.up_proj.weight))


def foreign_module(parts: Any, at: int) -> None:
    parts[at].mlp.forward = parts[at - 1].mlp.forward


def exchanged_layers(parts: Any, at: int) -> None:
    """Their caches stay: a layer writes what its number says."""
    one, other = parts[at - 1], parts[at]
    parts[at - 1], parts[at] = other, one


def branch(parts: Any, at: int) -> None:
    def branching(plain: Callable[..., Any], index: int) -> Callable[..., Any]:
        return lambda x: plain(x) * 2 if index == at else plain(x)

    for index, part in enumerate(parts):
        replaced(part.mlp, partial(branching, index=index))


def branch_while_exported(parts: Any, at: int) -> None:
    replaced(parts[at].mlp, lambda plain: lambda x: plain(x) * 2 if torch.compiler.is_exporting() else plain(x))


def long_residual(parts: Any, at: int) -> None:
    kept: dict[str, Tensor] = {}

    def keep(plain: Callable[..., Any]) -> Callable[..., Any]:
        def kept_now(x: Tensor) -> Tensor:
            kept["x"] = plain(x)
            return kept["x"]

        return kept_now

    replaced(parts[at - 2].mlp, keep)
    replaced(parts[at].mlp, lambda plain: lambda x: plain(x) + kept["x"])


def other_type(parts: Any, at: int) -> None:
    parts[at].mlp.double()
    replaced(parts[at].mlp, lambda plain: lambda x: plain(x.double()).to(x.dtype))


def other_way_round(parts: Any, at: int) -> None:
    replaced(parts[at].mlp, lambda plain: lambda x: x + plain(x))
    for index, part in enumerate(parts):
        if index != at:
            replaced(part.mlp, lambda plain: lambda x: plain(x) + x)


def literal(parts: Any, at: int) -> None:
    for index, part in enumerate(parts):
        replaced(part.mlp, partial(lambda plain, factor: lambda x: plain(x) * torch.tensor(factor), factor=3.0 if index == at else 2.0))


def factor_of_each(parts: Any, at: int) -> None:
    for index, part in enumerate(parts):
        replaced(part.mlp, partial(lambda plain, number: lambda x: plain(x) / (number + at + 0.5), number=index))


def square_of_each(parts: Any, at: int) -> None:
    for index, part in enumerate(parts):
        replaced(part.mlp, partial(lambda plain, number: lambda x: plain(x) * number, number=(index + at) ** 2))


def left_out(parts: Any, at: int) -> None:
    parts[at].mlp.forward = lambda x: x


def of_half(parts: Any, at: int) -> None:
    """The same numbers for a tensor of memory; another type for any that follows."""
    replaced(parts[at].mlp, lambda plain: lambda x: plain(x.half().float()))


PLANTS = [
    other_epsilon, other_scale, other_activation, shared_weight, foreign_weight, foreign_module, exchanged_layers, branch,
    branch_while_exported, long_residual, other_type, other_way_round, literal, factor_of_each, square_of_each, left_out, of_half,
]


@pytest.mark.parametrize(("plant", "at"), [
    *((plant, 2) for plant in PLANTS), *((plant, DEEP - 1) for plant in (other_epsilon, foreign_weight, exchanged_layers, left_out)),
])
def test_layer_that_is_another_one_is_traced(
    plant: Callable[[Any, int], None], at: int, traced: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever can be seen of the layers from outside is not looked at, so that the calls alone must show it."""
    monkeypatch.setattr(layers, "_looks", lambda lists, config, deep: [{}] * deep)
    model = llama()
    plant(model.model.layers, at)
    found = captured(model, 4)
    assert traced[0][0] == 2 and (DEEP, True) in traced
    assert found.graphs == exported(model, 4).graphs


@pytest.mark.parametrize("plant", [other_scale, other_activation])
def test_layer_that_looks_like_another_one_may_be_a_first_one(plant: Callable[[Any, int], None], traced: list[tuple[int, bool]]) -> None:
    model = llama(6)
    plant(model.model.layers, 2)
    found = captured(model, 4)
    assert {seen for seen, _ in traced} == {5} and found == exported(model, 4)


def test_layer_with_another_window_is_traced(traced: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_looks", lambda lists, config, deep: [{}] * deep)
    types = [KINDS[0]] * 2 + [KINDS[1], KINDS[0]]
    model = tiny("gemma2", {**WINDOWED, "num_hidden_layers": DEEP, "layer_types": types})
    found = captured(model, 4)
    assert traced[0][0] == 2 and (DEEP, True) in traced and found == exported(model, 4)


def test_integers_that_count_the_layers_are_no_obstacle(traced: list[tuple[int, bool]]) -> None:
    model = llama()
    for index, part in enumerate(model.model.layers):
        replaced(part.mlp, partial(lambda plain, number: lambda x: plain(x) + number, number=3 * index + 1))
    found = captured(model, 4)
    assert {seen for seen, _ in traced} == {2} and found == exported(model, 4)


def test_weight_of_all_layers_stays_one(traced: list[tuple[int, bool]]) -> None:
    model = llama()
    for part in model.model.layers:
        part.mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    found = captured(model, 4)
    assert {seen for seen, _ in traced} == {2} and found == exported(model, 4)


def test_the_model_itself_is_never_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while its twin is traced: its own thread may run it."""
    model: Any = llama(7)
    before = {path: {**vars(part), "_modules": dict(part._modules)} for path, part in model.named_modules()}
    plain, seen = export_decode, []

    def looking(twin: Any, *rest: Any) -> Any:
        assert len(twin.model.layers) == 2 and twin.model.layers[1] is model.model.layers[1] and twin.lm_head is model.lm_head
        seen.append({path: {**vars(part), "_modules": dict(part._modules)} for path, part in model.named_modules()} == before)
        return plain(twin, *rest)

    monkeypatch.setattr(deep, "export_decode", looking)
    captured(model, 4)
    assert seen == [True]
    assert {path: {**vars(part), "_modules": dict(part._modules)} for path, part in model.named_modules()} == before


def test_periods_are_found() -> None:
    def depth(model_type: str, options: dict[str, Any]) -> Depth | None:
        model = tiny(model_type, options)
        return depth_of(model, kv_spec(model, WORKLOAD, held_by(model)), held_by(model))

    def gemma(types: list[str]) -> Depth | None:
        return depth("gemma3_text", {**WINDOWED, "num_hidden_layers": len(types), "layer_types": types})

    wanted = {"paths": ("model.layers",)}
    assert gemma(KINDS * 9) == Depth(deep=18, shallow=4, period=2, **wanted)
    assert gemma([KINDS[0], *KINDS * 9]) == Depth(deep=19, shallow=5, period=2, **wanted)
    assert gemma([*[KINDS[0]] * 3, *[KINDS[1]] * 16]) == Depth(deep=19, shallow=5, period=1, **wanted)
    assert gemma([KINDS[0]] * 18 + KINDS) is None
    conv = {**SHORT, "num_hidden_layers": 18, "layer_types": ["conv", "conv", "full_attention"] * 6}
    assert depth("lfm2", conv) == Depth(deep=18, shallow=6, period=3, **wanted)
