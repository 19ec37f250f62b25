"""kernels.json: one row per operator, shape and type; which claims hold; rows of one commit only."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
from attrs import frozen

Row = dict[str, Any]
KEY = ("family", "op", "shape", "dtype")
CLAIMED_BYTES = 128 << 20
SLOWER = 1.0  # times the peer: "no slower" is at most this, plus what the two medians spread


@frozen(kw_only=True)
class Claim:
    """One sentence of what these figures should show: the rows that it is about, and whether one of them shows it."""

    text: str
    about: Callable[[Row], bool]
    holds: Callable[[Row], bool]


def no_slower(row: Row, peer: str) -> bool:
    """Whether ours takes at most as long as a peer, within the spread of both."""
    theirs, spread = row.get(f"{peer}_us"), row.get(f"{peer}_spread_us", 0.0)
    return bool(row.get("us")) and (theirs is None or row["us"] - row["spread_us"] <= SLOWER * theirs + spread)


def share(row: Row, at_least: float) -> bool:
    """Whether a row reaches a share of its ceiling."""
    return bool(row.get("us")) and row["share"] >= at_least


def of_cublas(row: Row, path: str, at_least: float) -> bool:
    """Whether a path of the product reaches a share of the speed of cuBLAS."""
    us = row["us"] if row.get("path") == path else row.get("paths", {}).get(path, {}).get("us")
    return bool(us) and row["cublas_us"] / us >= at_least


LARGE = "4096x4096x4096"
CLAIMS = (
    Claim(text="GEMV at batch 1: no slower than cuBLAS", about=lambda r: r["family"] == "gemv", holds=lambda r: no_slower(r, "cublas")),
    Claim(text="heads: at least 88 % of the read ceiling", about=lambda r: r["family"] == "gemv" and r["op"] == "head",
          holds=lambda r: share(r, 0.88)),
    Claim(text="rows beyond 128 MiB: at least 85 % of the ceiling",
          about=lambda r: r["family"] not in ("gemv", "gemm") and r["bytes"] > CLAIMED_BYTES, holds=lambda r: share(r, 0.85)),
    Claim(text="rows: no slower than torch.compile", about=lambda r: r["family"] not in ("gemv", "gemm"),
          holds=lambda r: no_slower(r, "torch_compile")),
    Claim(text="4096^3 fp16 by mma.sync: at least 55 % of cuBLAS", about=lambda r: r["family"] == "gemm" and r["shape"] == LARGE,
          holds=lambda r: of_cublas(r, "tensor", 0.55)),
    Claim(text="4096^3 fp16 by wgmma: at least 80 % of cuBLAS", about=lambda r: r["family"] == "gemm" and r["shape"] == LARGE,
          holds=lambda r: of_cublas(r, "wgmma", 0.80)),
)


def claims(rows: Sequence[Row]) -> list[tuple[str, int, int, list[str]]]:
    """Each claim: how many rows show it, of how many, and which do not."""
    found = []
    for claim in CLAIMS:
        about = [row for row in rows if claim.about(row)]
        missed = [" ".join(row[name] for name in KEY) for row in about if not claim.holds(row)]
        found.append((claim.text, len(about) - len(missed), len(about), missed))
    return found


def summary(rows: Sequence[Row]) -> str:
    """The claims in lines, with the rows that miss them."""
    lines = [f"{held} of {count}: {text}" + "".join(f"\n    not: {name}" for name in missed) for text, held, count, missed in claims(rows)]
    wrong = [" ".join(row[name] for name in KEY) + ": " + row["why"] for row in rows if row.get("why")]
    return "\n".join([*lines, *(f"without a kernel: {one}" for one in wrong)])


def key_of(row: Row) -> tuple[str, ...]:
    """What a row is known by."""
    return tuple(row[name] for name in KEY)


def known(out: Path, commit: str) -> dict[tuple[str, ...], Row]:
    """The rows of this commit that are there already."""
    path = out / "kernels.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {key_of(row): row for row in rows if row["commit"] == commit}


def write(row: Row, out: Path, commit: str, head: Row) -> Path:
    """Add one row to ``<out>/kernels.json``; rows of other commits go. ``head``: machine and ceilings of this process."""
    path = out / "kernels.json"
    with harness.alone(path):
        date = time.strftime("%Y-%m-%d")
        stamp = {"commit": commit, "date": date, "gpu_uuid": head["gpu_uuid"], "read_ceiling_gbps": head["read_ceiling_gbps"],
                 "copy_ceiling_gbps": head["copy_ceiling_gbps"]}
        rows = {**known(out, commit), key_of(row): {**row, **stamp}}
        document = {"schema": 1, **head, "versions": harness.versions(), "commit": commit, "date": date,
                    "rows": [rows[key] for key in sorted(rows)]}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(document, indent=1) + "\n")
        fresh.replace(path)
    return path
