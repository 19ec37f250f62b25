"""What every kernel is built with is compiled ahead, once."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from agentcompile_validator_emulation import engine, toolchain
from agentcompile_validator_emulation.backend import EmulationBackend


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def run(command: list[str], deadline_s: float, what: str, folders: Sequence[Path]) -> None:
        seen.append(what)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(engine, "_run", run)
    return seen


def test_a_build_behind_it_compiles_the_kernel_alone(tmp_path: Path, compiled: list[str]):
    EmulationBackend(tmp_path).prepare()
    assert sorted(compiled) == ["the emulator's own runtime.cpp", "the emulator's own shim.h"]
    EmulationBackend(tmp_path).prepare()
    engine.build("", {}, ("kernel",), cache_folder=tmp_path)
    assert compiled[2:] == ["the kernel", "to link the kernel"]


def test_threads_that_need_it_at_once_wait_for_one(tmp_path: Path, compiled: list[str]):
    threads = [threading.Thread(target=engine.prepare, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 2


@pytest.mark.parametrize("target", ["", "cccl/"])
@pytest.mark.parametrize("differs", ["cuda_fp16.h", "cuda_fp16.hpp", "crt/mma.h", "{}nv/detail/__target_macros", "{}cuda/std/array",
                                     "cooperative_groups/details/sync.h"])
def test_what_was_built_serves_another_environment_with_the_same_headers_and_no_other(
        tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, differs: str, target: str):
    def built(folder: Path) -> Path:
        monkeypatch.setattr(toolchain, "_header_candidates", lambda: [folder])
        toolchain.find_toolchain.cache_clear()
        return engine.build("", {}, ("kernel",), cache_folder=tmp_path / "cache")

    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, text in zip(folders, ("1", "1", "2")):
        for name in ("cuda_fp16.h", "cuda_bf16.h", "builtin_types.h", "crt/host_defines.h", f"{target}nv/target"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
        (folder / differs.format(target)).parent.mkdir(parents=True, exist_ok=True)
        (folder / differs.format(target)).write_text(text)
    try:
        one, same, other = map(built, folders)
        compilers = [EmulationBackend(tmp_path).compiler() for _ in (built(folder) for folder in folders)]
    finally:
        toolchain.find_toolchain.cache_clear()
    assert one == same != other and compilers[0] == compilers[1] != compilers[2], "records of what was judged have another key too"
    assert len(compiled) == 2 * 4, "the emulator's own two files, the kernel, and what links it"


def test_who_asks_for_the_compiler_alone_does_not_wait_for_the_headers_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[object] = []
    monkeypatch.setattr(toolchain, "_digest_of", lambda includes: read.append(includes) or "digest")
    toolchain.find_toolchain.cache_clear()
    try:
        backend = EmulationBackend(tmp_path)
        assert backend.available() is True and toolchain.find_toolchain().compiler and not read
        assert backend.compiler() == backend.compiler() and "headers digest" in backend.compiler()
        assert read == [toolchain.find_toolchain().includes], "once, where a key is made"
    finally:
        toolchain.find_toolchain.cache_clear()


def test_headers_behind_links_are_read_and_a_circle_of_links_ends(tmp_path: Path):
    inner, elsewhere = tmp_path / "cuda" / "std", tmp_path / "elsewhere"
    inner.mkdir(parents=True)
    elsewhere.mkdir()
    for name in ("up", "again"):  # both ways at each level: without an end after 40 levels there would be 2^40 of them
        (inner / name).symlink_to(tmp_path / "cuda")
    (tmp_path / "cuda" / "linked").symlink_to(elsewhere)
    (inner / "array").write_text("1")
    (elsewhere / "behind").write_text("1")
    assert sorted(map(str, toolchain._files_below(tmp_path / "cuda"))) == [str(tmp_path / "cuda/linked/behind"), str(inner / "array")]
    digests = [toolchain._digest_of((tmp_path,))]
    for path in (elsewhere / "behind", inner / "array"):
        path.write_text("2")
        digests.append(toolchain._digest_of((tmp_path,)))
    assert len(set(digests)) == 3
