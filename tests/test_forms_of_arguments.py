"""Arguments of ``generate`` in every form that numbers come in: taken for what they are, or refused in one sentence."""

import array
import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_around_requests import model
from test_framework_path import t5
from test_generate_manners import QUICK

import agentcompile_core as ac
from agentcompile_core.errors import UsageError

NEW, VOCABULARY, PADDING = 3, 100, 7
FEW = settings(max_examples=30, derandomize=True, database=None, deadline=None)
TYPES = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
IDS = st.lists(st.lists(st.integers(8, VOCABULARY - 1), min_size=1, max_size=5), min_size=1, max_size=3)
OPTIONS = st.sampled_from([{}, {"repetition_penalty": 1.3}, {"do_sample": True, "seed": 3}])


@pytest.fixture(scope="module", params=["captured", "not captured"])
def mine(request: pytest.FixtureRequest) -> Any:
    return ac.compile(model() if request.param == "captured" else t5(), **QUICK)


@pytest.fixture(scope="module")
def captured() -> Any:
    return ac.compile(model(), **QUICK)


WHOLE: dict[str, Callable[[Any, str], Any]] = {  # of rows of one length
    "numpy": lambda rows, kind: np.array(rows, dtype=kind), "torch": lambda rows, kind: torch.tensor(rows, dtype=getattr(torch, kind)),
    "a view": lambda rows, kind: torch.tensor([[x for y in row for x in (y, 0)] for row in rows], dtype=getattr(torch, kind))[:, ::2],
    "of inference": lambda rows, kind: torch.inference_mode()(torch.tensor)(rows, dtype=getattr(torch, kind)),
}
ROWS: dict[str, Callable[[Any, str], Any]] = {  # of any rows
    "lists": lambda rows, kind: rows, "tuples": lambda rows, kind: tuple(map(tuple, rows)),
    "rows of numpy": lambda rows, kind: [np.array(row, dtype="int64" if kind == "uint64" else kind) for row in rows],
    "rows of torch": lambda rows, kind: [torch.tensor(row, dtype=getattr(torch, kind)) for row in rows],
}


@FEW
@given(st.data(), IDS, st.sampled_from(TYPES), OPTIONS)
@pytest.mark.filterwarnings("ignore")
def test_integers_of_every_type_are_the_same_prompt(mine, data, rows: list[list[int]], kind: str, options: dict[str, Any]) -> None:
    forms = {**ROWS, **(WHOLE if len(set(map(len, rows))) == 1 else {})}
    form = data.draw(st.sampled_from(sorted(forms)))
    count = data.draw(st.sampled_from([int, np.int64, np.uint8, torch.tensor]))
    pad = data.draw(st.sampled_from([int, np.int32, torch.tensor]))
    wanted = mine.generate(rows, NEW, pad_token_id=PADDING, eos_token_id=None, **options)
    found = mine.generate(forms[form](rows, kind), count(NEW), pad_token_id=pad(PADDING), eos_token_id=None, **options)
    assert torch.equal(found, wanted)


def sparse(rows: Any) -> Any:
    return torch.tensor(rows).to_sparse()


UNREAD: tuple[Callable[[Any], Any], ...] = (
    lambda rows: torch.empty((len(rows), len(rows[0])), dtype=torch.int64, device="meta"), sparse,
    lambda rows: torch.nested.nested_tensor([torch.tensor(row) for row in rows]),
    lambda rows: torch.quantize_per_tensor(torch.ones(len(rows), len(rows[0])), 1.0, 0, torch.quint8),
    lambda rows: (row for row in rows), lambda rows: {1, 2}, lambda rows: [[None] * len(row) for row in rows], lambda rows: object(),
    lambda rows: np.array([[None] * len(row) for row in rows], dtype=object), lambda rows: [[2**63] for _ in rows], lambda rows: len,
    lambda rows: [["1"] * len(row) for row in rows], lambda rows: [[1.5] * len(row) for row in rows],
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(UNREAD)))
@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_what_holds_no_integers_gets_one_sentence(mine, name: str, number: int) -> None:
    for rows in ([[9, 10, 11]], [[9, 10], [11, 12]]):
        with pytest.raises(UsageError) as caught:
            mine.generate(**{"input_ids": rows, "max_new_tokens": 1, "pad_token_id": PADDING, name: UNREAD[number](rows)})
        assert "\n" not in str(caught.value)


@FEW
@given(st.data(), st.sampled_from([*TYPES, "float32", "float16", "bool"]), st.integers(1, 2), st.integers(1, 5))
def test_a_mask_of_any_type_holds_zeros_and_ones(captured, data, kind: str, rows: int, width: int) -> None:
    ids = torch.arange(9, 9 + rows * width).view(rows, width)
    values = data.draw(st.lists(st.integers(0, width - 1), min_size=rows, max_size=rows))
    mask = torch.tensor([[int(i >= first) for i in range(width)] for first in values])
    wanted = captured.generate(ids, NEW, attention_mask=mask, eos_token_id=None)
    typed = mask.to(getattr(torch, kind))
    for form in (typed, typed.numpy(), typed.tolist()):
        assert torch.equal(captured.generate(ids, NEW, attention_mask=form, eos_token_id=None), wanted)
    for wrong in (mask * 2, mask.float() * -1, torch.where(mask == 1, 0.0, float("-inf")), mask.float() * float("nan")):
        if wrong.isinf().any() or wrong.ne(0).any():
            with pytest.raises(UsageError, match="other values than 1"):
                captured.generate(ids, NEW, attention_mask=wrong)


@pytest.mark.parametrize(("name", "value"), [
    *((name, value) for name in ("max_new_tokens", "max_length")
      for value in (0, -1, 2.5, "5", True, [4], np.float32(4), torch.tensor(4.0))),
    *(("pad_token_id", value) for value in ("x", 3.5, 2**70, [3, 4], True)),
    *(("top_k", value) for value in ("x", [1])), ("num_beams", "x"), ("penalty_alpha", "x"),
    ("input_ids", array.array("d", [1.0])), ("input_ids", collections.Counter()),
])
@pytest.mark.filterwarnings("ignore")
def test_numbers_of_another_kind_get_one_sentence(captured, name: str, value: Any) -> None:
    asked = {"input_ids": [[9, 10]], **({} if name.startswith("max_") else {"max_new_tokens": 2}), name: value}
    with pytest.raises(UsageError) as caught:
        captured.generate(**asked)
    assert "\n" not in str(caught.value)
