"""A block in which float types stand for others: in the code of a model, in operators of ours, and without a copy of its parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentcompile_core.stages.capture.comparison_exact import EXACT, EXACT_OF_SINGLE, RELAXED, WIDE
from agentcompile_core.stages.capture.retyped import Retyped

X = torch.linspace(-3.0, 3.0, 24).reshape(4, 6).bfloat16()


class Mixed(nn.Module):
    """A norm in float32 between products in bfloat16, as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.seen = nn.Linear(6, 5).bfloat16(), list[torch.dtype]()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        wide = y.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        back = normed.to(y.dtype)
        self.seen = [one.dtype for one in (y, wide, back)]
        return torch.softmax(back, -1, dtype=torch.float32)


def run(types: dict[torch.dtype, torch.dtype] | object, module: nn.Module) -> Tensor:
    with torch.inference_mode(), Retyped(types, [*module.parameters(), *module.buffers(), X]):  # type: ignore[arg-type]
        found = module(X.clone())
    assert isinstance(found, Tensor)
    return found


def in_float64(module: Mixed) -> Tensor:
    y = F.linear(X.double(), module.up.weight.double(), module.up.bias.double())
    return torch.softmax(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6), -1)


@torch.no_grad()
def test_types_that_the_code_names_are_exchanged_too() -> None:
    module = Mixed()
    found = run(EXACT, module)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, in_float64(module), rtol=1e-14, atol=1e-15)
    assert run(WIDE, module).dtype is torch.float32 and module.up.weight.dtype is torch.bfloat16


@torch.no_grad()
def test_roundings_keep_their_places_where_float32_stands_for_bfloat16() -> None:
    module = Mixed()
    found = run(RELAXED, module)
    assert found.dtype is torch.float64 and module.seen == [torch.bfloat16, torch.float32, torch.bfloat16], "what the code is told"
    y = F.linear(X.float(), module.up.weight.float(), module.up.bias.float())
    wide = y.double()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).float()
    torch.testing.assert_close(found, torch.softmax(normed.double(), -1), rtol=1e-14, atol=1e-15)


@torch.no_grad()
def test_what_a_model_in_float32_rounds_stays_rounded() -> None:
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.bfloat16).to(torch.float32)

    x = torch.full((3,), 1.001)
    with torch.inference_mode(), Retyped(EXACT_OF_SINGLE, [x]):
        assert torch.equal(Rounds()(x), torch.ones(3, dtype=torch.float64))


def test_operators_of_ours_compute_in_what_stands_for_their_types() -> None:
    x, weight = torch.linspace(-2.0, 3.0, 8).bfloat16(), torch.linspace(0.5, 1.5, 8).bfloat16()
    with torch.inference_mode(), Retyped(RELAXED, [x, weight]):
        found = torch.ops.agentcompile.rms_norm.default(x, weight, 1e-5)
    wide = x.double()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).float()
    assert found.dtype is torch.float32 and torch.equal(found, weight.float() * normed)


@pytest.mark.parametrize("write", [lambda m: m.count.add_(1.0), lambda m: m.count[:1].fill_(2.0), lambda m: m.up.weight.t().mul_(2.0)])
def test_what_is_given_is_not_written_to(write: object) -> None:
    class Writes(Mixed):
        def forward(self, x: Tensor) -> Tensor:
            write(self)  # type: ignore[operator]
            return x

    module = Writes()
    before = [t.clone() for t in (*module.parameters(), *module.buffers())]
    with pytest.raises(NotImplementedError, match="writes to a tensor of the model"):
        run(EXACT, module)
    assert all(map(torch.equal, before, (*module.parameters(), *module.buffers())))


def test_parameters_that_are_read_scaled() -> None:
    table, matrix, bias = torch.randn(7, 4).bfloat16(), torch.randn(3, 4).bfloat16(), torch.randn(3).bfloat16()
    with torch.inference_mode(), Retyped(EXACT, [table, matrix, bias], [table, matrix], 0.25):
        rows = F.embedding(torch.tensor([2, 5]), table)
        found, also = F.linear(rows, matrix, bias), rows @ matrix.t()[:, :2]
    wanted = table[[2, 5]].double() * 0.25
    assert torch.equal(rows, wanted) and torch.equal(also, wanted @ (matrix.t()[:, :2].double() * 0.25))
    torch.testing.assert_close(found, F.linear(wanted, matrix.double() * 0.25, bias.double()), rtol=1e-14, atol=1e-15)


def test_views_and_lookups_of_parameters_and_grouped_products() -> None:
    table, matrices = torch.randn(7, 4).bfloat16(), torch.randn(3, 4, 8).bfloat16()
    ids, ends = torch.tensor([2, 0, 5, 6]), torch.tensor([1, 1, 3], dtype=torch.int32)
    with torch.inference_mode(), Retyped(EXACT, [table, matrices]):
        rows = F.embedding(ids, table)
        found = torch.ops.aten._grouped_mm.default(rows, matrices, ends)
        turned = table.t()[1:3] * 2.0
    assert torch.equal(rows, table[ids].double()) and torch.equal(turned, table.t()[1:3].double() * 2.0)
    assert torch.equal(found[0], rows[0] @ matrices[0].double()) and torch.equal(found[1:3], rows[1:3] @ matrices[2].double())
    assert not found[3].any()
