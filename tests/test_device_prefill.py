"""On a GPU: prompts of many lengths through captured pieces, in half precision by libraries, and their time over capacity."""

import statistics
import time
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from capture_models import TOKENS, tiny
from test_live_prefill import MODELS
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, GraphSet, Workload
from agentcompile_core.ops import live_attention, operators
from agentcompile_core.ops.experts import expert_linear
from agentcompile_core.ops.operator_names import RMS_NORM as RMS
from agentcompile_core.ops.operators import AttentionCall
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import Backend
from agentcompile_core.plugin_api import Feature, Heads, Scoring
from agentcompile_core.runtime.built_in import PlainKVCache
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CHUNKS = (32, 64, 128)
HALF: dict[str, Any] = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768, **TOKENS}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_catalog(only=("cuda",)).find("agentcompile_backends", "cuda")  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def session(model: nn.Module, backend: Backend, context: int, chunks: tuple[int, ...] = CHUNKS, prefill: str = "live") -> Session:
    from agentcompile_runtime_cudagraph import CudaGraphRuntime

    dtype = DType(str(next(model.parameters()).dtype).removeprefix("torch."))
    graphs: GraphSet = capture_language_model(model, "tiny", Workload(dtype=dtype, max_context=context, prefill_chunks=chunks))
    assert graphs.graphs and graphs.kv is not None, graphs.eager_reason
    mine = Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model.cuda(), "cuda"),
                   Executables(device="cuda", backend=backend, prefill=prefill), kv_state=PlainKVCache().allocate(graphs.kv, "cuda"),
                   decode=CudaGraphRuntime())
    mine.prepare()
    assert {name: step.reason for name, step in mine._steps.items()} == dict.fromkeys(mine._steps, "")  # type: ignore[attr-defined]
    return mine


def has_wgmma(backend: Backend) -> bool:
    target = backend.live_target()
    assert target is not None
    return target.has(Feature.WGMMA)


def first_logits(mine: Session, prompt: Tensor) -> Tensor:
    with torch.inference_mode():
        return mine.prefill(prompt).output(0)[0, -1].float().cpu()


def prompt_of(length: int) -> Tensor:
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_any_length_give_the_modules_logits(name: str, backend: Backend) -> None:
    model = tiny(name, MODELS[name])
    mine = session(model, backend, 60, (4, 8))
    for length in (1, 3, 4, 5, 8, 9, 16, 26, 59, 27, 2):
        with torch.inference_mode():
            wanted = model(prompt_of(length).cuda(), use_cache=False).logits[0, -1].cpu()
        torch.testing.assert_close(first_logits(mine, prompt_of(length)), wanted, rtol=1e-3, atol=1e-3 * float(wanted.std()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by", ["kernel", "libraries"])
def test_half_precision_is_as_near_to_fp32_as_the_whole_cache_under_a_mask(by: str, dtype: torch.dtype, backend: Backend,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel over all, and through the libraries, histories in several parts: errors against the module in fp32 beside those of the
    other form."""
    monkeypatch.setattr(live_attention, "LARGE", CHUNKS[-1])
    if by == "libraries":
        monkeypatch.setattr(backend, "attend_cached", lambda *_, **__: False)
    model = tiny("llama", HALF, dtype)
    wide = tiny("llama", HALF).cuda()
    wide.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    live, masked = (session(model, backend, 1024, prefill=form) for form in ("live", "capacity"))
    for length in (5, 127, 129, 300, 384, 7 * 128, 1000):
        with torch.inference_mode():
            wanted = wide(prompt_of(length).cuda(), use_cache=False).logits[0, -1].cpu()
        ours, theirs = ((first_logits(mine, prompt_of(length)) - wanted).square().mean().sqrt() for mine in (live, masked))
        assert float(ours) <= 1.5 * float(theirs) + 1e-3 * float(wanted.std()), length
    kernels = {key[0]: used for key, used in backend._rows._served.items() if dtype in key}  # type: ignore[attr-defined]
    wanted_kernels = {"norm_rows_warp", "add_norm_rows", "place_heads", "gate_rows", *(["merge_rows"] if by == "libraries" else [])}
    assert wanted_kernels <= kernels.keys() and all(kernels.values())


@pytest.mark.filterwarnings("always")
def test_the_host_waits_once_per_prompt(backend: Backend, recwarn: pytest.WarningsRecorder) -> None:
    """For the copy of all numbers of its chunks: then it runs ahead of the device, from chunk to chunk."""
    mine = session(tiny("llama", HALF, torch.float16), backend, 1024)
    for length in (5, 128, 1000):
        first_logits(mine, prompt_of(length))  # libraries prepare themselves
        recwarn.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with torch.inference_mode():
                mine.prefill(prompt_of(length))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [str(one.message) for one in recwarn if "called a synchronizing" in str(one.message)]
        assert len(waits) <= 1, waits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count, start, rotary", [(128, 0, 128), (128, 1000, 64), (2048, 2048, 128), (7, 3, 32)])
def test_heads_are_placed_as_by_the_operators(dtype: torch.dtype, count: int, start: int, rotary: int, backend: Backend) -> None:
    """Bit by bit where no norm is; with one, as its kernel alone and the rotation behind it, a unit apart at the most elements."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    generator, numbers = torch.Generator("cuda").manual_seed(count), (16, 8, 8)
    rows = [one.transpose(1, 2) for one in normal(1, count, 32, 128).split(numbers, 2)]
    at, (cos, sin) = torch.tensor([start], device="cuda"), (normal(1, count, rotary) for _ in range(2))
    for norms in (False, True):
        norm = [(normal(128), 1e-6, False, False) if norms and i < 2 else () for i in range(3)]
        outs = [torch.full((1, n, start + count + 5 if i else count, 128), 7.0, dtype=dtype, device="cuda") for i, n in enumerate(numbers)]
        heads = [Heads(rows=x, out=out, at=at if i else None, norm=norm[i], turn=(cos, sin, False) if i < 2 else ())
                 for i, (x, out) in enumerate(zip(rows, outs, strict=True))]
        assert backend.place(heads)
        for one in heads:
            first, wanted = 0 if one.at is None else start, torch.full_like(one.out, 7.0)
            made = operators.rms_norm(one.rows, *one.norm) if one.norm else one.rows
            wanted[:, :, first : first + count] = operators.rope(made, *one.turn) if one.turn else made
            if not one.norm:
                assert torch.equal(one.out, wanted)
                continue
            torch.testing.assert_close(one.out, wanted, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
            assert float((one.out == wanted).float().mean()) > 0.99


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count, columns", [(128, 2048), (2048, 2048), (33, 256), (5, 12288)])
def test_sums_with_norms_are_the_operators(dtype: torch.dtype, count: int, columns: int, backend: Backend) -> None:
    generator = torch.Generator("cuda").manual_seed(count)
    left, right = (torch.randn(1, count, columns, generator=generator, device="cuda", dtype=dtype) * 3 for _ in range(2))
    weight, body = torch.randn(columns, generator=generator, device="cuda", dtype=dtype), backend.body("aten.add.Tensor", RMS)
    assert body is not None
    total, out = body(left, right, weight, 1e-6)
    wanted = operators.rms_norm(left + right, weight, 1e-6)
    assert torch.equal(total, left + right)
    # The normed row may be rounded otherwise where sums are added in another order, and its product with the weight then again.
    torch.testing.assert_close(out, wanted, rtol=2.01 * torch.finfo(dtype).eps, atol=1e-6)
    assert float((out == wanted).float().mean()) > 0.99


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count, start", [(128, 1000), (2048, 0), (2048, 2048 * 3), (2048, 777), (1024, 5120)])
def test_libraries_give_the_formula(dtype: torch.dtype, count: int, start: int, backend: Backend) -> None:
    generator = torch.Generator("cuda").manual_seed(count + start)
    q = torch.randn(1, count, 16, 128, generator=generator, device="cuda", dtype=dtype).transpose(1, 2)
    caches = [torch.randn(1, start + count + 64, 8, 128, generator=generator, device="cuda", dtype=dtype) for _ in range(2)]
    call = AttentionCall(q, q, q, *caches, torch.tensor([start], device="cuda"), 0.09)
    assert backend.attend(q, *(c[:, :count].transpose(1, 2) for c in caches), causal=True, scale=0.09) is not None
    wanted = live_attention.attend(
        AttentionCall(q.float(), q, q, *(c.float() for c in caches), call.position, 0.09), start)
    found, masked = live_attention.attend(call, start, part=backend.attend), live_attention.attend(call, start)
    merged = live_attention.attend(call, start, part=backend.attend, merged=backend.merge)
    torch.testing.assert_close(merged, found, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    errors = [(x.float() - wanted).square().mean().sqrt() for x in (found, masked)]
    assert float(errors[0]) <= 1.5 * float(errors[1]) + 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 8, 128), (12, 2, 128), (6, 6, 128), (32, 8, 64), (3, 1, 64)])
@pytest.mark.parametrize("count, start", [(1, 0), (64, 0), (65, 1), (128, 127), (191, 0), (193, 500), (300, 77), (1024, 1000), (4100, 129),
                                          (3000, 5300)])
def test_the_kernel_over_all_gives_the_formula(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, count: int, start: int,
                                               backend: Backend) -> None:
    """Over caches behind whose live rows NaN lies, into rows behind which something else does; at most as far off as SDPA's twice."""
    generator = torch.Generator("cuda").manual_seed(count + start)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    live = start + count
    q, caches = normal(1, count, heads, dim).transpose(1, 2), [normal(1, live + 70, kv_heads, dim) for _ in range(2)]
    for cache in caches:
        cache[:, live:] = float("nan")
    k, v = (cache[:, :live].transpose(1, 2) for cache in caches)
    place = torch.full((1, count + 3, heads, dim), 7.0, device="cuda", dtype=dtype)
    served = backend.attend_cached(q, k, v, place[:, :count].transpose(1, 2), scale=0.09)
    assert served is has_wgmma(backend)
    if not served:
        pytest.skip("this GPU has no wgmma")
    assert bool((place[:, count:] == 7.0).all())
    seen = torch.arange(live, device="cuda") <= start + torch.arange(count, device="cuda")[:, None]
    wanted, framework = (torch.nn.functional.scaled_dot_product_attention(
        *(x.to(kind) for x in (q, k, v)), attn_mask=seen, scale=0.09, enable_gqa=True).float() for kind in (torch.float32, dtype))
    errors = [float((found.float() - wanted).abs().max()) for found in (place[:, :count].transpose(1, 2), framework)]
    assert errors[0] <= 2 * errors[1] + 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, dim, wide, scores", [
    (8, 4, 256, 256, {"window": 512, "softcap": 50.0}), (8, 4, 256, 256, {"softcap": 50.0}), (4, 1, 256, 256, {"window": 100}),
    (8, 4, 256, 256, {}), (32, 32, 96, 96, {"window": 300}), (6, 6, 96, 96, {}), (16, 2, 64, 64, {"window": 128, "sinks": True}),
    (16, 2, 64, 64, {"sinks": True}), (8, 2, 128, 128, {"window": 1}), (8, 2, 128, 128, {"window": 700}),
    (4, 4, 192, 128, {}), (4, 4, 80, 80, {}), (4, 4, 64, 64, {"slopes": True}), (4, 4, 128, 128, {"slopes": True, "window": 200})])
@pytest.mark.parametrize("count, start", [(130, 0), (700, 333), (4097, 1)])
def test_windows_caps_and_sinks_are_those_of_the_operator(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, wide: int,
                                                          scores: dict[str, Any], count: int, start: int, backend: Backend) -> None:
    """As near to the operator in fp32 as it is itself in half precision, twice; what windows hide and what lies behind holds NaN."""
    generator = torch.Generator("cuda").manual_seed(count + start)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    live, window = start + count, scores.get("window", 0)
    caches = [normal(1, live + 70, kv_heads, width) for width in (dim, wide)]
    for cache in caches:
        cache[:, live:] = float("nan")
        cache[:, : max(0, start - window + 1) if window else 0] = float("nan")
    nothing = normal(1, 1, 1, 1)
    call = AttentionCall(2 * normal(1, heads, count, dim), nothing, nothing, *caches, torch.tensor([start], device="cuda"), dim**-0.5,
                         window, scores.get("softcap", 0.0), normal(heads) if "sinks" in scores else None,
                         slopes=[0.5**head for head in range(heads)] if "slopes" in scores else None)
    asked: list[bool] = []

    def over_all(*tensors: Tensor, scale: float, **more: Any) -> bool:
        asked.append(backend.attend_cached(*tensors, scale=scale, scoring=Scoring(**more) if more else None))
        return asked[-1]

    found = live_attention.attend(call, start, over_all=over_all)
    assert asked == [has_wgmma(backend)]
    if not asked[0]:
        pytest.skip("this GPU has no wgmma")
    clean = evolve(call, k_cache=caches[0].nan_to_num(), v_cache=caches[1].nan_to_num())
    exact = evolve(clean, **{name: getattr(clean, name).float() for name in ("q", "k_cache", "v_cache")},
                   sinks=None if clean.sinks is None else clean.sinks.float())
    wanted, framework = (live_attention.attend(one, start).float() for one in (exact, clean))
    errors = [float((one.float() - wanted).abs().max()) for one in (found, framework)]
    assert errors[0] <= 2 * errors[1] + 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns, terms", [(4096, 2048), (2048, 6144), (1000, 264), (151936, 1024), (7, 8), (2560, 9728), (9728, 2560)])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_products_of_few_rows_are_the_frameworks(dtype: torch.dtype, columns: int, terms: int, count: int, backend: Backend) -> None:
    generator = torch.Generator("cuda").manual_seed(count)
    x, gate, up = (torch.randn(*size, generator=generator, device="cuda", dtype=dtype) * terms**-0.25
                   for size in ((1, count, terms), (columns, terms), (columns, terms)))
    gated, plain = backend.body("aten.linear.default", "aten.silu.default", "aten.mul.Tensor"), backend.body("aten.linear.default")
    bias = up[:, 0].contiguous()
    assert plain is not None and gated is not None
    target = backend.live_target()
    assert target is not None
    if not target.has(Feature.BULK_COPY):
        assert plain(x, gate) is None
        pytest.skip("this GPU has no bulk copies")
    left, right = (torch.nn.functional.linear(x.double(), one.double()) for one in (gate, up))
    eps = torch.finfo(dtype).eps
    for given in ((x, gate), (x, gate, bias)):
        wanted = left + (bias.double() if len(given) > 2 else 0.0)
        for _ in range(3):
            assert bool(((plain(*given).double() - wanted).abs() <= eps * wanted.abs() + 1e-3).all())
    for how in ({}, {"approximate": "tanh"}):
        by = backend.body("aten.linear.default", "aten.gelu.default", "aten.mul.Tensor") if how else gated
        active, found = torch.nn.functional.gelu(left, **how) if how else torch.nn.functional.silu(left), by(x, gate, up, **how).double()
        assert bool(((found - active * right).abs() <= eps * (2 * (active * right).abs() + 2.3 * left.abs() * right.abs()) + 1e-3).all())


def test_the_kernel_over_all_takes_what_it_reads_and_nothing_else(backend: Backend) -> None:
    q = torch.randn(1, 130, 4, 128, device="cuda", dtype=torch.float16).transpose(1, 2)
    out = torch.empty_like(q)
    assert backend.attend_cached(q, q, q, out, scale=0.1) is has_wgmma(backend)
    wide = torch.randn(1, 130, 4, 129, device="cuda", dtype=torch.float16).transpose(1, 2)
    for queries, keys, scale in ((q.float(), q, 0.1), (q.to(torch.bfloat16), q, 0.1), (q, q[:, :, :100], 0.1), (q, q, -0.1),
                                 (wide[..., 1:], q, 0.1), (q[..., :64], q[..., :64], 0.0), (q, q[:, :3], 0.1),
                                 (q[..., :40], q[..., :40], 0.1)):
        assert not backend.attend_cached(queries, keys, keys, torch.empty_like(queries), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation, how", [("silu", {}), ("gelu", {}), ("gelu", {"approximate": "tanh"}), ("relu", {})])
@pytest.mark.parametrize("count, columns, terms", [(1024, 6144, 2048), (1500, 1000, 264), (4097, 8960, 1536), (1025, 136, 72)])
def test_gated_products_are_the_frameworks(dtype: torch.dtype, activation: str, how: dict[str, str], count: int, columns: int, terms: int,
                                           backend: Backend) -> None:
    generator = torch.Generator("cuda").manual_seed(count)
    x, gate, up = (torch.randn(*size, generator=generator, device="cuda", dtype=dtype) * terms**-0.25
                   for size in ((1, count, terms), (columns, terms), (columns, terms)))
    body = backend.body("aten.linear.default", f"aten.{activation}.default", "aten.mul.Tensor")
    assert body is not None
    found = body(x, gate, up, **how)
    assert (found is not None) is has_wgmma(backend)
    if found is None:
        pytest.skip("this GPU has no wgmma")
    act, linear = partial(getattr(torch.nn.functional, activation), **how), torch.nn.functional.linear
    framework, wanted = act(linear(x, gate)) * linear(x, up), act(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    errors = [float((one.double() - wanted).square().mean().sqrt()) for one in (found, framework)]
    assert errors[0] <= 1.05 * errors[1]
    torch.testing.assert_close(found, framework, rtol=8 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    assert body(x[:, :100], gate, up) is None and body(x.float(), gate, up) is None and body(x, gate[:, :-8], up) is None


@pytest.mark.parametrize("experts, slots, columns, terms, transposed", [(128, 8, 1536, 2048, False), (8, 2, 4096, 1408, False),
                                                                         (32, 4, 5760, 2880, True), (5, 1, 264, 72, False)])
@pytest.mark.parametrize("count", [2, 100, 1500])
def test_rows_are_multiplied_by_the_experts_they_chose(experts: int, slots: int, columns: int, terms: int, transposed: bool, count: int,
                                                       backend: Backend) -> None:
    generator = torch.Generator("cuda").manual_seed(count)
    x, weight = (torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16) * terms**-0.25
                 for size in ((count, 1, terms), (experts, *((terms, columns) if transposed else (columns, terms)))))
    bias = torch.randn(experts, columns, generator=generator, device="cuda", dtype=torch.bfloat16) if transposed else None
    chosen = torch.rand(count, experts, generator=generator, device="cuda").topk(slots).indices
    body = backend.body("agentcompile.expert_linear.default")
    found = None if body is None else body(x, weight, chosen, bias, transposed)
    assert (found is not None) is has_wgmma(backend)
    wanted = expert_linear(*(None if one is None else one.cpu() for one in (x, weight, chosen, bias)), transposed)
    torch.testing.assert_close(wanted if found is None else found.cpu(), wanted, rtol=8 * 2.0**-7, atol=2.0**-5)


def test_time_does_not_grow_with_capacity(backend: Backend) -> None:
    """The same prompts at capacities of 4,096 and 16,384, alternating; captured pieces of every size run."""
    model = tiny("llama", HALF, torch.float16)
    sessions = [session(model, backend, context, (128, 512, 2048)) for context in (4096, 16384)]
    for length in (128, 513, 3000, 4000):
        times: list[list[float]] = [[], []]
        for turn in range(34):
            for mine, found in zip(sessions, times, strict=True):
                torch.cuda.synchronize()
                began = time.perf_counter()
                with torch.inference_mode():
                    mine.prefill(prompt_of(length))
                torch.cuda.synchronize()
                if turn >= 4:
                    found.append(time.perf_counter() - began)
        small, large = map(statistics.median, times)
        assert large <= 1.1 * small, f"{length} tokens: {small * 1e3:.2f} ms at 4,096, {large * 1e3:.2f} ms at 16,384"
