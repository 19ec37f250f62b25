"""What identifies a model does not depend on the folder that a program runs in: a bundle made in one is loaded in another."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate_manners import CONFIG, PROMPT, QUICK
from torch import nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages.capture import libraries
from agentcompile_core.stages.capture.identity import identity


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def made(body: str, filename: str) -> Any:
    """A function whose source is no file, as those of notebooks, prompts and generated classes."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(f"def act(x):\n    return {body}\n", filename, "exec"), names)
    return names["act"]


@contextmanager
def within(folder: str) -> Iterator[None]:
    before = os.getcwd()
    if folder == "gone":
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
    else:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


FOLDERS = ["/", "gone", tempfile.gettempdir(), *(str(Path(str(one.__file__)).parent) for one in (torch, transformers, ac, os))]
FILES = ["<string>", "<stdin>", "<ipython-input-3-0a>", "<attrs generated>", "<frozen mine>"]
LLAMA = transformers.LlamaForCausalLM(CONFIG)


def of(module: nn.Module) -> Any:
    libraries.is_library_file.cache_clear()
    return identity(LoadedModel(module=module, name="m"))


@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(st.lists(st.sampled_from(FOLDERS), min_size=2, max_size=3, unique=True), st.sampled_from(FILES))
def test_a_model_is_itself_in_every_folder(folders: list[str], filename: str) -> None:
    relu, tanh = (Calls(made(f"torch.{name}(x)", filename)) for name in ("relu", "tanh"))
    found = []
    for folder in folders:
        with within(folder):
            found.append([of(one) for one in (LLAMA, relu, tanh)])
    assert all(one == found[0] for one in found)
    assert found[0][1] != found[0][2] or filename.startswith("<frozen"), "code without a file is nobody's library"


def test_a_bundle_made_in_one_folder_is_loaded_in_another(tmp_path: Path) -> None:
    mine = ac.compile(LLAMA.eval().requires_grad_(False), **QUICK)
    mine.save(tmp_path / "bundle")
    with within("/"):
        assert torch.equal(ac.load(tmp_path / "bundle", LLAMA, device="cpu").generate(PROMPT, 4), mine.generate(PROMPT, 4))
    with within("gone"), pytest.raises(UsageError, match="current folder is gone"):
        ac.load(tmp_path / "bundle", LLAMA, device="cpu")


@pytest.mark.parametrize("filename", FILES[:-1])
def test_code_without_a_file_is_no_library_even_inside_of_one(filename: str) -> None:
    with within(str(Path(str(torch.__file__)).parent)):
        libraries.is_library_file.cache_clear()
        assert not libraries.is_library_file(filename)


def test_what_identifies_a_model_is_the_same_behind_a_compile_by_torch() -> None:
    """torch's compiler puts functions of its own around two of ``Module``; one of somebody else's counts as before."""
    program = """
import torch, transformers
from test_identity_anywhere import Calls, CONFIG, of
models = [Calls(torch.tanh), transformers.LlamaForCausalLM(CONFIG)]
before = [of(model) for model in models]
torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
assert torch.nn.Module.__init__.__qualname__.startswith("install_generation_tagging_init"), "torch does so no more"
print([of(model) for model in models] == before)
within = torch.nn.Module.__init__.__closure__[0].cell_contents
torch.nn.Module.__init__.__closure__[0].cell_contents = lambda self, *args: within(self, *args)
print([of(model) for model in models] == before)
"""
    said = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "False"]
