"""The training script: what text it keeps, and that a few steps learn and save a model that loads."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

SCRIPT = Path(__file__).parents[1] / "examples" / "train_tiny_model.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prose_is_kept_unwrapped_and_markup_dropped(script: ModuleType) -> None:
    text = (
        "Title here\n==========\n\nReturn the ``value`` of the\nfirst *argument*, which must be a class:`int` object.\n\n"
        '>>> value(3)\n3\n\nThe caller\u2019s well-\nknown name is a string that is "not" changed here [1].\n'
    )
    assert list(script.prose_paragraphs(text)) == [
        'Return the "value" of the first argument, which must be a class:"int" object.',
        'The caller\'s well-known name is a string that is "not" changed here.',
    ]


@pytest.mark.parametrize(
    "paragraph",
    [
        "Too short.",
        "the sentence does not begin with a capital letter, so it is a part of something else.",
        "The sentence announces an example that is not kept, as shown in the following lines:",
        "if_stmt ::= if assignment_expression suite and so on and so on and so on in a grammar.",
        "Args: the first is the name of the file and the second is the mode of opening it.",
        "X1, y_2 (3.5) -> 17; [a_b] + {c_d} % 9 <= 4 && q == 1.5e-3 || ~0x77 ^ zz9 @ 12.",
    ],
)
def test_other_text_is_dropped(script: ModuleType, paragraph: str) -> None:
    assert not script.is_prose(paragraph)


def test_docstrings_of_a_source_file_are_found_and_broken_files_have_none(script: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text('"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n', "utf-8")
    assert list(script.docstrings(source)) == ["Module.", "Class.", "Method."]
    source.write_text("def (:", "utf-8")
    assert list(script.docstrings(source)) == []


def test_a_few_steps_learn_and_the_saved_model_loads(script: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    documents = ["The value of the expression is the value of the object. " * 60] * 2
    tokenizer = script.train_tokenizer(documents)
    ids = script.encode(tokenizer, documents, seed=0).repeat(20)
    config = script.model_config()
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16  # a minute of Muon otherwise
    model = Qwen3ForCausalLM(config)
    steps = list(script.train(model, ids, ids, script.Limits(steps=40, minutes=math.inf, rows=1, compiled=False)))
    assert steps == []  # shorter than one report
    assert script.held_out_loss(model, ids[:600]) < 0.5 * math.log(config.vocab_size)

    script.save(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    probe = torch.tensor([AutoTokenizer.from_pretrained(tmp_path).encode("The value of")])
    with torch.no_grad():
        assert torch.allclose(loaded(probe).logits, model(probe).logits, atol=0.05)


@pytest.mark.parametrize("option", [["--steps", "0"], ["--minutes", "0"], ["--rows", "-1"]])
def test_limits_that_allow_no_work_are_refused(script: ModuleType, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main(["--out", "unused", *option])
    assert stopped.value.code == 2
    assert "must be above 0" in capsys.readouterr().err


def test_learning_rate_warms_up_and_decays(script: ModuleType) -> None:
    factors = [script.schedule(i / 100) for i in range(101)]
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[0] < 0.1 and factors[100] < 0.05
    assert factors[2:] == sorted(factors[2:], reverse=True)
