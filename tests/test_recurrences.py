"""``agentcompile.recurrence``: what it says, and what transformers' scans and delta rules become of it in a trace."""

import importlib
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from capture_models import TOKENS, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, GraphKind, Workload
from agentcompile_core.ops import recurrence as operator
from agentcompile_core.ops.operator_names import RECURRENCE
from agentcompile_core.ops.recurrence import recurrence, shape_only
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages.capture import recurrences
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.language_model import capture_language_model

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


@frozen(kw_only=True)
class Sizes:
    """Of one call: tokens, heads of a group, groups, rows and terms of a head's state."""

    tokens: int
    shared: int
    groups: int
    rows: int
    terms: int
    begins: bool
    optional: tuple[bool, ...]  # which of the arguments are given that need not be
    seed: int

    def drawn(self, *shape: int) -> torch.Tensor:
        """Normal numbers, others for every shape."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed + sum(shape)))

    @property
    def heads(self) -> int:
        """All of them."""
        return self.shared * self.groups


SIZES = st.builds(Sizes, tokens=st.integers(2, 19), shared=st.integers(1, 3), groups=st.integers(1, 3), rows=st.integers(1, 5),
                  terms=st.integers(1, 6), begins=st.booleans(), optional=st.tuples(*[st.booleans()] * 4), seed=st.integers(0, 999))


def published(module: str, kernel: str) -> Any:
    """transformers' function whose kernel is called so."""
    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return next(value for value in vars(found).values() if recurrences.kernel_name(value) == kernel)


def grouped(one: Sizes, function: Any) -> Sizes:
    """``one``, or with keys for each head, where this version of transformers repeats them before it calls ``function``."""
    return one if "num_k_heads" in function.__wrapped__.__code__.co_varnames else evolve(one, shared=1)


def check(function: Any, *args: Any, **keywords: Any) -> None:
    """What a trace of ours puts in the place of ``function`` computes the same."""
    ours = recurrences._either(recurrences._OURS[recurrences.kernel_name(function)], function)
    mine, theirs = ours(*args, **keywords), function(*args, **keywords)
    for one, other in zip(mine if isinstance(mine, tuple) else (mine,), theirs if isinstance(theirs, tuple) else (theirs,), strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert one.shape == other.shape and one.dtype is other.dtype
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@SETTINGS
@given(one=SIZES)
def test_selective_scans(one: Sizes) -> None:
    skips, gated, biased, soft = one.optional
    width = one.heads
    state = {"return_last_state": True} if one.begins else {}
    check(published("mamba", "selective_scan_fn"), one.drawn(1, width, one.tokens), one.drawn(1, width, one.tokens).abs(),
          -one.drawn(width, one.terms).abs(), one.drawn(1, one.terms, one.tokens), one.drawn(1, one.terms, one.tokens),
          D=one.drawn(width) if skips else None, z=one.drawn(1, width, one.tokens) if gated else None,
          delta_bias=one.drawn(width).abs() if biased else None, delta_softplus=soft, **state)


@SETTINGS
@given(one=SIZES, bounded=st.booleans(), returned=st.booleans())
def test_chunk_scans(one: Sizes, bounded: bool, returned: bool) -> None:
    skips, _, biased, soft = one.optional
    check(published("mamba2", "mamba_chunk_scan_combined"), one.drawn(1, one.tokens, one.heads, one.rows),
          one.drawn(1, one.tokens, one.heads).abs(), -one.drawn(one.heads).abs(), one.drawn(1, one.tokens, one.groups, one.terms),
          one.drawn(1, one.tokens, one.groups, one.terms), chunk_size=4, D=one.drawn(one.heads) if skips else None,
          dt_bias=one.drawn(one.heads).abs() if biased else None, dt_softplus=soft, dt_limit=(0.1, 0.9) if bounded else (0.0, float("inf")),
          initial_states=one.drawn(1, one.heads, one.rows, one.terms) if one.begins else None, return_final_states=returned)


@SETTINGS
@given(one=SIZES, returned=st.booleans(), of_terms=st.booleans())
def test_delta_rules(one: Sizes, returned: bool, of_terms: bool) -> None:
    if of_terms:
        pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    function = published("kimi_linear", "chunk_kda") if of_terms else published("qwen3_next", "chunk_gated_delta_rule")
    one = grouped(one, function)
    keys, terms = (1, one.tokens, one.groups, one.terms), (one.terms,) if of_terms else ()
    check(function, one.drawn(*keys), one.drawn(*keys).flip(1), one.drawn(1, one.tokens, one.heads, one.rows),
          g=-one.drawn(1, one.tokens, one.heads, *terms).abs(), beta=one.drawn(1, one.tokens, one.heads).sigmoid(), chunk_size=4,
          initial_state=one.drawn(1, one.heads, one.terms, one.rows) if one.begins else None, output_final_state=returned,
          use_qk_l2norm_in_kernel=True)


@SETTINGS
@given(one=SIZES, gated=st.booleans(), width=st.integers(2, 4))
def test_single_tokens(one: Sizes, gated: bool, width: int) -> None:
    """Of both scans, of a delta rule and of a convolution, the states that are written in place among them."""
    skips, silu, biased, soft = one.optional

    def check_in_place(function: Any, state: torch.Tensor, *args: Any, at: int = 0, **keywords: Any) -> None:
        ours = recurrences._either(recurrences._OURS[recurrences.kernel_name(function)], function)
        mine, theirs = state.clone(), state.clone()
        found, wanted = (run(*args[:at], kept, *args[at:], **keywords) for run, kept in ((ours, mine), (function, theirs)))
        torch.testing.assert_close((found, mine), (wanted, theirs), atol=2e-5, rtol=2e-5)

    rows, width_of_one = one.drawn(1, one.heads), one.heads
    numbers = (one.drawn(width_of_one).abs(), one.drawn(width_of_one).abs())
    check_in_place(published("mamba", "selective_state_update"), one.drawn(1, width_of_one, one.terms), rows, rows.abs(),
                   -one.drawn(width_of_one, one.terms).abs(), one.drawn(1, one.terms), one.drawn(1, one.terms).flip(1),
                   numbers[0] if skips else None, z=rows.flip(1) if gated else None, dt_bias=numbers[1] if biased else None,
                   dt_softplus=soft)
    heads, lines = (one.heads, one.rows), one.drawn(1, one.groups, one.terms)
    spread = [number[:, None].expand(*heads) for number in numbers]
    check_in_place(published("mamba2", "selective_state_update"), one.drawn(1, *heads, one.terms), one.drawn(1, *heads),
                   rows.abs()[..., None].expand(1, *heads), -numbers[0][:, None, None].expand(*heads, one.terms), lines, lines.flip(2),
                   spread[0] if skips else None, dt_bias=spread[1] if biased else None, dt_softplus=soft)
    rule = published("qwen3_next", "fused_recurrent_gated_delta_rule")
    one = grouped(one, rule)
    keys, beta = one.drawn(1, 1, one.groups, one.terms), one.drawn(1, 1, one.heads)
    check(rule, keys, keys.flip(3), one.drawn(1, 1, one.heads, one.rows), g=-beta.abs(), beta=beta.sigmoid(),
          initial_state=one.drawn(1, one.heads, one.terms, one.rows), output_final_state=True, use_qk_l2norm_in_kernel=True)
    channels = one.heads
    check_in_place(published("mamba2", "causal_conv1d_update"), one.drawn(1, channels, width), one.drawn(1, channels, 1),
                   one.drawn(channels, width), one.drawn(channels) if biased else None, "silu" if silu else None, at=1)


def test_what_is_not_understood_is_left_to_the_model() -> None:
    scan = published("mamba2", "mamba_chunk_scan_combined")
    two = torch.randn(2, 5, 2, 3), torch.rand(2, 5, 2), -torch.rand(2), torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 4)
    single = [tensor[:1, :1] if tensor.dim() > 1 else tensor for tensor in two]
    ours = recurrences._either(recurrences._OURS["mamba_chunk_scan_combined"], scan)
    for given_tensors in (two, single):
        torch.testing.assert_close(ours(*given_tensors, chunk_size=4), scan(*given_tensors, chunk_size=4))
    assert recurrences.kernel_name(lambda func_name="selective_scan_fn": func_name) == "" and recurrences.kernel_name(3) == ""


@SETTINGS
@given(one=SIZES, at=st.integers(0, 20), delta=st.booleans(), cut=st.integers(1, 18))
def test_padding_and_parts_leave_the_state_of_the_tokens(one: Sizes, at: int, delta: bool, cut: int) -> None:
    """Tokens behind ``valid`` change nothing and read zeros; two parts, the second from the first one's state, are the whole."""
    state, x = one.drawn(1, one.heads, one.terms, one.rows).mT, one.drawn(1, one.tokens, one.heads, one.rows)
    lines = one.drawn(1, one.tokens, one.groups, one.terms)
    rows = [-one.drawn(1, one.tokens, one.heads).abs(), x, lines, lines.flip(1)]
    strength = one.drawn(1, one.tokens, one.heads).sigmoid() if delta else None

    def run(begin: torch.Tensor, first: int, end: int, valid: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return recurrence(begin, *(tensor[:, first:end] for tensor in rows), None, None if strength is None else strength[:, first:end],
                          None if valid is None else torch.tensor([valid]))

    live = min(at, one.tokens)
    y, last = run(state, 0, one.tokens, at)
    wanted, kept = run(state, 0, live)
    with pytest.MonkeyPatch.context() as patch:  # as where nobody may ask the device
        patch.setattr(operator, "_live", lambda valid, tokens: None if valid is not None else tokens)
        torch.testing.assert_close(run(state, 0, one.tokens, at), (y, last))
    torch.testing.assert_close((y[:, :live], last), (wanted, kept))
    assert not y[:, live:].any() and y.is_contiguous() and last.stride() == state.stride()
    cut = min(cut, one.tokens - 1)
    (first, middle), (second, end) = run(state, 0, cut), run(run(state, 0, cut)[1], cut, one.tokens)
    whole, final = run(state, 0, one.tokens)
    torch.testing.assert_close((torch.cat([first, second], 1), end), (whole, final), atol=1e-5, rtol=1e-5)
    assert middle.shape == state.shape
    shapes = shape_only(state, *rows, None, strength)
    assert [tensor.shape for tensor in shapes] == [whole.shape, final.shape]


@pytest.mark.parametrize("wrong", ["heads", "terms", "strength", "dtype", "rates"])
def test_operands_that_do_not_fit_are_refused(wrong: str) -> None:
    heads, terms = 4, 5
    state, decay, x = torch.zeros(1, heads, 3, terms), torch.zeros(1, 2, heads), torch.zeros(1, 2, heads, 3)
    keys, rates, strength = torch.zeros(1, 2, 2, terms), torch.zeros(heads, terms), torch.zeros(1, 2, heads)
    shape_only(state, decay, x, keys, keys, rates, strength)
    other = {"heads": (state, decay[..., 1:], x, keys, keys), "terms": (state, decay, x, keys, keys[..., 1:]),
             "strength": (state, decay, x, keys, keys, None, strength[:, 1:]), "dtype": (state, decay.half(), x, keys, keys),
             "rates": (state, decay, x, keys, keys, rates[1:])}[wrong]
    with pytest.raises(RuntimeError, match="recurrence"):
        shape_only(*other)


DELTA: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "max_position_embeddings": 64, **TOKENS}


def test_a_delta_rule_is_one_operator_of_a_chunk_that_takes_padding() -> None:
    model = tiny("qwen3_5_text", DELTA)
    graphs = capture_language_model(model, "m", Workload(dtype=DType.F32, max_context=24, prefill_chunks=(4, 8)))
    assert not graphs.whole_chunks and {g.tokens for g in graphs.of_kind(GraphKind.PREFILL)} == {4, 8}, graphs.eager_reason
    for graph in graphs.of_kind(GraphKind.PREFILL):
        assert [node.op for node in graph.nodes].count(RECURRENCE) == 1
    assert difference(graphs, LoadedModel(module=model, name="m")) == ""
