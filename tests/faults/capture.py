"""Capture identity: what a module computes is served, whatever was compiled before on the same cache."""

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from capture_models import SIZES, tiny
from test_capture_comparison import SwappedStore
from test_capture_identity import FILE, PAIRS, X, compiled, language_model_changes, served
from torch import nn

from agentcompile_core.store import Store

from .registry import add, fault
from .seen import noted

AREA, RIGHT = "capture identity", "each module got its own result, in both orders, on one cache"


def _pair(name: str) -> Any:
    def run(folder: Path) -> str:
        store, modules = Store(folder / "store"), [make() for make in PAIRS[name]]
        for module in (*modules, *reversed(modules)):
            assert torch.equal(served(module, store), module(X)), "another module's graph was served"
        kept = store.describe().get("text-capture", 0)
        return f"{len(modules)} modules that differ in one {name}: each computed its own, {kept} captures are kept"

    return run


for _name in PAIRS:
    add(AREA, f"another {_name}", f"two modules of equal parameters that differ in one thing only: {_name}", _pair(_name), RIGHT)


@fault(AREA, "relu.py, then tanh.py, with one cache", RIGHT)
def _another_file_of_equal_parameters(folder: Path) -> str:
    store = Store(folder / "store")
    for name in ("relu", "tanh", "relu"):
        path = folder / f"{name}.py"
        path.write_text(FILE.format(top="", result=f"torch.{name}(x)"))
        assert torch.equal(compiled(path, store)(X), getattr(torch, name)(X))
    return "relu.py and tanh.py computed their own"


@fault(AREA, "a file is edited in place", RIGHT)
def _an_edited_file(folder: Path) -> str:
    store, path = Store(folder / "store"), folder / "net.py"
    for name in ("relu", "tanh", "sigmoid"):
        path.write_text(FILE.format(top=f"def act(x):\n    return torch.{name}(x)", result="act(x)"))
        assert torch.equal(compiled(path, store)(X), getattr(torch, name)(X))
    return "after each edit of a helper in the file the new function was computed"


@cache
def _unchanged() -> tempfile.TemporaryDirectory[str]:
    """A cache in which the model is compiled as it was: one for all changes, each of which gets a copy."""
    kept = tempfile.TemporaryDirectory()
    compiled(tiny("qwen3", SIZES), Store(Path(kept.name) / "store"), max_context=16)
    return kept


def _live(name: str) -> Any:
    def run(folder: Path) -> str:
        shutil.copytree(Path(_unchanged().name) / "store", folder / "store")
        store, prompt = Store(folder / "store"), torch.tensor([[3, 17, 90]])
        for change in (lambda m: None, dict(language_model_changes())[name]):
            model = tiny("qwen3", SIZES)
            change(model)
            made, ids = compiled(model, store, max_context=16), prompt
            for _ in range(4):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
            assert torch.equal(made.generate(prompt, 4, eos_token_id=None), ids), "tokens of the unchanged model"
        return f"a live model with another {name} generated its own tokens"

    return run


for _name in ("activation", "scaling", "eps", "rope", "hook"):
    add(AREA, f"live model with another {_name}", f"a live Qwen3 is changed in its {_name} after it was compiled", _live(_name), RIGHT)


@fault(AREA, "a capture in the cache is replaced by a valid one of another operator", "the graph was made anew and is right")
def _a_changed_capture_in_the_cache(folder: Path) -> str:
    from .cheap import lenient

    store = SwappedStore(folder / "store")
    with lenient():
        compiled(nn.ReLU(), store, example_inputs=(X,))
        made = compiled(nn.ReLU(), store, example_inputs=(X,))
    assert torch.equal(made(X), X.relu())
    return noted(made, "made anew")


@fault(AREA, "torch.export traces something else than the module computes", "the framework runs the module itself")
def _an_export_that_is_wrong(folder: Path) -> str:
    from .cheap import lenient

    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh() if torch.compiler.is_compiling() else x.relu()

    store = Store(folder / "store")
    with lenient():
        made = compiled(Other(), store, example_inputs=(X,))
    assert torch.equal(made(X), X.relu()) and "text-capture" not in store.describe()
    return noted(made, "runs on the framework")


@fault(AREA, "torch.rsub with a positional alpha, add.Scalar with a positional alpha", "both are what torch computes")
def _arguments_by_position(folder: Path) -> str:
    class Positional(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.add.Scalar(torch.rsub(x, 3, alpha=2), 3, 2)

    module, store = Positional(), Store(folder / "store")
    assert torch.allclose(served(module, store), module(X), atol=1e-6)
    return "3 - 2 x + 6 was computed, as torch computes it"
