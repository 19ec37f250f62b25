"""CUDA text as the operators see it: comments blanked, lines counted, brackets matched."""

import re

from attrs import frozen

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*\)")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@frozen(kw_only=True)
class Edit:
    """Characters start .. end of a text, replaced."""

    start: int
    end: int
    replacement: str

    def apply(self, text: str) -> str:
        """The text after the edit."""
        return text[:self.start] + self.replacement + text[self.end:]


def code_only(text: str) -> str:
    """The text with every comment, preprocessor line and launch bound replaced by blanks of the same length.

    Launch bounds limit registers; no mutant of them computes anything else.
    """
    blanked = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    blanked = _BOUNDS.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), blanked)
    return re.sub(r"^[ \t]*#[^\n]*", lambda found: " " * len(found[0]), blanked, flags=re.MULTILINE)


def line_of(text: str, place: int) -> int:
    """The line, from 1, of a character."""
    return text.count("\n", 0, place) + 1


def line_at(text: str, place: int) -> str:
    """The line that holds a character, without blanks around it."""
    return text[text.rfind("\n", 0, place) + 1:_line_end(text, place)].strip()


def statement_before(text: str, place: int) -> str:
    """The text between the end of the statement before and a character."""
    return re.split(r"[;{}]", text[:place])[-1]


def _line_end(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def closing(text: str, opening: int) -> int:
    """The place of the bracket that closes the one at ``opening``; -1 where none does."""
    depth, pair = 0, (text[opening], _CLOSING[text[opening]])
    for place in range(opening, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if depth == 0:
            return place
    return -1


def arguments(text: str, opening: int) -> list[tuple[int, int]]:
    """Start and end of each argument of the call whose bracket is at ``opening``."""
    end, depth, start, found = closing(text, opening), 0, opening + 1, []
    for place in range(opening + 1, end):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if text[place] == "," and depth == 0:
            found.append((start, place))
            start = place + 1
    return [*found, (start, end)] if end > opening + 1 else found
