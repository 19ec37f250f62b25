"""An environment that is made inside another one sees that one's packages, and NVIDIA's libraries where NVIDIA's own search looks."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import setup_environment


def test_packages_and_libraries_of_the_environment_around_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = tmp_path / "around" / "site-packages"
    (around / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (around / "only_there.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "without" / "site-packages"), str(around)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    inside = tmp_path / "inside"
    venv.EnvBuilder(system_site_packages=True).create(inside)
    place = setup_environment._parent_link(inside).parent / "nvidia"
    place.symlink_to(tmp_path / "moved")  # of an environment that is no longer there
    for _ in range(2):  # set up once more, nothing changes
        setup_environment._link_parent_environment(inside)
    code = "import site, only_there, pathlib; print(any((pathlib.Path(p) / 'nvidia/cu13/lib').is_dir() for p in site.getsitepackages()))"
    done = subprocess.run([inside / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("linked", [False, True])
def test_an_environment_that_is_active_itself_is_brought_up_to_date_and_not_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """`make lint` with .venv active, after the script has changed: it used to be built upon itself."""
    (tmp_path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    link = setup_environment._parent_link(tmp_path)
    if linked:
        link.write_text("/somewhere\n")
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["setup_environment.py", "--venv", str(tmp_path), "--use-system"])
    monkeypatch.setattr(setup_environment.venv, "EnvBuilder", None)
    monkeypatch.setattr(setup_environment.subprocess, "run", lambda command, **_: asked.append(tuple(command)))
    assert setup_environment.main() == 0
    installed = [command for command in asked if "attrs>=23.3" in command]
    assert bool(installed) is not linked and any("-e" in command for command in asked)
    assert not any(part.startswith(("torch", "transformers")) for command in asked for part in command), "they stay as they are"
    assert link.exists() is linked and all(command[0] == str(tmp_path / "bin" / "python") for command in asked)
