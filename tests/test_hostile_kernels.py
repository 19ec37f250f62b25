"""Kernels of a bundle that somebody else made: built again from installed families, or refused without the user's word."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agentcompile_core.configuration import Config, files
from agentcompile_core.context import Context
from agentcompile_core.errors import UsageError
from agentcompile_core.installation import trust
from agentcompile_core.ir.verdict import Rejudged
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import FakeBackend

# ---- kernels


class Emulation(FakeBackend):
    name = "emulation"


def context(target: Any, store: Store | None = None, trusting: bool = False) -> Context:
    return Context(catalog=load_catalog(strict=False), target=target, config=Config(trust_kernels=trusting), store=store or Store(None))


def passes(asked: Sequence[Any], backend: Any, ctx: Context) -> Sequence[Rejudged]:
    """A judge who finds nothing; what the real one finds is in test_rebuilt_kernels.py."""
    return [Rejudged(on_record=True)] * len(asked)


def decided(tiny_bundle: Path, change: Callable[[Any], Any] = lambda source: source, store: Store | None = None,
            trusting: bool = False) -> tuple[trust.Trusted, FakeBackend, Context]:
    """What is decided about the bundle's kernels, every source of its decode program changed, with a backend that builds anything."""
    installed = bundle_reader.read(tiny_bundle)
    target = installed.manifest.target
    ctx = context(target, store, trusting)
    backend = Emulation()
    program = installed.programs["decode"]
    made = {s.key: change(s) for s in program.sources}
    segments = tuple(evolve(s, source=made[s.source].key) if s.source else s for s in program.segments)
    programs = {"decode": evolve(program, sources=tuple(made.values()), segments=segments)}
    return trust.decide(programs, installed.kernels, trust.Foreign(target=target, judge=passes), backend, ctx), backend, ctx


def steps(found: trust.Trusted) -> int:
    return sum(1 for s in found.programs["decode"].segments if s.source)


def with_text(source: Any) -> Any:
    return evolve(source, code=source.code + "\n// another line\n")


def with_launch(source: Any) -> Any:
    first = source.launches[0]
    return evolve(source, launches=(evolve(first, grid=(first.grid[0] + 1, *first.grid[1:])), *source.launches[1:]))


def test_what_installed_families_make_is_built_again(tiny_bundle: Path) -> None:
    found, _, _ = decided(tiny_bundle)
    count = len(bundle_reader.read(tiny_bundle).programs["decode"].sources)
    assert steps(found) > 0 and found.notes == (f"{count} kernels of the bundle not known to this machine's cache: made again from the "
                                                "installed families, and validated here",)
    assert all(kernel.backend == "emulation" for kernel in found.kernels.values())


@pytest.mark.parametrize("change", [with_text, with_launch])
def test_what_nobody_here_makes_runs_only_by_the_users_word(tiny_bundle: Path, change: Callable[[Any], Any]) -> None:
    refused, _, _ = decided(tiny_bundle, change)
    assert steps(refused) == 0 and refused.kernels == {} and len(refused.notes) == 1 and "--trust-kernels" in refused.notes[0]
    refused.programs["decode"].verify()
    accepted, _, _ = decided(tiny_bundle, change, trusting=True)
    assert steps(accepted) > 0 and "run all the same (--trust-kernels)" in accepted.notes[0]


def test_a_binary_is_known_for_exactly_the_source_it_was_built_from(tiny_bundle: Path, tmp_path: Path) -> None:
    installed = bundle_reader.read(tiny_bundle)
    for change in (with_text, with_launch):
        store = Store(tmp_path / change.__name__)
        for source in installed.programs["decode"].sources:
            store.put_known(installed.kernels[source.digest].sha256, change(source))
            assert not store.knows(installed.kernels[source.digest].sha256, source)
            assert not store.knows("0" * 64, change(source))
        known, _, _ = decided(tiny_bundle, change, Store(tmp_path / change.__name__))
        assert steps(known) > 0 and known.notes == ()
        other, _, _ = decided(tiny_bundle, with_text if change is with_launch else with_launch, Store(tmp_path / change.__name__))
        assert steps(other) == 0


def test_only_the_user_may_trust_kernels(tmp_path: Path) -> None:
    path = tmp_path / "agentcompile.toml"
    path.write_text("trust_kernels = true\n")
    with pytest.raises(UsageError, match="trust_kernels"):
        files.read(path, of_project=True)
    assert files.read(path, of_project=False).values == {"trust_kernels": True} and Config().trust_kernels is False


def test_one_text_of_two_shapes_has_one_binary(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store knows it for the launches of one of them; that of the other, made again from the same text, is another file."""
    installed, store = bundle_reader.read(tiny_bundle), Store(tmp_path)
    program = installed.programs["decode"]
    first, segment = program.sources[0], next(s for s in program.segments if s.source == program.sources[0].key)
    second = with_launch(first)
    assert second.digest == first.digest and second.key != first.key
    rest = tuple(s for s in program.segments if s.source and s.source != first.key and s.nodes != segment.nodes)
    other = rest[0]
    store.put_known(installed.kernels[first.digest].sha256, first)
    segments = tuple(evolve(s, source=second.key) if s is other else s for s in program.segments)
    programs = {"decode": evolve(program, sources=(*program.sources, second), segments=segments)}
    monkeypatch.setattr(trust, "_made_here", lambda source, *others: True)
    backend = type("Own", (FakeBackend,), {"name": installed.kernels[first.digest].backend})()
    found = trust.decide(programs, installed.kernels, trust.Foreign(target=installed.manifest.target, judge=passes), backend,
                         context(installed.manifest.target, store))
    assert found.kernels[first.digest] == installed.kernels[first.digest]
    run = {s.source for s in found.programs["decode"].segments if s.source}
    assert {first.key, second.key} <= run and not any("run instead" in note for note in found.notes)
