"""benchmarks/on_gpus.sh: every command runs once, on one GPU, with what it is told, and none beyond its time; the list of jobs is one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "on_gpus.sh"


def run(tmp_path: Path, jobs: str, limit_s: int = 30, gpus: str = "0 1") -> tuple[int, str, dict[str, str]]:
    """Exit code, what was said, and what each job printed."""
    (tmp_path / "jobs").write_text(jobs)
    environment = {**os.environ, "GPUS": gpus, "COMMIT": "abc",
                   "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(SCRIPT), str(tmp_path / "out"), str(tmp_path / "jobs"), str(limit_s)], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr, {p.stem: p.read_text() for p in (tmp_path / "out").glob("*.txt")}


def test_every_job_runs_once_on_a_gpu_of_its_own(tmp_path: Path) -> None:
    jobs = "# heading\n\n"
    jobs += "".join(f"job{n} 1 echo $CUDA_VISIBLE_DEVICES $COMMIT 'a  b' | tr c C; echo x >> $OUT/ran{n}\n" for n in range(9))
    code, said, printed = run(tmp_path, jobs)
    assert code == 0 and said.count(": done") == 9
    assert all(printed[f"job{n}"].split(" ", 1)[0] in "01" and printed[f"job{n}"].endswith("abC a  b\n") for n in range(9))
    assert all((tmp_path / "out" / f"ran{n}").read_text() == "x\n" for n in range(9))


def test_a_failure_is_said_and_the_others_run(tmp_path: Path) -> None:
    _, said, printed = run(tmp_path, "bad 1 echo why; exit 3\ngood 1 echo fine\n", gpus="0")
    assert "GPU 0: bad: exit code 3" in said and "why" in said and printed["good"] == "fine\n"


def test_what_there_is_no_time_for_is_not_begun_and_what_runs_over_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    _, said, printed = run(tmp_path, "long 1 echo begun; sleep 60; echo ended\nlate 100 echo late\nquick 1 echo quick\n", limit_s=3)
    assert time.monotonic() - began < 20
    assert printed == {"long": "begun\n", "quick": "quick\n"} and "no time was left for late, which takes 100 s" in said


@pytest.mark.parametrize("arguments", [[], ["out"], ["out", "nothing-of-this-name"]])
def test_without_jobs_it_says_how_it_is_used(arguments: list[str]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "OUT JOBS [LIMIT]" in done.stdout


def test_the_jobs_of_the_roofline_name_scripts_and_options_that_exist() -> None:
    lines = [line for line in (ROOT / "benchmarks" / "roofline.jobs").read_text().splitlines() if line and not line.startswith("#")]
    assert len({line.split()[0] for line in lines}) == len(lines)
    shared = "".join((ROOT / "benchmarks" / name).read_text() for name in ("full_models.py", "peers/command.py"))
    for line in lines:
        _, seconds, python, script, *arguments = line.split()
        assert int(seconds) > 0 and python == "python3"
        known = (ROOT / script).read_text() + shared
        assert all(f'"{word.partition("=")[0]}"' in known for word in arguments if word.startswith("--")), line
