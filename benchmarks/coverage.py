"""Compiles tiny models of transformers' types and plain modules, and compares each with HuggingFace or torch; writes coverage.json.

All share one cache and are compiled twice, in two orders. Without a GPU generated kernels run on the emulator, with
``--device cuda`` those that were selected by their times run:

    python benchmarks/coverage.py                      # make coverage
    python benchmarks/coverage.py --device cuda --seconds 1500
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import harness
from covered import models, results
from covered.judge import Bench, Row, model_row, module_row
from covered.modules import CASES

from agentcompile_core.configuration import Config
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store

Item = tuple[str, str]  # kind and name


def items(only: str, limit: int, seed: int) -> list[Item]:
    """What is compiled, models and modules mixed by ``seed``; ``limit`` of each kind (0: all), or those of ``only``."""
    chosen = [name for name in only.split(",") if name]
    draw = random.Random(seed)
    found: list[Item] = []
    for kind, names in (("model", models.covered()), ("module", tuple(CASES))):
        some = [name for name in names if name in chosen] if chosen else list(names)
        found += [(kind, name) for name in (draw.sample(some, min(limit, len(some))) if limit else some)]
    draw.shuffle(found)
    return found


def row_of(item: Item, bench: Bench) -> Row:
    """Compile and judge one."""
    kind, name = item
    return model_row(name, bench) if kind == "model" else module_row(CASES[name], bench)


class TooLong(Exception):
    """One model or module took longer than it may."""


def _too_long(*_: Any) -> None:
    raise TooLong("its time is over")


def sweep(chosen: list[Item], bench: Bench, options: argparse.Namespace) -> list[Row]:
    """Every item in its order, then all in reverse, over one store."""
    ends = time.monotonic() + options.seconds
    signal.signal(signal.SIGALRM, _too_long)
    rows = []
    for order, sequence in ((1, chosen), (2, chosen[::-1])):
        for item in sequence:
            if time.monotonic() > ends:
                break
            signal.alarm(options.item_seconds)
            row = {"order": order, **row_of(item, bench)}
            signal.alarm(0)
            rows.append(row)
            share = f"{row.get('generated_share', 0):4.0%}"
            print(f"{order} {row['kind']:6} {row['name']:28} {row['outcome']:6} {row.get('path', ''):9} {share} {row['seconds']:6.1f} s "
                  f"{row['why']}", flush=True)
    return rows


def bench_of(options: argparse.Namespace, folder: Path) -> Bench:
    """The one place where everything is compiled."""
    config = Config(device=options.device, budget_s=options.budget_s, budget_plans=options.budget_plans, rounds=1,
                    **({"origins": (), "validators": ()} if options.without_kernels else {}))
    run_on = "framework" if options.without_kernels else "emulation" if options.device == "cpu" else "auto"
    return Bench(device=options.device, run_on=run_on, config=config, catalog=load_catalog(), store=Store(folder))


def main() -> int:
    """Run the sweep, write coverage.json; 1 where anything is wrong or raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="names of models and modules, by commas")
    parser.add_argument("--limit", type=int, default=0, help="at most this many models and this many modules, drawn by the seed")
    parser.add_argument("--kind", default="", choices=("", "model", "module"), help="only models or only modules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no other one is begun after this time")
    parser.add_argument("--item-seconds", type=int, default=300)
    parser.add_argument("--budget-s", type=float, default=60.0, help="search budget of each")
    parser.add_argument("--budget-plans", type=int, default=24, help="candidates of each")
    parser.add_argument("--without-kernels", action="store_true", help="the graphs alone, every node on the framework: quick")
    parser.add_argument("--cache", type=Path, help="the shared cache; default: a new one, removed afterwards")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, help="folder of coverage.json; default: benchmarks/results/cpu, or h200")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # models this small only wait for each other's threads
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    chosen = [item for item in items(options.only, options.limit, options.seed) if options.kind in ("", item[0])]
    with tempfile.TemporaryDirectory() as scratch:
        rows = sweep(chosen, bench_of(options, options.cache or Path(scratch)), options)
    out = options.out or harness.RESULTS / ("cpu" if options.device == "cpu" else "h200")
    path = results.write(rows, chosen, out, options)
    print(results.summary(rows, chosen), f"\n{path}", flush=True)
    return 0 if results.is_clean(rows, chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
