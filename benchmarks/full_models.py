"""Full-size models with random weights, as benchmarks compile them; and how far their logits are from those in fp32."""

import argparse
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import torch
from transformers import AutoConfig

from agentcompile_core import api
from agentcompile_core.cli.progress import Progress
from agentcompile_core.configuration import Config
from agentcompile_core.report import bench
from agentcompile_core.store import Store


def add_options(parser: argparse.ArgumentParser, budget_s: float) -> None:
    """What every command takes that compiles one model: which, how long it is searched, where it is kept and where results go."""
    parser.add_argument("model", choices=harness.MODELS)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--advisor", default="heuristic")
    parser.add_argument("--budget-s", type=float, default=budget_s)
    parser.add_argument("--budget-plans", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--log")
    parser.add_argument("--commit")
    parser.add_argument("--cache", type=Path, help="the store to compile into, kept; default: a new one, removed afterwards")
    parser.add_argument("--out", type=Path, help="folder of results (default: benchmarks/results/, by the name of the GPU)")


@contextmanager
def kept_or_passing(options: argparse.Namespace) -> Iterator[Store]:
    """The store that ``--cache`` names, or one that is removed afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        yield Store(options.cache or Path(scratch))


def context_of(name: str, asked: int) -> int:
    """``asked`` positions, or as many as the model of this name has."""
    config = AutoConfig.from_pretrained(harness.CONFIGS / name).get_text_config()
    return min(asked, getattr(config, "max_position_embeddings", None) or asked)


def compiled_model(name: str, options: argparse.Namespace, store: Store, run_on: str = "auto") -> tuple[Any, float]:
    """Compile, and the seconds of the compile() call without loading weights. ``run_on``: as ``compile`` takes it."""
    config = Config(advisor=options.advisor, budget_s=options.budget_s, budget_plans=options.budget_plans, rounds=options.rounds)
    model = api.compile(str(harness.CONFIGS / name), dtype=options.dtype, max_context=options.context, config=config, store=store,
                        report=Progress(log=options.log), random_weights=True, run_on=run_on)
    spent = sum(seconds for stage, seconds in model.compilation.seconds if stage != "load")
    return model, spent


@contextmanager
def compiled_here(options: argparse.Namespace) -> Iterator[tuple[Any, float, float]]:
    """The model of ``options`` on this GPU, the seconds of its compilation and the read ceiling before it; ``options.out`` is filled in."""
    options.out = options.out or harness.gpu_folder()
    torch.zeros(1, device="cuda")
    ceiling = harness.read_ceiling_gbps()
    torch.cuda.empty_cache()
    with kept_or_passing(options) as store:
        model, seconds = compiled_model(options.model, options, store)
        model.context.close()
        check_captured(options.model, model)
        yield model, seconds, ceiling


def check_captured(name: str, model: Any) -> None:
    """End the program where ``model`` runs on the framework's own loop."""
    if model.graphs.kv is None:
        raise SystemExit(f"{name} was not captured, so there is nothing of ours to time: {'; '.join(model.notes)}")


def accuracy_row(name: str, model: Any, positions: int) -> dict[str, Any] | None:
    """Teacher-forced logits of ours and of the framework's half precision, both against the same weights in fp32 with TF32 off.

    None where the weights in fp32 do not fit beside the model.
    """
    if 2.2 * model.graphs.model.parameter_bytes > torch.cuda.mem_get_info()[0]:
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    tokens = bench.random_prompt(model.graphs.model.vocab_size, positions, seed=7)
    ours = model.session.teacher_forced(tokens).float().cpu()
    module = model.loaded.module
    with torch.inference_mode():
        framework = module(tokens.cuda()).logits[0].float().cpu()
        reference = _fp32_logits(module, tokens)
    mine, theirs = (ours - reference).abs(), (framework - reference).abs()

    def rms(error: torch.Tensor) -> float:
        return float(error.double().pow(2).mean().sqrt())

    def p999(error: torch.Tensor) -> float:
        return float(error.flatten().double().kthvalue(int(0.999 * error.numel())).values)

    agree = (ours.argmax(-1) == reference.argmax(-1)).float().mean()
    return {"model": name, "dtype": model.graphs.kv.dtype.value, "positions": positions, "rms_ratio": rms(mine) / rms(theirs),
            "p999_ratio": p999(mine) / p999(theirs), "rms_error": rms(mine), "framework_rms_error": rms(theirs),
            "greedy_agreement": float(agree)}


def _fp32_logits(module: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the same weights in fp32: the model is built again and filled, since converting in place would lose the narrow ones."""
    with torch.device("cuda"):  # where billions of initial values take no time
        wide = type(module)(module.config).to(dtype=torch.float32).eval()
    with torch.no_grad():
        for to, of in zip(wide.parameters(), module.parameters(), strict=True):
            to.copy_(of)
    logits = wide(tokens.cuda()).logits[0].float().cpu()
    del wide
    gc.collect()
    torch.cuda.empty_cache()
    return logits
