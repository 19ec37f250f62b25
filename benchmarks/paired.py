"""Two versions of AgentCompile beside each other on one GPU: is the second one slower?

Each version runs in a process of its own, with its packages first on the path; both hold their compiled model, and the
parent lets them generate in turns (ABBA), so that clocks and temperature are the same for both. Reported is the mean of
the paired ratios new / old with the upper end of its 95 % confidence interval ("no slower": at most 1.03). A pair runs on
one GPU; with ``--gpus N`` models are spread over that many, one after another on each.

    python benchmarks/paired.py OLD_SITE NEW_SITE qwen3-1.7b llama-3.2-1b --out paired.json
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from paired_ratio import NO_SLOWER, paired_ratio
from peers import serving
from peers.child import Child, PeerDied

MOST_S = 1800.0  # of a compile, and of one request


class Side(Child):
    """One version: a child that compiled a model and generates on demand."""

    def __init__(self, site: str, model: str, tokens: int, gpu: str) -> None:
        path = os.pathsep.join((str(Path(site).resolve()), os.environ.get("PYTHONPATH", "")))
        self._cache = tempfile.TemporaryDirectory()
        environment = {**os.environ, "PYTHONPATH": path, "AGENTCOMPILE_CACHE_DIR": self._cache.name, "AGENTCOMPILE_CONFIG": ""}
        environment.update({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(harness.CONFIGS / model), str(tokens)]
        super().__init__(site, command, environment, start_s=MOST_S)  # a folder of its own: workers are looked up in their parent's first
        self.facts = self.ready()

    def sample_ms(self) -> float:
        """Milliseconds of one request."""
        return float(self.ask({}, MOST_S)["ms"])

    def close(self) -> None:
        """End the child."""
        super().close()
        self._cache.cleanup()


def child(model: str, tokens: int) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Compile ``model``; then every question is one request of 128 + ``tokens`` tokens."""
    import torch

    import agentcompile_core
    from agentcompile_core import api

    began = time.perf_counter()
    compiled = api.compile(model, dtype="float16", random_weights=True)
    compile_s = time.perf_counter() - began
    compiled.context.close()
    ids = torch.randint(0, compiled.graphs.model.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    never = {"eos_token_id": []} if "eos_token_id" in api.CompiledModel.generate.__doc__ else {}

    def run(_: dict[str, Any]) -> dict[str, Any]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = compiled.generate(ids, tokens, **never)
        torch.cuda.synchronize()
        assert out.shape[1] == 128 + tokens
        return {"ms": (time.perf_counter() - began) * 1e3}

    for _ in range(3):
        run({})
    return {"from": agentcompile_core.__file__, "notes": list(compiled.notes), "compile_s": compile_s}, run


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
    mean, half = paired_ratio([b for _, b in samples], [a for a, _ in samples])
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
        return serving.serve(lambda: child(sys.argv[2], int(sys.argv[3])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="folder with the packages of the old version (pip install --target)")
    parser.add_argument("new", help="folder with the packages of the new version")
    parser.add_argument("models", nargs="+", choices=harness.MODELS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=0, help="spread the models over this many GPUs (default: the current one)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    try:
        rows = spread(options)
    except PeerDied as exc:
        raise SystemExit(str(exc)) from exc
    for row in rows:
        print(f"{row['model']:<14} old {row['old_ms']:8.2f} ms  new {row['new_ms']:8.2f} ms  "
              f"ratio {row['ratio']:.4f} (upper {row['upper']:.4f})")
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, **harness.machine(), "versions": harness.versions()}, indent=1) + "\n")
    return 0 if all(row["no_slower"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
