"""Accumulators kept in half precision: every sum of a kernel, rounded to fp16 or bf16 after each addition.

These stand for a class and not for a sample: a kernel that adds up in 16 bits is to be refused wherever it does so.
"""

import re
from collections.abc import Iterator

from attrs import frozen

from .operators import wrap_call
from .text import Edit, closing, code_only

ROUNDED = {"fp16": ("__half2float(__float2half_rn(", "))"), "bf16": ("__bfloat162float(__float2bfloat16_rn(", "))")}
_SUMS = r"(?:sum|sums|total|squares|value|merged\.sum|weighted)(?:\[[^\]\n]*\])*"
_ADDED = re.compile(rf"(?<![\w.])({_SUMS}) \+= ([^;\n]+);")
_COMBINED = re.compile(rf"(?<![\w.])({_SUMS}) = (\1 \* [^;\n]+ \+ [^;\n]+);")
_TENSOR = re.compile(r"ac::mma_m16n8k16<T>\(")


@frozen(kw_only=True)
class Narrow:
    """One accumulator of a text, kept in ``type``."""

    type: str
    edit: Edit


def narrowed(text: str) -> Iterator[Narrow]:
    """Every accumulator of a text in either type."""
    code = code_only(text)
    for name, (before, after) in ROUNDED.items():
        for edit in wrap_call("fmaf", before, after)(code):
            yield Narrow(type=name, edit=edit)
        for found in _ADDED.finditer(code):
            yield _replaced(name, found, f"{found[1]} = {before}{found[1]} + ({found[2]}){after};")
        for found in _COMBINED.finditer(code):
            yield _replaced(name, found, f"{found[1]} = {before}{found[2]}{after};")
        for found in _TENSOR.finditer(code):
            end = closing(code, found.end() - 1) + 1
            sums = code[found.end():code.index(",", found.end())]
            rounds = f"for (int kept = 0; kept < 4; ++kept) {sums}[kept] = {before}{sums}[kept]{after}"
            yield Narrow(type=name, edit=Edit(start=found.start(), end=end, replacement=f"{{ {code[found.start():end]}; {rounds}; }}"))


def _replaced(name: str, found: re.Match[str], replacement: str) -> Narrow:
    return Narrow(type=name, edit=Edit(start=found.start(), end=found.end(), replacement=replacement))
