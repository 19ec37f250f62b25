"""What compute-sanitizer prints, as values. Pure."""

import re

from attrs import frozen

PREFIX = "========="
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")
_RACES = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_NOISE = re.compile(r"(COMPUTE-SANITIZER|LEAK SUMMARY|ERROR SUMMARY|RACECHECK SUMMARY|Saved host backtrace|Host Frame|Device Frame"
                    r"|Backtrace|For detailed|Target application|This tool|Please)")
_PLACES = re.compile(r"0x[0-9a-fA-F]+|\(\d+,\s*\d+,\s*\d+\)|\d+")
_ACCESS = re.compile(r"access at (\S.*?)\+0x([0-9a-fA-F]+)")
MOST = 100  # findings that a tool is asked to print; with as many, others may have been left out
FULL = "Warning: Maximum number of hazards reached"  # racecheck keeps ten million and drops the others


@frozen(kw_only=True)
class Finding:
    """One report of a tool: its first line, and everything else that it says on one line."""

    what: str
    detail: str = ""

    @property
    def kind(self) -> str:
        """What it is about, without addresses, threads, sizes and places: equal for equal mistakes in other kernels."""
        first = re.split(r"\b(?:at|in)\b", self.what, maxsplit=1)[0]
        return _PLACES.sub("#", first).strip()

    @property
    def accesses(self) -> tuple[tuple[str, int], ...]:
        """The accesses that race, as function and byte offset of the instruction: the later one, then those that it races with."""
        return tuple((name, int(offset, 16)) for name, offset in _ACCESS.findall(str(self)))

    def __str__(self) -> str:
        return f"{self.what}; {self.detail}" if self.detail else self.what


@frozen(kw_only=True)
class Report:
    """What one run of one tool said. ``complete``: it got as far as its summary; nothing is known from one that is not."""

    complete: bool
    errors: int  # as the summary counts them, warnings of racecheck with them
    findings: tuple[Finding, ...] = ()


def read(text: str) -> Report:
    """The report in what a tool printed; lines of the program that it watched are skipped.

    A summary counts even if no finding could be read above it, and a finding even if the summary counts none.
    """
    lines = [line[len(PREFIX):] for line in text.splitlines() if line.startswith(PREFIX)]
    counts = [int(found[1]) for line in lines if (found := _SUMMARY.search(line))]
    races = [int(found[2]) + int(found[3]) for line in lines if (found := _RACES.search(line))]
    findings = tuple(_findings(lines))
    totals = [*counts, *races]
    return Report(complete=bool(totals), errors=max(sum(totals), len(findings)), findings=findings[:MOST])


def _findings(lines: list[str]) -> list[Finding]:
    """Reports are set apart by empty lines or begin at the left; what belongs to one is indented."""
    blocks: list[list[str]] = []
    for line in lines:
        indented, said = line.startswith("   "), line.strip()
        if not said:
            blocks.append([])
        elif indented and blocks and blocks[-1]:
            blocks[-1].append(said)
        elif not indented:
            blocks.append([said])
    kept = ([line for line in block if not _NOISE.match(line)] for block in blocks)
    return [Finding(what=block[0], detail="; ".join(block[1:])) for block in kept if block]
