"""Whole generations of several lengths: ours, eager, torch.compile and vLLM in turns on one GPU, each peer in a process of its own.

Rows are written as they come into benchmarks/results/<gpu>/sweep.json. The same command again measures what is missing there; rows of
another commit are refused. A peer that does not start, or dies, costs its own rows, which say why.

    python benchmarks/sweep.py qwen3-1.7b --workloads 128/128,2048/512 --peer-path ~/peers/vllm_site --budget-s 540
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from peers.command import Entrants, begun, checked, parser
from peers.rounds import OURS
from peers.systems import PEERS

from agentcompile_core.runtime.device import release_cache

SYSTEMS = (OURS, "eager", "torch_compile_loop", "vllm")


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, until the time is over."""
    options = checked(parser(__doc__, SYSTEMS, estimate_over_s=60.0).parse_args(arguments), (OURS, *PEERS))
    command = begun("sweep", options)
    for name in options.models:
        if not command.measure(name, tuple(system for system in options.systems if system != OURS), Entrants):
            break
        gc.collect()
        release_cache()
    command.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
