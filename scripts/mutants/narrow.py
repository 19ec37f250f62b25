"""Accumulators kept in half precision: every sum or product that a kernel carries along, rounded to fp16 or bf16 wherever it changes.

These stand for a class and not for a sample: a kernel that adds up in 16 bits is to be refused wherever it does so. What a text
adds up is found by form, whatever it is called: ``x += ..``, ``x = x * .. + ..``, ``fmaf``, sums over lanes, tensor cores. A sum is
also rounded late: where it is handed on (to another warp, block or launch), and where it is divided by or a logarithm or root of.
Maxima are left out: of stored elements they are exact, and a softmax is the same whatever is subtracted from its scores.
"""

import re
from collections.abc import Iterable, Iterator

from attrs import frozen

from .operators import wrap_call
from .text import Edit, arguments, closing, code_only

ROUNDED = {"fp16": ("__half2float(__float2half_rn(", "))"), "bf16": ("__bfloat162float(__float2bfloat16_rn(", "))")}
_INDEX = r"\[(?:[^\[\]\n]|\[[^\[\]\n]*\])*\]"
PLACE = rf"[A-Za-z_]\w*(?:(?:\.|->)\w+|{_INDEX})*"  # of a number: a variable, a member, an element
_START = r"(?<![\w.>\]:])"
_WRITTEN = re.compile(rf"{_START}({PLACE}) ([-+*/]?)= ")
_SUM_CALL = re.compile(r"(?<![\w:])((?:\w+::)?\w*_sum(?:<[^;()]*>)?)\(")
_DEFINED = re.compile(r"(?:float|auto|void)\s+$")
_TENSOR = re.compile(r"(?<![\w:])(?:\w+::)?w?g?mma\w*(?:<[^;()]*>)?\(")
_HANDED_ON = {"make_float2": (0, 1), "store_to_cluster": (2,)}  # calls, and which of their arguments
_USED = re.compile(rf"(?:(?<= / )|(?<=\blogf\()|(?<=\bsqrtf\())({PLACE})(?![\w.(\[])")
_TIMES = re.compile(rf"(?<=return )({PLACE})(?= [*/] )")
_INTEGER = r"(?:int|long long|unsigned int|unsigned|bool|size_t|u?int\d+_t|[\w:]+\*)"  # an address: its star stands beside the type


@frozen(kw_only=True)
class Write:
    """``place sign= value;`` from ``start`` to ``end``; ``sign`` is empty for a plain assignment."""

    place: str
    sign: str
    value: str
    start: int
    begin: int  # of the value
    end: int

    def becomes(self, value: str) -> Edit:
        """The plain assignment of ``value`` in its stead."""
        return Edit(start=self.start, end=self.end, replacement=f"{self.place} = {value};")


@frozen(kw_only=True)
class Narrow:
    """One accumulator of a text, kept in ``type``."""

    type: str
    edit: Edit


def narrowed(text: str, carried: Iterable[str] = ()) -> Iterator[Narrow]:
    """Every accumulator of a text in either type; ``carried``: names of what other texts add up and this one may hand on."""
    code = code_only(text)
    names = {*accumulators(code), *carried}
    for name, (before, after) in ROUNDED.items():
        for edit in dict.fromkeys((*_while_adding(code, before, after), *_behind(code, names, before, after))):
            yield Narrow(type=name, edit=edit)


def accumulators(text: str) -> set[str]:
    """The names (of members: without what they belong to) of what a text adds up."""
    code = code_only(text)
    changed = [write.place for write in (*_changed(code), *_combined(code))]
    summed = [write.place for write in _writes(code) if re.search(r"\bfmaf\(", write.value) or _SUM_CALL.search(write.value)]
    added = [code[start:end] for found in re.finditer(r"(?<![\w:])fmaf\(", code) for start, end in arguments(code, found.end() - 1)[2:]]
    return {_last(place.strip()) for place in (*changed, *summed, *added) if re.fullmatch(PLACE, place.strip())}


def is_integer(code: str, place: str) -> bool:
    """Whether the text declares what stands at ``place`` as an integer or an address, and nowhere as a float."""
    name = _last(place)
    declared = rf"(?<![\w:])(?:const )?{{type}}(?:\s|&)\s*(?:[\w]+(?: = [^;,()]+)?, )*{re.escape(name)}\b"
    return bool(re.search(declared.format(type=_INTEGER), code)) and not re.search(declared.format(type="float"), code)


def _while_adding(code: str, before: str, after: str) -> Iterator[Edit]:
    yield from wrap_call("fmaf", before, after)(code)
    for write in _changed(code):
        yield write.becomes(f"{before}{write.place} {write.sign} ({write.value}){after}")
    for write in _combined(code):
        yield write.becomes(f"{before}{write.value}{after}")
    for found in _SUM_CALL.finditer(code):
        if not _DEFINED.search(code[:found.start()]):
            yield _wrapped(code, found.start(), closing(code, found.end() - 1) + 1, before, after)
    for found in _TENSOR.finditer(code):
        end, given = closing(code, found.end() - 1) + 1, arguments(code, found.end() - 1)
        if not _DEFINED.search(code[:found.start()]) and given:
            rounds = f"for (float& kept : {code[given[0][0]:given[0][1]].strip()}) kept = {before}kept{after}"
            yield Edit(start=found.start(), end=end, replacement=f"{{ {code[found.start():end]}; {rounds}; }}")


def _behind(code: str, names: set[str], before: str, after: str) -> Iterator[Edit]:
    """Where a sum that is complete, or a part of one, is handed on or used."""
    places = [(write.begin, write.end - 1) for write in _writes(code) if not write.sign]
    for call, which in _HANDED_ON.items():
        for found in re.finditer(rf"(?<![\w:]){call}\(", code):
            given = arguments(code, found.end() - 1)
            places += [given[i] for i in which if i < len(given)]
    places += [found.span(1) for pattern in (_USED, _TIMES) for found in pattern.finditer(code)]
    for start, end in places:
        start += len(code[start:end]) - len(code[start:end].lstrip())
        read = code[start:end]
        if re.fullmatch(rf"{PLACE}(?:\.word\(\w+\))?", read) and _last(read) in {*names, "word"} and not is_integer(code, read):
            yield _wrapped(code, start, end, before, after)


def _writes(code: str) -> Iterator[Write]:
    """Every statement that writes a number; what a loop does at its turns ends with a bracket, and is none."""
    for found in _WRITTEN.finditer(code):
        end = _end_of_statement(code, found.end())
        if end > 0 and ";" not in code[found.end():end]:
            yield Write(place=found[1], sign=found[2], value=code[found.end():end], start=found.start(), begin=found.end(), end=end + 1)


def _end_of_statement(code: str, start: int) -> int:
    depth = 0
    for place in range(start, len(code)):
        depth += (code[place] in "([{") - (code[place] in ")]}")
        if depth < 0 or (code[place] == ";" and depth == 0):
            return place if depth == 0 else -1
    return -1


def _changed(code: str) -> Iterator[Write]:
    return (write for write in _writes(code) if write.sign and not is_integer(code, write.place))


def _combined(code: str) -> Iterator[Write]:
    for write in _writes(code):
        own = rf"(?<![\w.\]]){re.escape(write.place)}(?![\w.\[(])"
        reads = re.search(rf"{own} [-+*/] |[-+*/] {own}", write.value)
        if not write.sign and reads and not is_integer(code, write.place) and not _is_one_call(write.value):
            yield write


def _is_one_call(expression: str) -> bool:
    """A call and nothing else: what it returns is rounded where it is called."""
    called = re.match(r"(?:\w+::)?(?:fmaf|\w*_sum)(?:<[^;()]*>)?\(", expression)
    return called is not None and closing(expression, called.end() - 1) == len(expression) - 1


def _last(place: str) -> str:
    return re.split(r"\.|->", re.sub(_INDEX, "", place).split("(")[0])[-1]


def _wrapped(code: str, start: int, end: int, before: str, after: str) -> Edit:
    return Edit(start=start, end=end, replacement=f"{before}{code[start:end]}{after}")

