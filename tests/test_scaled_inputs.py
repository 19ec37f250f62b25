"""Numbers that scale what a linear layer reads: taken in where the row before them can be read in the place of the product."""

import pytest
from agentcompile_rules_transformers.draft import Draft
from agentcompile_rules_transformers.linear import LinearRule

from agentcompile_core.plugin_api import DType, Ref
from agentcompile_core.testing.doubles import FAKE

K = 16
ROW = (1, 1, K)


def every_second(draft: Draft) -> Ref:
    """Elements of a row that lie apart; what a number makes of them lies in one piece."""
    whole = draft.given("x", (1, 1, 2 * K), DType.F32)
    return draft.apart("aten.slice.Tensor", (whole, 2, 0, 2 * K, 2), ROW, (2 * K, 2 * K, 2), DType.F32)[0]


def one_for_all(draft: Draft) -> Ref:
    return draft.apart("aten.expand.default", (draft.given("x", (1, 1, 1), DType.F32), ROW), ROW, (1, 1, 0), DType.F32)[0]


ROWS = {
    "in one piece": (lambda draft: draft.given("x", ROW, DType.F32), True),
    "every second element": (every_second, False), "one element for all": (one_for_all, False),
    "whole numbers": (lambda draft: draft.given("x", ROW, DType.I64), False),
    "truth values": (lambda draft: draft.given("x", ROW, DType.BOOL), False),
}


@pytest.mark.parametrize("what", ROWS)
def test_a_row_is_read_before_its_number_where_it_lies_as_the_product_does(what: str) -> None:
    make, taken = ROWS[what]
    draft = Draft()
    scaled = draft.one("aten.mul.Tensor", (make(draft), 0.5), ROW, DType.F32)
    matches = list(LinearRule().find(draft.graph(draft.linear("linear", scaled, 8, K, DType.F32)), FAKE))
    assert [match.need("x").values[0] != scaled.value for match in matches] == [False] + [True] * taken


@pytest.mark.parametrize(("numbers", "taken"),
                         [((1e38, 2.0), [2, 3]), ((1e39,), []), ((-1e300,), []), ((1e30, -1e30), [2]), ((1e-50,), [2])])
def test_numbers_that_float32_does_not_hold_stay_in_front(numbers: tuple[float, ...], taken: list[int]) -> None:
    """Zeros among the elements stay zeros times a large product of numbers, and are NaN times an infinity."""
    draft = Draft()
    row = draft.given("x", ROW, DType.F32)
    for number in numbers:
        row = draft.one("aten.mul.Tensor", (row, number), ROW, DType.F32)
    matches = list(LinearRule().find(draft.graph(draft.linear("linear", row, 8, K, DType.F32)), FAKE))
    assert [len(match.nodes) for match in matches] == [1, *taken]
