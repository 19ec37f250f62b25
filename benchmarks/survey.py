"""A decode step of every model in benchmarks/configs, at full size with random weights: each in a process of its own, on several GPUs.

Runs ``benchmarks/decode.py MODEL`` with the options that follow ``--``, the largest model first, and says in the end what failed. Rows of
this commit that the results have already are not measured again, so that a command goes on where another one ended:

    python benchmarks/survey.py --gpus 4 --seconds 540 -- --dtype bfloat16 --baselines "" --budget-s 20 --repetitions 3
    python benchmarks/survey.py gemma-3-1b smollm2-135m -- --dtype bfloat16 --baselines eager
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness

ROOT = Path(__file__).resolve().parent


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="*", metavar="MODEL", help="names of folders in benchmarks/configs (default: all of them)")
    made.add_argument("--gpus", type=int, default=1, help="models are dealt to so many GPUs, one at a time on each (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=7200.0,
                      help="no model is begun, and none goes on, after this time (default: %(default)s)")
    made.add_argument("--model-seconds", type=float, default=300.0, help="a model that takes longer has failed (default: %(default)s)")
    made.add_argument("--needs-seconds", type=float, default=60.0, help="none is begun when less is left (default: %(default)s)")
    made.add_argument("--logs", type=Path, help="folder of what each process printed (default: none is kept)")
    made.add_argument("--commit")
    made.add_argument("--out", type=Path, help="folder of results (default: benchmarks/results/, by the name of the GPU)")
    return made


class Survey:
    """Models dealt to GPUs until none is left or the time is over."""

    def __init__(self, names: list[str], options: argparse.Namespace, arguments: list[str]) -> None:
        self._options, self._arguments = options, arguments
        self._left = names
        self._ends = time.monotonic() + options.seconds
        self._lock = threading.Lock()
        self.failed: list[str] = []

    def run(self) -> list[str]:
        """Measure; the models that no process began."""
        threads = [threading.Thread(target=self._serve, args=(gpu,)) for gpu in range(self._options.gpus)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._left

    def _serve(self, gpu: int) -> None:
        while (name := self._next()) is not None:
            said, ended = self._measure(name, gpu)
            with self._lock:
                print(f"[gpu {gpu}] {name}: {said}", flush=True)
                if not ended:
                    self.failed.append(name)

    def _next(self) -> str | None:
        with self._lock:
            return self._left.pop(0) if self._left and self._ends - time.monotonic() > self._options.needs_seconds else None

    def _measure(self, name: str, gpu: int) -> tuple[str, bool]:
        """What the process of this model said of ours, or its last words; and whether it ended well."""
        visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v] or [str(i) for i in range(self._options.gpus)]
        command = [sys.executable, str(ROOT / "decode.py"), name, "--commit", self._options.commit, "--out", str(self._options.out)]
        seconds = min(self._options.model_seconds, self._ends - time.monotonic())
        try:
            ran = subprocess.run([*command, *self._arguments], env=os.environ | {"CUDA_VISIBLE_DEVICES": visible[gpu]}, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired as late:
            self._keep(name, late.stdout.decode(errors="replace") if late.stdout else "")
            return f"took longer than {seconds:.0f} s", False
        self._keep(name, ran.stdout)
        lines = [line.strip() for line in ran.stdout.splitlines() if line.strip()]
        if ran.returncode:
            return (lines or [f"exit {ran.returncode}"])[-1], False
        return next((line for line in lines if line.startswith("agentcompile:")), "no row of ours"), True

    def _keep(self, name: str, printed: str) -> None:
        if self._options.logs:
            self._options.logs.mkdir(parents=True, exist_ok=True)
            (self._options.logs / f"{name}.log").write_text(printed)


def chosen(asked: list[str], dtype: str, out: Path, commit: str) -> list[str]:
    """Names in the order of their sizes, largest first; without those of which ``out`` has a row of this commit.

    Raises:
        SystemExit: a name has no configuration.
    """
    for name in asked:
        if name not in harness.MODELS:
            raise SystemExit(f"{name} is no model of benchmarks/configs; there are {', '.join(harness.MODELS)}")
    path = out / f"decode{'_bf16' if dtype == 'bfloat16' else ''}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = {row["model"] for row in rows if row["commit"] == commit and row["system"] == "agentcompile"}
    return sorted((name for name in asked or harness.MODELS if name not in measured), key=lambda name: -_elements(name))


def _elements(name: str) -> int:
    """Elements of the parameters of the model that is measured: of the class that the core opens it with."""
    from agentcompile_core.stages.capture.huggingface import load_pretrained

    opened = load_pretrained(str(harness.CONFIGS / name), dtype=None, device="cpu", meta=True, random_weights=None)
    return sum(p.numel() for p in opened.module.parameters())


def main(arguments: list[str] | None = None) -> int:
    """Measure all that were asked for; 1 where one failed or was not begun."""
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    options, passed = parser().parse_args(given[:cut]), given[cut + 1:]
    options.out, options.commit = options.out or harness.gpu_folder(), harness.commit(options.commit)
    dtype = passed[passed.index("--dtype") + 1] if "--dtype" in passed else "float16"
    survey = Survey(chosen(options.models, dtype, options.out, options.commit), options, passed)
    left = survey.run()
    for said, names in (("failed", survey.failed), ("not begun in this time", left)):
        if names:
            print(f"{said}: {', '.join(names)}")
    return 1 if survey.failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
