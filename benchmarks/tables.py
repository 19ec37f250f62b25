"""Writes the results in benchmarks/results/<gpu>/*.json into docs/performance.md, README.md and docs/decode.svg.

`make results` runs it; nobody types a number. With --check it writes nothing and exits with 1 where a document is stale.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import ablation_tables
import architecture_tables
import batch_tables
import budget_tables
import coverage_tables
import image_tables
import kernel_tables
import mutant_tables
import sampling_tables
import step_tables
import sweep_tables
from chart import decode_chart
from harness import MODELS, RESULTS
from kernelbench_run import scores
from markdown_table import table

ROOT = RESULTS.parent.parent
PAGES = ("performance", "kernels", "kernelbench", "coverage", "mutants", "budgets")
DOCUMENTS = (*(ROOT / "docs" / f"{name}.md" for name in PAGES), ROOT / "README.md")
CHART = ROOT / "docs" / "decode.svg"
DRAWN = "![Milliseconds per token by model and system](decode.svg)"
BEGIN, END = "<!-- results: {} (written by `make results`) -->", "<!-- end of results -->"
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
SYSTEMS = ("eager", "torch_compile", "vllm", "agentcompile")

# Columns of evaluation.md, section 5: what a row of each file must have.
COLUMNS = {
    "decode": ("model", "dtype", "workload", "system", "e2e_ms", "prefill_ms", "step_ms", "floor_step_ms", "repetitions", "spread_ms",
               "estimated"),
    "pipeline": ("model", "nodes", "regions", "merged_regions", "plans", "candidates", "built", "validated", "advised", "selected",
                 "selected_us_min", "selected_us_max", "max_abs", "max_rel", "files", "signatures"),
    "accuracy": ("model", "positions", "rms_ratio", "p999_ratio"),
    "memory": ("model", "extra_memory_bytes", "weight_bytes", "kv_bytes"),
    "prefill": ("model", "dtype", "context", "length", "workload", "prefill", "ms", "spread_ms", "eager_ms", "repetitions",
                "extra_memory_bytes"),
    "compile_time": ("model", "cold_s", "warm_s"),
    "kernels": ("family", "op", "shape", "dtype", "bytes", "flops", "us", "floor_us", "share", "why"),
    "attention": ("shape", "length", "us", "us_ordinary_edges", "system"),
}
COLUMNS["prefill_experts"] = COLUMNS["prefill_states"] = COLUMNS["prefill_scans"] = COLUMNS["prefill"]
COLUMNS |= {f"{name}_bf16": COLUMNS[name] for name in ("decode", "pipeline", "accuracy", "memory", "compile_time")}
COLUMNS["alone"] = (*COLUMNS["decode"], "rms_ratio", "cold_s", "warm_s", "extra_memory_bytes")
COLUMNS["coverage"] = ("kind", "name", "order", "outcome", "why", "seconds", "path", "reason", "generated_share", "kernels_run")
COLUMNS["planned"] = ("name", "share", "reason", "seconds")
COLUMNS["kernelbench"] = ("level", "number", "name", "correct", "correct_ours", "is_fallback", "generated_share", "us",
                         "baseline_us", "speedup")
COLUMNS["steps"] = ("model", "dtype", "workload", "context", "position", "from_position", "us", "us_first", "spread_us", "floor_us",
                    "repetitions")
COLUMNS["capacities"] = ("model", "dtype", "workload", "context", "capacity", "position", "us", "us_context", "spread_us", "repetitions")
COLUMNS["sampling"] = ("model", "dtype", "workload", "settings", "system", "e2e_ms", "prefill_ms", "step_ms", "spread_ms", "repetitions")
COLUMNS["batches"] = ("model", "dtype", "workload", "batch", "together_us", "single_us", "system", "e2e_ms", "spread_ms", "repetitions",
                      "why")
COLUMNS["images"] = ("model", "dtype", "workload", "prompt", "system", "e2e_ms", "prefill_ms", "step_ms", "floor_step_ms", "spread_ms",
                     "repetitions")
COLUMNS["sweep"] = COLUMNS["sweep_loop"] = (*COLUMNS["decode"], "context", "run", "why")
COLUMNS["sweep_loop_llama"] = COLUMNS["sweep_loop_4b"] = COLUMNS["sweep_loop_4b_long"] = COLUMNS["sweep"]
COLUMNS["sweep_4b"] = COLUMNS["sweep_llama"] = COLUMNS["sweep"]
COLUMNS["ablation"] = COLUMNS["ablation_long"] = (*COLUMNS["sweep"], "roles", "adds", "place")
FUNNEL = ("candidates", "lowered", "evaluated", "built", "validated", "selected")  # rows before "evaluated" counted baselines as built
UNTIMED = tuple((name, "read_ceiling_gbps") for name in ("coverage", "planned", "kernelbench"))  # nothing in these is compared with a floor
HEADER = ("schema", "gpu", "driver", "versions", "commit", "date", "read_ceiling_gbps", "rows")
ALONE = ("model", "type", "prompt/new", "ms per token")  # what both tables of ours alone begin with


class ResultsError(Exception):
    """A results file that does not hold what it must."""


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Results files of one GPU by name, checked.

    Raises:
        ResultsError: a header field or a column is missing.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if path.stem in COLUMNS:
            check(path.stem, document)
        found[path.stem] = document
    return found


def check(name: str, document: dict[str, Any]) -> None:
    """Check one document; see ``load``."""
    missing = [key for key in HEADER if key not in document and (name, key) not in UNTIMED]
    if missing:
        raise ResultsError(f"{name}.json lacks {', '.join(missing)}; write it with benchmarks/harness.py")
    for row in document["rows"]:
        missing = [key for key in COLUMNS[name] if key not in row]
        if missing:
            raise ResultsError(f"{name}.json, row {row.get('model', row.get('name', row))}: lacks {', '.join(missing)}")
        counts = [row[key] for key in FUNNEL if key in row]
        if name == "pipeline" and "evaluated" in row and counts != sorted(counts, reverse=True):
            raise ResultsError(f"{name}.json, row {row['model']}: {', '.join(FUNNEL)} are {counts}, but each is a part of the one before")


def conditions(document: dict[str, Any]) -> str:
    """What a table's figures were measured on, in one sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    commits = sorted({(r["commit"] if "commit" in r else document["commit"])[:10] for r in document["rows"]})
    if "gpu" not in document:  # figures of numbers, which no machine makes faster
        return f"{versions}; commit {', '.join(commits)}."
    dates = sorted({r.get("date", document["date"]) for r in document["rows"]})
    measured = f"{document['gpu']}, driver {document['driver']}, {versions}; "
    made = f"commit {', '.join(commits)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    if "read_ceiling_gbps" not in document:
        return measured + made
    ceilings = sorted(round(r.get("read_ceiling_gbps", document["read_ceiling_gbps"])) for r in document["rows"])
    ceiling = " to ".join(dict.fromkeys((str(ceilings[0]), str(ceilings[-1]))))
    return f"{measured}read ceiling measured beside each {ceiling} GB/s; {made}"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    model = MODELS.index(row["model"]) if row["model"] in MODELS else len(MODELS)
    system = SYSTEMS.index(row["system"]) if row.get("system") in SYSTEMS else -1
    return (model, row["model"], [int(n) for n in re.findall(r"\d+", row.get("workload", ""))], system)


def decode_table(document: dict[str, Any]) -> str:
    """Every system on every workload."""
    head = ("model", "prompt/new", "system", "total ms", "spread ms", "prefill ms", "ms per token", "tokens/s", "over eager", "floor ms",
            "bandwidth", "runs")
    rows = []
    for r in sorted(document["rows"], key=_order):
        system = r["system"] + (" (estimated)" if r["estimated"] else "")
        rows.append((r["model"], r["workload"], system, f"{r['e2e_ms']:.1f}", f"{r['spread_ms']:.1f}", f"{r['prefill_ms']:.2f}",
                     f"{r['step_ms']:.3f}", f"{1e3 / r['step_ms']:.0f}", _speedup(document, r, "eager"),
                     f"{r['floor_step_ms']:.3f}", _bandwidth(r, 0), str(r["repetitions"])))
    return table(head, rows)


def _speedup(document: dict[str, Any], row: dict[str, Any], over: str) -> str:
    """How many times faster a row is end to end than the system ``over`` on the same model and workload."""
    base = [r for r in document["rows"] if (r["model"], r["workload"], r["system"]) == (row["model"], row["workload"], over)]
    return f"{base[0]['e2e_ms'] / row['e2e_ms']:.2f}x" if base else "-"


def summary_table(document: dict[str, Any]) -> str:
    """One row per model and workload: ours beside the baselines."""
    types = ", ".join(sorted({DTYPES.get(r["dtype"], r["dtype"]) for r in document["rows"]}))
    head = (f"model, {types}, batch 1", "prompt/new", "eager ms/token", "torch.compile", "agentcompile", "tokens/s", "over eager",
            "over torch.compile", "share of memory bandwidth")
    rows = []
    for r in sorted((r for r in document["rows"] if r["system"] == "agentcompile"), key=_order):
        steps = {o["system"]: o["step_ms"] for o in document["rows"] if (o["model"], o["workload"]) == (r["model"], r["workload"])}
        cells = [f"{steps[s]:.2f}" if s in steps else "-" for s in ("eager", "torch_compile")]
        rows.append((r["model"], r["workload"], *cells, f"{r['step_ms']:.2f}", f"{1e3 / r['step_ms']:.0f}", _speedup(document, r, "eager"),
                     _speedup(document, r, "torch_compile"), _bandwidth(r, 0)))
    return table(head, rows)


def alone_table(document: dict[str, Any]) -> str:
    """Ours alone, all models at one commit: what a token takes, and what was said about the compilation."""
    head = (*ALONE, "floor ms", "read GB/s", "bandwidth", "prefill ms", "RMS error over the framework's", "cold s", "warm s",
            "GiB beyond weights and KV", "runs")
    return table(head, [(*_alone(r, 3), f"{r['floor_step_ms']:.3f}", f"{r['read_ceiling_gbps']:.0f}", _bandwidth(r, 1),
                         f"{r['prefill_ms']:.2f}", f"{r['rms_ratio']:.3f}", *_compile_seconds(r, 1),
                         f"{r['extra_memory_bytes'] / 2**30:.2f}", str(r["repetitions"])) for r in sorted(document["rows"], key=_order)])


def alone_summary(document: dict[str, Any]) -> str:
    """Of ``alone_table`` what a user asks first."""
    head = (*ALONE, "tokens/s", "share of memory bandwidth", "first token ms", "compile s", "again s")
    return table(head, [(*_alone(r, 2), f"{1e3 / r['step_ms']:.0f}", _bandwidth(r, 0), f"{r['prefill_ms']:.1f}", *_compile_seconds(r, 0))
                        for r in sorted(document["rows"], key=_order)])


def _alone(row: dict[str, Any], digits: int) -> tuple[str, ...]:
    return row["model"], DTYPES.get(row["dtype"], row["dtype"]), row["workload"], f"{row['step_ms']:.{digits}f}"


def _bandwidth(row: dict[str, Any], digits: int) -> str:
    """The share of the memory bandwidth that a step reaches."""
    return f"{row['floor_step_ms'] / row['step_ms']:.{digits}%}"


def _compile_seconds(row: dict[str, Any], digits: int) -> tuple[str, ...]:
    return tuple(f"{row[key]:.{digits}f}" if row[key] is not None else "-" for key in ("cold_s", "warm_s"))


def memory_table(document: dict[str, Any]) -> str:
    """Device memory of ours while it generates."""
    rows = [(r["model"], f"{r['weight_bytes'] / 2**30:.2f}", f"{r['kv_bytes'] / 2**30:.2f}", f"{r['extra_memory_bytes'] / 2**30:.2f}")
            for r in sorted(document["rows"], key=_order) if "extra_memory_bytes" in r]
    return table(("model", "weights GiB", "KV cache GiB", "beyond both GiB"), rows)


def prefill_table(document: dict[str, Any]) -> str:
    """First tokens by length of the prompt."""
    rows = []
    for r in sorted(document["rows"], key=lambda r: (*_order(r)[:2], r["prefill"] != "live", r["context"], r["length"])):
        eager = (f"{r['eager_ms']:.1f}", f"{r['eager_ms'] / r['ms']:.2f}x") if r["eager_ms"] is not None else ("-", "-")
        rested, parts = (f"{r[key]:.2f}" if r.get(key) is not None else "-" for key in ("rested_ms", "parts_ms"))
        rows.append((r["model"], r["dtype"], f"{r['context']}", f"{r['length']}", r["prefill"], f"{r['ms']:.2f}", f"{r['spread_ms']:.2f}",
                     rested, parts, *eager, f"{r['extra_memory_bytes'] / 2**30:.2f}", str(r["repetitions"])))
    return table(("model", "type", "context", "prompt", "attends over", "ms to the first token", "spread ms", "rested ms",
                  "parts alone ms", "eager ms", "over eager", "GiB beyond weights and KV", "runs"), rows)


def pipeline_table(document: dict[str, Any]) -> str:
    """The pipeline's counts per model."""
    keys = COLUMNS["pipeline"][1:10]
    head = ("model", *(k.replace("_", " ") for k in keys), "latency us", "max abs", "max rel", "files/signatures")
    rows = [(r["model"], *(str(r[k]) for k in keys), f"{r['selected_us_min']:.2f} to {r['selected_us_max']:.2f}", f"{r['max_abs']:.1e}",
             f"{r['max_rel']:.1e}", f"{r['files']}/{r['signatures']}") for r in sorted(document["rows"], key=_order)]
    return table(head, rows)


def origins_table(document: dict[str, Any]) -> str:
    """Who moves the bytes of a decode step, and what stays on the framework."""
    rows = []
    for r in sorted((r for r in document["rows"] if "accounting" in r), key=_order):
        share, calls, rest = (r["accounting"][k] for k in ("share", "calls", "framework_operators"))
        rows.append((r["model"], f"{share.get('generated', 0.0):.2%}", str(calls.get("generated", 0)), f"{share.get('framework', 0.0):.2%}",
                     ", ".join(f"{n} {op}" for op, n in rest.items()) or "nothing"))
    return table(("model", "bytes through generated kernels", "launches per token", "bytes on the framework", "framework operators"), rows)


def accuracy_table(document: dict[str, Any]) -> str:
    """Logit errors against fp32, ours over the framework's."""
    rows = [(r["model"], str(r["positions"]), f"{r['rms_ratio']:.3f}", f"{r['p999_ratio']:.3f}")
            for r in sorted(document["rows"], key=_order)]
    return table(("model", "positions", "RMS error, ours / framework's", "99.9th percentile, ours / framework's"), rows)


def compile_table(document: dict[str, Any]) -> str:
    """Seconds of compile()."""
    rows = [(r["model"], *_compile_seconds(r, 1)) for r in sorted(document["rows"], key=_order)]
    return table(("model", "cold s", "warm s"), rows)


def attention_table(document: dict[str, Any]) -> str:
    """Attention of one step by itself."""
    rows = [(r["shape"], r["dtype"], str(r["length"]), f"{r['us']:.2f}", f"{r['us_ordinary_edges']:.2f}", f"{r['gbps']:.0f}",
             f"{r['framework_us']:.1f}" if r["framework_us"] is not None else "-",
             ", ".join(f"{name} {value}" for name, value in sorted(r["schedule"].items()))) for r in document["rows"]]
    return table(("heads of Q x K, V x channels", "type", "positions", "us", "us with ordinary edges", "GB/s of K and V", "framework us",
                  "schedule"), rows)


def kernelbench_table(document: dict[str, Any]) -> str:
    """What the whole set adds up to, then every task."""
    return f"{scores.sentence(document['summary'], document['terms'])}.\n\n{scores.markdown(document['rows'])}"


# Marker name -> (results file, table).
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "summary": ("decode", summary_table), "decode": ("decode", decode_table), "memory": ("memory", memory_table),
    "alone": ("alone", alone_table), "alone_summary": ("alone", alone_summary),
    "prefill": ("prefill", prefill_table), "prefill_experts": ("prefill_experts", prefill_table),
    "prefill_states": ("prefill_states", prefill_table), "prefill_scans": ("prefill_scans", prefill_table),
    "pipeline": ("pipeline", pipeline_table), "origins": ("pipeline", origins_table), "accuracy": ("accuracy", accuracy_table),
    "compile_time": ("compile_time", compile_table), "architectures": ("decode_bf16", architecture_tables.architectures),
    "accuracy_bf16": ("accuracy_bf16", accuracy_table),
    "kernels_held": ("kernels", kernel_tables.held), "kernels_gemv": ("kernels", kernel_tables.gemv),
    "kernels_rows": ("kernels", kernel_tables.rows), "kernels_products": ("kernels", kernel_tables.products),
    "random_plans": ("random_plans", kernel_tables.random_plans), "random_families": ("random_plans", kernel_tables.random_families),
    "attention": ("attention", attention_table), "ablation": ("ablation", ablation_tables.ablation),
    "ablation_long": ("ablation_long", ablation_tables.ablation),
    "sampling": ("sampling", sampling_tables.sampling), "batches": ("batches", batch_tables.batches), "steps": ("steps", step_tables.steps),
    "capacities": ("capacities", step_tables.capacities),
    "sweep": ("sweep", sweep_tables.sweep), "sweep_ratios": ("sweep", sweep_tables.ratios),
    **{f"sweep_{of}": (f"sweep_{of}", sweep_tables.ratios) for of in ("4b", "llama")},
    **{f"sweep_{of}_times": (f"sweep_{of}", sweep_tables.sweep) for of in ("4b", "llama")},
    "sweep_loop": ("sweep_loop", sweep_tables.ratios), "sweep_loop_llama": ("sweep_loop_llama", sweep_tables.ratios),
    "sweep_loop_4b": ("sweep_loop_4b", sweep_tables.ratios), "sweep_loop_4b_long": ("sweep_loop_4b_long", sweep_tables.ratios),
    "supported": ("coverage", coverage_tables.supported), "coverage_counts": ("coverage", coverage_tables.counts),
    "coverage_models": ("coverage", coverage_tables.models), "coverage_modules": ("coverage", coverage_tables.modules),
    "coverage_images": ("coverage", coverage_tables.images), "images": ("images", image_tables.images),
    "planned": ("planned", coverage_tables.planned), "kernelbench": ("kernelbench", kernelbench_table),
    "mutant_classes": ("mutants", mutant_tables.by_class), "mutant_families": ("mutants", mutant_tables.by_family),
    "mutants_right": ("mutants", mutant_tables.right), "budgets": ("budgets", budget_tables.budgets),
}

ONCE = frozenset({"supported"})  # one table, from the newest file: what is supported grows


def section(marker: str, gpus: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The text between the markers called ``marker``: a table and its conditions per GPU.

    Raises:
        ResultsError: no table is called so.
    """
    if marker not in TABLES:
        raise ResultsError(f"no table is called {marker!r}; there are {', '.join(TABLES)}")
    name, make = TABLES[marker]
    some = {gpu: results for gpu, results in gpus.items() if name in results}
    if marker in ONCE:
        some = dict([max(some.items(), key=lambda item: str(item[1][name]["date"]))]) if some else {}
    some = dict(sorted(some.items(), key=lambda item: -_models(item[1][name])))
    parts = [f"{make(results[name])}\n\n{conditions(results[name])} ([{name}.json]({{path}}benchmarks/results/{gpu}/{name}.json))"
             for gpu, results in some.items()]
    return "\n\n".join([*([DRAWN] * bool(parts and marker == "decode")), *parts]) or "Not measured yet."


def _models(document: dict[str, Any]) -> int:
    """Of how many models a file tells: the GPU that most were measured on comes first."""
    return len({row.get("model") for row in document["rows"]})


def rendered(text: str, gpus: dict[str, dict[str, dict[str, Any]]], to_root: str) -> str:
    """``text`` with every marked section written anew; ``to_root`` leads from the document to the repository."""
    pattern = re.compile(re.escape(BEGIN).replace(r"\{\}", r"(\w+)") + r"\n.*?" + re.escape(END), re.DOTALL)

    def put(found: re.Match[str]) -> str:
        return "\n".join((BEGIN.format(found[1]), "", section(found[1], gpus).replace("{path}", to_root), "", END))

    return pattern.sub(put, text)


def documents(results: Path = RESULTS) -> dict[Path, str]:
    """Every document that holds results, as it must be."""
    gpus = {folder.name: load(folder) for folder in sorted(results.glob("*")) if folder.is_dir()}
    found = {path: rendered(path.read_text(), gpus, "../" if path.parent != ROOT else "") for path in DOCUMENTS if path.exists()}
    decode = max((r["decode"] for r in gpus.values() if "decode" in r), key=_models, default=None)
    if decode is not None:
        found[CHART] = decode_chart([r for r in sorted(decode["rows"], key=_order) if r["workload"] == "128/128"], decode["gpu"])
    return found


def main() -> int:
    """Write the documents, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a document is stale")
    options = parser.parse_args()
    stale = {path: text for path, text in documents().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'stale' if options.check else 'written'}")
        if not options.check:
            path.write_text(text)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
