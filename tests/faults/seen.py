"""What a user sees of a compile: the summary, ``--json``, ``explain`` and notes; and whether the result is right."""

from pathlib import Path
from typing import Any

import torch

from agentcompile_core import report
from agentcompile_core.errors import AgentCompileError, UsageError
from agentcompile_core.plugin import failures
from agentcompile_core.stages.emit import evidence


def right(made: Any, size: int = 100) -> None:
    """The compiled addition adds."""
    a, b = torch.randn(size), torch.randn(size)
    assert torch.equal(made(a, b), a + b), "the program is wrong"


def told(made: Any, words: str, folder: Path | None = None) -> str:
    """The one failure that holds ``words``: once in the summary, in ``--json`` and in ``explain``, in whole words."""
    found = [f for f in made.compilation.failures if words in str(f)]
    assert len(found) == 1, f"{words!r} is in {len(found)} of {[str(f) for f in made.compilation.failures]}"
    (failure,) = found
    assert failure.plugin and failure.subject and not failure.message.endswith("...")
    text = report.compilation_text(made, None)
    assert text.count(" ".join(str(failure).split())) == 1, "not once in the summary"
    assert any(one["message"] == failure.message for one in failures.document(made.compilation.failures)), "not in --json"
    if folder is not None:
        stored = evidence.read(made.save(folder / "bundle"))
        assert report.failures_text(stored.failures).count(" ".join(str(failure).split())) == 1, "not in explain"
    return str(failure)


def noted(made: Any, words: str) -> str:
    """The note that holds ``words``."""
    found = [note for note in made.notes if words in note]
    assert found, f"{words!r} is in no note: {made.notes}"
    return str(found[0])


def refused(call: Any, words: str, error: type[AgentCompileError] = UsageError) -> str:
    """The one sentence with which ``call`` is refused."""
    try:
        call()
    except error as exc:
        said = str(exc)
        assert words in said, f"{words!r} is not in {said!r}"
        assert "\n" not in said.strip() and len(said) < 2000 and "Traceback" not in said
        return said
    raise AssertionError("it was not refused")


def command(*arguments: object) -> tuple[int, str, str]:
    """The command line in this process: exit code, standard output, standard error."""
    import contextlib
    import io

    from agentcompile_core.cli import main

    from .cheap import lenient

    out, err = io.StringIO(), io.StringIO()
    with lenient(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as exc:  # argparse
            code = int(exc.code or 0)
    return code, out.getvalue(), err.getvalue()


def exits(code: int, words: str, *arguments: object) -> str:
    """A command that ends with ``code`` and one sentence that holds ``words``."""
    found, out, err = command(*arguments)
    lines = [line for line in err.splitlines() if line.startswith("agentcompile: ")]
    assert (found, len(lines)) == (code, 1) and not out, (found, out, err)
    assert words in lines[0] and "Traceback" not in err, err
    return lines[0]
