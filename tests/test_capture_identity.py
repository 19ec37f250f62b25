"""A capture belongs to exactly one computation: what a module computes is served, whatever was compiled before with the same store."""

import contextlib
import functools
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_models import SIZES, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agentcompile_core import api
from agentcompile_core.errors import UsageError
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages.capture.describe import describe
from agentcompile_core.stages.capture.identity import identity
from agentcompile_core.store import Store

CATALOG = load_catalog(only=())
X = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)
FILE = """
import torch
{top}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return {result}

def get_init_inputs():
    return []

def get_inputs():
    return [torch.ones(3, 4)]
"""


def compiled(what: object, store: Store, **options: Any) -> api.CompiledModel:
    return api.compile(what, device="cpu", store=store, catalog=CATALOG, **options)


def served(module: nn.Module, store: Store, x: torch.Tensor = X) -> torch.Tensor:
    return compiled(module, store, example_inputs=(x,))(x)


def of(module: nn.Module) -> str:
    return identity(LoadedModel(module=module, name="m")).capture


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def file_result(path: Path, store: Store) -> torch.Tensor:
    return compiled(path, store)(X)


def test_files_of_equal_parameters_are_not_confused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for name, function in (("relu", torch.relu), ("tanh", torch.tanh)):
        path = tmp_path / f"{name}.py"
        path.write_text(FILE.format(top="", result=f"torch.{name}(x)"))
        assert torch.equal(file_result(path, store), function(X))
    path.write_text(FILE.format(top="", result="torch.sigmoid(x)"))  # edited in place
    assert torch.equal(file_result(path, store), torch.sigmoid(X))


@pytest.mark.parametrize("top", ["def act(x):\n    return {0}", "act = lambda x: {0}", "FACTOR = {1}\ndef act(x):\n    return x * FACTOR"])
def test_what_a_file_defines_beside_its_model_counts(top: str, tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "net.py"
    for body, factor in (("torch.relu(x)", 2.0), ("torch.exp(x)", 3.0)):
        path.write_text(FILE.format(top=top.format(body, factor), result="act(x)"))
        want = X * factor if "FACTOR" in top else eval(body, {"torch": torch, "x": X})
        assert torch.equal(file_result(path, store), want)


def test_a_file_is_what_is_written_in_it_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where bytecode is kept, and an edit changes neither the size nor the second of the file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    store, path = Store(tmp_path / "store"), tmp_path / "net.py"
    for name in ("relu", "tanh", "ceil", "sqrt"):
        path.write_text(FILE.format(top="", result=f"torch.{name}(x.abs())"))
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert torch.equal(file_result(path, store), getattr(torch, name)(X.abs()))
    assert not list(tmp_path.glob("__pycache__")), "nothing is left beside somebody's file"


def test_a_helper_in_a_sibling_module_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path, helper = Store(tmp_path / "store"), tmp_path / "net.py", tmp_path / "w1_sibling_helper.py"
    for use in ("from w1_sibling_helper import act", "import w1_sibling_helper"):
        path.write_text(FILE.format(top=use, result="act(x)" if "from" in use else "w1_sibling_helper.act(x)"))
        for name in ("relu", "tanh", "sigmoid"):
            helper.write_text(f"import torch\ndef act(x):\n    return torch.{name}(x)\n# {name}\n" + "#" * len(name))
            monkeypatch.delitem(sys.modules, "w1_sibling_helper", raising=False)
            for cached in tmp_path.glob("__pycache__/*"):
                cached.unlink()
            assert torch.equal(file_result(path, store), getattr(torch, name)(X))


def scaled_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


class Steered(nn.Module):
    def __init__(self, mode: int) -> None:
        super().__init__()
        self.register_buffer("mode", torch.tensor(mode))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if bool(self.mode) else x.tanh()


def overridden(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    module = nn.ReLU()
    module.forward = function  # type: ignore[method-assign]
    return module


def hooked(function: Callable[..., Any], before: bool = False) -> nn.Module:
    module = nn.ReLU()
    module.register_forward_pre_hook(function) if before else module.register_forward_hook(function)
    return module


PAIRS: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "lambda": (lambda: Calls(lambda x: x + 1), lambda: Calls(lambda x: x + 2)),
    "builtin": (lambda: Calls(torch.relu), lambda: Calls(torch.tanh)),
    "closure": (lambda: Calls(scaled_by(2.0)), lambda: Calls(scaled_by(3.0))),
    "partial": (lambda: Calls(functools.partial(torch.clamp, min=0.0)), lambda: Calls(functools.partial(torch.clamp, min=1.0))),
    "default": (lambda: Calls(lambda x, k=1.0: x + k), lambda: Calls(lambda x, k=2.0: x + k)),
    "constant tensor": (lambda: Calls(scaled_by(torch.ones(4))), lambda: Calls(scaled_by(torch.zeros(4)))),  # type: ignore[arg-type]
    "override": (lambda: overridden(torch.tanh), lambda: overridden(torch.exp), nn.ReLU),
    "hook": (lambda: hooked(lambda m, i, o: o * 2), lambda: hooked(lambda m, i, o: o * 3), nn.ReLU),
    "pre-hook": (lambda: hooked(lambda m, i: (i[0] - 1,), True), lambda: hooked(lambda m, i: (i[0] + 1,), True)),
    "steering buffer": (lambda: Steered(0), lambda: Steered(1)),
    "layer": (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.Tanh())),
    "attribute": (lambda: nn.LeakyReLU(0.1), lambda: nn.LeakyReLU(0.3)),
    "eps": (lambda: nn.LayerNorm(4, eps=1e-5), lambda: nn.LayerNorm(4, eps=1e-1)),
    "hidden module": (lambda: Calls([nn.ReLU()][0].forward), lambda: Calls([nn.Tanh()][0].forward)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_modules_that_differ_in_one_thing_only(name: str) -> None:
    modules = [make() for make in PAIRS[name]]
    assert len({of(m) for m in modules}) == len(modules), "the key does not see the difference"
    assert [of(m) for m in modules] == [of(make()) for make in PAIRS[name]], "the key differs for equal modules"
    store = Store(None)
    for module in (*modules, *reversed(modules)):
        assert torch.equal(served(module, store), module(X))


def test_what_was_changed_in_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = of(nn.Sequential(nn.ReLU())), set()
    for target, name, value in ((nn.ReLU, "forward", nn.Tanh.forward), (nn.ReLU, "forward", lambda self, x: x),
                                (nn.functional, "relu", nn.functional.gelu), (nn.functional, "relu", lambda x, inplace=False: x)):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            seen.add(of(nn.Sequential(nn.ReLU())))
    assert before not in seen and len(seen) == 4
    assert of(nn.Sequential(nn.ReLU())) == before


def test_global_hooks_count() -> None:
    before = of(nn.ReLU())
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2)
    try:
        assert of(nn.ReLU()) != before
    finally:
        handle.remove()
    assert of(nn.ReLU()) == before


def language_model_changes() -> Iterator[tuple[str, Callable[[Any], None]]]:
    yield "activation", lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.Tanh())
    yield "scaling", lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.5)
    yield "eps", lambda m: setattr(m.model.norm, "variance_epsilon", 2e-6)
    yield "rope", lambda m: setattr(m.model.rotary_emb, "attention_scaling", 1.5)
    yield "hook", lambda m: m.model.layers[0].register_forward_hook(lambda a, b, out: out * 1.5) and None
    yield "override", lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x)


def test_every_change_of_a_live_language_model_is_seen() -> None:
    model, seen = tiny("qwen3", SIZES), {}
    seen[of(model)] = "nothing"
    for name, change in language_model_changes():
        model = tiny("qwen3", SIZES)
        assert of(model) in seen
        change(model)
        assert seen.setdefault(of(model), name) == name, f"{name} is confused with {seen[of(model)]}"


def test_a_changed_live_language_model_is_served_as_it_is() -> None:
    store, prompt = Store(None), torch.tensor([[3, 17, 90]])
    changes = dict(language_model_changes())
    for name in ("", "activation", "scaling"):
        model = tiny("qwen3", SIZES)
        changes.get(name, lambda m: None)(model)
        made = compiled(model, store, max_context=16)
        ids = prompt
        for _ in range(4):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(made.generate(prompt, 4), ids), name
        assert not made.graphs.eager_reason


UNARY = ("relu", "tanh", "sigmoid", "exp", "neg", "abs")
EXPRESSIONS = st.lists(st.one_of(st.sampled_from(UNARY), st.tuples(st.sampled_from(("add", "mul")), st.sampled_from((0.5, 2.0, 3.0)))),
                       min_size=1, max_size=3)
SHARED = Store(None)


class Chain(nn.Module):
    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = getattr(torch, step)(x) if isinstance(step, str) else getattr(torch, step[0])(x, step[1])
        return x


@settings(max_examples=8)
@given(st.lists(EXPRESSIONS, min_size=2, max_size=2))
def test_any_expressions_in_any_order_with_one_store(expressions: list[list[Any]]) -> None:
    for steps in expressions:
        module = Chain(steps)
        assert torch.equal(served(module, SHARED), module(X))


PROCESS = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
from agentcompile_core.stages.capture.frontends import ModuleFileFrontend
from agentcompile_core.stages.capture.identity import identity
from agentcompile_core.plugin.interfaces import LoadedModel
from capture_models import SIZES, tiny
loaded = ModuleFileFrontend().load({path!r}, {{}})
for one in (loaded, LoadedModel(module=tiny("qwen3", SIZES), name="m"), LoadedModel(module=torch.nn.LSTM(3, 4), name="m")):
    found = identity(one)
    print(found.model, found.capture, repr(found.unstable))
"""


def test_identity_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.format(top="NAMES = {'a', 'b', 'c', 'd'}\nact = lambda x: x * len(NAMES)", result="act(x) * self.scale"))
    code = PROCESS.format(tests=str(Path(__file__).parent), path=str(path))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another order of sets than here
    fresh = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=300,
                           env={**os.environ, "PYTHONHASHSEED": seed}).stdout
    with contextlib.redirect_stdout(io.StringIO()) as here:  # where tests before this one have left what they left
        exec(code, {"__name__": "here"})
    assert fresh == here.getvalue() and fresh.count("''") == 3, fresh


class Unstable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = iter([1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def test_what_has_no_stable_form_is_served_and_never_stored() -> None:
    store = Store(None)
    assert identity(LoadedModel(module=Unstable(), name="m")).unstable
    assert torch.equal(served(Unstable(), store), X.relu())
    assert "text-capture" not in store.describe()
    served(nn.ReLU(), store)
    assert store.describe()["text-capture"] == 1


def test_code_that_reads_the_world_outside_is_unstable() -> None:
    for function in (lambda x: x * float(os.environ["FACTOR"]), lambda x: x * eval("2")):
        assert identity(LoadedModel(module=Calls(function), name="m")).unstable


def test_a_bundle_loads_for_its_own_module_and_no_other(tmp_path: Path) -> None:
    module, other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    made = compiled(module, Store(None), example_inputs=(X,))
    folder = made.save(tmp_path / "bundle")
    loaded = api.load(folder, module, device="cpu", catalog=CATALOG, example_inputs=(X,))
    assert torch.equal(loaded(X), module(X))
    with pytest.raises(UsageError, match="pass the model it was compiled for"):
        api.load(folder, other, device="cpu", catalog=CATALOG, example_inputs=(X,))


def test_a_bundle_of_a_file_loads_for_that_file(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.format(top="", result="torch.relu(x) * self.scale"))
    folder = compiled(path, Store(None)).save(tmp_path / "bundle")
    loaded = api.load(folder, path, device="cpu", catalog=CATALOG)
    assert torch.equal(loaded(X), X.relu() * 2)
    path.write_text(FILE.format(top="", result="torch.tanh(x) * self.scale"))
    with pytest.raises(UsageError, match="pass the model it was compiled for"):
        api.load(folder, path, device="cpu", catalog=CATALOG)


def test_digest_of_a_model_is_that_of_its_meta_twin() -> None:
    real = tiny("qwen3", SIZES)
    with torch.device("meta"):
        meta = type(real)(real.config).eval()
    assert describe(LoadedModel(module=real, name="a")).digest == describe(LoadedModel(module=meta, name="b")).digest
