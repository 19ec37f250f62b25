"""The framework's own systems in a process of their own: ``eager``, ``torch_compile`` (both transformers' ``generate``), ``cudalinear``
(eager, with linear layers that run compiled kernels) or ``torch_compile_loop`` (a greedy loop over the compiled step). The argument is
JSON: system, folder of the configuration, type, device.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from agentcompile_core.configuration import Config
from agentcompile_core.report import bench
from agentcompile_core.store import Store
from peers import eager_attention, idle_memory, serving
from peers.step_loop import Step, StepLoop, reduce_overhead

LAYER_BUDGET_S = 15.0  # of the search for one shape of linear layers; all of them together get no more than our own search of the model
INTERPRETED = ("eager", "cudalinear")  # nothing of theirs is compiled by torch


class Framework:
    """Answers requests: a prompt, how many new tokens, and how many positions the workload has at most."""

    def __init__(self, module: Any, system: str, compiler: Callable[[Step], Step] = reduce_overhead) -> None:
        self._module, self._system, self._compiler = module, system, compiler
        self._device = next(module.parameters()).device
        self._length = 0
        self._loop: StepLoop | None = None
        self._idle = idle_memory.of(self._device, kept=system not in INTERPRETED)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds of one request, and the tokens where they are asked for."""
        ids, count = torch.tensor([request["prompt"]], device=self._device), request["new"]
        if request["length"] != self._length:
            self._forget(request["length"])
        run = self._runner(ids)
        found: list[torch.Tensor] = []
        self._idle.take_again()
        spent_ms = bench.timed(lambda: found.append(run(count)))
        tokens = found[0][0, -count:].tolist()
        self._idle.give_back()
        if found[0].shape[1] not in (count, ids.shape[1] + count):
            raise RuntimeError(f"{found[0].shape[1]} tokens came where {count} were asked for behind {ids.shape[1]}")
        return {"ms": spent_ms, **({"tokens": tokens} if request.get("tokens") else {})}

    def _runner(self, ids: torch.Tensor) -> Callable[[int], torch.Tensor]:
        if self._system != "torch_compile_loop":
            return bench.framework(self._module, ids, self._length, "eager" if self._system in INTERPRETED else self._system)
        if self._loop is None:
            self._loop = StepLoop(self._module, self._length, self._compiler)
        loop = self._loop
        return lambda count: loop(ids, count)

    def _forget(self, length: int) -> None:
        """Begin anew for another number of positions: a second shape would be compiled as one that changes, which is slower."""
        self._length, self._loop = length, None
        if self._system not in INTERPRETED:
            torch._dynamo.reset()
            for name in ("_compiled_call", "_previous_max_cache_length"):
                self._module.__dict__.pop(name, None)


def with_linears(module: Any, **options: Any) -> dict[str, Any]:
    """Put layers into ``module`` that run compiled kernels; returns how many there are by what serves them.

    Raises:
        RuntimeError: none was replaced.
    """
    from agentcompile_runtime_cudalinear import replace_linears

    replaced = replace_linears(module, **options)
    if not replaced.layers:
        raise RuntimeError(f"no linear layer was replaced: {'; '.join(dict.fromkeys(replaced.left.values()))}")
    return {"replaced": dict(Counter(replaced.layers.values())), "left": len(replaced.left)}


def layer_search_s(module: Any, whole_s: float) -> float:
    """Seconds of the search for one shape of the linear layers of ``module``, where that of a whole model takes ``whole_s``."""
    layers = (layer for layer in module.modules() if isinstance(layer, torch.nn.Linear))
    shapes = {(layer.in_features, layer.out_features, layer.bias is None) for layer in layers}
    return min(LAYER_BUDGET_S, whole_s / max(1, len(shapes)))


def start() -> tuple[dict[str, Any], Any]:
    """Build the model with random weights."""
    import transformers

    terms = json.loads(sys.argv[1])
    torch.manual_seed(0)
    with torch.device(terms["device"]):
        config = transformers.AutoConfig.from_pretrained(terms["model"])
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, terms["dtype"])).eval()
    facts: dict[str, Any] = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    if terms["system"] in INTERPRETED and module.device.type == "cuda":
        facts["eager_attention"] = eager_attention.choose(module)
    if terms["system"] == "cudalinear":
        with tempfile.TemporaryDirectory() as scratch:
            store = Store(Path(terms.get("cache") or scratch))
            budget_s = layer_search_s(module, terms["search_s"])
            facts |= {"layer_search_s": budget_s, **with_linears(module, config=Config(budget_s=budget_s), store=store)}
    return facts, Framework(module, terms["system"]).answer


if __name__ == "__main__":
    sys.exit(serving.serve(start))
