"""Finding compute-sanitizer, and running one of its tools on one kernel in a process of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentcompile_core.plugin_api import ContractError, Kernel, Reject, Role, Trial, child_environment, serial

from .. import headers
from . import child, reports

if TYPE_CHECKING:
    import torch

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TOOL_S = 240.0
_OPTIONS = {"memcheck": ("--report-api-errors", "no", "--padding", "256")}


def find() -> Path | Reject:
    """The program, or a sentence on what to do."""
    on_path = shutil.which(PROGRAM)
    homes = [home / folder / PROGRAM for home in headers.toolkit_homes() for folder in ("bin", "compute-sanitizer")]
    found = next((path for path in (*([Path(on_path)] if on_path else []), *homes) if path.is_file()), None)
    return found or Reject(f"{PROGRAM} is neither on PATH nor in CUDA_HOME or /usr/local/cuda; install it (it is part of the CUDA toolkit, "
                           "package cuda-sanitizer), or compile without --sanitize")


def run(tool: str, trial: Trial, kernel: Kernel, inputs: "Sequence[Mapping[str, torch.Tensor]]", program: Path) -> reports.Report:
    """What ``tool`` says of a kernel on the operands of each case (CPU tensors by name, those of outputs left out).

    Raises:
        ContractError: it did not get as far as a summary, or the kernel did not run to its end and nothing was reported.
    """
    with tempfile.TemporaryDirectory(prefix="agentcompile-sanitizer-") as name:
        folder = Path(name)
        write_request(folder, trial, kernel, inputs)
        options = ("--tool", tool, "--print-limit", str(reports.MOST), *_OPTIONS.get(tool, ()))
        output = _output([str(program), *options, sys.executable, "-m", child.__name__, name], folder)
    report = reports.read(output)
    if not report.complete or (child.DONE not in output and not report.errors):
        last = next((line for line in reversed(output.splitlines()) if line.strip("= ")), "no message")
        raise ContractError(f"{tool} of {PROGRAM} came to no end: {last.strip('= ')}")
    return report


def write_request(folder: Path, trial: Trial, kernel: Kernel, inputs: "Sequence[Mapping[str, torch.Tensor]]") -> None:
    """Write what the child reads: the binary, the launches, and per case each buffer's name, bytes and file.

    A buffer without a file (None) is never written before the kernel runs; an empty name stands for zeros.
    """
    (folder / "kernel.cubin").write_bytes(kernel.binary)
    cases = []
    for number, tensors in enumerate(inputs):
        buffers: list[tuple[str, int, str | None]] = []
        for operand in trial.match.operands:
            file = None
            if operand.role is not Role.OUTPUT:
                file = f"{number}-{operand.name}.bin"
                (folder / file).write_bytes(_bytes(tensors[operand.name]))
            buffers.append((operand.name, operand.spec.nbytes, file))
        buffers += [(w.name, w.nbytes, "" if w.zeroed else None) for w in trial.source.workspaces]
        cases.append({"buffers": buffers})
    request = {"sha256": kernel.sha256, "launches": [serial.unstructure(launch) for launch in trial.source.launches], "cases": cases}
    (folder / "request.json").write_text(json.dumps(request))


def _bytes(tensor: "torch.Tensor") -> bytes:
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _output(command: list[str], folder: Path) -> str:
    environment = {**child_environment(), **_of_cuda(), "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, cwd=folder)
    try:
        return process.communicate(timeout=TOOL_S)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise ContractError(f"{Path(command[0]).name} did not end within {TOOL_S:g} s and was killed") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _of_cuda() -> dict[str, Any]:
    return {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "NVIDIA_"))}
