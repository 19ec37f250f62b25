"""The weight store keeps one copy: concatenations are what the module reads too, ties stay ties, nothing changes value."""

import pytest
import torch
from torch import nn

from agentcompile_core.errors import ContractError, UsageError
from agentcompile_core.runtime.weights import WeightStore


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 6), nn.Linear(8, 4, bias=False), nn.Linear(8, 3)
        self.tied = nn.Linear(8, 3)
        self.tied.weight = self.o.weight


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer().requires_grad_(False)


def test_concatenated_siblings_are_what_the_module_reads(layer: Layer) -> None:
    x = torch.randn(8)
    before = layer.q(x), layer.k(x)
    store = WeightStore(layer, "cpu")
    store.arrange([("q.weight", "k.weight")])
    joined = store.concatenated(("q.weight", "k.weight"))
    assert joined.shape == (10, 8) and joined.is_contiguous()
    assert layer.q.weight.data_ptr() == joined.data_ptr()
    assert layer.k.weight.data_ptr() == joined[6:].data_ptr()
    assert torch.equal(layer.q(x), before[0]) and torch.equal(layer.k(x), before[1])
    joined[0, 0] = 42.0
    assert layer.q.weight[0, 0] == 42.0


def test_bytes_stay_those_of_one_copy(layer: Layer) -> None:
    store = WeightStore(layer, "cpu")
    before = store.nbytes
    store.arrange([("q.weight", "k.weight"), ("q.weight", "k.weight")])
    assert store.nbytes == before


def test_packing_keeps_values_and_ties(layer: Layer) -> None:
    store = WeightStore(layer, "cpu")
    values = {name: p.clone() for name, p in layer.named_parameters()}
    store._pack(["o.weight", "tied.weight", "o.bias", "q.bias"])
    assert layer.o.weight.data_ptr() == layer.tied.weight.data_ptr() == store.tensor("o.weight").data_ptr()
    assert all(torch.equal(p, values[name]) for name, p in layer.named_parameters())
    assert all(store.tensor(n).data_ptr() % 16 == 0 for n in ("o.weight", "o.bias", "q.bias"))


def test_misaligned_weights_are_moved(layer: Layer) -> None:
    layer.o.bias.data = torch.zeros(8)[1:4]
    store = WeightStore(layer, "cpu")
    store.arrange([])
    assert store.tensor("o.bias").data_ptr() % 16 == 0
    assert layer.o.bias.data_ptr() == store.tensor("o.bias").data_ptr()


def test_one_weight_in_two_groups_is_refused(layer: Layer) -> None:
    store = WeightStore(layer, "cpu")
    store.arrange([("q.weight", "k.weight")])
    with pytest.raises(ContractError, match="already concatenated"):
        store.concatenated(("q.weight", "o.weight"))


def test_a_model_without_weights_is_refused_with_one_sentence() -> None:
    with pytest.raises(UsageError, match="holds no data"):
        WeightStore(nn.Linear(2, 2, device="meta"), "cpu")


def test_an_unknown_name_says_that_the_model_is_another(layer: Layer) -> None:
    with pytest.raises(UsageError, match="another model"):
        WeightStore(layer, "cpu").tensor("v.weight")
