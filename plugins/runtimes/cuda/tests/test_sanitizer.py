"""What compute-sanitizer prints is read rightly, what it is given is complete, and what is a false alarm is decided by a right kernel."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import hostile_kernels as hostile
import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda import machine_code
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.sanitizer import child, reports, running, validator
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.errors import UsageError
from agentcompile_core.plugin_api import Cause, ContractError, Feature, Kernel, Outcome, Reject
from agentcompile_core.testing.doubles import FakeBackend

WRITE = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at control_kernel_c0n7r015+0x1b0
=========     by thread (77,0,0) in block (2,0,0)
=========     Access to 0x7f4d5ba00534 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f4d5ba00000 of size 1332 bytes
=========         Host Frame: main [0x1234] in python
=========
output of the program
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call to cuCtxSynchronize.
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 2 errors
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at bulk(float*)+0x240
=========     and Read access at bulk(float*)+0x2a0 [128 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
REACHED = ("========= Warning: Maximum number of hazards reached. Environment variable NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS can be "
           "used to increase this count.\n")
FULL = RACE.replace("========= RACECHECK", f"{REACHED}========= RACECHECK")
BULK = frozenset({("bulk(float*)", 0x240)})
WARNING = RACE.replace("Error: Race", "Warning: Race").replace("(1 error, 0 warnings)", "(0 errors, 1 warning)")
UNINITIALISED = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at k+0x90
=========     by thread (7,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
BARRIER = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block
=========     at k+0x40
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 33 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\nagentcompile: every launch has ended\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
NO_DEVICE = "========= COMPUTE-SANITIZER\n========= Error: Target application terminated before first instrumented API call\n"


@pytest.mark.parametrize("text, errors, kinds", [
    (WRITE, 2, ["Invalid __global__ write of size # bytes", "Program hit CUDA_ERROR_LAUNCH_FAILED (error #) due to"]),
    (RACE, 1, ["Error: Race reported between Write access"]), (WARNING, 1, ["Warning: Race reported between Write access"]),
    (UNINITIALISED, 1, ["Uninitialized __global__ memory read of size # bytes"]),
    (BARRIER, 33, ["Barrier error detected. Divergent thread(s)"]), (CLEAN, 0, []), (NO_RACE, 0, [])])
def test_reports_are_read(text: str, errors: int, kinds: list[str]) -> None:
    found = reports.read(text)
    assert found.complete and found.errors == errors
    assert [f.kind.partition(' "')[0] for f in found.findings] == kinds


def test_a_finding_says_what_and_where_in_one_line() -> None:
    first = reports.read(WRITE).findings[0]
    assert str(first).startswith("Invalid __global__ write of size 4 bytes; at control_kernel_c0n7r015+0x1b0; by thread (77,0,0)")
    assert "Host Frame" not in str(first) and "\n" not in str(first)


@pytest.mark.parametrize("text", ["", "no such file", NO_DEVICE, WRITE.partition("========= ERROR SUMMARY")[0]])
def test_without_a_summary_nothing_is_known(text: str) -> None:
    assert not reports.read(text).complete


@given(st.text(alphabet="= abERORSUMY:0123\n()", max_size=300))
def test_no_text_breaks_the_reader_and_none_without_a_summary_is_complete(text: str) -> None:
    found = reports.read(text)
    assert found.errors >= len(found.findings) or len(found.findings) == 20
    assert not found.complete or "SUMMARY" in text


def test_only_what_a_right_kernel_raises_too_is_a_false_alarm() -> None:
    race = reports.read(RACE)
    alarms = frozenset(finding.kind for finding in reports.read(RACE.replace("bulk(float*)+0x240", "other+0x10")).findings)
    refused = validator.judged("racecheck", race, frozenset(), BULK)
    assert refused.outcome is Outcome.FAIL
    assert "1 errors, the first one: Error: Race reported between Write access at bulk" in refused.detail
    allowed = validator.judged("racecheck", race, alarms, BULK)
    assert allowed.outcome is Outcome.PASS and "1 false alarms" in allowed.detail
    both = reports.read(RACE.replace("========= RACECHECK", UNINITIALISED + "========= RACECHECK"))
    assert validator.judged("racecheck", both, alarms, BULK).outcome is Outcome.FAIL
    nobody_explains = reports.Report(complete=True, errors=3)
    assert validator.judged("racecheck", nobody_explains, alarms, BULK).outcome is Outcome.FAIL


ACCESSES = st.tuples(st.sampled_from(["k", "k(float*, int)", "ns::k<3>(T)"]), st.integers(0, 1 << 16).map(lambda i: 16 * i))


@given(ACCESSES, st.lists(ACCESSES, min_size=1, max_size=4), st.sets(ACCESSES, max_size=4), st.data())
def test_a_race_without_a_bulk_copy_is_never_a_false_alarm(first: tuple[str, int], others: list[tuple[str, int]],
                                                           copies: set[tuple[str, int]], data: st.DataObject) -> None:
    """In a kernel that copies in bulk a forgotten barrier between plain accesses reads the same but for its places."""
    copies |= set(data.draw(st.lists(st.sampled_from([first, *others]), max_size=3)))
    lines = [f"=========     and Read access at {name}+0x{offset:x} [9 hazards]" for name, offset in others]
    write = f"========= Error: Race reported between Write access at {first[0]}+0x{first[1]:x}"
    text = "\n".join(["========= COMPUTE-SANITIZER", write, *lines, "=========",
                      "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"])
    report = reports.read(text)
    assert report.findings[0].accesses == (first, *others)
    kinds = frozenset(finding.kind for finding in reports.read(RACE).findings)
    passed = validator.judged("racecheck", report, kinds, frozenset(copies)).outcome is Outcome.PASS
    assert passed is (first in copies or all(other in copies for other in others))


def test_reports_that_were_left_out_are_no_false_alarms() -> None:
    one = RACE[RACE.index("========= Error"):RACE.index("========= RACECHECK")]
    alarms = frozenset(finding.kind for finding in reports.read(RACE).findings)
    for count, outcome in ((reports.MOST - 1, Outcome.PASS), (reports.MOST, Outcome.FAIL), (reports.MOST + 5, Outcome.FAIL)):
        summary = f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"
        report = reports.read("========= COMPUTE-SANITIZER\n" + one * count + summary)
        assert validator.judged("racecheck", report, alarms, BULK).outcome is outcome
    more = reports.read(RACE.replace("(1 error, 0 warnings)", "(7 errors, 0 warnings)"))
    assert validator.judged("racecheck", more, alarms, BULK).outcome is Outcome.FAIL


class Run:
    """What a validator gets, as far as this one uses it."""

    backend = FakeBackend()

    def inputs(self, case: Any, device: str) -> dict[str, torch.Tensor]:
        x, weight = torch.full((1, 1, hostile.COLUMNS), float(case.seed)), torch.ones(hostile.ROWS, hostile.COLUMNS)
        return {"x": x.half(), "weight": weight.half()}


class Said:
    """Tools that say what they are told, by tool and by whether the bulk control is asked about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ours: dict[str, str], control: dict[str, str] | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self.ours, self.control = ours, control or {}
        kernel = Kernel(digest="d", backend="cuda", arch="sm_90", binary=b"x", sha256="s", compiler="c")
        monkeypatch.setattr(running, "find", lambda: Path("/bin/true"))
        monkeypatch.setattr(CudaBackend, "build", lambda self, source, target: kernel)
        monkeypatch.setattr(running, "run", self.run)
        monkeypatch.setattr(machine_code, "bulk_copies", lambda binary: BULK)

    def run(self, tool: str, trial: Any, kernel: Any, inputs: Any, program: Path) -> reports.Report:
        is_control = trial.source.launches[0].entry == validator.BULK
        self.asked.append((tool, "control" if is_control else "ours"))
        clean = NO_RACE if tool == "racecheck" else CLEAN
        is_many = is_control and trial.source.launches[0].grid[0] > 1
        return reports.read((self.control if is_control else self.ours).get("many" if is_many else tool, clean))


def trial(*features: str) -> Any:
    made = hostile.trial("honest", preset("h200"))
    return evolve(made, source=evolve(made.source, features=features))


def test_a_clean_winner_passes_all_four_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, {})
    found = validator.SanitizerValidator().check(trial(), Run())
    assert found.passed and [c.name for c in found.checks] == list(running.TOOLS) and len(said.asked) == 4


@pytest.mark.parametrize("tool, text, cause", [("memcheck", WRITE, Cause.MEMORY_FAULT), ("racecheck", RACE, Cause.RACE),
                                               ("initcheck", UNINITIALISED, Cause.MEMORY_FAULT), ("synccheck", BARRIER, Cause.RACE),
                                               ("memcheck", WRITE.replace("Access to", "Misaligned access to"), Cause.MISALIGNED)])
def test_what_a_tool_reports_refuses_the_winner(tool: str, text: str, cause: Cause, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, {tool: text})
    found = validator.SanitizerValidator().check(trial(), Run())
    assert (found.outcome, found.cause) == (Outcome.FAIL, cause) and found.message.startswith(f"{tool}: ")
    assert said.asked[-1] == (tool, "ours"), "without bulk copies no report is a false alarm"


@pytest.mark.parametrize("control, passes", [({"racecheck": RACE}, True), ({}, False), ({"racecheck": WARNING}, False)])
def test_a_report_on_bulk_copies_is_held_against_the_control(control: dict[str, str], passes: bool,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, {"racecheck": RACE}, control)
    judge = validator.SanitizerValidator()
    assert judge.check(trial(Feature.BULK_COPY), Run()).passed is passes
    judge.check(trial(Feature.BULK_COPY), Run())
    assert said.asked.count(("racecheck", "control")) == 1, "asked once"


@pytest.mark.parametrize("many, passes", [(FULL, True), (RACE, False)])
def test_more_hazards_than_racecheck_keeps_are_held_against_a_control_with_as_many(many: str, passes: bool,
                                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """First seen on the H200: gate/up of Qwen3-1.7B alone is 25 million false hazards, and racecheck keeps ten."""
    Said(monkeypatch, {"racecheck": FULL}, {"racecheck": RACE, "many": many})
    assert validator.SanitizerValidator().check(trial(Feature.BULK_COPY), Run()).passed is passes


def test_the_child_is_given_every_buffer_at_its_size(tmp_path: Path) -> None:
    made = hostile.trial("honest", preset("h200"))
    kernel = Kernel(digest="d", backend="cuda", arch="sm_90", binary=b"\x7fELF", sha256="s", compiler="c")
    running.write_request(tmp_path, made, kernel, [Run().inputs(case, "cpu") for case in made.cases])
    request = json.loads((tmp_path / "request.json").read_text())
    assert [[name for name, _, _ in case["buffers"]] for case in request["cases"]] == [["x", "weight", "out"]] * 2
    for case in request["cases"]:
        sizes = {name: (nbytes, file) for name, nbytes, file in case["buffers"]}
        assert sizes["out"] == (2 * hostile.ROWS, None), "an output is not initialised"
        assert all((tmp_path / file).stat().st_size == nbytes for nbytes, file in sizes.values() if file)


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Writes a program that prints a text, in place of compute-sanitizer."""
    def write(text: str, seconds: float = 0.0) -> Path:
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!{sys.executable}\nimport sys, time\nprint({text!r})\nsys.stdout.flush()\ntime.sleep({seconds})\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return write


def run(program: Path) -> reports.Report:
    kernel = Kernel(digest="d", backend="cuda", arch="sm_90", binary=b"x", sha256="s", compiler="c")
    made = hostile.trial("honest", preset("h200"))
    return running.run("memcheck", made, kernel, [Run().inputs(made.cases[0], "cpu")], program)


def test_a_run_that_comes_to_no_end_is_no_pass(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(program(CLEAN)).errors == 0 and run(program(WRITE)).errors == 2
    for text in (NO_DEVICE, "", CLEAN.replace(child.DONE, "")):
        with pytest.raises(ContractError, match="memcheck of compute-sanitizer came to no end"):
            run(program(text))
    monkeypatch.setattr(running, "TOOL_S", 1.0)
    with pytest.raises(ContractError, match=r"compute-sanitizer did not end within 1 s and was killed"):
        run(program(CLEAN, 60.0))


def test_without_the_tool_or_a_gpu_compile_says_so_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import agentcompile_core as ac

    monkeypatch.setattr(CudaBackend, "available", lambda self: Reject("torch sees no CUDA device"))
    with pytest.raises(UsageError, match=r"--sanitize runs kernels on a GPU .* torch sees no CUDA device"):
        ac.compile("no/such/model", sanitize=True)
    monkeypatch.setattr(CudaBackend, "available", lambda self: True)
    monkeypatch.setattr(running, "find", lambda: Reject("compute-sanitizer is neither on PATH nor in CUDA_HOME"))
    with pytest.raises(UsageError, match="neither on PATH nor in CUDA_HOME"):
        ac.compile("no/such/model", sanitize=True)
    with pytest.raises(UsageError, match="asks the validator absent, which is not installed"):
        ac.compile("no/such/model", sanitize=True, sanitizer="absent")


def test_controls_are_the_standard_ones_of_cuda() -> None:
    judge = validator.SanitizerValidator()
    with pytest.raises(ContractError, match="offers no CUDA controls"):
        judge.controls(FakeBackend())
    good, bad = judge.controls(CudaBackend())
    assert [t.source.launches[0].arguments[-1].value for t in (*good, *bad)] == [0, 3]


@pytest.mark.compile
def test_the_bulk_control_is_built_and_adds() -> None:
    from agentcompile_validator_emulation.checking import run_checked

    made = validator.bulk_control(preset("h200"))
    assert len(machine_code.bulk_copies(CudaBackend().build(made.source, made.target).binary)) == 1
    tensors = {"in0": torch.arange(128.0), "in1": torch.ones(128), "out": torch.full((128,), float("nan"))}
    run_checked(made.source, tensors)
    assert torch.equal(tensors["out"], tensors["in0"] + 1.0)
