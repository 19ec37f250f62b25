"""The product's roles switched on one by one, from transformers' eager generation to all of it, as the paper's Table 4 does, and between
them what else serves a role: CUDALinear layers in HuggingFace's own loop, flash-attn's attention, kernels written by hand in Triton.

One compilation; each row is the same model with some of its steps left to the framework or to such an implementation, checked against
the framework when it is installed. A row whose package is not there says so. Rows take turns on one GPU and are written as they come into
benchmarks/results/<gpu>/ablation.json; the same command again goes on where it ended.

    python benchmarks/ablation.py qwen3-4b --workloads 128/128,2048/512 --peer-path FOLDER --budget-s 540 --cache STORE

With --cache the next command finds what this one searched, for our kernels and for CUDALinear's, and has the time for measuring.

--peer-path names the folder that holds flash-attn (flash_attn/). It is put behind everything else on the module path of this process,
before anything is compiled: what is installed already is not taken from there. Workers of the search do not see it.
"""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from peers.command import begun, checked, parser
from roles import OUTSIDE, Roles, variants

NAMES = tuple(variant.name for variant in variants())


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, until the time is over."""
    options = checked(parser(__doc__, NAMES, estimate_over_s=20.0).parse_args(arguments), NAMES)
    put_on_path(options.peer_path)
    command = begun("ablation", options, together=True)
    for name in options.models:
        if not command.measure(name, tuple(system for system in options.systems if system in OUTSIDE),
                               partial(Roles, workloads=options.workloads)):
            break
    command.finish()
    return 0


def put_on_path(folders: Iterable[Path]) -> None:
    """Have modules found in ``folders`` too, behind all that is found already."""
    sys.path += [str(folder.resolve()) for folder in folders]


if __name__ == "__main__":
    sys.exit(main())
