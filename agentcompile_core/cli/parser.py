"""What the command line understands: commands, options, defaults and examples."""

import argparse

from ..configuration import Config, Effective, resolve
from ..configuration.layers import DEFAULT
from ..errors import UsageError
from ..version import __version__

EPILOG = """examples:
  agentcompile compile ./Qwen3-1.7B --out qwen3.bundle       compile for the GPU here (or --target h200 without one)
  agentcompile generate --bundle qwen3.bundle --prompt "Once upon a time"
  agentcompile bench ./Qwen3-1.7B --input 128 --output 128   ours beside eager and torch.compile
  agentcompile explain qwen3.bundle                          why each step got what it got
"""
EXAMPLES = {
    "compile": """examples:
  agentcompile compile Qwen/Qwen3-1.7B --out qwen3.bundle
  agentcompile compile ./folder --target h200 --advisor heuristic --budget-s 30 --json
  agentcompile compile module.py --out module.bundle         a file with Model, get_inputs() and get_init_inputs(); it is executed
""",
    "generate": """examples:
  agentcompile generate --bundle qwen3.bundle --prompt "Once upon a time" --max-new-tokens 60
  agentcompile generate --bundle qwen3.bundle --prompt-file story.txt --temperature 0.8 --top-p 0.95 --seed 1
  echo "Once upon a time" | agentcompile generate ./Qwen3-1.7B --prompt -
""",
    "bench": """examples:
  agentcompile bench ./Qwen3-1.7B --input 128 --output 128 --baselines eager,torch_compile
""",
    "trace": """examples:
  agentcompile trace --bundle qwen3.bundle --svg layer.svg  what one layer of a decode step spends its time on, and the largest losses
  agentcompile trace ./Qwen3-1.7B --position 8192 --json
""",
    "explain": """examples:
  agentcompile explain qwen3.bundle
  agentcompile explain qwen3.bundle --region layer          the plans of one region: risk, what was ruled out, who refused what
""",
    "audit": """examples:
  agentcompile audit qwen3.bundle            every decision of that compile, and whether it follows from its records
""",
    "advice": """examples:
  agentcompile compile ./Qwen3-1.7B --advisor heuristic --no-cache --out plain.bundle
  agentcompile compile ./Qwen3-1.7B --advisor litellm --no-cache --out asked.bundle
  agentcompile advice plain.bundle asked.bundle                how soon each search met what was fastest, and what it cost
""",
    "cache": """examples:
  agentcompile cache show
  agentcompile cache verify                  read everything; exit code 1 if anything is damaged
  agentcompile cache prune                   remove what is damaged, left over or of older versions
  agentcompile cache export timings.gz       measurements, for a machine with the same GPU, driver and versions
  agentcompile cache import timings.gz       take them; no kernel is ever taken from a file
""",
    "plugins": """examples:
  agentcompile plugins --json
""",
    "doctor": """examples:
  agentcompile doctor
""",
    "config": """examples:
  agentcompile config               every value and where it comes from
  agentcompile config --path        the files that are read
""",
    "completion": """examples:
  agentcompile completion bash > ~/.local/share/bash-completion/completions/agentcompile
  agentcompile completion zsh > ~/.zfunc/_agentcompile
""",
}
COMMANDS = {
    "compile": "compile a model and write its bundle",
    "generate": "generate text from a bundle, or from a model compiled on the way",
    "bench": "time generation beside the framework",
    "trace": "note when the blocks of one layer's kernels pass their phases, and name what is lost",
    "explain": "say why each step of a bundle got what it got",
    "audit": "make every decision of a compile again from its bundle, and say whether it follows from the records",
    "advice": "say what advice was worth, from bundles of one model that were compiled with different advisors",
    "cache": "show, verify, prune, export or import what is kept between runs",
    "plugins": "list plugins, what they offer and what failed",
    "doctor": "say what this machine can do, and what is missing",
    "config": "print what is configured, and where each value comes from",
    "completion": "print a completion script for a shell (needs shtab)",
}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = argparse.ArgumentParser(prog="agentcompile", description="Compile HuggingFace and PyTorch models to validated kernels.",
                                   epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--version", action="version", version=f"agentcompile {__version__}", help="print the version and exit")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", epilog=EXAMPLES[name],
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in _ARGUMENTS:
            _ARGUMENTS[name](sub)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return made


def _compile(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="model identifier, folder, or .py file with Model and get_inputs")
    sub.add_argument("--out", metavar="DIR", help="write the bundle as this folder: a new one, or an older bundle (default: write none)")
    sub.add_argument("--meta", action="store_true", help="capture without weights: everything but running")
    sub.add_argument("--sanitize", action="store_true", default=None,
                     help="run every winner under compute-sanitizer at full size, and take none that it refuses (needs a GPU)")
    _model_arguments(sub)


def _generate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", help="model to compile on the way (with --bundle: where its weights are, if they moved)")
    sub.add_argument("--bundle", metavar="DIR", help="run this bundle: no tuning, no compiler")
    prompt = sub.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads it from standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the text to continue from this file (UTF-8)")
    sub.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="new tokens at most (default: 128)")
    sub.add_argument("--run-on", default="auto", metavar="WHERE",
                     help="where steps run: auto, framework, or a backend by name (default: auto)")
    _trust(sub)
    _sampling(sub.add_argument_group("choosing tokens", "by default as the model's generation_config says, which is mostly greedy"))
    _model_arguments(sub)


def _trust(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--trust-kernels", action="store_true", default=None,
                     help="run kernels of the bundle that no installed family makes, as they are (default: the framework in their place)")
    sub.add_argument("--trust-graphs", action="store_true", default=None,
                     help="run graphs of the bundle that are not what is captured of the model here (default: it is refused)")


def _sampling(group: argparse._ArgumentGroup) -> None:
    how = group.add_mutually_exclusive_group()
    how.add_argument("--sample", action="store_true", help="sample")
    how.add_argument("--greedy", action="store_true", help="take the most likely token")
    group.add_argument("--temperature", type=float, metavar="T", help="over 0; implies --sample (default: the model's, else 1.0)")
    group.add_argument("--top-k", type=int, metavar="K", help="0 or more, 0 is off; implies --sample (default: the model's, else 50)")
    group.add_argument("--top-p", type=float, metavar="P", help="over 0, at most 1; implies --sample (default: the model's, else 1.0)")
    group.add_argument("--min-p", type=float, metavar="P", help="from 0 to 1; implies --sample (default: the model's, else off)")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="over 0, 1.0 is off (default: the model's, else 1.0)")
    group.add_argument("--seed", type=int, metavar="N", help="seed of the random numbers (default: another one in each run)")


def _bench(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="model identifier or folder")
    sub.add_argument("--input", type=int, default=128, metavar="N", help="prompt tokens (default: 128)")
    sub.add_argument("--output", type=int, default=128, metavar="N", help="new tokens, at least 2 (default: 128)")
    sub.add_argument("--repetitions", type=int, default=10, metavar="N", help="rounds in which the systems alternate (default: 10)")
    sub.add_argument("--baselines", default="eager", metavar="NAMES", help="comma separated: eager, torch_compile (default: eager)")
    _model_arguments(sub)


def _trace(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", help="model to compile on the way (with --bundle: where its weights are, if they moved)")
    sub.add_argument("--bundle", metavar="DIR", help="trace this bundle: no tuning")
    sub.add_argument("--position", type=int, default=192, metavar="N", help="of the token that the traced step reads (default: 192)")
    sub.add_argument("--layer", type=int, metavar="N", help="layer to trace, from 0 (default: the middle one)")
    sub.add_argument("--repetitions", type=int, default=15, metavar="N", help="steps whose medians are shown (default: 15)")
    sub.add_argument("--svg", metavar="FILE", help="draw the time line into this file")
    sub.set_defaults(run_on="auto")
    _trust(sub)
    _model_arguments(sub)


def _explain(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("bundle", help="folder of a bundle")
    sub.add_argument("--region", metavar="NAME", help="one region (its name, or how its signature begins): covers with their risk, and for "
                                                      "every match who serves it, what was ruled out, and who refused it")


def _audit(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run", metavar="RUN", help="folder of the bundle that the compile wrote")


def _advice(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("bundles", metavar="BUNDLE", nargs="+", help="folders of bundles of one model, workload and target; several of one "
                                                                   "advisor count together")


def _cache(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("action", choices=("show", "verify", "prune", "export", "import"),
                     help="show: what is in it; verify: read and check all of it; prune: remove what is damaged, left over or of older "
                          "versions; export, import: measurements as a file, never kernels")
    sub.add_argument("file", nargs="?", help="file of export and import")


def _completion(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="shell to print the script for")


def _model_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="element type (default: the model's own)")
    sub.add_argument("--context", type=int, metavar="TOKENS", help="positions of KV cache (default: the model's limit, at most 8192)")
    sub.add_argument("--device", metavar="TYPE",
                     help=f"where to run: cpu, or an installed backend's device ({_default('device', 'what is here')})")
    sub.add_argument("--target", metavar="NAME",
                     help=f"hardware to compile for ({_default('target', 'what is here, else the preferred one')})")
    sub.add_argument("--advisor", metavar="NAME", help=f"who advises on the space ({_default('advisor')})")
    sub.add_argument("--budget-s", type=float, metavar="S",
                     help=f"seconds of the whole search: advice, building, checking, timing, chain ({_default('budget_s')})")
    sub.add_argument("--budget-plans", type=int, metavar="N", help=f"candidates to evaluate at most ({_default('budget_plans')})")
    sub.add_argument("--rounds", type=int, metavar="N", help=f"rounds of advice and evaluation ({_default('rounds')})")
    sub.add_argument("--validators", metavar="NAMES", help=f"validators by name, comma separated ({_default('validators', 'none')})")
    sub.add_argument("--log", metavar="FILE", help="append one JSON line per evaluated candidate (default: none)")
    sub.add_argument("--random-weights", action="store_true", help="random weights, seed 0, instead of the model's own")
    sub.add_argument("--no-cache", action="store_true", help="neither read nor write the cache of kernels and timings")


def _config(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--path", action="store_true", help="print the files that are read instead of the values")


def _default(name: str, empty: str = "") -> str:
    """What holds where the option is not given, and where that is configured; for a help text."""
    effective = _effective()
    value, origin = getattr(effective.config, name), effective.origin(name)
    shown = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
    said = f"default: {shown or empty}" + (f", from {origin}" if origin != DEFAULT else "")
    return said.replace("%", "%%")


def _effective() -> Effective:
    try:
        return resolve()
    except UsageError:  # help is printed whatever the files hold; the command itself refuses them
        return Effective(config=Config())


_ARGUMENTS = {"compile": _compile, "generate": _generate, "bench": _bench, "trace": _trace, "explain": _explain, "audit": _audit,
              "advice": _advice, "cache": _cache, "config": _config, "completion": _completion}
