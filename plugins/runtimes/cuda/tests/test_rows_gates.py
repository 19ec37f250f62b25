"""Gates of prompt chunks and of batches, and products of few rows, emulated: the framework's numbers, or a refusal."""

from typing import Any

import pytest
import torch
from agentcompile_runtime_cuda.gates import GELU, RELU, SILU, gate_of
from agentcompile_runtime_cuda.rows import RowKernels
from hypothesis import given
from hypothesis import strategies as st
from test_rows import GATED, HALVES, SETTINGS, normal
from test_rows import rows as rows

from agentcompile_core.plugin_api import operator_names

MULTIPLY, LINEAR = operator_names.MULTIPLY, operator_names.LINEAR
GATED_BY: list[tuple[str, dict[str, Any]]] = [
    (SILU, {}), (GELU, {}), (GELU, {"approximate": "none"}), (GELU, {"approximate": "tanh"}), (RELU, {})]


@SETTINGS
@given(st.data())
def test_gates_are_the_operators(rows: RowKernels, data: st.DataObject) -> None:
    """Of two tensors, or of slices of wider rows."""
    draw, dtype = data.draw, data.draw(st.sampled_from(HALVES))
    count, columns, scale = draw(st.integers(1, 9)), 8 * draw(st.integers(1, 400)), draw(st.sampled_from([0.01, 1.0, 20.0]))
    beside = 8 * draw(st.integers(0, 3))
    wide = normal(count, 1, count, 2 * columns + beside, dtype=dtype) * scale
    gate, up = wide[..., :columns], wide[..., columns + beside :]
    gate, up = (one.contiguous() if draw(st.booleans()) else one for one in (gate, up))
    activation, how = draw(st.sampled_from(GATED_BY))
    body, by = rows.body(activation, MULTIPLY), gate_of(activation, how)
    assert body is not None and by is not None
    exact = by.run(gate.double()) * up.double()  # two roundings: of the gate, of the product
    found, eps = body(gate, up, **how), torch.finfo(dtype).eps
    smallest = torch.finfo(dtype).smallest_normal * eps
    assert found is not None and found.is_contiguous()
    # Below zero 1 + erf and 1 + tanh are what is left of two numbers of fp32, in the framework as well.
    left = 2.0**-22 * (gate.double() * up.double()).abs() if "gelu" in by.name else 0.0
    assert ((found.double() - exact).abs() <= 1.01 * eps * exact.abs() + smallest * (up.double().abs() + 1.0) + left).all()


def test_an_activation_that_is_told_something_else_is_the_frameworks(rows: RowKernels) -> None:
    x = normal(1, 2, 16, dtype=torch.float16)
    for activation, how in ((GELU, {"approximate": "other"}), (SILU, {"approximate": "tanh"}), (RELU, {"inplace": True})):
        gate, product = rows.body(activation, MULTIPLY), rows.body(LINEAR, activation, MULTIPLY)
        assert gate is not None and product is not None
        assert gate(x, x, **how) is None and product(x, x, x, **how) is None


def test_gates_that_lie_otherwise_are_the_frameworks(rows: RowKernels) -> None:
    body = rows.body(*GATED)
    assert body is not None
    wide = normal(1, 2, 6, 32, dtype=torch.float16)
    for gate in (wide[:, :3, :16], wide[..., ::2], wide[..., 4:20], wide.transpose(0, 1)[..., :16]):
        assert body(gate, gate.contiguous()) is None
    one = wide[0, 0, 0]
    for gate, up in ((wide, one), (one, wide), (one, one), (wide, wide.float()), (wide, wide[..., :16])):
        assert body(gate, up) is None


def test_products_of_few_rows_are_the_frameworks_and_those_of_more_are_left_to_it(rows: RowKernels) -> None:
    plain, gated = rows.body(LINEAR), rows.body(LINEAR, *GATED)
    assert plain is not None and gated is not None
    x, first, second = (normal(count, *size, dtype=torch.float16) / 8 for count, size in enumerate(((1, 8, 64), (40, 64), (40, 64))))
    bias, place = normal(3, 40, dtype=torch.float16), torch.zeros(3, 40, dtype=torch.float16)
    for given_ in ((x, first), (x[:, :3], first), (x[:, :3], first, bias)):
        torch.testing.assert_close(plain(*given_), torch.nn.functional.linear(*given_), rtol=2e-3, atol=1e-3)
    assert plain(x[0, :3], first, bias, out=place) is place
    torch.testing.assert_close(place, torch.nn.functional.linear(x[0, :3], first, bias), rtol=2e-3, atol=1e-3)
    wanted = torch.nn.functional.silu(x @ first.T) * (x @ second.T)
    torch.testing.assert_close(gated(x, first, second), wanted, rtol=4e-3, atol=1e-3)
    assert plain(x.repeat(1, 2, 1), first) is None and gated(x.repeat(1, 2, 1), first, second) is None
    for other in (bias[:39], bias.float(), torch.stack((bias, bias), 1)[:, 0]):
        assert plain(x, first, other) is None


@pytest.mark.parametrize("count", [3, 1100])
def test_each_activation_of_a_gated_product_is_told_from_the_others(rows: RowKernels, count: int) -> None:
    """Below zero GELU and its form with tanh are a percent apart, and a gate by one column of the rows is exact."""
    x, gate, up = torch.zeros(1, count, 64, dtype=torch.float16), *torch.zeros(2, 40, 64, dtype=torch.float16)
    x[0, :, 0], x[0, :, 1] = torch.linspace(-4, -1, count), 1.0
    gate[:, 0], up[:, 1] = 1.0, 1.0
    results = []
    for activation, how in GATED_BY[:2] + GATED_BY[3:]:
        body, by = rows.body(LINEAR, activation, MULTIPLY), gate_of(activation, how)
        assert body is not None and by is not None
        found, wanted = body(x, gate, up, **how), by.run(x[..., :1].double()).expand(1, count, 40)
        assert found is not None and ((found.double() - wanted).abs() <= 2.0**-10 * wanted.abs() + 2.0**-22 * 8).all()
        results.append(found)
    assert all(bool(((one - other).abs() > 1e-4).any()) for i, one in enumerate(results) for other in results[:i])
