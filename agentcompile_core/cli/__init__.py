"""The command line: compile, generate, bench, explain, plugins, doctor. Exit codes: 0 done, 1 failed, 2 asked wrongly."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ..errors import AgentCompileError, UsageError
from ..version import __version__

EPILOG = """examples:
  agentcompile compile ./Qwen3-1.7B --out qwen3.bundle       compile for the GPU here (or --target h200 without one)
  agentcompile generate --bundle qwen3.bundle --prompt "Once upon a time"
  agentcompile bench ./Qwen3-1.7B --input 128 --output 128   ours beside eager and torch.compile
  agentcompile explain qwen3.bundle                          why each step got what it got
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentcompile", description="Compile HuggingFace and PyTorch models to validated CUDA kernels.",
                                     epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"agentcompile {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _compile(commands.add_parser("compile", help="compile a model and write its bundle"))
    _generate(commands.add_parser("generate", help="generate text from a bundle, or from a model compiled on the way"))
    _bench(commands.add_parser("bench", help="time generation beside the framework"))
    explain = commands.add_parser("explain", help="say why each step of a bundle got what it got")
    explain.add_argument("bundle", help="folder of a bundle")
    plugins = commands.add_parser("plugins", help="list plugins, what they offer and what failed")
    doctor = commands.add_parser("doctor", help="say what this machine can do, and what is missing")
    for sub in commands.choices.values():
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    del plugins, doctor
    return parser


def _model_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="element type (default: the model's own)")
    sub.add_argument("--context", type=int, metavar="TOKENS", help="positions of KV cache (default: the model's limit, at most 8192)")
    sub.add_argument("--device", choices=("cuda", "cpu"), help="where to run (default: cuda where there is one)")
    sub.add_argument("--target", metavar="NAME", help="GPU to compile for (default: the one here, else h200)")
    sub.add_argument("--advisor", default="heuristic", help="who advises on the space (default: heuristic)")
    sub.add_argument("--budget-s", type=float, default=150.0, metavar="S",
                     help="seconds for the whole search: advice, candidates and the captured chain (default: 150)")
    sub.add_argument("--budget-plans", type=int, default=400, metavar="N", help="candidates to evaluate at most")
    sub.add_argument("--rounds", type=int, default=2, metavar="N", help="rounds of advice and evaluation")
    sub.add_argument("--validators", default="numerics", help="validators by name, comma separated (default: numerics)")
    sub.add_argument("--log", metavar="FILE", help="write one JSON line per evaluated candidate")
    sub.add_argument("--random-weights", action="store_true", help="random weights for a folder that holds a configuration only")
    sub.add_argument("--no-cache", action="store_true", help="neither read nor write the cache of kernels and timings")


def _compile(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="model identifier, folder, or .py file with Model and get_inputs")
    sub.add_argument("--out", metavar="DIR", help="write the bundle as this folder")
    sub.add_argument("--meta", action="store_true", help="capture without weights: everything but running")
    _model_arguments(sub)


def _generate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", help="model to compile on the way (with --bundle: where its weights are, if they moved)")
    sub.add_argument("--bundle", metavar="DIR", help="run this bundle: no tuning, no compiler")
    sub.add_argument("--prompt", required=True, help="text to continue")
    sub.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    sub.add_argument("--run-on", choices=("auto", "framework", "emulation"), default="auto", help="where steps run (default: auto)")
    sub.add_argument("--sample", action="store_true", help="sample instead of taking the most likely token")
    sub.add_argument("--temperature", type=float, default=1.0)
    sub.add_argument("--top-k", type=int, default=0)
    sub.add_argument("--top-p", type=float, default=1.0)
    sub.add_argument("--seed", type=int)
    _model_arguments(sub)


def _bench(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="model identifier or folder")
    sub.add_argument("--input", type=int, default=128, metavar="N", help="prompt tokens (default: 128)")
    sub.add_argument("--output", type=int, default=128, metavar="N", help="new tokens (default: 128)")
    sub.add_argument("--repetitions", type=int, default=10, metavar="N")
    sub.add_argument("--baselines", default="eager", help="comma separated: eager, torch_compile (default: eager)")
    _model_arguments(sub)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from . import commands, interrupt

    try:
        with interrupt.in_order():
            return commands.COMMANDS[options.command](options)
    except UsageError as exc:
        return _refuse(options, str(exc), 2)
    except AgentCompileError as exc:
        return _refuse(options, str(exc), 1)
    except RuntimeError as exc:
        if type(exc).__name__ != "OutOfMemoryError":  # torch's, without importing it here
            raise
        return _refuse(options, "the GPU has too little free memory for this model and context; use a smaller --context, or free some", 1)
    except KeyboardInterrupt:
        return _refuse(options, interrupt.what_is_kept(options, getattr(options, "progress", None)), 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _refuse(options: argparse.Namespace, message: str, code: int) -> int:
    if options.json:
        print(json.dumps({"error": message, "exit_code": code}))
    print(f"agentcompile: {message}", file=sys.stderr)
    return code
