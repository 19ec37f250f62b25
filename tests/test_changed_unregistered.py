"""Modules and tensors that a module keeps in plain lists, mappings and objects, registered nowhere: a graph holds what they were."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_generate_manners import CONFIG, PROMPT, QUICK
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.runtime.held import held_by
from agentcompile_core.runtime.module_changes import AsBound
from agentcompile_core.runtime.unregistered import MOST_PARTS
from agentcompile_core.store import Store

# What a module holds is watched whoever computes: without plugins no kernels are lowered for graphs that the framework runs.
FRAMEWORK: dict[str, Any] = {"device": "cpu", "store": Store(None), "catalog": load_catalog(only=())}


class Scaled(nn.Module):
    """Multiplies by a number that is an attribute, and one that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.by, self.tensor = 2.0, torch.tensor(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by * self.tensor


class Net(nn.Module):
    """Reads modules and tensors that it did not register."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.order, self.weights = [self.second, self.first], {"a": self.first.weight, "b": self.second.bias}
        self.acts, self.named = [nn.LayerNorm(4), Scaled()], {"last": nn.Sequential(nn.GELU(), nn.LayerNorm(4))}
        self.tensors, self.scale = {"in": [torch.tensor(2.0), torch.ones(4)]}, torch.full((4,), 3.0)
        self.latest: dict[str, Any] = {"x": torch.zeros(1), "random": torch.randn(4)}
        object.__setattr__(self, "hidden", nn.Sequential(nn.LayerNorm(4)))

    def forward(self, x: Tensor) -> Tensor:
        for one in (*self.order, *self.acts, self.named["last"], self.hidden):
            x = one(x)
        return x * self.tensors["in"][0] + self.tensors["in"][1] * self.scale


def compiled() -> tuple[Any, Any]:
    net = Net().eval()
    for part in (net, *net.acts, net.named["last"], net.hidden):  # type: ignore[misc]
        part.eval().requires_grad_(False)
    return net, ac.compile(net, example_inputs=(torch.randn(3, 4),), **FRAMEWORK)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "acts, a number": lambda net: setattr(net.acts[1], "by", 4.0),
    "acts, a tensor that is an attribute": lambda net: net.acts[1].tensor.fill_(4.0),
    "acts, another tensor": lambda net: setattr(net.acts[1], "tensor", torch.tensor(4.0)),
    "acts, a weight": lambda net: net.acts[0].weight.fill_(4.0),
    "acts, one element of a weight": lambda net: net.acts[0].weight[2].fill_(4.0),
    "acts, another weight": lambda net: setattr(net.acts[0], "weight", nn.Parameter(torch.randn(4))),
    "acts, weights from a file": lambda net: net.acts[0].load_state_dict({"weight": torch.randn(4), "bias": torch.randn(4)}),
    "acts, another module": lambda net: net.acts.__setitem__(1, nn.Tanh()),
    "acts, one more": lambda net: net.acts.append(nn.Tanh()),
    "acts, one of a part": lambda net: net.acts[1].__setattr__("part", nn.Tanh()),
    "acts, its mode": lambda net: net.acts[1].train(),
    "acts, a hook": lambda net: net.acts[1].register_forward_hook(lambda part, args, result: result + 1),
    "acts, its forward": lambda net: setattr(net.acts[1], "forward", lambda x: x),
    "named, a part of one": lambda net: net.named["last"].__setitem__(0, nn.Tanh()),
    "named, a number of a part of one": lambda net: setattr(net.named["last"][1], "eps", 0.5),
    "hidden": lambda net: net.hidden[0].bias.fill_(4.0),
    "hidden, another one": lambda net: object.__setattr__(net, "hidden", nn.Tanh()),
    "order, of those that are registered": lambda net: net.order.reverse(),
    "tensors": lambda net: net.tensors["in"][0].fill_(4.0),
    "tensors, through a view": lambda net: net.tensors["in"][1][2:].mul_(4.0),
    "tensors, another one": lambda net: net.tensors["in"].__setitem__(1, torch.randn(4)),
    "tensors, others": lambda net: setattr(net, "tensors", copy.deepcopy(net.tensors)),
    "tensors, one less": lambda net: net.tensors["in"].pop(),
    "tensors, that change places": lambda net: net.tensors["in"].reverse(),
    "scale": lambda net: net.scale.mul_(4.0),
    "scale, through its data": lambda net: net.scale.data.fill_(4.0),
    "tensors, by numpy": lambda net: net.tensors["in"][1].numpy().__setitem__(slice(1, 2), 4.0),
    "hidden, through the data of a weight": lambda net: net.hidden[0].weight.data.fill_(4.0),
}
EQUAL: dict[str, Callable[[Any], Any]] = {
    "weights that are read where they lie": lambda net: net.first.weight.fill_(4.0),
    "written anew, with the same number": lambda net: (net.tensors["in"][0].fill_(2.0), net.acts[0].weight.mul_(1.0), net.scale.fill_(3.0)),
    "an attribute": lambda net: setattr(net, "scale", torch.full((4,), 3.0)),
    "an equal module": lambda net: net.acts.__setitem__(1, copy.deepcopy(net.acts[1])),
    "weights from a file": lambda net: net.hidden.load_state_dict(copy.deepcopy(net.hidden.state_dict())),
    "what its forward keeps": lambda net: net.latest.update(x=torch.ones(3), y=torch.ones(3)),
    "no number that a graph could hold": lambda net: net.latest["random"].copy_(torch.randn(4)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_is_not_registered_is_refused_by_its_name(what: str) -> None:
    net, mine = compiled()
    assert mine.graphs.graphs  # it is programs that run
    x = torch.randn(3, 4)
    torch.testing.assert_close(mine(x), net(x))
    CHANGES[what](net)
    with pytest.raises(UsageError, match=rf"^{what.partition(',')[0]} holds something else"):
        mine(x)


@pytest.mark.parametrize("what", EQUAL)
def test_what_changes_no_result_is_no_change(what: str) -> None:
    net, mine = compiled()
    x = torch.randn(3, 4)
    for _ in range(2):
        EQUAL[what](net)
        torch.testing.assert_close(mine(x), net(x))
    net.acts[1].by = 9.0
    with pytest.raises(UsageError, match="acts holds something else"):
        mine(x)


def test_a_tensor_that_took_the_place_of_an_equal_one_is_looked_at_like_that() -> None:
    net, mine = compiled()
    net.scale = torch.full((4,), 3.0)
    mine(torch.randn(3, 4))
    net.scale.add_(1.0)
    with pytest.raises(UsageError, match="scale holds something else"):
        mine(torch.randn(3, 4))


def test_a_module_that_cannot_be_called_is_taken_to_read_all_that_it_holds() -> None:
    net = Net()
    bound = AsBound(net, with_mode=True)
    bound.note_reads(lambda watched: net(torch.zeros(1, 99)), all_of_it=True)
    assert bound.change() == ""
    net.latest["x"] = torch.ones(1)
    assert bound.change() == "latest holds something else"


def test_circles_end_and_a_whole_model_that_lies_beside_is_left_alone_but_not_what_lies_with_it() -> None:
    net = Net()
    net.acts[1].__dict__["owner"] = [net, net.acts[1]]
    net.tensors["beside"] = [nn.Sequential(*(nn.Tanh() for _ in range(MOST_PARTS))), {"by": 2.0}]  # type: ignore[list-item]
    assert [one.path for one in held_by(net)] == ["order", "weights", "acts", "named", "tensors", "scale", "latest", "hidden"]
    bound = AsBound(net, with_mode=True)
    net.tensors["beside"][0][0].by = 3.0  # type: ignore[index]
    assert bound.change() == ""
    net.tensors["beside"][1]["by"] = 3.0  # type: ignore[index]
    assert bound.change() == "tensors holds something else"


def test_what_the_forward_of_a_language_model_writes_to_such_a_tensor_is_not_asked_for_again() -> None:
    net = Net()
    bound = AsBound(net, with_mode=False, forward=lambda part: part.scale.add_(1.0))
    net.scale.add_(1.0)
    assert bound.change() == ""
    net.acts[1].by = 9.0
    assert bound.change() == "acts holds something else"


@torch.jit.script
def times(x: Tensor, by: Tensor) -> Tensor:
    return x * by


class Keeps(nn.Module):
    """Holds registered buffers, numbers of unusual types, what a script reads, what it exchanges and what it does not read at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("twice", torch.full((4,), 2.0))
        self.register_buffer("nothing", torch.zeros(4))
        self.buffers_in_order, self.scripted = [self.twice, self.nothing], [torch.full((4,), 3.0)]
        self.unusual = {"complex": torch.ones(2, dtype=torch.complex64), "narrow": torch.ones(2).to(torch.float8_e4m3fn), "by": 2.0}
        self.highest, self.teacher = [torch.zeros(())], [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()]

    def forward(self, x: Tensor) -> Tensor:
        y = times(self.linear(x), self.scripted[0]) * self.buffers_in_order[0] + self.buffers_in_order[1]
        self.highest[0] = torch.maximum(self.highest[0], y.max())
        return y * self.unusual["by"]


def kept() -> tuple[Any, Any]:
    net = Keeps().eval().requires_grad_(False)
    return net, ac.compile(net, example_inputs=(torch.randn(3, 4),), **FRAMEWORK)


@pytest.mark.parametrize(("path", "change"), [
    ("buffers_in_order", lambda net: net.buffers_in_order.reverse()),
    ("scripted", lambda net: net.scripted.__setitem__(0, torch.ones(4))),
    ("scripted", lambda net: setattr(net.scripted[0], "data", torch.ones(4))),
    ("unusual", lambda net: net.unusual.update(by=4.0)),
    ("unusual", lambda net: net.unusual.update(complex=0.0)),
])
def test_it_is_noticed_whatever_lies_beside_it_and_whoever_reads_it(path: str, change: Callable[[Any], Any]) -> None:
    net, mine = kept()
    assert mine.graphs.graphs
    x = torch.randn(3, 4)
    torch.testing.assert_close(mine(x), net(x))
    change(net)
    with pytest.raises(UsageError, match=f"^{path} holds something else"):
        mine(x)


def test_what_the_forward_exchanges_and_what_it_does_not_read_may_be_others() -> None:
    net, mine = kept()
    net(torch.randn(3, 4))  # exchanges ``highest``
    net.teacher[0].load_state_dict({name: torch.randn_like(one) for name, one in net.teacher[0].state_dict().items()})
    x = torch.randn(3, 4)
    torch.testing.assert_close(mine(x), net(x))


def test_modules_that_are_reached_in_many_ways_are_looked_at_once() -> None:
    net: Any = Net()
    part: nn.Module = Scaled()
    for _ in range(40):
        part = nn.ModuleDict({"a": part, "b": part})
    net.ways, scaled = [part], list(part.modules())[-1]
    bound = AsBound(net, with_mode=True)
    scaled.by = 9.0
    assert bound.change() == "ways holds something else"


class Biased(modeling_llama.LlamaMLP):
    """One layer that adds a number that lies in a list."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.biases = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.biases[0]


def test_another_tensor_in_a_list_of_a_language_model_is_noticed() -> None:
    model: Any = transformers.LlamaForCausalLM(copy.deepcopy(CONFIG)).eval().requires_grad_(False)
    model.model.layers[0].mlp = Biased(model.config).requires_grad_(False)
    mine = ac.compile(model, **QUICK)
    mine.generate(PROMPT, max_new_tokens=2)
    model.model.layers[0].mlp.biases[0] = torch.full((1,), 50.0)
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.biases holds something else"):
        mine.generate(PROMPT, max_new_tokens=2)
