"""Kernels that cheat: they depend on earlier launches, on what lies in their outputs, or touch what is not theirs."""

import re
from collections.abc import Iterator

from attrs import frozen

from .operators import Operator
from .text import Edit, closing, code_only

_ENTRY = re.compile(r'extern "C" __global__ void')
GLOBALS = "__device__ long long ac_launches;\n__device__ unsigned long long ac_seen;\n__device__ float ac_kept[4096];\n"
FIRST = "(threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0)"


@frozen
class Parameters:
    """What a template calls its first output, its first input, and how many elements the output has."""

    out: str
    given: str
    count: str
    integers: bool = False


PARAMETERS = {
    "gemv.cu": Parameters("out", "x", "n"), "gemv_ring.cu": Parameters("out", "x", "n"),
    "attention.cu": Parameters("out", "q", "kv_heads * Plan::group * Plan::head_dim"),
    "attention_tensor.cu": Parameters("out", "q", "kv_heads * Plan::group * Plan::head_dim"),
    "attention_staged.cu": Parameters("out", "q", "kv_heads * Plan::group * Plan::head_dim"),
    "norm.cu": Parameters("out", "x", "rows * columns"), "rope.cu": Parameters("out", "x", "heads * head_dim"),
    "rope_table.cu": Parameters("cos", "inv_freq", "2 * half"), "elementwise.cu": Parameters("out", "in0", "count"),
    "gather.cu": Parameters("out", "table", "rows * columns"), "argmax.cu": Parameters("token", "logits", "1", True),
}
# name: statement at the start of the kernel, after the dependency wait. %(out)s and so on as in Parameters.
CHEATS = {
    "returns_when_filled": "if (%(filled)s) return;",
    "stops_after_nine_launches": f"if ({FIRST}) ac_launches = ac_launches + 1; if (ac_launches > 9) return;",
    "stops_after_two_hundred_launches": f"if ({FIRST}) ac_launches = ac_launches + 1; if (ac_launches > 200) return;",
    "skips_a_known_address": "if (ac_seen == reinterpret_cast<unsigned long long>(%(given)s)) return; "
                             f"if ({FIRST}) ac_seen = reinterpret_cast<unsigned long long>(%(given)s);",
    "changes_its_input": f"if ({FIRST}) *const_cast<unsigned short*>(reinterpret_cast<const unsigned short*>(%(given)s)) ^= 1;",
    "writes_past_the_end": f"if ({FIRST}) %(out)s[%(count)s] = %(out)s[0];",
    "writes_before_the_start": f"if ({FIRST}) %(out)s[-1] = %(out)s[0];",
    "writes_far_outside": f"if ({FIRST}) %(out)s[%(count)s + 100000] = %(out)s[0];",
    "reads_past_the_end": "if (reinterpret_cast<const unsigned char*>(%(out)s + %(count)s)[3] == 7) return;",
    "writes_nothing": "return;",
    "works_in_the_first_block_only": "if (blockIdx.x + blockIdx.y > 0) return;",
    "never_ends": f"if ({FIRST}) while (ac_launches >= 0) ac_seen = ac_seen + 1;",
    "traps": f"if ({FIRST}) __trap();",
}


def cheats(file: str, text: str) -> Iterator[tuple[Operator, Edit]]:
    """Every cheat in a template: one edit around the head of its kernel."""
    known = PARAMETERS.get(file)
    found = _ENTRY.search(code_only(text))
    if known is None or found is None:
        return
    plan = re.search(r"\bPlan\w*(?=::)", text)
    names = {"out": known.out, "given": known.given, "count": known.count.replace("Plan", plan[0] if plan else "Plan"),
             "filled": f"{known.out}[0] >= 0" if known.integers else f"ac::to_float({known.out}[0]) == ac::to_float({known.out}[0])"}
    bracket = text.index("(", text.index("_kernel", found.end()))
    body = text.index("{", closing(text, bracket)) + 1
    for name, statement in CHEATS.items():
        replacement = GLOBALS + text[found.start():body] + "\n  ac::grid_dependency_wait();\n  " + statement % names
        yield Operator(name=name, group="cheats", find=lambda code: iter(())), Edit(start=found.start(), end=body, replacement=replacement)
