"""Norms of rows, alone and behind sums, emulated: the framework's numbers, or a refusal."""

import inspect

import torch
from agentcompile_runtime_cuda.rows import RowKernels
from hypothesis import given
from hypothesis import strategies as st
from row_cases import HALVES, SETTINGS, near, normal
from row_cases import rows as rows

from agentcompile_core.ops import operators
from agentcompile_core.plugin_api import operator_names

SUM_AND_NORM = (operator_names.ADD, operator_names.RMS_NORM)


@SETTINGS
@given(st.data())
def test_norms_are_the_operators(rows: RowKernels, data: st.DataObject) -> None:
    draw, dtype = data.draw, data.draw(st.sampled_from((*HALVES, torch.float32)))
    columns, count = 8 * draw(st.sampled_from([1, 3, 16, 31, 33, 128, 130, 256])), draw(st.integers(1, 21))
    x = normal(columns, 1, count, columns, dtype=dtype) * draw(st.sampled_from([1e-3, 1.0, 50.0]))
    weight = draw(st.sampled_from([None, normal(1, columns, dtype=dtype)]))
    one_plus, once = draw(st.sampled_from([(False, False), (True, False), (False, True)])) if weight is not None else (False, False)
    body = rows.body(operator_names.RMS_NORM)
    assert body is not None
    near(body(x, weight, 1e-6, one_plus, once), operators.rms_norm(x, weight, 1e-6, one_plus, once))


def test_layer_norms_take_all_that_the_frameworks_do(rows: RowKernels) -> None:
    body = rows.body(operator_names.ATEN_LAYER_NORM)
    assert body is not None
    schema = torch.ops.aten.layer_norm.default._schema.arguments
    assert [p.name for p in inspect.signature(body).parameters.values()] == [argument.name for argument in schema]


@SETTINGS
@given(st.data())
def test_layer_norms_are_the_operators_alone_and_of_sums(rows: RowKernels, data: st.DataObject) -> None:
    """Of either operator; also of rows whose mean is far above what they differ by."""
    draw, dtype = data.draw, data.draw(st.sampled_from((*HALVES, torch.float32)))
    columns, count = 8 * draw(st.sampled_from([1, 3, 16, 33, 128, 130, 258, 1100])), draw(st.integers(1, 9))
    left, right = (normal(columns + i, 1, count, columns, dtype=dtype) * draw(st.sampled_from([1e-2, 1.0, 50.0])) for i in (0, 1))
    left = (left + draw(st.sampled_from([0.0, 0.0, 8.0]))).to(dtype)
    weight, bias = (draw(st.sampled_from([None, normal(i, columns, dtype=dtype)])) for i in (1, 2))
    plain = draw(st.booleans())
    name, how = (operator_names.LAYER_NORM, (weight, 1e-5)) if plain else (operator_names.ATEN_LAYER_NORM, ((columns,), weight, bias, 1e-5))
    alone, both = rows.body(name), rows.body(operator_names.ADD, name)
    assert alone is not None and both is not None

    def exactly(x: torch.Tensor) -> torch.Tensor:
        scale, shift = (None if one is None else one.double() for one in (weight, None if plain else bias))
        return torch.nn.functional.layer_norm(x.double(), (columns,), scale, shift, 1e-5)

    def close(found: torch.Tensor | None, x: torch.Tensor) -> None:
        assert found is not None and found.dtype is dtype
        wanted, unit = exactly(x), torch.finfo(dtype).eps
        rounded = 2.0**-20 * (x.double().abs().amax(-1, keepdim=True) / x.double().std(-1, keepdim=True, correction=0).clamp_min(1e-3) + 1)
        spread = rounded * (1.0 if weight is None else float(weight.abs().max()))
        assert bool(((found.double() - wanted).abs() <= 0.51 * unit * wanted.abs() + spread + 1e-7).all())

    if dtype is torch.float32:  # means cancel otherwise there
        assert alone(left, *how) is None and both(left, right, *how) is None
        return
    close(alone(left, *how), left)
    total, out = both(left, right, *how)
    assert torch.equal(total, left + right)
    close(out, left + right)
    if not plain:
        assert alone(left, (count, columns), None, None, 1e-5) is None


@SETTINGS
@given(st.data())
def test_sums_with_their_norms_are_the_operators(rows: RowKernels, data: st.DataObject) -> None:
    """The sum bit by bit, whether a row stays in registers or not."""
    draw, dtype = data.draw, data.draw(st.sampled_from(HALVES))
    columns, count = 8 * draw(st.sampled_from([1, 3, 33, 256, 258, 1100])), draw(st.integers(1, 5))
    left, right = (normal(columns + i, 1, count, columns, dtype=dtype) * draw(st.sampled_from([1e-3, 1.0, 50.0])) for i in (0, 1))
    weight = draw(st.sampled_from([None, normal(1, columns, dtype=dtype)]))
    one_plus, once = draw(st.sampled_from([(False, False), (True, False), (False, True)])) if weight is not None else (False, False)
    body = rows.body(*SUM_AND_NORM)
    assert body is not None
    total, out = body(left, right, weight, 1e-6, one_plus, once)
    assert torch.equal(total, left + right)
    near(out, operators.rms_norm(left + right, weight, 1e-6, one_plus, once))
    assert body(left, right[..., :8], weight, 1e-6) is None or columns == 8
