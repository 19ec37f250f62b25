"""Mutants of the kernels: made reproducibly and judged as candidates are.

The whole set is `make mutants`; here a few of it, drawn by a seed, are made and judged again.
"""

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from mutants.cheats import CHEATS  # noqa: E402
from mutants.equivalence import proofs  # noqa: E402
from mutants.judging import EQUIVALENT, KILLED, NOT_COMPILING, Asked, Cache, Finding, judged  # noqa: E402
from mutants.operators import OPERATORS, edits  # noqa: E402
from mutants.planning import pool, sampled  # noqa: E402
from mutants.results import COLUMNS, row_of, shortcomings  # noqa: E402
from mutants.subjects import subjects  # noqa: E402
from mutants.text import arguments, code_only, line_of  # noqa: E402

AGAIN, SEED = 10, 5  # mutants that every run of the tests makes and judges, of the families that are fast to emulate
FAST = ("norm.cu", "rope.cu", "rope_table.cu", "elementwise.cu", "gather.cu", "argmax.cu")
GROUPS = {"bounds", "barriers", "masks", "accumulators", "tails", "strides", "tie-breaks", "dropped inputs", "waits", "cheats"}


def mutated(text: str) -> set[str]:
    return {edit.apply(text) for _, edit in edits(text)}


@pytest.mark.parametrize("text, mutants", [
    ("  if (i < n) out[i] = x;", {"  if (i <= n) out[i] = x;", "  if (true) out[i] = x;", "  if (i < n - 1) out[i] = x;"}),
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


def test_every_operator_and_every_cheat_finds_a_place_and_no_two_mutants_are_one() -> None:
    everything = [mutant for mutants in pool().values() for mutant in mutants]
    assert {mutant.operator for mutant in everything} == {operator.name for operator in OPERATORS} | set(CHEATS)
    assert {mutant.group for mutant in everything} >= GROUPS
    assert Counter(mutant.id for mutant in everything).most_common(1)[0][1] == 1
    assert proofs().keys() <= {mutant.id for mutant in everything}


def test_a_larger_sample_begins_with_the_smaller_one() -> None:
    small, large = sampled(60, seed=1), sampled(240, seed=1)
    assert [mutant.id for mutant in large[:60]] == [mutant.id for mutant in small]
    assert [mutant.id for mutant in sampled(60, seed=2)] != [mutant.id for mutant in small]
    families = {subject.family for mutant in large for subject in subjects().values() if mutant.file in subject.files()}
    assert families == {subject.family for subject in subjects().values()} and {mutant.group for mutant in large} >= GROUPS


def finding(outcome: str, by: str = "") -> Finding:
    return Finding(id="0", file="norm.cu", line=1, operator="less", group="bounds", before="a", after="b", outcome=outcome, by=by)


def test_results_count_what_has_no_proof_as_eligible() -> None:
    found = [finding(KILLED, "numerics")] * 199 + [finding("no effect"), finding("identical machine code"), finding("not compiling")]
    total = row_of(found)
    assert total == dict(zip(COLUMNS, (202, 1, 199, 0, 0, 1, 0, 1), strict=True))
    assert shortcomings({"total": total}) == ["1 mutants are eligible and not shown to be right"]
    assert "at least 200" in shortcomings({"total": row_of(found[:150])})[0]
    assert "at most 10%" in shortcomings({"total": row_of(found[:199] + [finding(EQUIVALENT)] * 40)})[0]


@pytest.mark.slow
def test_mutants_of_all_classes_are_refused(tmp_path: Path) -> None:
    """A few of `make mutants`, from scratch: each is built, judged on the cases of its candidate and refused."""
    drawn = random.Random(SEED).sample([mutant for mutant in sampled(300, seed=1) if mutant.file in FAST], AGAIN)
    found = judged(drawn, Asked(seed=1), Cache(tmp_path))
    assert [finding.id for finding in found] == [mutant.id for mutant in drawn]
    assert [finding for finding in found if finding.outcome not in (KILLED, NOT_COMPILING)] == []
