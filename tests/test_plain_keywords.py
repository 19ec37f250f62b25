"""``compile(model, advisor="x")``: what is configured may be given as plain keywords, and is stronger than files and variables."""

from pathlib import Path
from typing import Any

import pytest
from addition_module import MODULE
from faults import cheap
from faults.advice import Does

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.advice import Advice
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles


def compiled(folder: Path, asked: list[Any], **keywords: Any) -> Any:
    """The addition, compiled for nobody to run, with an advisor that notes what it is asked."""
    (folder / "addition.py").write_text(MODULE)
    plugin = cheap.offers(advisors=Does(lambda question: asked.append(question) or Advice()), validators=doubles.SimpleValidator(),
                          template_families=cheap.Family("honest"), backends=cheap.Backend())
    catalog = cheap.load_catalog(only=(), extra=[("doubles", plugin), ("rules", cheap.agentcompile_rules_transformers)])
    return ac.compile(str(folder / "addition.py"), catalog=catalog, store=Store(None), device="cpu", run_on="nothing", **keywords)


def test_an_advisor_is_named_as_a_plain_keyword(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCOMPILE_ADVISOR", "heuristic")
    asked: list[Any] = []
    made = compiled(tmp_path, asked, advisor="does", budget_s=20.0, rounds=1, validators=("simple",))
    assert len(asked) == 1 and [one.advisor for one in made.compilation.advice] == ["does"]
    config = made.context.config
    assert (config.advisor, config.budget_s, config.rounds, config.validators) == ("does", 20.0, 1, ("simple",))
    made = compiled(tmp_path, asked, budget_s=20.0, rounds=1, validators=("simple",))
    assert len(asked) == 1 and made.context.config.advisor == "heuristic"


def test_one_that_nobody_offers_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown advisor 'x'; installed: .*does"):
        compiled(tmp_path, [], advisor="x")
    with pytest.raises(UsageError, match="advisors"):
        compiled(tmp_path, [], advisors="does")
