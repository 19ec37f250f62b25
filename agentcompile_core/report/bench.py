"""End-to-end timing: ours and the framework's own generation, alternating in one process on one machine."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

BASELINES = ("eager", "torch_compile")
WARM_UPS = 2


def compare(compiled: Any, *, prompt: int, new_tokens: int, repetitions: int = 10, baselines: tuple[str, ...] = ("eager",),
            seed: int = 0) -> list[dict[str, Any]]:
    """Time greedy generation of ``new_tokens`` after a random prompt of ``prompt`` tokens.

    Every system is warmed up, then the systems alternate for ``repetitions`` rounds. Rows hold milliseconds:
    ``e2e_ms`` (median), ``spread_ms`` (half of the 10th to 90th percentile), ``prefill_ms`` (one new token),
    ``step_ms`` = (e2e - prefill) / (new_tokens - 1), and ``speedup`` over eager.

    Raises:
        UsageError: a baseline is unknown, or nothing could be decoded.
    """
    check(prompt, new_tokens, repetitions, baselines)
    ids = random_prompt(compiled.graphs.model.vocab_size, prompt, seed)
    systems: dict[str, Callable[[int], Any]] = {"agentcompile": lambda n: generate_exactly(compiled, ids, n)}
    for name in baselines:
        systems[name] = framework(compiled.loaded.module, ids, prompt + new_tokens, name)
    times = alternate(systems, new_tokens, repetitions)
    return rows_of(times, new_tokens)


def check(prompt: int, new_tokens: int, repetitions: int, baselines: tuple[str, ...]) -> None:
    """Refuse what cannot be timed.

    Raises:
        UsageError: a baseline is unknown, or a number is too small.
    """
    unknown = [b for b in baselines if b not in BASELINES]
    if unknown:
        raise UsageError(f"unknown baseline {unknown[0]!r}; allowed: {', '.join(BASELINES)}")
    if new_tokens < 2 or prompt < 1 or repetitions < 1:
        raise UsageError("bench needs a prompt of at least 1 token, 2 new tokens and 1 repetition")


def generate_exactly(compiled: Any, ids: "torch.Tensor", new_tokens: int) -> "torch.Tensor":
    """Greedy tokens without an end: every token of ``ids`` counts, and nothing stops before ``new_tokens``."""
    return compiled.generate(ids, new_tokens, eos_token_id=None, do_sample=False, attention_mask=ids.new_ones(ids.shape))


def random_prompt(vocabulary: int, length: int, seed: int) -> "torch.Tensor":
    """int64 [1, length] of uniform token ids."""
    import torch

    return torch.randint(0, max(2, vocabulary), (1, length), generator=torch.Generator().manual_seed(seed))


def alternate(systems: dict[str, Callable[[int], Any]], new_tokens: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every system and repetition, for one new token (``prefill``) and for all (``e2e``)."""
    for run in systems.values():
        for _ in range(WARM_UPS):
            run(new_tokens)
        run(1)
    times: dict[str, dict[str, list[float]]] = {name: {"e2e": [], "prefill": []} for name in systems}
    for _ in range(repetitions):
        for name, run in systems.items():
            times[name]["e2e"].append(timed(lambda run=run: run(new_tokens)))  # type: ignore[misc]
            times[name]["prefill"].append(timed(lambda run=run: run(1)))  # type: ignore[misc]
    return times


def rows_of(times: dict[str, dict[str, list[float]]], new_tokens: int) -> list[dict[str, Any]]:
    """Medians, spreads and speedups."""
    eager = statistics.median(times["eager"]["e2e"]) if "eager" in times else 0.0
    rows = []
    for name, samples in times.items():
        e2e, prefill = statistics.median(samples["e2e"]), statistics.median(samples["prefill"])
        rows.append({"system": name, "e2e_ms": e2e, "prefill_ms": prefill, "step_ms": (e2e - prefill) / (new_tokens - 1),
                     "spread_ms": spread(samples["e2e"]), "repetitions": len(samples["e2e"]), "speedup": eager / e2e if eager else 0.0})
    return rows


def spread(samples: list[float]) -> float:
    """Half the distance between the 10th and the 90th percentile."""
    if len(samples) < 2:
        return 0.0
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / 2


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call, until the device is done."""
    _synchronize()
    began = time.perf_counter()
    call()
    _synchronize()
    return (time.perf_counter() - began) * 1e3


def _synchronize() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def framework(module: Any, ids: "torch.Tensor", length: int, name: str, **more: Any) -> Callable[[int], Any]:
    """transformers' own ``generate`` behind the prompt ``ids``: greedy, as many new tokens as it is called with.

    ``eager``: with its dynamic cache; ``torch_compile``: with a static cache of ``length`` positions, compiled and captured.
    ``more``: what the prompt holds beside its tokens, such as ``pixel_values``.

    Raises:
        UsageError: the module has no ``generate``.
    """
    import torch

    if not hasattr(module, "generate"):
        raise UsageError(f"{type(module).__name__} has no generate of its own to compare with")
    device = next(module.parameters()).device
    on_device = ids.to(device)
    mask = torch.ones_like(on_device)
    common: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": mask, **more}
    if name == "torch_compile":
        common |= {"cache_implementation": "static", "max_length": None}
        module.generation_config.max_cache_len = length
    else:
        common |= {"disable_compile": True}

    def run(new_tokens: int) -> Any:
        with torch.inference_mode():
            return module.generate(on_device, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **common)

    return run
