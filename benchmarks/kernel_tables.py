"""The tables of kernels.json (operators beside their peers, and which claims hold) and of random_plans.json."""

from collections import Counter
from typing import Any

from markdown_table import table
from operator_claims import claims

TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
PEERS = ("eager", "eager_fused", "torch_compile", "torch_compile_autotune", "cublas")


def held(document: dict[str, Any]) -> str:
    """How many rows show each claim, and those that do not."""
    rows = [(text, f"{count} of {about}", "; ".join(missed) or "-") for text, count, about, missed in claims(document["rows"])]
    ceilings = sorted({round(row["copy_ceiling_gbps"]) for row in document["rows"]})
    copied = " to ".join(dict.fromkeys((str(ceilings[0]), str(ceilings[-1])))) if ceilings else "-"
    made = table(("claim", "rows that show it", "rows that do not"), rows)
    return f"{made}\n\nCopy ceiling {copied} GB/s, bytes read plus bytes written."


def gemv(document: dict[str, Any]) -> str:
    """One row per projection, heads first."""
    rows = [row for row in document["rows"] if row["family"] == "gemv"]
    rows.sort(key=lambda row: (row["op"] != "head", -row["bytes"]))
    head = ("n x k", "of", "us", "of the read ceiling", "eager us", "torch.compile us", "cuBLAS us", "over the best of them", "schedule")
    return table(head, [(row["shape"], "; ".join(row["names"]), *_ours(row), *_us(row, "eager", "torch_compile", "cublas"), _ratio(row),
                         _schedule(row)) for row in rows])


def rows(document: dict[str, Any]) -> str:
    """One row per operator, shape and type."""
    some = [row for row in document["rows"] if row["family"] not in ("gemv", "gemm")]
    some.sort(key=lambda row: (row["family"], row["op"], row["bytes"]))
    head = ("operator", "rows x columns", "type", "MiB", "us", "of the ceiling", "eager us", "torch.compile us", "over the best of them",
            "schedule")
    return table(head, [(row["op"], row["shape"], TYPES[row["dtype"]], f"{row['bytes'] / 2**20:.2f}", *_ours(row), _eager(row),
                         *_us(row, "torch_compile"), _ratio(row), _schedule(row)) for row in some])


def products(document: dict[str, Any]) -> str:
    """One row per product and path."""
    found = []
    for row in (row for row in document["rows"] if row["family"] == "gemm"):
        mine = {"us": row["us"], "schedule": row.get("schedule", {})}
        for path, facts in {row.get("path", ""): mine, **row.get("paths", {})}.items():
            us, cublas = facts["us"], row.get("cublas_us")
            speed = f"{row['flops'] / us / 1e6:.0f}" if us else "-"
            found.append((row["shape"], TYPES[row["dtype"]], path or "-", f"{us:.1f}" if us else "-", speed,
                          *_us(row, "eager", "torch_compile", "torch_compile_autotune", "cublas"),
                          f"{cublas / us:.0%}" if us and cublas else "-", _schedule(facts)))
    head = ("m x n x k", "type", "path", "us", "TFLOP/s", "eager us", "torch.compile us", "its max-autotune us", "cuBLAS us", "of cuBLAS",
            "schedule")
    return table(head, found)


def _ours(row: dict[str, Any]) -> tuple[str, str]:
    return (f"{row['us']:.2f}", f"{row['share']:.0%}") if row["us"] else ("-", "-")


def _us(row: dict[str, Any], *peers: str) -> tuple[str, ...]:
    return tuple(f"{row[f'{peer}_us']:.2f}" if row.get(f"{peer}_us") else "-" for peer in peers)


def _eager(row: dict[str, Any]) -> str:
    fused = row.get("eager_fused_us")
    return _us(row, "eager")[0] + (f" ({fused:.2f} fused)" if fused else "")


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f}x" if row.get("ratio") else "-"


def _schedule(facts: dict[str, Any]) -> str:
    said = ", ".join(f"{name} {value}" for name, value in facts.get("schedule", {}).items())
    return said or facts.get("why", "-").replace("|", "/")


def random_plans(document: dict[str, Any]) -> str:
    """One row per target: plans, what became of them, and what they need."""
    head = ("target", "plans", "lowered", "built", "refused late", "failed", "draws refused before", "most registers", "plans that spill",
            "most shared memory, KiB")
    found = []
    for target, counts in document["counts"].items():
        mine = [row for row in document["rows"] if row["target"] == target and "registers" in row]
        used = (str(max((row["registers"] for row in mine), default=0)), str(sum(row["spill_bytes"] > 0 for row in mine)),
                f"{max((row['shared_bytes'] for row in mine), default=0) / 1024:.0f}")
        names = ("planned", "lowered", "built", "refused", "failed", "refused_draws")
        found.append((f"{target} ({mine[0]['arch'] if mine else '-'})", *(str(counts[name]) for name in names), *used))
    return table(head, found)


def random_families(document: dict[str, Any]) -> str:
    """One row per family: plans of it, registers and shared memory as predicted and as used, and why draws were refused."""
    head = ("family", "plans", "built", "spill", "registers used, at most allowed", "registers predicted, off by", "most frequent refusal")
    found = []
    for family in sorted({row["family"] for row in document["rows"]}):
        mine = [row for row in document["rows"] if row["family"] == family]
        built = [row for row in mine if row["outcome"] == "built"]
        closest = max(built, key=lambda row: row["registers"] / row["registers_cap"], default=None)
        foreseen = [row["registers"] - row["registers_predicted"] for row in built if row.get("registers_predicted")]
        why = Counter({reason: count for who, reason, count in document["reasons"] if who == family}).most_common(1)
        found.append((family, str(len(mine)), str(len(built)), str(sum(row["spill_bytes"] > 0 for row in built)),
                      f"{closest['registers']} of {closest['registers_cap']}" if closest else "-",
                      f"{min(foreseen)} to {max(foreseen)}" if foreseen else "-", why[0][0].replace("|", "/") if why else "-"))
    return table(head, found)
