"""Evidence holds as long as what found it: another oracle, protocol or validator asks again; another validator of winners asks winners."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from select_cases import FAMILY, context, plan, step

from agentcompile_core import pipeline
from agentcompile_core.configuration import Config
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.stages import lower, validate
from agentcompile_core.stages.validate import entries, final_checks
from agentcompile_core.store import code, keys
from agentcompile_core.testing import doubles


def key_of(ctx: Any) -> str:
    ordered = (plan(step("honest", 4.0)),)
    (candidate,) = lower.run(ordered, ctx)
    found = entries.Queue(ordered, ctx.backend, ctx).entry_of(candidate)
    assert found is not None
    return found.key


class Newer(doubles.SimpleValidator):
    version = 2


class Set(doubles.SimpleValidator):
    """Has a setting that its keys must hold."""

    identity = ("limit", 5)


def with_validator(validator: Any) -> Any:
    made = context()
    made.catalog.offers["agentcompile_validators"]["doubles/simple"] = validator
    return made


def test_a_changed_oracle_comparison_or_protocol_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(context())
    assert before == key_of(context())
    monkeypatch.setattr(keys, "judging_code", lambda: "another oracle")
    assert key_of(context()) != before


def copies(names: tuple[str, ...], folder: Path) -> list[Path]:
    """Those files and folders of the core's code, copied below ``folder``."""
    for name in names:
        source = code.CORE / name
        for file in source.rglob("*.py") if source.is_dir() else [source]:
            target = folder / file.relative_to(code.CORE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return [folder / name for name in names]


@pytest.mark.parametrize("module", ["ops/reference/rules.py", "ops/reference/__init__.py", "worker/timing.py", "worker/after_timing.py",
                                    "worker/operands.py", "stages/validate/input_cases.py"])
def test_the_digest_of_what_judges_covers(module: str, tmp_path: Path) -> None:
    copied = copies(code.JUDGES, tmp_path)
    assert code.digest_of(*copied) == code.judging_code()
    changed = tmp_path / module
    changed.write_bytes(changed.read_bytes() + b"\n")
    assert code.digest_of(*copied) != code.judging_code()


@pytest.mark.parametrize("module", ["ops/schema.py", "stages/capture/rotary.py", "stages/capture/export.py", "ir/graph.py",
                                    "runtime/installed_packages.py"])
def test_graphs_that_other_code_captured_are_not_served(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the version before served graphs that an older normalisation had left on the framework."""
    copied = copies(code.CAPTURERS, tmp_path)
    assert code.digest_of(*copied) == code.capturing_code()
    workload = Workload(dtype=DType.F32, max_context=64)
    before = keys.capture_key("model", workload, ())
    assert before == keys.capture_key("model", workload, ())
    changed = tmp_path / module
    changed.write_bytes(changed.read_bytes() + b"\n")
    monkeypatch.setattr(keys, "capturing_code", lambda: code.digest_of(*copied))
    assert keys.capture_key("model", workload, ()) != before


def test_another_version_or_other_code_of_a_validator_is_another_key() -> None:
    before = key_of(context())
    assert key_of(with_validator(Newer())) != before, "another version"
    assert key_of(with_validator(type("Simple", (doubles.SimpleValidator,), {"__module__": __name__})())) != before, "another module"


def test_a_validator_of_winners_is_no_part_of_the_keys_of_candidates() -> None:
    assert key_of(context(validators=("simple", "picky"))) == key_of(context(validators=("simple",)))
    ctx = context(validators=("simple", "picky"))
    version = final_checks._version(ctx, "picky")
    assert keys.winner_key("record-1", version) != keys.winner_key("record-1", (version[0], 2, *version[2:]))
    assert keys.winner_key("record-1", version) != keys.winner_key("record-2", version)


@given(st.dictionaries(st.sampled_from(["a.py", "b.py", "deep/c.h", "d.pyc"]), st.binary(max_size=3), min_size=1),
       st.dictionaries(st.sampled_from(["a.py", "b.py", "deep/c.h", "d.pyc"]), st.binary(max_size=3), min_size=1))
def test_code_is_equal_where_its_files_are(tmp_path_factory: pytest.TempPathFactory, one: dict[str, bytes],
                                           other: dict[str, bytes]) -> None:
    digests = []
    for files in (one, other):
        folder = tmp_path_factory.mktemp("code") / "package"
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        folder.mkdir(exist_ok=True)
        digests.append(code.digest_of(folder))
    plain = [{name: data for name, data in files.items() if not name.endswith(".pyc")} for files in (one, other)]
    assert (digests[0] == digests[1]) == (plain[0] == plain[1])


def test_code_of_a_plugin_is_its_whole_package() -> None:
    from agentcompile_validator_numerics import validator

    folder = Path(validator.__file__).parent
    assert code.code_of(validator.NumericsValidator) == code.digest_of(folder)
    assert code.code_of(doubles.SimpleValidator).startswith(code.judging_code())


@pytest.mark.parametrize("config", [Config(), Config(validators=("simple", "picky")), Config(winners=("picky",), validators=("simple",))])
def test_time_is_kept_for_winners_where_somebody_judges_them(config: Config) -> None:
    ctx = evolve(context(), config=config)
    pipeline.begin_budget(ctx)
    asked = "picky" in (*config.validators, *config.winners)
    assert (ctx.budget.left_s("search") < ctx.budget.total_s * 0.95) is asked


def test_records_of_an_older_oracle_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = context()
    asked: list[int] = []

    class Counting:
        def prepare(self, *_: Any) -> None:
            pass

        def evaluate(self, jobs: Any, **_: Any) -> Any:
            asked.append(len(list(jobs)))
            return iter(())

    made.worker = Counting()
    ordered = (plan(step("honest", 4.0)),)
    first = entries.Queue(ordered, made.backend, made).entries(lower.run(ordered, made))[0]
    from agentcompile_core.ir.record import TuningRecord
    from agentcompile_core.ir.verdict import Outcome, Verdict

    candidate = first.candidate
    made.store.put_record(TuningRecord(key=first.key, signature="s1", step=candidate.step, source_digest=candidate.source.digest,
                                       verdict=Verdict(validator="simple", outcome=Outcome.PASS), measurement=doubles.measurement(4.0)))
    assert [r.step.implementation for r in validate.run(lower.run(ordered, made), ordered, 9.0, made).records] == [FAMILY]
    assert asked == []
    monkeypatch.setattr(keys, "judging_code", lambda: "another oracle")
    validate.run(lower.run(ordered, made), ordered, 9.0, made)
    assert asked == [1]
