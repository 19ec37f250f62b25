"""What is refused before a model is opened, and the prompt from wherever it comes."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..api import arguments, hardware
from ..configuration import Config
from ..errors import UsageError
from ..plugin.discovery import load_catalog

FLAGS = ("advisor", "validators", "target", "device", "budget_s", "budget_plans", "rounds", "trust_graphs", "trust_kernels", "sanitize")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def config_of(options: argparse.Namespace) -> Config:
    """The configuration that holds: files, environment and the options that were given; every name and number of it checked.

    Raises:
        UsageError: a number is out of range, or a name is of nothing that is installed.
    """
    catalog = load_catalog()
    effective, notes = arguments.resolved({name: getattr(options, name, None) for name in FLAGS}, catalog)
    arguments.check_choices(effective.config, catalog, effective.origin)
    arguments.check_context(options.context)
    hardware.choose(effective.config, catalog)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return effective.config


def choosing(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``generate`` for the options that choose tokens; any of the sampling ones implies sampling.

    Raises:
        UsageError: a value is out of range, or greedy and sampling are asked for at once.
    """
    found = {name: getattr(options, name) for name in (*SAMPLING, "repetition_penalty") if getattr(options, name) is not None}
    ranges = {"temperature": (found.get("temperature", 1.0) > 0, "over 0"), "top_k": (found.get("top_k", 0) >= 0, "0 or more"),
              "top_p": (0 < found.get("top_p", 1.0) <= 1, "over 0 and at most 1"),
              "min_p": (0 <= found.get("min_p", 0.0) <= 1, "from 0 to 1"),
              "repetition_penalty": (found.get("repetition_penalty", 1.0) > 0, "over 0")}
    for name, (holds, allowed) in ranges.items():
        if not holds:
            raise UsageError(f"{name} is {found[name]}; --{name.replace('_', '-')} must be {allowed}")
    given = [name for name in SAMPLING if name in found]
    if options.greedy and given:
        raise UsageError(f"--greedy and --{given[0].replace('_', '-')} contradict each other; leave one of them out")
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens is {options.max_new_tokens}; it must be at least 1")
    if options.sample or given:
        found["do_sample"] = True
    elif options.greedy:
        found["do_sample"] = False
    return found


def check_trace(options: argparse.Namespace) -> None:
    """Refuse what cannot be traced before a model is opened.

    Raises:
        UsageError: a number is out of range, or the picture cannot be written.
    """
    least = {"position": (options.position, 1), "layer": (options.layer or 0, 0), "repetitions": (options.repetitions, 1)}
    for name, (value, allowed) in least.items():
        if value < allowed:
            raise UsageError(f"--{name} is {value}; it must be at least {allowed}")
    folder = Path(options.svg).absolute().parent if options.svg else Path()
    if not folder.is_dir():
        raise UsageError(f"--svg {options.svg}: the folder {folder} does not exist; make it, or name another file")


def prompt_of(options: argparse.Namespace) -> str:
    """The text to continue: as given, from a file, or from standard input for ``-``; one line end at its end is dropped.

    Raises:
        UsageError: it cannot be read, is no UTF-8, or is empty.
    """
    where = options.prompt_file or ("standard input" if options.prompt == "-" else "--prompt")
    try:
        if options.prompt_file:
            text = Path(options.prompt_file).read_text(encoding="utf-8").removesuffix("\n")
        else:
            text = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    except OSError as exc:
        raise UsageError(f"cannot read the prompt from {where}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"the prompt from {where} is no UTF-8 text ({exc.reason} at byte {exc.start})") from exc
    if not text:
        raise UsageError(f"a prompt of 0 tokens ({where} is empty); give some text to continue")
    return str(text)


def check_tokenizer(model: str) -> None:
    """Refuse a folder that holds a model and no tokenizer.

    Raises:
        UsageError: so it is.
    """
    folder = Path(model).expanduser()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
    if (folder / "config.json").is_file() and not any((folder / name).is_file() for name in names):
        raise UsageError(f"{folder} has no tokenizer, so it cannot read text; use the Python API with token ids")
