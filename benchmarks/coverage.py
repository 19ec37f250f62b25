"""Compiles tiny models of transformers' types and plain modules, and compares each with HuggingFace or torch; writes coverage.json.

Some models read images. All share one cache and are compiled twice, in two orders. Without a GPU generated kernels run on the emulator,
with ``--device cuda`` those that were selected by their times run:

    python benchmarks/coverage.py                      # make coverage
    python benchmarks/coverage.py --device cuda --seconds 1500
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import harness
from covered import results, sweep


def main() -> int:
    """Run the sweep, write coverage.json; 1 where anything is wrong or raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="names of models and modules, by commas")
    parser.add_argument("--all", action="store_true", help="every type that is known to be made tiny, not only those of the list")
    parser.add_argument("--limit", type=int, default=0, help="at most this many models and this many modules, drawn by the seed")
    parser.add_argument("--kind", default="", choices=("", "model", "image", "module"), help="only models, models with images, or modules")
    parser.add_argument("--shard", default="1/1", help="only this part of them, such as 2/8; shards may share --cache and --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no other one is begun after this time")
    parser.add_argument("--item-seconds", type=int, default=300)
    parser.add_argument("--budget-s", type=float, help="search budget of each; default: 60, on a GPU 15")
    parser.add_argument("--budget-plans", type=int, default=16, help="candidates of each")
    parser.add_argument("--without-kernels", action="store_true", help="the graphs alone, every node on the framework: quick")
    parser.add_argument("--cache", type=Path, help="the shared cache; default: a new one, removed afterwards")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, help="folder of coverage.json; default: benchmarks/results/cpu, or by the name of the GPU")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # models this small only wait for each other's threads
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    options.commit = harness.commit(options.commit)  # what is judged, whatever is committed meanwhile
    chosen = sweep.items(options)
    with tempfile.TemporaryDirectory() as scratch:
        rows = sweep.run(chosen, sweep.bench_of(options, options.cache or Path(scratch)), options)
    print(results.summary(rows, chosen), flush=True)
    if options.out or not options.without_kernels:  # a run without kernels says nothing about them
        print(results.write(rows, options.out or (harness.RESULTS / "cpu" if options.device == "cpu" else harness.gpu_folder()), options))
    return 0 if results.is_clean(rows, chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
