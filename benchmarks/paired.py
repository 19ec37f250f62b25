"""Two versions of AgentCompile beside each other on one GPU: is the second one slower?

Each version runs in a process of its own, with its packages first on the path; both hold their compiled model, and the
parent lets them generate in turns (ABBA), so that clocks and temperature are the same for both. Reported is the mean of
the paired ratios new / old with the upper end of its 95 % confidence interval ("no slower": at most 1.03). A pair runs on
one GPU; with ``--gpus N`` models are spread over that many, one after another on each.

    python benchmarks/paired.py OLD_SITE NEW_SITE qwen3-1.7b llama-3.2-1b --out paired.json
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness

NO_SLOWER = 1.03


class Side:
    """One version: a child that compiled a model and generates on demand."""

    def __init__(self, site: str, model: str, tokens: int, gpu: str) -> None:
        folder = tempfile.mkdtemp()
        path = os.pathsep.join((str(Path(site).resolve()), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": path, "AGENTCOMPILE_CACHE_DIR": folder, "AGENTCOMPILE_CONFIG": ""}
        environment.update({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(harness.CONFIGS / model), str(tokens)]
        self._child = subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True)  # in a folder of its own: workers are modules, looked up where their parent stands first
        self.facts = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit("a side ended before it answered; its error stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def sample_ms(self) -> float:
        """Milliseconds of one request."""
        assert self._child.stdin is not None
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        return float(self._answer()["ms"])

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()


def child(model: str, tokens: int) -> None:
    """Compile ``model``, then time one request of 128 + ``tokens`` tokens per line of standard input."""
    import torch

    import agentcompile_core
    from agentcompile_core import api

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.perf_counter()
    compiled = api.compile(model, dtype="float16", random_weights=True)
    compile_s = time.perf_counter() - began
    compiled.context.close()
    ids = torch.randint(0, compiled.graphs.model.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    never = {"eos_token_id": []} if "eos_token_id" in api.CompiledModel.generate.__doc__ else {}

    def run() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = compiled.generate(ids, tokens, **never)
        torch.cuda.synchronize()
        assert out.shape[1] == 128 + tokens
        return (time.perf_counter() - began) * 1e3

    for _ in range(3):
        run()
    print(json.dumps({"from": agentcompile_core.__file__, "notes": list(compiled.notes), "compile_s": compile_s}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps({"ms": run()}), file=answers, flush=True)


def compare(options: argparse.Namespace, model: str, gpu: str) -> dict[str, Any]:
    """One row: medians of both sides and the paired ratio."""
    tokens, pairs = options.tokens, options.pairs
    sides = [Side(options.old, model, tokens, gpu), Side(options.new, model, tokens, gpu)]
    try:
        samples: list[tuple[float, float]] = []
        for index in range(pairs):
            order = (0, 1) if index % 2 else (1, 0)
            taken = {which: sides[which].sample_ms() for which in order}
            samples.append((taken[0], taken[1]))
    finally:
        for side in sides:
            side.close()
    ratios = [b / a for a, b in samples]
    half = 2.1 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    mean = statistics.mean(ratios)
    return {"model": model, "workload": f"128/{tokens}", "old_ms": statistics.median(a for a, _ in samples),
            "new_ms": statistics.median(b for _, b in samples), "ratio": mean, "upper": mean + half, "lower": mean - half, "pairs": pairs,
            "no_slower": mean + half <= NO_SLOWER, "old_compile_s": sides[0].facts["compile_s"],
            "new_compile_s": sides[1].facts["compile_s"], "old_notes": sides[0].facts["notes"], "new_notes": sides[1].facts["notes"]}


def spread(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all models in their order."""
    count = max(1, options.gpus)

    def on(gpu: int) -> list[dict[str, Any]]:
        return [compare(options, model, str(gpu) if options.gpus else "") for model in options.models[gpu::count]]

    with ThreadPoolExecutor(count) as pool:
        rows = [row for found in pool.map(on, range(count)) for row in found]
    return sorted(rows, key=lambda row: options.models.index(row["model"]))


def main() -> int:
    """Compare and print a table; exit with 1 where the new version is slower."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="folder with the packages of the old version (pip install --target)")
    parser.add_argument("new", help="folder with the packages of the new version")
    parser.add_argument("models", nargs="+", choices=harness.MODELS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=0, help="spread the models over this many GPUs (default: the current one)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = spread(options)
    for row in rows:
        print(f"{row['model']:<14} old {row['old_ms']:8.2f} ms  new {row['new_ms']:8.2f} ms  "
              f"ratio {row['ratio']:.4f} (upper {row['upper']:.4f})")
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, **harness.machine(), "versions": harness.versions()}, indent=1) + "\n")
    return 0 if all(row["no_slower"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
