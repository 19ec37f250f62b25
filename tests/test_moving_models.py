"""What torch does to its own modules and not to compiled ones: ``to``, and the transforms of ``torch.func``."""

from typing import Any

import pytest
import torch
from test_generate_manners import QUICK
from torch import nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError


@pytest.fixture(scope="module")
def mine() -> Any:
    return ac.compile(nn.Linear(4, 4).eval().requires_grad_(False), example_inputs=(torch.ones(2, 4),), **QUICK)


HERE: list[dict[str, Any]] = [{"given": ("cpu",)}, {"given": ("cpu:0", torch.float32, True)}, {"given": (torch.ones(1),)},
                              {"given": (None,)}, {"device": "cpu", "dtype": torch.float32, "non_blocking": True},
                              {"memory_format": torch.channels_last}, {}]


@pytest.mark.parametrize("asked", HERE, ids=str)
def test_where_it_is_already_it_is_itself(mine, asked: dict[str, Any]) -> None:
    assert mine.to(*asked.get("given", ()), **{name: one for name, one in asked.items() if name != "given"}) is mine


@pytest.mark.parametrize(("given", "words"), [
    (("meta",), "compiled for cpu and cannot move to meta"), ((torch.device("meta"),), "cannot move to meta"),
    ((torch.float16,), "cannot become torch.float16"), ((torch.ones(1, dtype=torch.float16),), "cannot become torch.float16"),
    ((torch.ones(1, device="meta"),), "cannot move to meta"), ((-1,), "names an accelerator"),
    (("banana",), "to.'banana'. names no device"),
    (({"a": 1},), "a dict; it takes a device, a dtype or a tensor"), ((1.5,), "a float; it takes"), (("cpu", [1]), "a list; it takes"),
], ids=str)
def test_anything_else_gets_one_sentence(mine, given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        mine.to(*given)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="without an accelerator")
def test_the_number_of_an_accelerator_that_is_not_there(mine) -> None:
    with pytest.raises(UsageError, match=r"to\(0\) names an accelerator, and this machine has none"):
        mine.to(0)


def test_names_that_torch_does_not_know(mine) -> None:
    with pytest.raises(UsageError, match="to takes no 'devise'; it takes device"):
        mine.to(devise="cpu")


@pytest.mark.parametrize("transformed", [
    lambda mine, x: torch.func.vmap(mine)(x.expand(3, 2, 4)), lambda mine, x: torch.func.jvp(mine, (x,), (x,)),
    lambda mine, x: torch.func.grad(lambda one: mine(one).sum())(x), lambda mine, x: torch.func.vmap(lambda _: mine(x))(torch.ones(3)),
], ids=["vmap", "jvp", "grad", "vmap over something else"])
def test_transforms_of_torch_func_are_refused(mine, transformed: Any) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(UsageError, match=r"inside of a transform of torch\.func .*transform the module itself"):
        transformed(mine, x)
    torch.testing.assert_close(mine(x), mine.loaded.module(x))
