"""The sweep: what is compiled, in which orders, on what."""

import argparse
import gc
import random
import signal
import time
from pathlib import Path
from typing import Any

from harness import shard as shard

from agentcompile_core.configuration import Config
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store

from . import composite, models
from .judge import Bench, Row, TooLong, image_row, model_row, module_row
from .modules import CASES

Item = tuple[str, str]  # kind and name


def items(options: argparse.Namespace) -> list[Item]:
    """What is compiled, models and modules mixed by the seed; at most ``limit`` of each kind, or those of ``only``; this shard's part."""
    chosen = [name for name in options.only.split(",") if name]
    draw = random.Random(options.seed)
    found: list[Item] = []
    for kind, names in (("model", models.covered(options.all or bool(chosen))), ("image", composite.covered()), ("module", tuple(CASES))):
        some = [name for name in names if (name in chosen or not chosen) and options.kind in ("", kind)]
        found += [(kind, name) for name in (draw.sample(some, min(options.limit, len(some))) if options.limit else some)]
    draw.shuffle(found)
    number, count = shard(options.shard)
    return found[number - 1::count]


def row_of(item: Item, bench: Bench) -> Row:
    """Compile and judge one."""
    kind, name = item
    return module_row(CASES[name], bench) if kind == "module" else {"model": model_row, "image": image_row}[kind](name, bench)


def _too_long(*_: Any) -> None:
    raise TooLong("its time is over")


def run(chosen: list[Item], bench: Bench, options: argparse.Namespace) -> list[Row]:
    """Every item in its order, then all that were judged in reverse, over one store; the first order may take 0.7 of the time."""
    began = time.monotonic()
    signal.signal(signal.SIGALRM, _too_long)
    rows: list[Row] = []
    for order, share in ((1, 0.7), (2, 1.0)):
        sequence = chosen if order == 1 else [(row["kind"], row["name"]) for row in reversed(rows)]
        for item in sequence:
            if time.monotonic() - began > share * options.seconds:
                break
            signal.alarm(options.item_seconds)
            row = {"order": order, **row_of(item, bench)}
            signal.alarm(0)
            gc.collect()  # sessions hold device memory, and hold themselves in circles
            rows.append(row)
            share_of_bytes = f"{row.get('generated_share', 0):4.0%}"
            print(f"{order} {row['kind']:6} {row['name']:28} {row['outcome']:6} {row.get('path', ''):9} {share_of_bytes} "
                  f"{row['seconds']:6.1f} s {row['why']}", flush=True)
    return rows


def bench_of(options: argparse.Namespace, folder: Path) -> Bench:
    """The one place where everything is compiled."""
    budget_s = options.budget_s or (60.0 if options.device == "cpu" else 15.0)
    config = Config(device=options.device, budget_s=budget_s, budget_plans=options.budget_plans, rounds=1,
                    **({"origins": (), "validators": ()} if options.without_kernels else {}))
    run_on = "framework" if options.without_kernels else "emulation" if options.device == "cpu" else "auto"
    return Bench(device=options.device, run_on=run_on, config=config, catalog=load_catalog(), store=Store(folder))
