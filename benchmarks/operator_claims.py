"""What the rows of kernels.json should show, one claim a sentence; and which of them do."""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen
from paired_ratio import NO_SLOWER

Row = dict[str, Any]
KEY = ("family", "op", "shape", "dtype")
CLAIMED_BYTES = 128 << 20
LARGE = "4096x4096x4096"
PRODUCTS = ("gemv", "gemm")


@frozen(kw_only=True)
class Claim:
    """One sentence of what these figures should show: the rows that it is about, and whether one of them shows it."""

    text: str
    about: Callable[[Row], bool]
    holds: Callable[[Row], bool]


def no_slower(row: Row, peer: str) -> bool:
    """Whether ours is no slower: the upper bound of the paired ratio is at most 1.03; of rows without one, as within_spread."""
    upper = row.get(f"{peer}_upper")
    return bool(row["us"]) and upper <= NO_SLOWER if upper is not None else within_spread(row, peer)


def within_spread(row: Row, peer: str) -> bool:
    """Whether the medians lie within the spread of both, or ours is lower; False where either was not timed."""
    theirs = row.get(f"{peer}_us")
    return bool(row["us"] and theirs) and row["us"] - row["spread_us"] <= theirs + row[f"{peer}_spread_us"]


def reaches(row: Row, share: float) -> bool:
    """Whether a row reaches a share of its ceiling."""
    return bool(row["us"]) and row["share"] >= share


def of_cublas(row: Row, path: str, share: float) -> bool:
    """Whether a path of a product reaches a share of the speed of cuBLAS."""
    us = row["us"] if row.get("path") == path else row.get("paths", {}).get(path, {}).get("us")
    return bool(us and row.get("cublas_us")) and row["cublas_us"] / us >= share


def _of_rows(row: Row) -> bool:
    return row["family"] not in PRODUCTS


def _large(row: Row) -> bool:
    return row["family"] == "gemm" and row["shape"] == LARGE


CLAIMS = (
    Claim(text="GEMV at batch 1: no slower than cuBLAS", about=lambda r: r["family"] == "gemv", holds=lambda r: no_slower(r, "cublas")),
    Claim(text="heads: at least 88 % of the read ceiling", about=lambda r: r["op"] == "head", holds=lambda r: reaches(r, 0.88)),
    Claim(text="rows beyond 128 MiB: at least 85 % of the ceiling", about=lambda r: _of_rows(r) and r["bytes"] > CLAIMED_BYTES,
          holds=lambda r: reaches(r, 0.85)),
    Claim(text="rows: no slower than torch.compile", about=_of_rows, holds=lambda r: no_slower(r, "torch_compile")),
    Claim(text="rows: medians within the spread of torch.compile's, or lower", about=_of_rows,
          holds=lambda r: within_spread(r, "torch_compile")),
    Claim(text="4096^3 fp16 by mma.sync: at least 55 % of cuBLAS", about=_large, holds=lambda r: of_cublas(r, "tensor", 0.55)),
    Claim(text="4096^3 fp16 by wgmma: at least 80 % of cuBLAS", about=_large, holds=lambda r: of_cublas(r, "wgmma", 0.80)),
)


def name_of(row: Row) -> str:
    """A row in words."""
    return " ".join(row[name] for name in KEY)


def claims(rows: Sequence[Row]) -> list[tuple[str, int, int, list[str]]]:
    """Each claim: how many rows show it, of how many, and which do not."""
    found = []
    for claim in CLAIMS:
        about = [row for row in rows if claim.about(row)]
        missed = [name_of(row) for row in about if not claim.holds(row)]
        found.append((claim.text, len(about) - len(missed), len(about), missed))
    return found
