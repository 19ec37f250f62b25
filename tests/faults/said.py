"""What a user must be told although nothing fails: where a request went, what was ignored, what was made up, what does not follow."""

import http.server
import json
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcompile_core.store import Store

from . import cheap
from .registry import add, fault
from .seen import command, right, told

KEY = "sk-canary-of-the-faults"
HALVES = {  # subject and accumulator, in fp16: in kernels of fp16, but for the softmax of bf16
    "the weighted values of an attention": ("lanes_split", "weighted[g][e] = __half2float"),
    "the weights of a softmax": ("lanes_split", "sum[g] = __half2float(__float2half_rn(sum[g] + (scores"),
    "the products of a matrix-vector kernel": ("gemv_rows", "sums[number] = __half2float"),
    "the scores of a softmax in bf16": ("softmax_looped_bf16", "sum = __half2float(__float2half_rn(sum + (expf"),
    "the elements of a reduction": ("reduction_strided_vectors", "value = __half2float(__float2half_rn(value + (other)))"),
    "the squares of an attention's normed heads": ("lanes_split", "squares = __half2float"),
}
ONCE = {"the sum of a softmax": ("softmax_split_rows", "1.0f / __half2float(__float2half_rn(sum))"),
        "the denominator of an attention": ("lanes_split", "total / __half2float")}


class _Redirecting(http.server.BaseHTTPRequestHandler):
    """Sends every request to another port, and keeps the keys that it was sent."""

    keys: list[str]
    location = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers.get("Authorization", ""))
        self.send_response(307)
        self.send_header("Location", self.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@contextmanager
def _server(location: str = "") -> Iterator[Any]:
    handler = type("Handler", (_Redirecting,), {"keys": [], "location": location})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@fault("advice", "the server of an advisor redirects its request to another one", "the key went nowhere else, the program is right")
def _a_server_of_advice_that_redirects(folder: Path) -> str:
    from agentcompile_advisor_litellm import API_BASE, MODEL, LiteLLMAdvisor

    with pytest.MonkeyPatch.context() as patch, _server() as elsewhere:
        patch.setenv("OPENAI_API_KEY", KEY)
        with _server(f"http://127.0.0.1:{elsewhere.server_port}/v1/chat/completions") as server:
            patch.setenv(MODEL, "openai/stub")
            patch.setenv(API_BASE, f"http://127.0.0.1:{server.server_port}/v1")
            advisor = ("acme", cheap.offers(advisors=LiteLLMAdvisor()))
            made = cheap.compiled(cheap.module(folder), Store(None), workers=cheap.HERE, advisor="litellm", extra=(advisor,))
            right(made)
            assert server.RequestHandlerClass.keys == [f"Bearer {KEY}"], [str(f) for f in made.compilation.failures]
            assert elsewhere.RequestHandlerClass.keys == []
    said = told(made, "no advice from openai/stub", folder)
    assert KEY not in said
    return said


@fault("input", "generation_config ends requests at a token and penalizes repetition; temperature is given without sampling",
       "the tokens are HuggingFace's")
def _settings_of_generation(folder: Path) -> str:
    import transformers
    from test_generate_manners import PROMPT

    from .inputs import _model

    mine = _model()
    model, before = mine.loaded.module, mine.loaded.module.generation_config
    try:
        model.generation_config = transformers.GenerationConfig(pad_token_id=7, eos_token_id=list(range(0, 100, 3)), repetition_penalty=1.8)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found, wanted = mine.generate(PROMPT, 12, temperature=0.5), model.generate(PROMPT, max_new_tokens=12)
        assert torch.equal(found, wanted) and found.shape[1] < PROMPT.shape[1] + 12, "generation_config was not honoured"
    finally:
        model.generation_config = before
    return next(str(one.message) for one in said if "without do_sample=True" in str(one.message))


@fault("input", "a folder holds a config.json and no weights", "it was compiled, and said to mean nothing")
def _weights_that_are_made_up(folder: Path) -> str:
    from test_generate_manners import CONFIG, QUICK

    import agentcompile_core as ac

    CONFIG.save_pretrained(folder)
    made = ac.compile(folder, meta=False, **{**QUICK, "run_on": "nothing"})
    (said,) = (note for note in made.notes if "random weights" in note)
    assert said.startswith(f"no weights in {folder}: random weights, seed 0") and "means nothing" in said
    return str(said)


@fault("bundles", "one comparison in the log of the captured chain is turned round, every hash made to agree",
       "the audit says which decision does not follow")
def _a_log_of_the_chain_that_was_altered(folder: Path) -> str:
    from test_audit_chain import judged_by_the_clock

    from agentcompile_core.stages.emit import evidence

    bundle = judged_by_the_clock(folder)
    assert command("audit", bundle)[0] == 0
    found = evidence.read(bundle).decisions
    assert found is not None and found.chain is not None and found.chain.trials
    _turned(bundle)
    code, out, err = command("audit", bundle, "--json")
    problems = [f"{row['kind']} {row['subject']}: {problem}" for row in json.loads(out)["decisions"] for problem in row["problems"]]
    assert code == 1 and problems and "Traceback" not in err
    return problems[0]


def _turned(bundle: Path) -> None:
    """The first trial of the chain's log says the opposite; the manifest agrees with it."""
    import hashlib

    path, manifest = bundle / "decisions.json", bundle / "manifest.json"
    document = json.loads(path.read_text())
    trial = document["chain"]["trials"][0]
    trial["taken"] = not trial.get("taken", False)
    path.write_text(json.dumps(document))
    listed = json.loads(manifest.read_text())
    for entry in listed["files"]:
        entry["sha256"] = hashlib.sha256((bundle / entry["path"]).read_bytes()).hexdigest()
    manifest.write_text(json.dumps(listed))


def _half(subject: str, line: str) -> Any:
    def run(folder: Path) -> str:
        sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
        try:
            from mutants.differences import first_beyond
            from mutants.narrow import narrowed
            from mutants.subjects import load, subjects
            from mutants.text import line_at
        finally:
            sys.path.pop(0)
        one = subjects()[subject]
        file, text = next((file, text) for file, whole in one.files().items() for found in narrowed(whole) if found.type == "fp16"
                          for text in [found.edit.apply(whole)] if line in line_at(text, found.edit.start))
        source = one.mutated(file, text)
        kind = load().kinds[one.match.kind]
        cases = [case for case in one.job(source).trial.cases if case.family in kind.lasting_families(one.match)]
        seen = first_beyond(one, source, cases)
        assert seen, "no case of the candidate shows it"
        return f"tolerance: {seen}"

    return run


for _what, (_subject, _line) in HALVES.items():
    add("kernels", f"a kernel that adds {_what} in half precision", f"{_what} are added in fp16, in a kernel of its family's own schedule",
        _half(_subject, _line), "the candidate is not selected")
for _what, (_subject, _line) in ONCE.items():
    add("kernels", f"a kernel that divides by {_what} in half precision", f"{_what} is rounded to fp16 once, where it is divided by",
        _half(_subject, _line), "the candidate is not selected")
