"""What a terminal obeys does not reach it from a bundle: titles, colours, lines that look like the program's own."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

HOSTILE = "\x1b]0;title\x07\x1b[31m\nFAKE: verified"
WORDS = ("why", "message", "detail", "note", "notes", "said", "subject", "plugin", "traceback")  # free text of documents


def poisoned(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: poisoned(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, key) for v in value]
    return value + HOSTILE if isinstance(value, str) and key in WORDS else value


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words") / "b"
    shutil.copytree(tiny_bundle, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        path = folder / entry["path"]
        if path.suffix == ".json" and path.parent == folder:
            document = json.loads(path.read_text())
            if path.name == "failures.json":
                document = [{"stage": "validate", "cause": "tolerance", "plugin": "gemv", "subject": "x", "message": "m", "traceback": ""}]
            if path.name == "graphs.json":
                document["model"]["name"] += HOSTILE
            path.write_text(json.dumps(poisoned(document) if path.name not in ("graphs.json", "programs.json") else document))
            entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["model"]["name"] += HOSTILE
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("command", ["explain", "audit", "advice", "generate"])
def test_only_what_is_printed_reaches_the_terminal(cli: Any, bundle: Path, command: str) -> None:
    more = {"advice": [bundle], "generate": ["--prompt", "x", "--max-new-tokens", 2, "--device", "cpu"]}.get(command, [])
    code, out, err = cli(command, *(["--bundle"] if command == "generate" else []), bundle, *more)
    assert code in (0, 2)
    assert not [c for c in out + err if c in "\x1b\x07\r"], repr(out + err)[:2000]
    if command == "explain":
        assert code == 0 and "FAKE" in out
        assert not [line for line in out.splitlines()[1:] if line.lstrip().startswith("FAKE")], out
