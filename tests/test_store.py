"""The store as its callers see it: what was put comes back, from memory and from disk, by any later store."""

import hashlib
import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import Cause, ContractError, UsageError
from agentcompile_core.ir.candidate import Kernel, Resources
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import Measurement, TuningRecord
from agentcompile_core.ir.verdict import Check, Outcome, Verdict
from agentcompile_core.store import Store, default_root


def make_kernel(binary: bytes = b"\x7fELF cubin") -> Kernel:
    return Kernel(digest="d1", backend="cuda", arch="sm_90", binary=binary, sha256=hashlib.sha256(binary).hexdigest(),
                  compiler="nvrtc 13.0", resources=Resources(registers=32, shared_bytes=1024), build_s=0.05)


def make_record(key: str = "r1", signature: str = "s1", us: float = 3.25) -> TuningRecord:
    step = Step(match_id="gemv:a+1:a", implementation="gemv/gemv", origin=Origin.GENERATED,
                schedule=Schedule({"warps": 8, "ring": True, "mode": "direct", "share": 0.5}))
    verdict = Verdict(validator="numerics", outcome=Outcome.PASS,
                      checks=(Check(name="normal", outcome=Outcome.PASS, max_abs=1e-3),))
    return TuningRecord(key=key, signature=signature, step=step, source_digest="src", verdict=verdict,
                        measurement=Measurement(us=us, spread_us=0.1, repetitions=20), failure=None)


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(None if request.param == "memory" else tmp_path / "cache")


def test_everything_put_comes_back(store: Store) -> None:
    assert store.kernel("k1") is None and store.record("r1") is None and store.text("captures", "c1") is None
    store.put_kernel("k1", make_kernel())
    store.put_record(make_record())
    store.put_text("captures", "c1", "größer 😀")
    assert store.kernel("k1") == make_kernel()
    assert store.record("r1") == make_record()
    assert store.text("captures", "c1") == "größer 😀"
    assert store.warnings == []


def test_another_store_on_the_same_root_sees_it(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.put_kernel("k1", make_kernel())
    first.put_record(make_record())
    second = Store(tmp_path)
    assert second.kernel("k1") == make_kernel()
    assert second.record("r1") == make_record()


def test_the_last_put_of_a_key_wins(store: Store) -> None:
    for text, us in (("one", 1.0), ("two", 2.0)):
        store.put_text("captures", "c1", text)
        store.put_record(make_record(us=us))
    assert store.text("captures", "c1") == "two"
    assert store.record("r1") == make_record(us=2.0)


def test_a_failed_candidate_is_kept_with_its_cause(store: Store) -> None:
    failed = make_record()
    failed = type(failed)(key="f", signature="s1", step=failed.step, source_digest="x", verdict=None, measurement=None,
                          failure=Cause.SHARED_MEMORY, message="needs 300000 bytes")
    store.put_record(failed)
    assert store.record("f") == failed


def test_kinds_of_texts_do_not_mix(store: Store) -> None:
    store.put_text("captures", "c1", "a graph")
    assert store.text("answers", "c1") is None


@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden", "a" * 129, "ü", "a\n", "a\0b"])
def test_a_key_that_is_no_file_name_is_refused(store: Store, key: str) -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        store.put_text("captures", key, "x")
    with pytest.raises(UsageError, match="letters, digits"):
        store.kernel(key)


def test_a_kernel_with_a_wrong_checksum_is_refused(store: Store) -> None:
    kernel = Kernel(digest="d", backend="b", arch="sm_90", binary=b"x", sha256="0" * 64, compiler="c")
    with pytest.raises(ContractError, match="sha256"):
        store.put_kernel("k1", kernel)


def test_folders_are_private(tmp_path: Path) -> None:
    Store(tmp_path / "cache").put_kernel("k1", make_kernel())
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_dir():
            assert path.stat().st_mode & 0o077 == 0, path


def test_an_existing_root_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Store(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_cache_that_others_can_write_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = next(iter(_version_folder(Store(tmp_path))))
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert "other users" in Store(tmp_path).warnings[0]
    assert "other users" in caplog.text


def _version_folder(store: Store) -> list[Path]:
    assert store.root is not None
    return [p for p in store.root.iterdir() if p.is_dir()]


def test_describe_counts_and_clear_forgets(store: Store) -> None:
    store.put_kernel("k1", make_kernel())
    store.put_kernel("k2", make_kernel(b"other"))
    store.put_record(make_record())
    store.put_text("captures", "c1", "x")
    found = store.describe()
    assert (found["kernels"], found["records"], found["text-captures"]) == (2, 1, 1)
    assert (found["bytes"] > 0) == (store.root is not None)
    store.clear()
    assert store.kernel("k1") is None and store.record("r1") is None and store.text("captures", "c1") is None
    store.put_record(make_record())
    assert store.record("r1") == make_record()


def test_clear_leaves_files_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    store = Store(tmp_path)
    store.clear()
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_default_root_is_the_environment_variable_else_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCOMPILE_CACHE_DIR", "/somewhere/else")
    assert default_root() == Path("/somewhere/else")
    monkeypatch.delenv("AGENTCOMPILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_root() == Path("/xdg/agentcompile")


def test_default_root_without_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTCOMPILE_CACHE_DIR", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "platformdirs", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative is not allowed")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_root() == Path("/home/someone/.cache/agentcompile")


@settings(derandomize=True, database=None, deadline=None, max_examples=30,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=300), key=st.from_regex(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,20}", fullmatch=True))
def test_any_text_survives(tmp_path: Path, text: str, key: str) -> None:
    Store(tmp_path).put_text("captures", key, text)
    assert Store(tmp_path).text("captures", key) == text


def test_stale_folders_of_killed_writers_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_text("captures", "c1", "x")
    (folder,) = _version_folder(store)
    old, fresh = folder / "tmp" / "1-old", folder / "tmp" / "2-fresh"
    for path in (old, fresh):
        path.mkdir()
        (path / "part").write_text("half")
    os.utime(old, (1.0, 1.0))
    Store(tmp_path)
    assert not old.exists() and fresh.exists()
