"""Which mutants are made: every edit of every file, sampled so that operators, files and places take turns."""

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache, lru_cache

from attrs import field, frozen

from agentcompile_core.plugin_api import StepSource

from .cheats import cheats
from .operators import edits
from .subjects import PLAN, Subject, subjects
from .text import Edit, line_at, line_of, statement_before

# Inline PTX has a double in the emulator: what stands in the GPU's half is no text that a CPU could run.
NOT_MUTATED = ("agentcompile/ptx.cuh", "agentcompile/ptx_cluster.cuh")
# Families and templates that joined a sample that was judged: what came together has places of its own, and what was drawn stays.
JOINED = (("gemm",), ("experts", "router"), ("masked_attention",), ("experts_stream.cu",),
          ("scan.cu", "scan_strided.cu", "pool.cu", "cross_entropy.cu"), ("gemm_bf16x6.cu", "attention_staged.cu", "gemm_row.cu"))
PLACE_OF_JOINED = 12  # every twelfth
LATER = ("other_element", "no_copy")  # operators that joined a sample that was judged: they draw for themselves, and what was drawn stays
_EARLY = re.compile(r"\bconstexpr\b|\bif \(!?Plan\w*::\w+\)")


@frozen(kw_only=True)
class Mutant:
    """One edit of one file; ``before`` and ``after`` are the first line that it changes."""

    file: str
    operator: str
    group: str
    line: int
    before: str
    after: str
    occurrence: int  # among edits that look the same
    early: bool  # in a statement that is decided when it is compiled
    edit: Edit = field(repr=False)

    @property
    def id(self) -> str:
        """The same for the same mistake in the same statement, wherever it stands in the file."""
        parts = (self.file, self.operator, self.before, self.after, str(self.occurrence))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    def source(self, subject: Subject) -> StepSource:
        """The source of ``subject`` with this mistake in it."""
        text = subject.files()[self.file]  # names carry each source's digest, so the edit is looked for again
        return subject.mutated(self.file, _by_id(self.file, text)[self.id].edit.apply(text))


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """All mutants of one text."""
    seen: dict[tuple[str, str, str], int] = defaultdict(int)
    shown = without_digests(text)
    for operator, edit in (*edits(text), *cheats(file, text)):
        mutated = edit.apply(text)
        before, after = line_at(text, edit.start), line_at(mutated, edit.start)
        if operator.group == "cheats":
            before, after = "the kernel", operator.name
        key = (operator.name, without_digests(before), without_digests(after))
        seen[key] += 1
        yield Mutant(file=file, operator=operator.name, group=operator.group, line=line_of(shown, edit.start), before=key[1], after=key[2],
                     occurrence=seen[key], early=bool(_EARLY.search(statement_before(text, edit.start) + before)), edit=edit)


@lru_cache(maxsize=256)
def _by_id(file: str, text: str) -> dict[str, Mutant]:
    return {mutant.id: mutant for mutant in mutants_of(file, text)}


@cache
def pool() -> dict[str, list[Mutant]]:
    """All mutants by file; a file that several subjects share is counted once."""
    found: dict[str, list[Mutant]] = {}
    for subject in subjects().values():
        for file, text in subject.files().items():
            if file not in found and file not in NOT_MUTATED and file != PLAN:
                found[file] = list(mutants_of(file, text))
    return found


def sampled(count: int, seed: int) -> list[Mutant]:
    """``count`` mutants; a larger sample begins with the smaller one. Files of families that joined later have every twelfth place."""
    joined = [_files_of(names) for names in JOINED]
    turns = [turn_of(place) for place in range(count)]
    rest = {file: found for file, found in pool().items() if not any(file in files for files in joined)}
    drawn = [_drawn({file: pool()[file] for file in files}, turns.count(turn), seed) for turn, files in enumerate(joined)]
    places = [iter(found) for found in (*drawn, _drawn(rest, turns.count(len(joined)), seed))]
    return [mutant for turn in turns if (mutant := next(places[turn], None)) is not None]


def turn_of(place: int) -> int:
    """Whose place it is: the number of those that joined together, or how many there are of these for all others."""
    return min(PLACE_OF_JOINED - 1 - place % PLACE_OF_JOINED, len(JOINED))


def _files_of(names: Collection[str]) -> frozenset[str]:
    """The templates of families and the headers that are theirs alone; of a family those templates that are not named themselves."""
    alone = {name for group in JOINED for name in group}
    mine, others = set(), set()
    for subject in subjects().values():
        joined = (subject.template if subject.template in alone else subject.family) in names
        (mine if joined else others).update((subject.template, *_own(subject)))
    return frozenset(mine - others if all(name.endswith(".cu") for name in names) else mine)


def _own(subject: Subject) -> list[str]:
    return [name for name, _ in subject.source.headers if name != PLAN]


def _drawn(files: Mapping[str, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants of some files.

    An operator brings mutants in proportion to the square root of how many it can make: all operators are there, and those that find
    many places are there more often without being most of the sample. Each brings its next one from the file that it has brought
    least of, there from the line that least were drawn of by any operator; what is left is drawn from ``seed``. Lines that a compiler
    decides come behind those that run: a mistake there mostly makes another schedule, or nothing. So the sample spreads over
    operators, files and places, and what becomes of a mutant has no part in it.
    """
    draw = random.Random(seed)
    waiting: dict[str, list[Mutant]] = defaultdict(list)
    for _, mutants in sorted(files.items()):
        for mutant in mutants:
            waiting[mutant.operator].append(mutant)
    order = sorted(waiting.keys() - LATER)
    draw.shuffle(order)
    for operator in order:
        draw.shuffle(waiting[operator])
    for operator in LATER:
        random.Random(f"{seed} {operator}").shuffle(waiting[operator])
    order += LATER
    weight = {operator: len(waiting[operator]) ** 0.5 for operator in order}
    brought: Counter[str] = Counter()
    taken: Counter[tuple[str, str]] = Counter()
    places: Counter[tuple[str, int]] = Counter()
    chosen: list[Mutant] = []
    seen: set[tuple[str, int, str]] = set()  # two operators may write the same
    while len(chosen) < count and any(waiting.values()):
        operator = min((name for name in order if waiting[name]), key=lambda name: (brought[name] + 0.5) / weight[name])
        mutant = min(waiting[operator], key=lambda one: (one.early, taken[one.operator, one.file], places[one.file, one.line]))
        waiting[operator].remove(mutant)
        if (written := (mutant.file, mutant.line, mutant.after)) in seen:
            continue
        seen.add(written)
        brought[operator] += 1
        taken[operator, mutant.file] += 1
        places[mutant.file, mutant.line] += 1
        chosen.append(mutant)
    return chosen


def order_of(mutant: Mutant, seed: int) -> list[Subject]:
    """The subjects in which the mutated file takes part, in the order in which they are tried."""
    having = [subject for subject in subjects().values() if mutant.file in subject.files()]
    random.Random(f"{seed} {mutant.id}").shuffle(having)
    return having


def without_digests(text: str) -> str:
    """The text with names as a family wrote them."""
    return re.sub(r"_[0-9a-f]{16}\b", "", text)
