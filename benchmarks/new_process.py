"""What a user waits for: from the start of a process to its first token, and where the seconds go.

    python benchmarks/new_process.py qwen3-4b --budget-s 46 --cache STORE      # warm, where STORE is what a cold compile has filled
    python benchmarks/new_process.py qwen3-4b --budget-s 46 --again 2          # cold, then twice warm: three processes and one store

Prints one JSON object for each process; --profile FILE keeps what Python's profiler sees of compile() of the last one, for pstats.
Loading makes random weights here.
"""

import argparse
import cProfile
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from full_models import add_options, check_captured, compiled_model, context_of, kept_or_passing

from agentcompile_core.report import bench

PROMPT = 128  # tokens
PASSED = ("dtype", "context", "advisor", "budget_s", "budget_plans", "rounds")


def _age_s() -> float:
    """Seconds since this process began."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def command(options: argparse.Namespace, store: Path) -> list[str]:
    """What does this for the model and search of ``options``, from ``store``, in a process of its own."""
    return [sys.executable, __file__, options.model, f"--cache={store}",
            *(f"--{name.replace('_', '-')}={getattr(options, name)}" for name in PASSED)]


def _in_processes(options: argparse.Namespace) -> int:
    """One process that may find a store without anything, then ``again`` that find what it has left; the first exit code that is not 0."""
    with kept_or_passing(options) as store:
        assert store.root is not None
        for number in range(options.again + 1):
            last = [f"--profile={options.profile}"] if options.profile and number == options.again else []
            code = subprocess.run([*command(options, store.root), *last], check=False).returncode
            if code:
                return code
    return 0


def main() -> int:
    """Compile, read one prompt, and say what took how long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, budget_s=46.0)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--profile", type=Path, help="where Python's profile of compile() is written")
    parser.add_argument("--again", type=int, default=0, help="how many processes more, one behind the other (default: %(default)s)")
    options = parser.parse_args()
    if options.again:
        return _in_processes(options)
    found = {"imports_s": _age_s()}
    options.context = context_of(options.model, options.context)
    torch.zeros(1, device="cuda")
    found["context_s"] = _age_s() - sum(found.values())
    profiler = cProfile.Profile()
    with kept_or_passing(options) as store:
        if options.profile:
            profiler.enable()
        model, _ = compiled_model(options.model, options, store)
        profiler.disable()
        stages = dict(model.compilation.seconds)  # the last one installs: it binds, captures, and compares with the module
        found["load_s"] = stages["load"]
        found["compile_s"] = sum(stages.values()) - stages["load"]
        found["between_stages_s"] = _age_s() - sum(found.values())
        model.context.close()
        check_captured(options.model, model)
        prompt = bench.random_prompt(model.graphs.model.vocab_size, PROMPT, seed=3)
        for name in ("first_token_s", "next_first_token_s"):
            began = time.time()
            bench.generate_exactly(model, prompt, 1)
            found[name] = time.time() - began
            found.setdefault("to_first_token_s", _age_s())
    print(json.dumps({"model": options.model, **found, "stages": stages}), flush=True)
    if options.profile:
        profiler.dump_stats(options.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
