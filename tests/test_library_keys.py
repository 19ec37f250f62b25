"""What a source may include is part of the key of all evidence about it; what it cannot include is not."""

from pathlib import Path

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.plugin.include_folders import folders_digest, included_files
from agentcompile_core.store import keys
from agentcompile_core.testing.doubles import FakeBackend, fake_source

TARGET = PRESETS["h200"]


class WithLibrary(FakeBackend):
    """The fake backend with folders to include from."""

    languages = ("c",)

    def __init__(self, *folders: Path) -> None:
        super().__init__()
        self.folders = folders

    def include_dirs(self) -> tuple[Path, ...]:
        return self.folders


class WithDigest(FakeBackend):
    """A backend that knows better what its sources include."""

    def library_digest(self, language: str) -> str:
        return f"toolkit 7 {language}"


def library(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


NAMES = st.sampled_from(["a.h", "b.h", "deep/a.h", "deep/er/c.h"])
LIBRARIES = st.dictionaries(NAMES, st.binary(max_size=4), min_size=1, max_size=4)


@given(LIBRARIES, LIBRARIES)
def test_keys_differ_exactly_where_the_library_does(tmp_path_factory: pytest.TempPathFactory, first: dict, second: dict) -> None:
    backends = [WithLibrary(library(tmp_path_factory.mktemp("library"), files)) for files in (first, second)]
    source = evolve(fake_source("honest"), language="c")
    assert len({keys.kernel_key(source, TARGET, b) for b in backends}) == len({keys.libraries_digest(b) for b in backends})
    assert (keys.kernel_key(source, TARGET, backends[0]) == keys.kernel_key(source, TARGET, backends[1])) == (first == second)
    foreign = evolve(source, language="another")
    assert keys.kernel_key(foreign, TARGET, backends[0]) == keys.kernel_key(foreign, TARGET, backends[1])


def test_the_first_folder_that_has_a_file_wins(tmp_path: Path) -> None:
    first, second = library(tmp_path / "1", {"a.h": b"1"}), library(tmp_path / "2", {"a.h": b"2", "b.h": b"2"})
    assert included_files((first, second)) == {"a.h": b"1", "b.h": b"2"}
    assert included_files((second, first)) == {"a.h": b"2", "b.h": b"2"}
    assert folders_digest((first, second)) != folders_digest((second, first))
    assert folders_digest(()) == folders_digest((tmp_path / "absent",)) == ""


def test_a_backend_without_a_library_and_one_with_a_digest_of_its_own() -> None:
    assert FakeBackend().library_digest("cuda") == ""
    assert keys.kernel_key(fake_source("honest"), TARGET, FakeBackend()) != keys.kernel_key(fake_source("honest"), TARGET, WithDigest())
