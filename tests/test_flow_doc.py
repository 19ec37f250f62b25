"""docs/flow.md names real files, all stages in order, and text that the code really writes."""

import re
from pathlib import Path

from agentcompile_cuda_kit import epilogue_struct

from agentcompile_core.ir.expression import Expression, Operation, PointwiseKind

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "flow.md").read_text()
STAGES = ("capture", "analyze", "plan", "advise", "lower", "validate", "select", "emit")


def test_every_stage_has_its_section_in_order():
    assert tuple(name.lower() for name in re.findall(r"^## \d\. (\w+)", TEXT, re.M)) == STAGES
    stages = {path.stem for path in (ROOT / "agentcompile_core" / "stages").iterdir() if not path.name.startswith("__")}
    assert stages == set(STAGES)


def test_every_file_it_names_exists():
    names = re.findall(r"`(?:agentcompile_core/)?([a-z_/]+(?:\.py|/))`", TEXT)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / "agentcompile_core" / name).exists()] == []


def test_the_generated_functor_is_what_the_code_writes():
    gate = Expression(arguments=("acc0", "acc1"), operations=(
        Operation(PointwiseKind.SILU, ("acc0",)), Operation(PointwiseKind.MUL, (0, "acc1"))))
    shown = "\n".join(line.removeprefix("    ") for line in TEXT.splitlines())
    assert epilogue_struct(gate, 2, 0) in shown
