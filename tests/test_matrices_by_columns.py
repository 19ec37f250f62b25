"""Parameters that a model multiplies from the right are linear layers, whose matrix lies transposed in the parameter's own memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from capture_models import GPT, tiny
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_capture_normalize import forward_graph, kinds, run
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.errors import ContractError, UsageError
from agentcompile_core.ir.graph import Graph, Ref, ValueKind
from agentcompile_core.ir.weight_source import parameter_of, transposed
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.schema import argument
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.collapse_linear import rows_where_read
from agentcompile_core.stages.capture.comparison import weights_of
from agentcompile_core.stages.capture.normalize import normalize
from agentcompile_core.store import Store

MORE = settings(max_examples=60, derandomize=True, database=None, deadline=None, phases=(Phase.generate,))
AXES = st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple)


class Multiplied(nn.Module):
    """x W [+ b] in one of the ways that models write it; ``also``: what else is done with W."""

    def __init__(self, form: str, given: int, made: int, also: str = "") -> None:
        super().__init__()
        self.form, self.also = form, also
        self.weight = nn.Parameter(torch.randn(given, made, dtype=torch.float64), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(made, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        made = self.bias.numel()
        if self.form == "matmul":
            found = x @ self.weight
        elif self.form == "added":
            found = x @ self.weight + self.bias
        elif self.form == "scaled":
            found = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight, alpha=2.0).view(*x.shape[:-1], made)
        else:
            found = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
            found = found.view(*x.shape[:-1], made) if self.form == "conv1d" else found.view(-1)
        if self.also == "sum":
            return found + self.weight.sum()
        if self.also == "linear":
            return found.sum() + nn.functional.linear(found.reshape(-1, made), self.weight)
        return found


def products(graph: Graph) -> list[Any]:
    """The matrices of its linear layers."""
    return [argument(node, "weight") for node in graph.nodes if node.kind == "linear"]


@MORE
@given(form=st.sampled_from(("matmul", "added", "conv1d", "flat")), axes=AXES, sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
       also=st.sampled_from(("", "", "sum", "linear")))
def test_a_matrix_that_is_only_multiplied_from_the_right_is_read_transposed(form: str, axes: tuple[int, ...], sizes: tuple[int, int],
                                                                           also: str) -> None:
    torch.manual_seed(sum(sizes))
    axes = axes or ((2,) if form in ("conv1d", "flat") else ())
    module, x = Multiplied(form, *sizes, also), torch.randn(*axes, sizes[0], dtype=torch.float64)
    graph = normalize(forward_graph(module, x))
    torch.testing.assert_close(run(graph, module, x), module(x))
    read = {value.source for value in graph.values if value.kind is ValueKind.WEIGHT}
    if also:
        assert "weight" in read and transposed("weight") not in read
        return
    assert "weight" not in read and products(graph) == [Ref(transposed("weight"))]
    assert graph.spec(transposed("weight")).shape == sizes[::-1] and not graph.spec(transposed("weight")).strides
    if form == "conv1d":  # rows stay in their axes
        assert not kinds(graph)["view"]


def test_a_scaled_product_is_no_linear_layer() -> None:
    module, x = Multiplied("scaled", 3, 5), torch.randn(2, 3, dtype=torch.float64)
    graph = normalize(forward_graph(module, x))
    assert not products(graph) and torch.equal(run(graph, module, x), module(x))


def test_a_reshape_that_puts_rows_elsewhere_stays() -> None:
    class Regrouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.reshape(-1, 4)).view(3, 2, 6)  # of an x [2, 3, 4]

    module, x = Regrouped(), torch.randn(2, 3, 4)
    graph = normalize(forward_graph(module, x))
    assert torch.equal(run(graph, module, x), module(x)) and run(graph, module, x).shape == (3, 2, 6)


def test_graphs_that_disagree_read_the_parameter_as_it_is() -> None:
    """One of them multiplies with it alone, another one takes its sum as well."""
    x = torch.randn(2, 3, dtype=torch.float64)
    alone, other = Multiplied("conv1d", 3, 5), Multiplied("conv1d", 3, 5, "sum")
    graphs = [normalize(forward_graph(module, x)) for module in (alone, other)]
    assert rows_where_read(graphs[:1]) == graphs[:1]
    found = rows_where_read(graphs)
    assert found[1] == graphs[1]
    assert {value.source for value in found[0].values if value.kind is ValueKind.WEIGHT} == {"weight", "bias"}
    torch.testing.assert_close(run(found[0], alone, x), alone(x))


def test_names_of_transpositions() -> None:
    assert parameter_of("h.0.weight") == ("h.0.weight", False)
    assert parameter_of(transposed("h.0.T")) == ("h.0.T", True)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(6, 4), requires_grad=False) for _ in range(2))
        self.tied = self.up


def test_a_matrix_is_laid_out_by_columns_in_place_of_itself() -> None:
    module = Pair()
    before, (up, down) = {name: p.clone() for name, p in module.named_parameters()}, (module.up, module.down)
    store = WeightStore(module, "cpu")
    nbytes = store.nbytes
    store.arrange([(transposed("up"),)])
    store.arrange([("down",), (transposed("tied"),)])  # another program, by the other name of the same parameter
    rows = store.concatenated((transposed("up"),))
    assert rows.shape == (4, 6) and rows.is_contiguous() and rows.data_ptr() % 16 == 0
    assert module.up is up is module.tied and module.down is down and store.nbytes == nbytes
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    module.up[2, 3] = 42.0
    assert rows[3, 2] == 42.0 and store.tensor("tied")[2, 3] == 42.0
    again = WeightStore(module, "cpu")
    again.arrange([(transposed("up"),)])
    assert again.concatenated((transposed("up"),)).data_ptr() == rows.data_ptr()  # a second compile moves nothing


def test_matrices_by_columns_are_concatenated_by_their_columns() -> None:
    module = Pair()
    before = module.up.clone(), module.down.clone()
    store = WeightStore(module, "cpu")
    names = (transposed("up"), transposed("down"))
    store.arrange([names])
    joined = store.concatenated(names)
    assert torch.equal(joined, torch.cat([one.t() for one in before])) and joined.is_contiguous()
    assert torch.equal(module.up, before[0]) and torch.equal(module.down, before[1])
    assert module.down.data_ptr() == joined[4:].data_ptr()


@pytest.mark.parametrize("first", [("up",), (transposed("up"),), ("up", "down"), (transposed("up"), transposed("down"))])
def test_one_matrix_by_rows_and_by_columns_is_refused(first: tuple[str, ...]) -> None:
    store = WeightStore(Pair(), "cpu")
    store.arrange([first])
    other = "up" if first[0] != "up" else transposed("tied")
    with pytest.raises(ContractError, match="by rows and by columns"):
        store.arrange([(other,)])


def test_the_transposition_of_what_is_no_matrix_is_another_models() -> None:
    store = WeightStore(nn.Linear(3, 2), "cpu")
    with pytest.raises(UsageError, match="another model"):
        store.tensor(transposed("bias"))


def test_a_compiled_model_is_saved_and_loaded_as_before(tmp_path: Path) -> None:
    """Also where its matrices lie by columns, which no file knows of."""
    model = tiny("gpt2", GPT, torch.float32)
    store = WeightStore(model, "cpu")
    name = "transformer.h.0.attn.c_attn.weight"
    store.arrange([(transposed(name),)])
    assert not model.get_parameter(name).is_contiguous()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(p, again.get_parameter(n)) and again.get_parameter(n).is_contiguous() for n, p in model.named_parameters())


def test_gpt2_generates_as_before_and_follows_its_weights() -> None:
    torch.manual_seed(5)
    model = tiny("gpt2", GPT, torch.float32)
    prompt = torch.randint(0, 8, (1, 5))
    compiled = ac.compile(model, device="cpu", max_context=16, origins=(), validators=())

    def alike() -> bool:
        ours, theirs = (one.generate(prompt, max_new_tokens=6, do_sample=False) for one in (compiled, model))
        return torch.equal(ours, theirs)

    assert alike()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    assert alike()


class Chained(nn.Module):
    """Two matrices, one of which is returned as it is too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(64, 128) / 8), nn.Parameter(torch.randn(128, 64) / 11)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.up) @ self.down, self.down


def test_emulated_kernels_read_a_matrix_by_columns_beside_other_sessions() -> None:
    """One row is theirs; more rows of the same module, and the same matrix as a linear layer, are compiled behind it and leave it alone."""
    class Other(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    torch.manual_seed(2)
    module = Chained().requires_grad_(False)
    given = torch.randn(1, 64), torch.randn(8, 64), torch.randn(1, 128)
    modules = module, module, Other(module.up)
    made = [ac.compile(one, example_inputs=(x,), device="cpu", run_on="emulation", budget_s=20.0, store=Store(None))
            for one, x in zip(modules, given, strict=True)]
    assert any(step.source is not None for selection in made[0].compilation.selections for step in selection.steps)
    assert module.up.stride() == (1, 64) and module.down.is_contiguous()
    place = module.up.data_ptr()
    for _ in range(2):
        for compiled, one, x in zip(made, modules, given, strict=True):
            ours, theirs = compiled(x), one(x)
            for mine, right in zip(*((found,) if isinstance(found, Tensor) else found for found in (ours, theirs)), strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
        assert module.up.data_ptr() == place and module.up.stride() == (1, 64)
        module.up.data.add_(0.25)


def test_a_refusal_leaves_nothing_behind() -> None:
    store = WeightStore(Pair(), "cpu")
    store.arrange([("up",)])
    with pytest.raises(ContractError, match="up is read by rows and by columns"):
        store.arrange([(transposed("up"),), (transposed("down"),)])
    store.arrange([("down",)])


class Padded(nn.Module):
    """A product of rows of which some are written over before its result is put back into their axes."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.inner, self.copied = nn.Linear(4, 6), copied

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(x)
        flat = hidden.view(-1, 4)
        product = self.inner(flat.clone() if self.copied else flat)
        hidden.masked_fill_(padding, 0.5)
        return product.view(2, 3, 6), hidden


@pytest.mark.parametrize("copied", [False, True])
def test_a_product_is_not_moved_behind_a_write_to_its_rows(copied: bool) -> None:
    """Which an example without padding does not show."""
    module, x = Padded(copied).requires_grad_(False), torch.randn(2, 3, 4)
    graph = normalize(forward_graph(module, x, torch.zeros(2, 3, 1, dtype=torch.bool)))
    padding = torch.rand(2, 3, 1) < 0.5
    env = {**weights_of(module), "input.0": x.clone(), "input.1": padding}
    found = compile_nodes(graph, device="cpu").run(env)
    for name, right in zip(graph.outputs, module(x, padding), strict=True):
        assert torch.equal(found[name], right)


def test_a_bias_of_rows_that_lie_apart_is_rounded_as_the_model_rounds_it() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1).reshape(-1, 4)).view(3, 2, 6)

    module, x = Turned().to(torch.bfloat16).requires_grad_(False), torch.randn(2, 3, 4).to(torch.bfloat16)
    assert torch.equal(run(normalize(forward_graph(module, x)), module, x), module(x))
