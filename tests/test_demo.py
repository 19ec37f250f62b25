"""`make demo` without a GPU: it shows what it claims, and fails when something that it claims does not hold."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("shared_captures")  # the demo shows what comes of a capture, twice of the same one


@pytest.fixture(scope="module")
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("agentcompile_demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["agentcompile_demo"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["agentcompile_demo"]


class Speaker:
    """Stands in for a compiled model: says given tokens, through given kernels."""

    def __init__(self, answer: list[int], kernels: int = 0) -> None:
        segments = tuple(SimpleNamespace(step=object() if i < kernels else None) for i in range(3))
        self.session = SimpleNamespace(bound=lambda name: SimpleNamespace(program=SimpleNamespace(segments=segments)))
        self.answer, self.notes = answer, ("a note",)

    def tokenizer(self, text: str, **options: object) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([[1, 2]]))

    def generate(self, ids: torch.Tensor, count: int, **options: object) -> torch.Tensor:
        return torch.tensor([[*ids[0].tolist(), *self.answer[:count]]])


def test_equal_tokens_pass(demo: Any) -> None:
    assert demo.check_same_tokens(Speaker([5, 6, 7], kernels=2), Speaker([5, 6, 7]), "x", 3) == [5, 6, 7]


@pytest.mark.parametrize(("kernels", "framework", "says"), [
    (Speaker([5, 6, 8], kernels=2), Speaker([5, 6, 7]), "differ"),
    (Speaker([5, 6], kernels=2), Speaker([5, 6]), "differ"),  # too few
    (Speaker([5, 6, 7], kernels=0), Speaker([5, 6, 7]), "no generated kernel"),
    (Speaker([5, 6, 7], kernels=2), Speaker([5, 6, 7], kernels=1), "itself"),
])
def test_what_is_not_a_check_fails(demo: Any, kernels: Speaker, framework: Speaker, says: str) -> None:
    with pytest.raises(demo.DemoError, match=says):
        demo.check_same_tokens(kernels, framework, "x", 3)


@pytest.mark.parametrize("text", ["", "oneone" * 30, " the the" * 20, " a function is used" * 9, "!!!! ???? ...."])
def test_nonsense_is_refused(demo: Any, text: str) -> None:
    with pytest.raises(demo.DemoError, match="no sense"):
        demo.check_sense(text)


def test_readable_text_passes(demo: Any) -> None:
    demo.check_sense("is used to obtain the same number of objects. These are the same as for the function object, with the same value.")


def test_a_failed_claim_exits_with_1(demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(options: object, folder: object) -> None:
        raise demo.DemoError("tokens differ")

    monkeypatch.setattr(demo, "without_gpu", fails)
    monkeypatch.setattr(demo, "with_gpu", fails)
    assert demo.main([]) == 1
    out, err = capsys.readouterr()
    assert "the demo FAILED: tokens differ" in err
    assert "held" not in out


def test_what_was_not_validated_is_built_for_the_target(demo: Any, tmp_path: Path) -> None:
    compiled = demo.compile_model(demo.TINY, tmp_path, dtype="float16", budget_s=0.001, budget_plans=4, target="a100", device="cpu",
                                  meta=True)
    lines = demo.build_unvalidated(compiled)
    judged = {(r.signature, r.step.match_id) for r in compiled.compilation.records}
    favourites = [(s.signature, m) for s in compiled.compilation.spaces for m in min(s.covers, key=lambda c: c.rank).matches]
    assert len(favourites) >= 9
    assert len(lines) == len([f for f in favourites if f not in judged]) > 0
    assert all("registers" in line for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows the demo of a machine without a GPU")
def test_the_whole_demo_with_a_small_model_in_place_of_qwen3(demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "QWEN3", demo.TINY)
    assert demo.main(["--budget-s", "10", "--tokens", "8", "--out", str(tmp_path / "tiny.bundle")]) == 0
    out, _ = capsys.readouterr()
    assert (tmp_path / "tiny.bundle" / "manifest.json").is_file()
    for row in ("IR nodes", "regions", "plans (covers)", "candidates in the space", "built", "validated", "selected steps",
                "files / signatures"):
        assert row in out
    assert "8 tokens of the tiny model through its generated CUDA kernels" in out
    assert "equal to the framework's" in out
    assert "Not measured, since there is no GPU here" in out
    assert "When an exception" in out
