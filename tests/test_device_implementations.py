"""On a GPU: implementations are timed, judged in the captured chain, captured or cut out of the graph, and give HuggingFace's tokens."""

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcompile_core import api
from agentcompile_core.configuration import Config
from agentcompile_core.ir.selection import Basis
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages.select import chain
from agentcompile_core.store import Store

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
DOUBLES = Path(__file__).parent / "implementation_doubles" / "acme_doubles.py"
PLUGINS = ("transformers_rules", "vendor", "acme", "cuda", "cudagraph", "flashkv", "numerics")

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plugin ``acme`` is installed; it says that no CUDA graph may hold it, and checks that none does."""
    folder = tmp_path_factory.mktemp("acme")
    shutil.copy(DOUBLES, folder)
    (folder / "acme_settings").write_text("set=outside")
    info = folder / "acme_doubles-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-doubles\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentcompile.v1]\nacme = acme_doubles\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("AGENTCOMPILE_PLUGINS", ",".join(PLUGINS))
        sys.modules.pop("acme_doubles", None)
        importlib.invalidate_caches()
        yield
    sys.modules.pop("acme_doubles", None)


def compiled(*origins: str) -> Any:
    # The framework is no allowed origin, so no clock decides this test.
    config = Config(origins=origins, rounds=1, budget_s=60.0)
    model = api.compile(str(TINY), dtype="float32", max_context=256, config=config, store=Store(None), catalog=load_catalog(only=PLUGINS))
    model.context.close()
    return model


def assert_right(model: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = model.tokenizer("When an exception", return_tensors="pt").input_ids
    wanted = model.loaded.module.generate(ids.cuda(), max_new_tokens=100, min_new_tokens=100, do_sample=False, eos_token_id=None,
                                          pad_token_id=0, disable_compile=True)
    assert torch.equal(model.generate(ids, 100), wanted.cpu())
    assert torch.equal(model.generate(ids, 100), wanted.cpu())


def steps(model: Any) -> list[Any]:
    return [step for selection in model.compilation.selections for step in selection.steps]


def test_capturable_ones_are_measured_and_captured(outside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "possible", lambda ctx: False)  # every step at its best alone
    model = compiled("third_party")
    assert {"vendor/linear"} <= {s.step.implementation for s in steps(model)} <= {"vendor/linear", "vendor/attention"}
    assert all(s.basis is Basis.MEASURED and s.measurement and s.measurement.us > 0 and s.baseline for s in steps(model))
    decode = model.session._steps["decode"]
    assert decode.captured and decode.outside == () and not any("framework" in note for note in model.notes)
    assert_right(model)


def test_the_graph_is_cut_at_those_that_no_graph_may_hold(outside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "possible", lambda ctx: False)
    model = compiled("handwritten")
    assert {s.step.implementation for s in steps(model)} == {"acme/residual"}
    decode = model.session._steps["decode"]
    assert decode.captured, decode.reason
    assert set(decode.outside) == {"acme/residual"} and len(decode.outside) == 5 * len(steps(model))
    assert_right(model)


@pytest.mark.parametrize("origins", [("third_party",), ("handwritten",), ("handwritten", "third_party")], ids="+".join)
def test_the_chain_judges_them_as_they_run(outside: Any, origins: tuple[str, ...]) -> None:
    model = compiled(*origins)
    assert [str(f) for f in model.context.failures if f.subject == "chain"] == []
    with_steps, framework = model.compilation.step_us
    assert with_steps > 0 and framework > 0
    assert {s.basis for s in steps(model)} <= {Basis.CHAIN}
    assert_right(model)


def test_a_bundle_is_bound_again(outside: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chain, "possible", lambda ctx: False)
    folder = compiled("handwritten").save(tmp_path / "b")
    again = api.load(folder, str(TINY), catalog=load_catalog(only=PLUGINS))
    assert set(again.session._steps["decode"].outside) == {"acme/residual"}
    assert_right(again)
    without = api.load(folder, str(TINY), catalog=load_catalog(only=[name for name in PLUGINS if name != "acme"]))
    (note,) = (note for note in without.notes if "acme" in note)
    assert note.startswith("acme/residual version 1 is not installed: the nodes of ")
    assert without.session._steps["decode"].outside == ()
    assert_right(without)
