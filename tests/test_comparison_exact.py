"""Models that magnify roundings are served, and mistakes in their graphs are seen as well as in those of usual ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve
from capture_models import SIZES, WORKLOAD, tiny
from graph_mutants import mutants
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import agentcompile_core as ac
from agentcompile_core.ir.graph import DType, GraphSet
from agentcompile_core.ops.agreement import is_by_rounding
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages import capture
from agentcompile_core.stages.capture import comparison, comparison_exact
from agentcompile_core.stages.capture.comparison import Agreed, difference
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.store import Store

SETTINGS = settings(max_examples=20, deadline=None, derandomize=True, database=None)
DEEP: dict[str, Any] = {**SIZES, "num_hidden_layers": 8}
EXPERTS: dict[str, Any] = {**DEEP, "num_hidden_layers": 5, "num_local_experts": 8, "num_experts_per_tok": 2}
NEO = {**{k: v for k, v in SIZES.items() if k != "num_hidden_layers"}, "attention_types": [[["global", "local"], 1]], "num_layers": 2,
       "window_size": 5}
MAMBA2 = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1,
          "chunk_size": 4}
USUAL: dict[str, dict[str, Any]] = {"gpt_neo": NEO, "granitemoe": {**EXPERTS, "num_hidden_layers": 2}, "mamba2": MAMBA2}


@cache
def captured(model_type: str, dtype: torch.dtype, deep: bool = False, sharp: float = 1.0, layers: int = 0) -> tuple[GraphSet, LoadedModel]:
    """``sharp``: how many times larger the matrices of q and k are; ``layers``: so many instead of the usual ones."""
    options = (EXPERTS if model_type == "granitemoe" else DEEP) if deep else USUAL.get(model_type, SIZES)
    model = tiny(model_type, {**options, "num_hidden_layers": layers} if layers else options, dtype)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(sharp)
    if sharp != 1.0:  # no graph says what is in a matrix
        return captured(model_type, dtype, deep, 1.0, layers)[0], LoadedModel(module=model, name=model_type)
    graphs = capture_language_model(model, model_type, evolve(WORKLOAD, dtype=DType(str(dtype).removeprefix("torch."))))
    return graphs, LoadedModel(module=model, name=model_type)


@cache
def mistakes(model_type: str, dtype: torch.dtype, deep: bool = False, layers: int = 0) -> dict[str, Callable[[], GraphSet]]:
    return dict(mutants(captured(model_type, dtype, deep, 1.0, layers)[0]))


CHAOTIC = [("llama", torch.float32, True, 16.0), ("granitemoe", torch.bfloat16, True, 4.0), ("gpt_oss", torch.bfloat16, False, 1.0)]


def judged_before(graphs: GraphSet, loaded: LoadedModel) -> str:
    """What is said where nothing is compared in float64."""
    def unable(*_: object) -> str:
        raise NotImplementedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison_exact, "difference", unable)
        return difference(graphs, loaded)


@pytest.mark.parametrize(("model_type", "dtype", "deep", "sharp"), CHAOTIC)
def test_right_graphs_of_models_that_magnify_roundings_are_served(model_type: str, dtype: torch.dtype, deep: bool, sharp: float) -> None:
    graphs, loaded = captured(model_type, dtype, deep, sharp)
    why = judged_before(graphs, loaded)
    assert is_by_rounding(why), "it does not magnify them enough to show anything"
    before = [parameter.clone() for parameter in loaded.module.parameters()]
    assert difference(graphs, loaded) == ""
    assert all(map(torch.equal, before, loaded.module.parameters()))


@pytest.mark.parametrize(("model_type", "dtype", "deep", "sharp"), CHAOTIC)
def test_the_same_bits_are_not_judged_twice_and_other_ones_are(model_type: str, dtype: torch.dtype, deep: bool, sharp: float,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, loaded = captured(model_type, dtype, deep, sharp)
    judge, seen = comparison_exact.difference, list[object]()
    monkeypatch.setattr(comparison_exact, "difference", lambda *given: seen.append(given) or judge(*given))
    first, again = Agreed(), Agreed()
    assert difference(graphs, loaded, first) == "" and len(seen) == 1 and first.now
    again.before = first.now
    assert difference(graphs, loaded, again) == "" and len(seen) == 1 and again.now == first.now
    parameter = [parameter for parameter in loaded.module.parameters() if parameter.dim() > 1][-1]
    other, kept = Agreed(before=first.now), parameter.detach().clone()
    try:
        parameter.data.mul_(1.25)
        assert difference(graphs, loaded, other) == "" and len(seen) == 2 and other.now not in ("", first.now)
    finally:
        parameter.data.copy_(kept)
    wrong = next(iter(mistakes(model_type, dtype, deep).values()))()
    assert difference(wrong, loaded, Agreed(before=first.now))


_said: list[tuple[Any, ...]] = []


@contextmanager
def modules_run_once() -> Iterator[None]:
    """What a module says of the same tokens is kept, and so is its copy in float32: whenever this is entered modules are as they were."""

    def asked(trials: Any) -> list[Any]:
        return [(one.tokens.tolist(), one.first, one.second, one.steps, one.at_once, one.offset) for one in trials]

    def once(made: Callable[..., Any]) -> Callable[..., Any]:
        def found(module: nn.Module, *given: Any) -> Any:
            if _get_current_dispatch_mode_stack():  # in other types than its own
                return made(module, *given)
            tokens = asked(given[0] if given and isinstance(given[0], list) else given)
            for of, one, known, said in _said:
                if of == made.__name__ and one is module and known == tokens:
                    return said
            _said.append((made.__name__, module, tokens, made(module, *given)))
            return _said[-1][-1]

        return found

    with pytest.MonkeyPatch.context() as patch:
        for name in ("reference", "prompt_rows", "_widened"):
            patch.setattr(comparison, name, once(getattr(comparison, name)))
        yield


def test_a_widened_copy_is_compared_once_and_again_for_other_weights_or_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, loaded = captured("llama", torch.bfloat16, layers=1)
    widened, seen = comparison._widened, list[object]()
    monkeypatch.setattr(comparison, "_widened", lambda module: seen.append(module) or widened(module))
    first = Agreed()
    assert difference(graphs, loaded, first) == "" and len(seen) == 1 and first.now
    again = Agreed(before=first.now)
    assert difference(graphs, loaded, again) == "" and len(seen) == 1 and again.now == first.now
    with modules_run_once():
        wrong = [make() for make in mistakes("llama", torch.bfloat16, layers=1).values()]
        served = [made for made in wrong if not difference(made, loaded, Agreed(before=first.now))]
        assert len(served) < len(wrong) and not any(difference(made, loaded) for made in served)
    parameter = [parameter for parameter in loaded.module.parameters() if parameter.dim() > 1][-1]
    kept, other = parameter.detach().clone(), Agreed(before=first.now)
    try:
        parameter.data.mul_(1.25)
        count = len(seen)
        assert difference(graphs, loaded, other) == "" and len(seen) == count + 1 and other.now not in ("", first.now)
    finally:
        parameter.data.copy_(kept)


def test_what_agreed_is_kept_beside_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm compile of a model that magnifies roundings runs nothing in float64. Its graphs, traced above, are traced no more."""
    graphs, loaded = captured(*CHAOTIC[0])
    monkeypatch.setattr(capture, "_captured", lambda *given: graphs)
    judge, seen, store = comparison_exact.difference, list[object](), Store(None)
    monkeypatch.setattr(comparison_exact, "difference", lambda *given: seen.append(given) or judge(*given))
    for _ in range(2):
        made = ac.compile(loaded.module, WORKLOAD, device="cpu", run_on="framework", store=store, validators=(), origins=[])
        assert not made.graphs.eager_reason and len(seen) == 1


@SETTINGS
@given(st.sampled_from(sorted(USUAL)), st.integers(0, 10_000))
def test_what_was_refused_still_is(model_type: str, number: int) -> None:
    """One mistake in any node of any graph: a number, a weight, an operator, a window, a state, a type that rounds."""
    loaded = captured(model_type, torch.float32)[1]
    made = mistakes(model_type, torch.float32)
    what = list(made)[number % len(made)]
    changed = made[what]()
    with modules_run_once():
        why = judged_before(changed, loaded)
        if why:
            assert difference(changed, loaded), f"{what} was refused, since {why}"


@SETTINGS
@given(st.sampled_from(CHAOTIC), st.integers(0, 10_000))
def test_mistakes_in_graphs_of_models_that_magnify_roundings_are_refused(model: tuple[str, torch.dtype, bool, float], number: int) -> None:
    """Whether one is a mistake says a model of the same type in float32 that magnifies nothing; one more rounding is none here, nor is
    what passed before, since it changes nothing where softmaxes are saturated."""
    model_type, dtype, deep, sharp = model
    calm, chaotic = captured(model_type, torch.float32, deep), captured(model_type, dtype, deep, sharp)
    calm_ones, chaotic_ones = mistakes(model_type, torch.float32, deep), mistakes(model_type, dtype, deep)
    names = [what for what in calm_ones if what in chaotic_ones and ": rounded" not in what and ": narrow type" not in what]
    what = names[number % len(names)]
    with modules_run_once():
        if judged_before(calm_ones[what](), calm[1]) and judged_before(wrong := chaotic_ones[what](), chaotic[1]):
            assert difference(wrong, chaotic[1]), what


@pytest.mark.parametrize("where", ["o_proj", "down_proj", "lm_head"])
def test_a_graph_in_float32_that_rounds_to_half_the_digits_is_refused_though_roundings_are_magnified(where: str) -> None:
    graphs, loaded = captured("llama", torch.float32, True, 16.0)
    weights = {node.name for node in graphs.graphs[0].nodes for name in node.inputs if where in name}
    made = mistakes("llama", torch.float32, True).items()
    found = [(what, one) for what, one in made if what.startswith("decode: rounded") and what.split()[3] in weights]
    assert found
    for _, changed in found[-1:]:
        why = difference(changed(), loaded)
        assert "its roundings come to" in why or "in float64" in why


class Deep(nn.Module):
    """Layers that each turn a difference into a larger one; ``rounds``: what a trace of it does beside, and it does not."""

    def __init__(self, gain: float, rounds: torch.dtype | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(12))
        self.gain, self.rounds = gain, rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(self.gain * layer(x))
            if self.rounds is not None and torch.compiler.is_compiling():
                x = x.to(self.rounds).to(torch.float32)
            elif torch.compiler.is_compiling():
                x = x * 3.0 / 3.0
        return x


@SETTINGS
@given(st.floats(5.0, 6.0), st.integers(0, 3), st.booleans())
def test_modules_that_magnify_roundings(gain: float, seed: int, rounds: bool) -> None:
    import agentcompile_core.api as api
    from agentcompile_core.plugin.discovery import load_catalog
    from agentcompile_core.store import Store

    torch.manual_seed(seed)
    module = Deep(gain, torch.bfloat16 if rounds else None).eval()
    made = api.compile(module, device="cpu", store=Store(None), catalog=load_catalog(only=()), example_inputs=(torch.randn(4, 24),))
    assert bool(made.graphs.eager_reason) is rounds, made.graphs.eager_reason


def test_where_float64_cannot_be_computed_the_verdict_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, loaded = captured("gpt_oss", torch.bfloat16)
    assert judged_before(graphs, loaded)
    monkeypatch.setattr(comparison, "is_by_rounding", lambda why: False)
    assert difference(graphs, loaded)


def test_a_mistake_that_saturated_softmaxes_multiply_by_zero_is_refused() -> None:
    loaded = captured("llama", torch.float32, True, 16.0)[1]
    what = "decode: model.layers.0.self_attn.k_proj.weight in place of model.layers.4.self_attn.v_proj.weight"
    wrong = next(one for name, one in mistakes("llama", torch.float32, True).items() if name.startswith(what))
    assert "with matrices that are 0.0625 of its own" in difference(wrong(), loaded)
