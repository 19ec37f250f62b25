"""Mutation operators: each finds places in CUDA code where one small mistake can be made, and makes it.

An operator belongs to the class of mistake that it stands for: bounds, barriers, masks, accumulators, tails, strides,
tie-breaks, dropped inputs, waits, constants. What cheats do is in ``cheats``.
"""

import re
from collections.abc import Callable, Iterator

from attrs import frozen

from .text import Edit, arguments, closing, code_only

Finder = Callable[[str], Iterator[Edit]]


@frozen(kw_only=True)
class Operator:
    """One kind of mistake."""

    name: str
    group: str  # its class
    find: Finder


def swap(pattern: str, *replacements: str) -> Finder:
    """Group 1 of every match of ``pattern`` becomes each of ``replacements``; ``{}`` stands for what it was."""
    compiled = re.compile(pattern, re.MULTILINE)

    def find(code: str) -> Iterator[Edit]:
        for found in compiled.finditer(code):
            for replacement in replacements:
                yield Edit(start=found.start(1), end=found.end(1), replacement=replacement.replace("{}", found[1]))

    return find


def delete_call(*names: str) -> Finder:
    """A statement that is nothing but a call of one of ``names`` becomes empty."""
    return swap(rf"^[ \t]*((?:if \([^;{{}}]*\) )?(?:[\w:]+(?:\.|->))?(?:ac::)?(?:{'|'.join(names)})(?:<[^;]*>)?\([^;{{}}]*\);)", ";")


def keep_argument(name: str) -> Finder:
    """``name(a, b)`` becomes each of its arguments."""
    def find(code: str) -> Iterator[Edit]:
        for found in re.finditer(rf"(?<![\w:]){name}\(", code):
            places = arguments(code, found.end() - 1)
            for start, end in places if len(places) > 1 else ():
                yield Edit(start=found.start(), end=closing(code, found.end() - 1) + 1, replacement=f"({code[start:end].strip()})")

    return find


def wrap_call(name: str, before: str, after: str) -> Finder:
    """``name(...)`` becomes ``before name(...) after``."""
    def find(code: str) -> Iterator[Edit]:
        for found in re.finditer(rf"(?<![\w:]){name}\(", code):
            end = closing(code, found.end() - 1) + 1
            yield Edit(start=found.start(), end=end, replacement=f"{before}{code[found.start():end]}{after}")

    return find


def replace_argument(name: str, index: int, replacement: str) -> Finder:
    """Argument ``index`` of every call of ``name`` becomes ``replacement``."""
    def find(code: str) -> Iterator[Edit]:
        for found in re.finditer(rf"(?<![\w:]){name}(?:<[^;()]*>)?\(", code):
            places = arguments(code, found.end() - 1)
            if len(places) > index and not code[:found.start()].endswith(("float ", "void ", "bool ")):
                start, end = places[index]
                yield Edit(start=start, end=end, replacement=f" {replacement}" if index else replacement)

    return find


_ASSERTION = re.compile(r"static_assert\([^;]*;")
INDICES = (r"(i|e|j|u|g|r|w|lane|number|index|warp|row|element|element \+ \w+|other|block|head|first|held|place|output|column|vector"
           r"|threadIdx\.x)")
WORD = r"[\w:\)\]]"
ENDS = r"(count|columns|vectors|n|length|row_end|width|in_vectors|padded|rows|span\.length|active|half)"
EXTENTS = (r"(\w+::size|size|Lanes|lanes|HeadDim|head_dim|row|cache_row|pitch|width|columns|step|stride|tile|Group|group|Threads|unroll"
           r"|Plan::\w+|slot_elements|threads_per_row)")
DIVISORS = r"(?:ac::warp_size|warp_size|HeadDim|lanes|Lanes|Plan::\w+|active|splits|2)"
PLACES = r"(?:lane|e|index|i|threadIdx\.x|row|offset|half|column|element)"
FACTORS = r"(?:scale|row\.inverse|attention_scaling|softcap|query_scale|score_scale|log2_e|norm_eps|sine|cosine)"
TERMS = r"(?:eps|shift|added\[e\]|row\.mean|acc\[1\]|aux\[\d\]|in\[\d\]|scale)"
SUM = r"(?<=[\w\]]) (\+=) (?!Threads|Batch|stride|Plan::|threads|step|stage)"
LOADS = ("load", "load_chunk", "load_input", "load_aux", "load_tile", "load_keys", "load_values", "Head::load", "PreparedHead::load",
         "load_affine", "add", "place", "combine", "sum_lanes", "store_to_cluster", "send_to_cluster", "transform")
COPIES = ("cp_async_wait", "cp_async_commit", "drain", "fill", "fill_all", "copy")
WAITS = ("mbarrier_wait", "mbarrier_wait_cluster", "wait_full", "cluster_wait", "opened", "expect", "acquire", "release")
OPERATORS: tuple[Operator, ...] = (
    Operator(name="less_or_equal", group="bounds", find=swap(rf"(?<={WORD}) (<) (?=[\w(])", "<=")),
    Operator(name="greater", group="bounds", find=swap(r" (>=) ", ">")),
    Operator(name="less", group="bounds", find=swap(r" (<=) ", "<")),
    Operator(name="greater_or_equal", group="bounds", find=swap(r"(?<=[\w)\]]) (>) (?=[\w(])", ">=")),
    Operator(name="no_early_exit", group="bounds", find=swap(r"(if \([^;{}]*\) (?:return|continue|break);)", ";")),
    Operator(name="no_guard", group="bounds", find=swap(r"if \(([^;{}]*)\) (?!return|continue|break)", "true")),
    Operator(name="no_barrier", group="barriers", find=delete_call("__syncthreads", "__syncwarp", "barrier", "named_barrier_sync")),
    Operator(name="no_fence", group="barriers", find=delete_call("__threadfence", "mbarrier_init_fence")),
    Operator(name="warp_barrier", group="barriers", find=swap(r"(__syncthreads\(\)|(?<= )barrier\(\));", "__syncwarp()")),
    Operator(name="relaxed_arrival", group="barriers", find=swap(r"(cluster_arrive_release)\(\);", "cluster_arrive_relaxed")),
    Operator(name="always", group="masks", find=swap(r"( \?) ", " || true ?")),
    Operator(name="never", group="masks", find=swap(r"^(?!.*is_aligned16).*?( \?) ", " && false ?")),
    Operator(name="one_condition", group="masks", find=swap(r"( && )", " || ")),
    Operator(name="half_warp", group="masks", find=swap(r"\((full_warp)[,)]", "0x0000ffffu")),
    Operator(name="short_shuffle", group="masks", find=swap(r"offset = (Width / 2|warp_size / 2|lanes);", "{} / 2", "{} * 2")),
    Operator(name="overwritten_sum", group="accumulators", find=swap(SUM, "=")),
    Operator(name="subtracted", group="accumulators", find=swap(SUM, "-=")),
    Operator(name="forgotten_sum", group="accumulators", find=replace_argument("fmaf", 2, "0.0f")),
    Operator(name="half_precision", group="accumulators", find=wrap_call("fmaf", "__half2float(__float2half_rn(", "))")),
    Operator(name="slightly_off", group="accumulators", find=wrap_call("fmaf", "1.002f * ", "")),
    Operator(name="no_rescale", group="accumulators", find=swap(r"(\*= rescale)", "*= 1.0f")),
    Operator(name="wrong_start", group="accumulators", find=swap(r"float \w+ = (0\.0f);", "1.0f")),
    Operator(name="rounded_down", group="tails", find=swap(r"( \+ [\w:. *()]+? - 1\)) / ", ")")),
    Operator(name="last_dropped", group="tails", find=swap(rf" < {ENDS}\b", "{} - 1")),
    Operator(name="either_end", group="tails", find=keep_argument("min")),
    Operator(name="lower_end", group="tails", find=keep_argument("max")),
    Operator(name="always_whole", group="tails", find=swap(r"(% [\w:<>]+::size == 0)", "* 0 == 0")),
    Operator(name="wide_stride", group="strides", find=swap(r"\+= ([\w:]+(?: \* [\w:]+)?)\)", "2 * ({})", "({}) + 1")),
    Operator(name="wrong_factor", group="strides", find=swap(rf"(?<=[\w\])]) \* {EXTENTS}\b", "({} + 1)", "({} - 1)")),
    Operator(name="other_quotient", group="strides", find=swap(rf"(?<=[\w)]) (/|%) {DIVISORS}\b", "+")),
    Operator(name="neighbour", group="strides", find=swap(rf"(?<=[\w)\]]) (\+) {PLACES}\b", "+ 1 +", "-")),
    Operator(name="other_element", group="strides", find=swap(rf"\[{INDICES}\]", "{} ^ 1")),
    Operator(name="last_index", group="tie-breaks", find=swap(r"a\.index (<) b\.index", ">", "<=")),
    Operator(name="nan_order", group="tie-breaks", find=swap(r"return (a_nan);", "b_nan", "false")),
    Operator(name="value_order", group="tie-breaks", find=swap(r"(a\.value > b\.value)", "a.value >= b.value", "a.value < b.value")),
    Operator(name="kept_first", group="tie-breaks",
             find=swap(r"(precedes\(b, a\))", "precedes(a, b)", "b.value >= a.value", "b.value > a.value")),
    Operator(name="zero_element", group="dropped inputs", find=swap(r"(ac::to_float\([\w\[\].: +\-]+\))", "0.0f")),
    Operator(name="no_term", group="dropped inputs", find=swap(rf"(?<=[\w)\]])( [+\-] {TERMS})\b", "")),
    Operator(name="no_statement", group="dropped inputs", find=swap(r"^[ \t]*([\w\[\].:>\-]+(?:\[[^\n=]*\])? [*+\-]?= [^;\n]*;)$", ";")),
    Operator(name="no_store", group="dropped inputs", find=swap(r"([\w\[\].:()]+(?:\.|::)store\([^;]*\);|store_\w+\([^;]*\);)", ";")),
    Operator(name="no_load", group="dropped inputs", find=delete_call(*LOADS)),
    Operator(name="no_factor", group="dropped inputs", find=swap(rf"(?<=[\w)\]])( \* {FACTORS})\b", "")),
    Operator(name="no_dependency_wait", group="waits", find=delete_call("grid_dependency_wait")),
    Operator(name="no_wait", group="waits", find=delete_call(*WAITS)),
    Operator(name="no_copy", group="waits", find=delete_call(*COPIES)),
    Operator(name="other_parity", group="waits", find=swap(r"([\w.]*parity(?: \^ 1u)?)[);]", "0", "({}) ^ 1u")),
    Operator(name="stuck_position", group="waits", find=delete_call("advance")),
    Operator(name="stale_load", group="waits", find=wrap_call("load_relaxed", "0 * ", "")),
    Operator(name="settled_too_early", group="waits", find=swap(r"( \|\| new_position != span\.position)", "")),
    Operator(name="one_percent", group="constants", find=swap(r"(?<![\w.])((?!0\.0f)\d+\.\d+(?:e[+-]?\d+)?f)\b", "(1.01f * {})", "-{}")),
    Operator(name="sign", group="constants", find=swap(r"(?<=[\w)\]]) (-) (?=[\w(])(?!1\) /)", "+")),
    Operator(name="last_arrival", group="bounds", find=swap(r"( \+ 1u == expected)", " == expected", " + 2u == expected")),
)


def edits(text: str) -> Iterator[tuple[Operator, Edit]]:
    """Every edit of every operator that changes ``text``."""
    code = _ASSERTION.sub(lambda found: " " * len(found[0]), code_only(text))
    for operator in OPERATORS:
        for edit in operator.find(code):
            if text[edit.start:edit.end] != edit.replacement:
                yield operator, edit

