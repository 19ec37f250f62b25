"""The warm compile of ``decode.py`` is that of a new process, with all that a user waits for; one that fails costs no other row."""

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

OPTIONS = Namespace(model="qwen3-4b", dtype="float16", context=8192, advisor="heuristic", budget_s=40.0, budget_plans=400, rounds=2)
SAID = {"model": "qwen3-4b", "imports_s": 5.0, "context_s": 1.0, "load_s": 6.0, "compile_s": 4.5, "between_stages_s": 0.5,
        "to_first_token_s": 17.1, "stages": {"load": 6.0, "capture": 1.5, "install": 3.0}}


@pytest.mark.parametrize("code", [0, 1])
def test_the_warm_compile_is_another_processs(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    decode, ran = bench("decode"), list[list[str]]()

    def run(command: list[str], **_: Any) -> Any:
        ran.append(command)
        return subprocess.CompletedProcess(command, code, stdout="" if code else f"a line\n{json.dumps(SAID)}\n")

    monkeypatch.setattr(decode.subprocess, "run", run)
    found = decode.warm_seconds(OPTIONS, tmp_path)
    (command,) = ran
    assert Path(command[1]).name == "new_process.py" and command[2] == "qwen3-4b"
    assert sorted(command[3:]) == ["--advisor=heuristic", "--budget-plans=400", "--budget-s=40.0", f"--cache={tmp_path}",
                                   "--context=8192", "--dtype=float16", "--rounds=2"]
    if code:
        assert found["warm_s"] is None and "new_process.py qwen3-4b ended with 1" in found["warm_why"]
    else:
        assert found == {"warm_s": 4.5, "warm_with_loading_s": 10.5, "warm_first_token_s": 17.1, "warm_stages_s": SAID["stages"]}


@pytest.mark.parametrize("failing", [None, 1])
def test_cold_and_warm_processes_share_a_store(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: int | None) -> None:
    """As many processes as were asked for, the profile of the last one alone; none behind one that failed."""
    new_process, ran = bench("new_process"), list[list[str]]()

    def run(command: list[str], **_: Any) -> Any:
        ran.append(command)
        return subprocess.CompletedProcess(command, 3 if len(ran) - 1 == failing else 0)

    monkeypatch.setattr(new_process.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["new_process.py", "qwen3-4b", "--budget-s=40", "--again=2", f"--profile={tmp_path}/seen"])
    assert new_process.main() == (0 if failing is None else 3)
    assert len(ran) == (3 if failing is None else 2)
    stores = [next(word for word in command if word.startswith("--cache=")) for command in ran]
    assert len(set(stores)) == 1 and all("--budget-s=40.0" in command and command[2] == "qwen3-4b" for command in ran)
    assert [f"--profile={tmp_path}/seen" in command for command in ran] == [False, False, True][: len(ran)]
