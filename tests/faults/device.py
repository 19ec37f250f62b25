"""The device tier: hostile kernels as real machine code on a GPU; one compile meets all of them and ends with a correct program."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from .registry import DEVICE, add
from .seen import told

sys.path.append(str(Path(__file__).parents[2] / "plugins" / "runtimes" / "cuda" / "tests"))

import hostile_kernels as hostile

TIMED = ("stops working", "returns when out is filled", "keeps results by address")
KEPT = "the honest kernel was selected and the program computes what torch computes"


@cache
def _compiled() -> tuple[Any, Any, Any]:
    import torch

    import agentcompile_core as ac
    from agentcompile_core.configuration import Config
    from agentcompile_core.plugin.discovery import load_catalog
    from agentcompile_core.store import Store

    from .cheap import lenient

    torch.manual_seed(0)
    module = torch.nn.Linear(hostile.COLUMNS, hostile.ROWS, bias=False).half().cuda()
    x = torch.randn(1, 1, hostile.COLUMNS, device="cuda", dtype=torch.float16)
    with lenient():
        catalog = load_catalog(only=("transformers_rules", "cuda", "cudagraph", "flashkv", "numerics"),
                               extra=[("hostile", hostile.offers())])
        config = Config(rounds=1, budget_s=100.0, margin=-1.0, origins=("generated",), validators=("numerics",))
        return ac.compile(module, example_inputs=(x,), catalog=catalog, config=config, store=Store(None)), module, x


def _refused(name: str) -> Any:
    def run(folder: Path) -> str:
        import torch

        made, module, x = _compiled()
        (found,) = [r for r in made.compilation.records
                    if r.step.implementation == hostile.FAMILY and r.step.schedule["kernel"] == name]
        expected = hostile.HOSTILE[name]
        assert found.failure in expected.causes and expected.message in found.message, (found.failure, found.message)
        assert found.measurement is None
        (selection,) = made.compilation.selections
        assert [s.step.schedule["kernel"] for s in selection.steps] == ["honest"], selection.fallback_reasons
        fresh = torch.randn_like(x)
        torch.testing.assert_close(made(fresh), module(fresh), rtol=2e-3, atol=2e-3)
        fatal = [f for f in made.compilation.failures if f.message == found.message]
        return told(made, found.message) if len(fatal) == 1 and fatal[0].count == 1 else f"{found.failure.value}: {found.message}"

    return run


for _name in hostile.HOSTILE:
    add("timing" if _name in TIMED else "kernels", f"on a GPU: a kernel that {_name}", f"machine code that {_name}", _refused(_name), KEPT,
        DEVICE)
