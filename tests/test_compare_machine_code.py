"""What scripts/compare_machine_code.py sees: machine code and nothing else; schedules that show every value of a parameter."""

import importlib.util
import json
import struct
from pathlib import Path

import pytest

from agentcompile_core.plugin_api import Schedule

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("compare_machine_code", ROOT / "scripts" / "compare_machine_code.py")
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


def elf(sections: dict[str, bytes]) -> bytes:
    """An ELF file of these sections and one of their names."""
    sections = {"": b"", ".shstrtab": b"", **sections}
    names = b"".join(name.encode() + b"\0" for name in sections)
    sections[".shstrtab"] = names
    body, headers, place = b"", b"", 0
    for name, content in sections.items():
        headers += struct.pack("<IIQQQQIIQQ", place, 1, 0, 0, 64 + len(body), len(content), 0, 0, 1, 0)
        body += content
        place += len(name) + 1
    head = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", 64 + len(body)) + bytes(10) + struct.pack("<HHH", 64, len(sections), 1)
    return head + body + headers


def test_only_the_content_of_code_sections_counts() -> None:
    code = bytes(range(32))
    one = compare.code_of(elf({".text.kernel_1234": code, ".nv.info": b"a"}))
    assert one["instructions"] == 2
    assert compare.code_of(elf({".nv.info": b"bcd", ".text.kernel_98": code})) == one
    assert compare.code_of(elf({".text.kernel_1234": code[::-1], ".nv.info": b"a"})) != one


def test_the_sample_shows_every_value_before_it_repeats() -> None:
    points = [Schedule({"path": path, "warps": warps}) for path in ("lanes", "tensor") for warps in (2, 4, 8)]
    chosen = compare.sample(points, 3, "case")
    assert {point["warps"] for point in chosen} == {2, 4, 8} and {point["path"] for point in chosen} == {"lanes", "tensor"}
    assert chosen == compare.sample(points, 3, "case") and len(compare.sample(points, 9, "case")) == 6


@pytest.mark.parametrize(("after", "code", "text"), [
    ({"gemv a": {"code": "1", "registers": 2}}, 0, "all: 1 of 1"),
    ({"gemv a": {"code": "3", "registers": 4}}, 1, "code 1 -> 3; registers 2 -> 4"),
    ({"gemv b": {"code": "1", "registers": 2}}, 1, "only before: gemv a"),
])
def test_figures_are_compared(after: dict, code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, figures in zip(files, ({"gemv a": {"code": "1", "registers": 2}, "norm b": {}}, after), strict=True):
        path.write_text(json.dumps(figures))
    monkeypatch.setattr("sys.argv", ["compare", *map(str, files), "--families", "gemv"])
    assert compare.main() == code
    assert text in capsys.readouterr().out
