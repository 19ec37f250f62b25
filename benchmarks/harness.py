"""What every benchmark shares: models with random weights, results files, the memory and the machine."""

import fcntl
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.append(str(ROOT.parent / "scripts"))

from checkout import commit as commit  # noqa: E402

CONFIGS = ROOT / "configs"
RESULTS = ROOT / "results"
_TUNED = ("qwen3-1.7b", "qwen3-4b", "llama-3.2-1b", "llama-3.2-3b")  # the models of the sweep come first in tables
MODELS = (*_TUNED, *sorted(found.name for found in CONFIGS.iterdir() if found.name not in _TUNED))
PACKAGES = ("torch", "transformers", "triton", "cuda-bindings", "cuda-core", "vllm", "flash-attn")


def versions() -> dict[str, str]:
    """Versions of everything that a number may depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """GPU name, UUID and driver."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # of the visible one, which need not be the first of the machine
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=driver_version", "--format=csv,noheader"]
    query = subprocess.run(command, capture_output=True, text=True, check=False)
    driver = query.stdout.strip() if query.returncode == 0 else ""
    return {"gpu": torch.cuda.get_device_name(0), "gpu_uuid": uuid, "driver": driver}


def gpu_folder(name: str = "") -> Path:
    """Where results of this GPU, or of one named so, belong: results/h200 for an NVIDIA H200; results/cpu without a GPU."""
    import torch

    said = name or (torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu")
    found = re.search(r"(RTX )?\b([A-Z]*\d+\w*)", said.replace("-", " "))
    return RESULTS / (f"{found[1] or ''}{found[2]}".replace(" ", "").lower() if found else "cpu")


def shard(text: str) -> tuple[int, int]:
    """``2/8``: the second of eight parts.

    Raises:
        SystemExit: it is no such text.
    """
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise SystemExit(f"--shard {text}: allowed is a part and how many there are, such as 2/8")
    return int(number), int(count)


def write_results(name: str, rows: list[dict[str, Any]], read_ceiling_gbps: float, out: Path, given_commit: str | None = None,
                  stays: Callable[[dict[str, Any]], bool] | None = None) -> Path:
    """Write ``<out>/<name>.json``; rows that are there and ``stays`` says so are kept, those that another process writes meanwhile too.

    By default rows stay whose model and workload are not measured now. The head says what the newest rows were measured on, and all
    versions that rows name; every row says on which GPU, at which commit and when it was measured itself.
    """
    path = out / f"{name}.json"
    measured = {(r["model"], r.get("workload")) for r in rows}
    with alone(path):
        return _write(path, rows, read_ceiling_gbps, given_commit, stays or (lambda r: (r["model"], r.get("workload")) not in measured))


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is about to write this results file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.stem}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, rows: list[dict[str, Any]], read_ceiling_gbps: float, given_commit: str | None,
           stays: Callable[[dict[str, Any]], bool]) -> Path:
    kept = [r for r in json.loads(path.read_text())["rows"] if stays(r)] if path.exists() else []
    here, measured_commit, date = machine(), commit(given_commit), time.strftime("%Y-%m-%d")
    stamp = {"gpu_uuid": here["gpu_uuid"], "read_ceiling_gbps": read_ceiling_gbps, "commit": measured_commit, "date": date}
    of_rows = {name: version for r in (*kept, *rows) for name, version in r.get("versions", {}).items()}
    document = {"schema": 1, **here, "versions": {**of_rows, **versions()}, "commit": measured_commit, "date": date,
                "read_ceiling_gbps": read_ceiling_gbps, "rows": kept + [{**row, **stamp} for row in rows]}
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document, indent=1) + "\n")
    fresh.replace(path)
    return path


def read_ceiling_gbps() -> float:
    """Measured read-only bandwidth of this GPU in 1e9 bytes per second."""
    from agentcompile_runtime_cuda.ceiling import read_ceiling_gbps as measure

    return float(measure())


def used_bytes() -> int:
    """Device memory in use by everyone on this GPU."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free
