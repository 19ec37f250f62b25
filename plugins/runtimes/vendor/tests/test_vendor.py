"""The vendor's implementations: what they accept, and that they compute it, in place, from whatever lies beyond the position."""

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_vendor import VendorAttention, VendorLinear, agentcompile_implementations
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops import operators
from agentcompile_core.plugin_api import (
    Access,
    DType,
    Expression,
    Match,
    Operand,
    Operation,
    Origin,
    PointwiseKind,
    Reject,
    Role,
    Schedule,
    SemanticLabel,
    TensorSpec,
)

H200 = preset("h200")
ADD = Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.ADD, ("acc0", "aux0")),))
ROUNDED = Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.ROUND, ("acc0",)),
                                                             Operation(PointwiseKind.ADD, ("aux0", 0))))
SILU = Expression(arguments=("acc0",), operations=(Operation(PointwiseKind.SILU, ("acc0",)),))
TWICE = Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.ADD, ("aux0", "aux0")),))
MUL = Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.MUL, ("acc0", "aux0")),))


def operand(name: str, role: Role, *shape: int, dtype: DType = DType.F32) -> Operand:
    access = {Role.OUTPUT: Access.WRITE, Role.STATE: Access.READ_WRITE}.get(role, Access.READ)
    return Operand(name=name, role=role, access=access, values=(name,), spec=TensorSpec(shape=shape, dtype=dtype))


def linear(n: int = 6, k: int = 4, epilogue: Expression | None = None, **changed: object) -> Match:
    operands = [operand("x", Role.INPUT, 1, 1, k), operand("weight", Role.WEIGHT, n, k), operand("out", Role.OUTPUT, 1, 1, n)]
    if epilogue is not None and "aux0" in epilogue.arguments:
        operands.append(operand("aux0", Role.INPUT, 1, 1, n))
    attributes = {"n": n, "k": k, "pair": 1, "norm": "none", "norm_eps": 0.0, **changed}
    return Match(kind="linear", label=SemanticLabel.GEMV, nodes=("l",), operands=tuple(operands), attributes=tuple(attributes.items()),
                 epilogue=epilogue)


def attention(heads: int = 4, kv_heads: int = 2, head_dim: int = 8, capacity: int = 16, **changed: object) -> Match:
    cache = (1, capacity, kv_heads, head_dim)
    operands = (operand("q", Role.INPUT, 1, 1, heads * head_dim), operand("k", Role.INPUT, 1, 1, kv_heads * head_dim),
                operand("v", Role.INPUT, 1, 1, kv_heads * head_dim), operand("k_cache", Role.STATE, *cache),
                operand("v_cache", Role.STATE, *cache), operand("position", Role.LENGTH, 1, dtype=DType.I64),
                operand("out", Role.OUTPUT, 1, 1, heads * head_dim))
    attributes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity, "scale": head_dim**-0.5, "window": 0,
                  "softcap": 0.0, "qk_norm": False, "rope": False, **changed}
    return Match(kind="attention", label=SemanticLabel.ATTENTION, nodes=("a",), operands=operands, attributes=tuple(attributes.items()))


def test_what_is_offered() -> None:
    offered = {i.name: i for i in agentcompile_implementations()}
    assert set(offered) == {"linear", "attention"}
    assert all(i.origin is Origin.THIRD_PARTY and i.capturable for i in offered.values())


@pytest.mark.parametrize("match", [linear(), linear(epilogue=ADD), linear(epilogue=ROUNDED)])
def test_linear_accepts_a_product_and_an_addition(match: Match) -> None:
    assert VendorLinear().accepts(match, H200) is True


@pytest.mark.parametrize("match", [linear(pair=2), linear(norm="rms"), linear(epilogue=SILU), linear(epilogue=MUL), linear(epilogue=TWICE),
                                   evolve(linear(), kind="norm")])
def test_linear_refuses_the_rest_with_a_reason(match: Match) -> None:
    answer = VendorLinear().accepts(match, H200)
    assert isinstance(answer, Reject) and answer.reason


@pytest.mark.parametrize("match", [attention(rope=True), attention(qk_norm=True), attention(softcap=30.0), linear()])
def test_attention_refuses_what_sdpa_does_not_hold(match: Match) -> None:
    answer = VendorAttention().accepts(match, H200)
    assert isinstance(answer, Reject) and answer.reason


TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(data=st.data(), attends=st.booleans(), add=st.booleans())
def test_what_is_accepted_runs_in_every_combination_of_types(data: st.DataObject, attends: bool, add: bool) -> None:
    """A product of two bfloat16 factors that was to be written in float32 was accepted, and raised."""
    match = attention() if attends else linear(epilogue=ADD if add else None)
    served = VendorAttention() if attends else VendorLinear()
    types = st.one_of(st.sampled_from([*TORCH]).map(lambda one: [one] * 9), st.lists(st.sampled_from([*TORCH]), min_size=9, max_size=9))
    drawn = data.draw(types)
    operands = tuple(o if o.role is Role.LENGTH else evolve(o, spec=evolve(o.spec, dtype=dtype))
                     for o, dtype in zip(match.operands, drawn, strict=False))
    match = evolve(match, operands=operands)
    answer = served.accepts(match, H200)
    one_type = len({o.spec.dtype for o in operands if o.role is not Role.LENGTH}) == 1
    assert answer is True if one_type else isinstance(answer, Reject) and "float" in answer.reason
    for schedule in served.space(match, H200).points if one_type else ():
        given_ = {o.name: torch.ones(o.spec.shape, dtype=TORCH.get(o.spec.dtype, torch.int64)) for o in operands}
        served.bind(match, schedule, H200)(**given_)
        assert bool(given_["out"].isfinite().all())


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.device)]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=20, derandomize=True, database=None, deadline=None)
@given(n=st.integers(1, 70), k=st.integers(1, 70), call=st.sampled_from(["matrix", "vector"]), add=st.booleans(), seed=st.integers(0, 99))
def test_linear_writes_the_product_into_its_output(device: str, n: int, k: int, call: str, add: bool, seed: int) -> None:
    match = linear(n, k, ADD if add else None)
    generator = torch.Generator().manual_seed(seed)
    given_ = {o.name: torch.randn(o.spec.shape, generator=generator, dtype=torch.float64).float().to(device) for o in match.operands}
    given_["out"].fill_(float("nan"))
    schedule = Schedule({"call": call})
    assert schedule in VendorLinear().space(match, H200)
    with torch.no_grad():
        VendorLinear().bind(match, schedule, H200)(**given_)
    wanted = given_["weight"].double() @ given_["x"].double().view(-1) + (given_["aux0"].double().view(-1) if add else 0.0)
    torch.testing.assert_close(given_["out"].double().view(-1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30, derandomize=True, database=None, deadline=None)
@given(position=st.integers(0, 15), sizes=st.tuples(st.sampled_from([0, 1, 5, 16]), st.sampled_from([0, 1, 6])), group=st.integers(1, 3),
       seed=st.integers(0, 99))
def test_attention_computes_what_the_operator_does_and_reads_nothing_beyond_the_position(
    device: str, position: int, sizes: tuple[int, int], group: int, seed: int
) -> None:
    window, chunk = sizes
    match = attention(heads=2 * group, window=window, chunk=chunk)
    generator = torch.Generator().manual_seed(seed)
    given_ = {o.name: torch.randn(o.spec.shape, generator=generator).to(device) for o in match.operands if o.name != "position"}
    given_["position"] = torch.tensor([position], device=device)
    wanted = {name: tensor.clone() for name, tensor in given_.items()}
    for name in ("k_cache", "v_cache"):
        given_[name][:, position:] = float("nan")
    with torch.no_grad():
        VendorAttention().bind(match, Schedule({}), H200)(**given_)
        q, k, v = (wanted[name].view(1, -1, 1, 8) for name in ("q", "k", "v"))
        found = operators.attention(q, k, v, wanted["k_cache"], wanted["v_cache"], wanted["position"], 8**-0.5, window,
                                    chunk=chunk)
    torch.testing.assert_close(given_["out"].view(-1), found.reshape(-1), rtol=1e-4, atol=1e-5)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(given_[name][:, : position + 1], wanted[name][:, : position + 1], rtol=0, atol=0)
        assert given_[name][:, position + 1 :].isnan().all()
