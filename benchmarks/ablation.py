"""The product's roles switched on one by one, from transformers' eager generation to all of it, as the paper's Table 4 does.

One compilation; each row is the same model with some of its steps left to the framework, checked against it when it is installed. Rows take
turns on one GPU and are written as they come into benchmarks/results/<gpu>/ablation.json; the same command again goes on where it ended.

    python benchmarks/ablation.py qwen3-4b --workloads 128/128,2048/512 --budget-s 540
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from peers.command import begun, checked, parser
from roles import Roles, variants

NAMES = tuple(variant.name for variant in variants())


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, until the time is over."""
    options = checked(parser(__doc__, NAMES, estimate_over_s=20.0).parse_args(arguments), NAMES)
    command = begun("ablation", options, together=True)
    for name in options.models:
        if not command.measure(name, tuple(system for system in options.systems if system == NAMES[0]), Roles):
            break
    command.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
