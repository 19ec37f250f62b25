"""Input: folders, files, options, prompts and configuration that cannot be. One sentence says what was seen and what to do."""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from test_framework_path import t5
from test_generate_manners import CONFIG, PROMPT, QUICK
from test_hostile_models import INDEX

import agentcompile_core as ac
from agentcompile_core.configuration import files
from agentcompile_core.errors import UsageError
from agentcompile_core.stages.capture.huggingface import load_pretrained

from . import cheap
from .registry import add, fault
from .seen import exits, refused

AREA, KEPT = "input", "nothing was begun"
TINY = Path(__file__).parents[2] / "examples" / "tiny_model"
QUICKLY = ("--device", "cpu", "--no-cache")


@cache
def _model() -> Any:
    import transformers

    torch.manual_seed(1)
    return ac.compile(transformers.LlamaForCausalLM(CONFIG).eval().requires_grad_(False), **QUICK)


@cache
def _t5() -> Any:
    with cheap.lenient():
        return ac.compile(t5(), **QUICK)


PROMPTS: dict[str, tuple[Any, str]] = {
    "a text": ("some text", "tokenize it first"), "a list of texts": (["some text"], "tokenize it first"),
    "an empty list": ([], "0 tokens"),
    "two prompts, one of them empty": ([[1, 2], []], "no prompt"), "a ragged list with a word": ([[1, 2], ["a"]], "no prompt"),
    "floats": (torch.ones(1, 3), "integers"), "nothing but dimensions": (torch.ones(1, 2, 2).long(), "prompts as integers"),
    "an object": (object(), "no prompt"),
    "ids beyond the vocabulary": ([[1, 100]], "vocabulary is 0 to 99"), "a dictionary": ({"input_ids": PROMPT}, "by name"),
}
for _name, (_given, _words) in PROMPTS.items():
    add(AREA, f"a prompt that is {_name}", f"generate({_name})", lambda folder, given=_given, words=_words: refused(
        lambda: _model().generate(given, 4), words), "the session serves the next request")
REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "more tokens than the context holds": ({"max_new_tokens": 60}, "exceed the context of 64"),
    "an option that does not exist": ({"temperatur": 1.0}, "did you mean temperature"),
    "a mask that hides all tokens": ({"attention_mask": torch.zeros(1, 5)}, "hides all tokens"),
    "no tokens": ({"max_new_tokens": 0}, "at least 1"),
}
for _name, (_options, _words) in REQUESTS.items():
    add(AREA, f"a request for {_name}", f"generate with {_name}", lambda folder, options=_options, words=_words: refused(
        lambda: _model().generate(PROMPT, **options), words), "the session serves the next request")


@fault(AREA, "T5, an encoder-decoder model: a text and then a prompt", "it generates what HuggingFace generates")
def _t5_and_a_text(folder: Path) -> str:
    said = refused(lambda: _t5().generate("translate this"), "text was given")
    assert torch.equal(_t5().generate(PROMPT, 4), t5().generate(PROMPT, max_new_tokens=4))
    return said


def _config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04not to be opened")


def _index(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        next(folder.glob("*.safetensors")).rename(folder / "part.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"p": name}}))

    return change


def _remote(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    fetching = {"attn_implementation": "somebody/kernel", "auto_map": {"AutoConfig": "evil.E"}}
    (folder / "config.json").write_text(json.dumps({**document, **fetching}))
    (folder / "evil.py").write_text(f"open({str(folder / 'canary')!r}, 'w').close()\n")


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "whose config.json is no JSON": (_config('{"model_type": "qwen3",'), "not valid JSON"),
    "whose config.json is a list": (_config("[]"), "model_type"),
    "without any file": (lambda folder: [path.unlink() for path in folder.iterdir() if path.is_file()], "config.json"),
    "with pickled weights": (_pickled, "pickled weights"),
    "whose weights are cut off": (lambda folder: os.truncate(folder / "model.safetensors", 90_000), "model"),
    "whose index names a file outside": (_index("../other.safetensors"), "beside it"),
    "whose index names a pickle": (_index("pytorch_model.bin"), "beside it"),
    "with an adapter of another model": (
        lambda folder: (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}'), "adapter_config"),
}


def _folder(change: Callable[[Path], object], words: str) -> Any:
    def run(folder: Path) -> str:
        shutil.copytree(TINY, folder / "model")
        change(folder / "model")
        return exits(2, words, "compile", folder / "model", *QUICKLY, "--context", 64)

    return run


for _name, (_change, _words) in FOLDERS.items():
    add(AREA, f"a model folder {_name}", f"a model folder {_name}", _folder(_change, _words), KEPT)


@fault(AREA, "config.json names code and kernels to fetch", "nothing was fetched, imported or run")
def _a_configuration_that_fetches(folder: Path) -> str:
    shutil.copytree(TINY, folder / "model")
    _remote(folder / "model")
    made = load_pretrained(str(folder / "model"), dtype=None, device="cpu", meta=False, random_weights=None)
    assert not (folder / "model" / "canary").exists()
    notes = [note for note in made.notes if "attn_implementation" in note or "auto_map" in note]
    assert notes
    return " ".join(notes)


COMMANDS: dict[str, tuple[tuple[object, ...], str]] = {
    "an advisor that is not installed": (("compile", TINY, "--advisor", "oracle"), "unknown advisor 'oracle'"),
    "a validator that is not installed": (("compile", TINY, "--validators", "hope"), "unknown validator 'hope'"),
    "a target that is not installed": (("compile", TINY, "--target", "gtx280"), "unknown target 'gtx280'"),
    "a context of one": (("compile", TINY, "--context", 1), "a context of 1"),
    "no rounds": (("compile", TINY, "--rounds", 0), "must be positive"),
    "an output that is something else": (("compile", TINY, "--out", TINY), "exists and is not a bundle"),
    "a log that cannot be written": (("compile", TINY, "--log", "/nowhere/at/all"), "cannot write the log"),
    "greedy sampling": (("generate", TINY, "--prompt", "x", "--greedy", "--top-k", 3), "contradict"),
    "a model that is nowhere": (("compile", "/nowhere/model", *QUICKLY), "no folder"),
    "a bundle that is none": (("explain", TINY), "is not a bundle"),
    "an audit of what is no run": (("audit", TINY), "is not a bundle"),
    "a sanitizer that cannot work here": (("compile", TINY, "--sanitize", "--device", "cpu"), "sanitize"),
    "a cache command without its file": (("cache", "export"), "needs a file"),
}
for _name, (_arguments, _words) in COMMANDS.items():
    add(AREA, f"a command with {_name}", f"agentcompile {_arguments[0]} with {_name}",
        lambda folder, arguments=_arguments, words=_words: exits(2, words, *arguments), KEPT)
TOML: dict[str, tuple[str, str]] = {
    "that is no TOML": ("[tool.agentcompile\n", "not valid TOML"),
    "whose tool is a text": ('[tool]\nagentcompile = "x"\n', "write a section"),
    "whose tool is a list": ("[[tool.agentcompile]]\nmodule = 'm.py'\n", "write a section"),
    "that holds a key": ("[tool.agentcompile]\napi_key = 'sk-123'\n", "keys never stand in a file"),
    "that moves the cache": ("[tool.agentcompile.cache]\nfolder = '/tmp'\n", "only your own file"),
}


def _pyproject(text: str, words: str) -> Any:
    def run(folder: Path) -> str:
        (folder / "pyproject.toml").write_text(text)
        return refused(lambda: files.read(folder / "pyproject.toml", of_project=True), words)

    return run


for _name, (_text, _words) in TOML.items():
    add(AREA, f"a pyproject.toml {_name}", f"a project's pyproject.toml {_name}", _pyproject(_text, _words), KEPT)
MODULES = {"without a Model": ("x = 1\n", "Model"), "that raises": ("raise SystemError('enough')\n", "enough"),
           "that is no Python": ("def (", "")}
for _name, (_text, _words) in MODULES.items():
    def _file(folder: Path, text: str = _text, words: str = _words) -> str:
        (folder / "net.py").write_text(text)
        return exits(2, words, "compile", folder / "net.py", *QUICKLY)

    add(AREA, f"a module file {_name}", f"a module file {_name}", _file, "the file's own failure is a sentence, with its name")


@fault(AREA, "a defect of ours: an exception that nobody expects", "one sentence, and where to see the rest")
def _a_defect_of_ours(folder: Path) -> str:
    from agentcompile_core.cli import commands

    def fails(options: object) -> int:
        raise ZeroDivisionError("a defect that nobody thought of")

    real = commands.COMMANDS["doctor"]
    commands.COMMANDS["doctor"] = fails
    try:
        return exits(1, "a defect that nobody thought of", "doctor")
    finally:
        commands.COMMANDS["doctor"] = real


@fault(AREA, "a project folder is named on a path that is no path", KEPT)
def _a_path_that_is_none(folder: Path) -> str:
    os.chdir(folder)
    return refused(lambda: ac.compile("\0" * 3, device="cpu"), "", UsageError)
