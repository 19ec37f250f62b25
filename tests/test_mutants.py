"""Mutants of the kernels: made reproducibly and judged as candidates are.

The whole set is `make mutants`; here a few of it, drawn by a seed, are made and judged again.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "mutants.json"
sys.path.insert(0, str(ROOT / "scripts"))

from mutants.cheats import CHEATS  # noqa: E402
from mutants.differences import beyond_budget, differences  # noqa: E402
from mutants.equivalence import proofs  # noqa: E402
from mutants.judging import EQUIVALENT, KILLED, WITHIN, Asked, Cache, Finding, judged  # noqa: E402
from mutants.operators import OPERATORS, edits  # noqa: E402
from mutants.planning import pool, sampled  # noqa: E402
from mutants.results import COLUMNS, row_of, shortcomings  # noqa: E402
from mutants.subjects import load, subjects  # noqa: E402
from mutants.text import arguments, code_only, line_of  # noqa: E402

AGAIN, SEED = 14, 5  # a twentieth of the mutants, of families that are fast to emulate: what every run of the tests makes and judges
FAST = ("norm.cu", "rope.cu", "rope_table.cu", "elementwise.cu", "gather.cu", "argmax.cu")
GROUPS = {"bounds", "barriers", "masks", "accumulators", "tails", "strides", "tie-breaks", "dropped inputs", "waits", "cheats"}


def mutated(text: str) -> set[str]:
    return {edit.apply(text) for _, edit in edits(text)}


@pytest.mark.parametrize("text, mutants", [
    ("  if (i < n) out[i] = x;", {"  if (i <= n) out[i] = x;", "  if (true) out[i] = x;", "  if (i < n - 1) out[i] = x;",
                                  "  if (i < n) out[i ^ 1] = x;"}),
    ("  __syncthreads();", {"  ;", "  __syncwarp();"}),
    ("  ac::grid_dependency_wait();", {"  ;"}),
    ("  sum += x;", {"  sum = x;", "  sum -= x;", "  ;"}),
    ("  y = fmaf(a, b, sum);", {"  y = fmaf(a, b, 0.0f);", "  y = 1.002f * fmaf(a, b, sum);", "  ;",
                                "  y = __half2float(__float2half_rn(fmaf(a, b, sum)));"}),
    ("  // if (i < n) __syncthreads();", set()),
])
def test_operators_make_the_mistakes_that_they_are_named_for(text: str, mutants: set[str]) -> None:
    assert mutated(text) == mutants


def test_places_are_found_where_comments_and_nested_calls_stand() -> None:
    text = "f(a, g(b, c)); // f(x)\nh();"
    assert [text[start:end].strip() for start, end in arguments(text, 1)] == ["a", "g(b, c)"]
    assert "f(x)" not in code_only(text) and len(code_only(text)) == len(text)
    assert line_of(text, text.index("h()")) == 2


def test_every_operator_and_every_cheat_finds_a_place_and_no_two_mutants_are_one(committed: dict[str, Any]) -> None:
    everything = [mutant for mutants in pool().values() for mutant in mutants]
    assert {mutant.operator for mutant in everything} == {operator.name for operator in OPERATORS} | set(CHEATS)
    assert {mutant.group for mutant in everything} >= GROUPS
    assert Counter(mutant.id for mutant in everything).most_common(1)[0][1] == 1
    # Results may be older than a kernel: proofs of what they hold stay until they are renewed, and no longer.
    assert proofs().keys() <= {mutant.id for mutant in everything} | {row["id"] for row in committed["rows"]}


def test_a_larger_sample_begins_with_the_smaller_one() -> None:
    small, large = sampled(60, seed=1), sampled(240, seed=1)
    assert [mutant.id for mutant in large[:60]] == [mutant.id for mutant in small]
    assert [mutant.id for mutant in sampled(60, seed=2)] != [mutant.id for mutant in small]
    files = {mutant.file for mutant in large}
    families = {subject.family for subject in subjects().values() if not files.isdisjoint(subject.files())}
    assert families == {subject.family for subject in subjects().values()} and {mutant.group for mutant in large} >= GROUPS


def finding(outcome: str, by: str = "") -> Finding:
    return Finding(id="0", file="norm.cu", line=1, operator="less", group="bounds", before="a", after="b", outcome=outcome, by=by)


def test_results_count_what_has_no_proof_as_eligible() -> None:
    right = [finding(outcome) for outcome in ("no effect", "other bits", "identical machine code", "within the budget", "not compiling")]
    found = [*[finding(KILLED, "numerics")] * 199, *right]
    total = row_of(found)
    assert total == dict(zip(COLUMNS, (204, 1, 199, 0, 0, 1, 0, 1, 2), strict=True))
    assert shortcomings({"total": total}) == ["2 mutants are eligible and not shown to be right"]
    assert "at least 200" in shortcomings({"total": row_of(found[:150])})[0]
    assert "at most 10%" in shortcomings({"total": row_of(found[:199] + [finding(EQUIVALENT)] * 40)})[0]


@pytest.mark.parametrize("row", [
    {"outcome": EQUIVALENT, "cases": 10_000}, {"outcome": EQUIVALENT, "cases": 9_999, "proof": "since"},
    {"outcome": WITHIN, "proof": "since"}, {"outcome": KILLED, "other_bits_on": ["norm"]}])
def test_what_is_called_right_needs_a_proof_and_ten_thousand_cases(row: dict[str, Any]) -> None:
    total = row_of([finding(KILLED, "numerics")] * 200)
    assert "10000 random cases: b00" in shortcomings({"total": total, "rows": [{"id": "b00", **row}]})[0]
    complete = {"id": "b00", **row, "cases": 10_000, "proof": "since"}
    assert shortcomings({"total": total, "rows": [complete]}) == []


# ---- benchmarks/results/cpu/mutants.json

@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_committed_mutants_are_refused_or_shown_to_be_right(committed: dict[str, Any]) -> None:
    found = [Finding(**row) for row in committed["rows"]]
    assert len({one.id for one in found}) == len(found) == len({(one.file, one.before, one.after, one.id) for one in found})
    assert committed["total"] == row_of(found) and shortcomings(committed) == []
    assert committed["by_class"].keys() >= GROUPS
    assert committed["by_family"].keys() == {"device library", *(subject.family for subject in subjects().values())}
    assert {one.id: one.proof for one in found if one.outcome in (EQUIVALENT, WITHIN)}.items() <= proofs().items()


def test_every_installed_family_is_a_subject() -> None:
    assert {family.name for family in load().template_families.values()} == {subject.family for subject in subjects().values()}


def test_two_mutants_agree_with_their_kernel_only_where_they_do(tmp_path: Path) -> None:
    """The random cases of `make mutants`, a few of them: equal bits, other bits within the budget, and beyond it."""
    subject = subjects()["norm_layer_f32"]
    text = subject.files()["norm.cu"]
    exact, rounding, wrong = (subject.mutated("norm.cu", text.replace("eps, scratch", changed, 1)) for changed in (
        "eps + 0.0f, scratch", "eps * 1.0001f, scratch", "eps + 0.1f, scratch"))
    assert [bool(seen) for seen in differences(subject, [exact, rounding, wrong], range(20))] == [False, True, True]
    assert [bool(seen) for seen in beyond_budget(subject, [exact, rounding, wrong], range(20))] == [False, False, True]


@pytest.mark.slow
def test_mutants_of_all_classes_are_refused(committed: dict[str, Any], tmp_path: Path) -> None:
    """A few of `make mutants`, from scratch: each is built, judged on the cases of its candidate and refused again."""
    refused = [row["id"] for row in committed["rows"] if row["outcome"] == KILLED and row["file"] in FAST and row["cause"] != "timeout"]
    by_id = {mutant.id: mutant for mutants in pool().values() for mutant in mutants}
    drawn = [by_id[name] for name in random.Random(SEED).sample(sorted(refused), AGAIN)]
    found = judged(drawn, Asked(seed=1), Cache(tmp_path))
    assert [finding.id for finding in found] == [mutant.id for mutant in drawn]
    assert [finding for finding in found if finding.outcome != KILLED] == []
