"""What every kernel is built with is compiled ahead, once."""

import threading
from pathlib import Path

import pytest
from agentcompile_validator_emulation import engine, toolchain
from agentcompile_validator_emulation.backend import EmulationBackend


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def run(command: list[str], deadline_s: float, what: str) -> None:
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
