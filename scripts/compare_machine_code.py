"""Say whether two checkouts generate the same machine code: for changes to kernels that should change nothing.

    python scripts/compare_machine_code.py BEFORE AFTER [--points 4] [--families gemv,attention]

BEFORE and AFTER are checkouts, or files of figures (``--save FILE`` writes those of BEFORE). Each checkout lowers and compiles the
same matches under its own packages, a sample of schedules per match and target that covers every value of every parameter where
it can. What is compared is the content of the sections that hold machine code, with registers, spills and shared memory beside
it; names carry digests of the source and do not count. Needs NVRTC or nvcc, and no GPU. Exit code 0 where everything is equal,
1 where something differs, 2 for a wrong command line.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TARGETS = ("a100", "h200", "rtx5090")  # sm_80, sm_90, sm_120
FAMILIES = ("gemv", "attention", "norm", "rope", "rope_table", "argmax", "elementwise", "gather", "softmax", "reduction",
            "gemm", "experts", "router", "recurrence_step", "convolution_step")
INSTRUCTION_BYTES = 16
FUNCTION_SECTION = ".text."
Figures = dict[str, dict[str, Any]]


def main() -> int:
    """Measure or read both sides and print what differs."""
    arguments = _arguments()
    if arguments.measure:
        json.dump(measure(arguments.families.split(","), arguments.points), sys.stdout)
        return 0
    before = _figures(arguments.before, arguments)
    if arguments.save:
        arguments.save.write_text(json.dumps(before), encoding="utf-8")
    if arguments.after is None:
        return 0
    chosen = tuple(f"{family} " for family in arguments.families.split(","))
    return _report({key: one for key, one in before.items() if key.startswith(chosen)}, _figures(arguments.after, arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="a checkout, or a file of figures")
    parser.add_argument("after", nargs="?", type=Path, help="a checkout, or a file of figures; absent: with --save only")
    parser.add_argument("--points", type=int, default=4, help="schedules per match and target (default: %(default)s)")
    parser.add_argument("--families", default=",".join(FAMILIES), help="(default: %(default)s)")
    parser.add_argument("--save", type=Path, help="write the figures of BEFORE here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.families.split(",")) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown families {', '.join(unknown)}; allowed: {', '.join(FAMILIES)}")
    if not arguments.measure and (arguments.before is None or (arguments.after is None and arguments.save is None)):
        parser.error("name two checkouts, or one with --save FILE")
    for side in (arguments.before, arguments.after):
        if side is not None and not (side.is_file() or (side / "agentcompile_core").is_dir()):
            parser.error(f"{side} is neither a checkout nor a file of figures")
    return arguments


def _figures(side: Path, arguments: argparse.Namespace) -> Figures:
    """Figures of one side: read, or measured in a process that imports that checkout and nothing of this one."""
    if side.is_file():
        return json.loads(side.read_text(encoding="utf-8"))
    packages = [side, *sorted(path.parent for path in side.glob("plugins/*/*/pyproject.toml"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(path.resolve()) for path in packages)}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", "--points", str(arguments.points),
               "--families", arguments.families]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _report(before: Figures, after: Figures) -> int:
    unequal = [key for key in before if key in after and before[key] != after[key]]
    missing = sorted(before.keys() ^ after.keys())
    for key in unequal:
        print(f"differs: {key}")
        changed = {name: (old, after[key].get(name)) for name, old in before[key].items() if old != after[key].get(name)}
        print("    " + "; ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items()))
    for key in missing:
        print(f"only {'before' if key in before else 'after'}: {key}")
    common = before.keys() & after.keys()
    for family in FAMILIES:
        keys = [key for key in common if key.startswith(f"{family} ")]
        if keys:
            same = sum(before[key] == after[key] for key in keys)
            print(f"{family}: {same} of {len(keys)} kernels have the same machine code")
    print(f"all: {len(common) - len(unequal)} of {len(common)}")
    return 1 if unequal or missing or not common else 0


# ---- one side: runs in a process of its own, under the packages of the checkout


def measure(families: Sequence[str], points: int) -> Figures:
    """Machine code by "family match target schedule", as digests and counts."""
    from agentcompile_cuda_kit.targets import preset
    from agentcompile_runtime_cuda.backend import CudaBackend

    backend = CudaBackend()

    def one(job: tuple[str, Any, Any, Any]) -> tuple[str, dict[str, Any]]:
        name, family, match, (target, schedule) = job
        kernel = backend.build(family.lower(match, schedule, target), target, 600.0)
        resources = kernel.resources
        return f"{family.name} {name} {target.arch} {schedule}", code_of(kernel.binary) | {
            "registers": resources.registers, "spill_bytes": resources.spill_bytes, "shared_bytes": resources.shared_bytes}

    jobs = [(name, family, match, (target, schedule)) for name, family, match in cases(families)
            for target in map(preset, TARGETS) if family.accepts(match, target) is True
            for schedule in sample(family.space(match, target).points, points, name)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(one, jobs))


def code_of(cubin: bytes) -> dict[str, Any]:
    """Digest over the machine code of every function in an ELF file, and its number of instructions."""
    table, = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    found = []
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if cubin[start:cubin.index(b"\0", start)].decode().startswith(FUNCTION_SECTION):
            found.append(cubin[offset:offset + length])
    return {"code": hashlib.sha256(b"".join(found)).hexdigest()[:16],
            "instructions": sum(len(code) for code in found) // INSTRUCTION_BYTES}


def sample(points: Sequence[Any], count: int, seed: str) -> list[Any]:
    """``count`` points: each the one that brings most unseen values and pairs of values, by a fixed order where several do."""
    order = list(points)
    random.Random(seed).shuffle(order)
    seen: set[tuple[Any, ...]] = set()
    chosen: list[Any] = []
    while order and len(chosen) < count:
        best = max(order, key=lambda point: len(_values(point) - seen))
        order.remove(best)
        seen |= _values(best)
        chosen.append(best)
    return chosen


def _values(point: Any) -> set[tuple[Any, ...]]:
    return {*point.items, *itertools.combinations(point.items, 2)}


def cases(families: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """(name, family, match) of the sample."""
    from agentcompile_core.plugin.discovery import load_catalog

    known = {family.name: family for family in load_catalog(strict=False).template_families.values()}
    for name in families:
        for label, match in MAKERS[name]():
            yield label, known[name], match


def _gemv() -> Iterator[tuple[str, Any]]:
    from agentcompile_rules_transformers.testing import gated_case, linear_case

    from agentcompile_core.plugin_api import DType

    yield "qkv", linear_case(n=(2048, 1024, 1024), k=2048, norm="rms")[0]
    yield "down", linear_case(n=2048, k=6144, residual=True)[0]
    yield "bias_residual_bf16", linear_case(n=1024, k=1536, bias=True, residual=True, dtype=DType.BF16)[0]
    yield "gate_up", gated_case(n=6144, k=2048, norm="rms")[0]
    yield "gate_up_bf16_one_plus", gated_case(n=2048, k=2048, norm="rms_one_plus", activation="gelu", dtype=DType.BF16)[0]
    yield "layer_activation", linear_case(n=3072, k=768, norm="layer", bias=True, activation="relu")[0]
    yield "f32", linear_case(n=512, k=2000, norm="rms", dtype=DType.F32)[0]
    yield "odd_rows", linear_case(n=100, k=255)[0]
    yield "head", linear_case(n=151936, k=2048, norm="rms")[0]


def _attention() -> Iterator[tuple[str, Any]]:
    from agentcompile_rules_transformers.testing import attention_case, sloped_case

    from agentcompile_core.plugin_api import DType

    layer = {"heads": (16, 8), "head_dim": 128, "capacity": 8192}
    qwen = attention_case(**layer, rope="rms")[0]
    yield "qwen", qwen
    yield "rotary_only", attention_case(heads=(32, 8), head_dim=64, capacity=4096, rope="none")[0]
    yield "plain_bf16", attention_case(**layer, dtype=DType.BF16)[0]
    yield "one_plus_bf16", attention_case(**layer, rope="rms_one_plus", dtype=DType.BF16)[0]
    yield "window_softcap", attention_case(heads=(8, 4), head_dim=256, capacity=4096, rope="none", window=1024, softcap=50.0)[0]
    yield "f32", attention_case(heads=(4, 4), head_dim=64, capacity=512, rope="rms", dtype=DType.F32)[0]
    yield "heads_of_80", attention_case(heads=(12, 4), head_dim=80, capacity=2048, rope="none")[0]
    yield "group_of_eight", attention_case(heads=(32, 4), head_dim=128, capacity=2048, rope="none")[0]
    slopes = [0.5**head for head in range(1, 17)]
    yield "slopes_narrow_value", sloped_case(heads=(16, 4), head_dim=96, value_dim=64, capacity=2048, slopes=slopes)[0]
    yield "group_of_twelve", attention_case(heads=(24, 2), head_dim=128, capacity=4096, rope="none", dtype=DType.BF16)[0]
    yield "multi_query", attention_case(heads=(71, 1), head_dim=64, capacity=2048, rope="none")[0]
    yield "sinks", _with_sinks(attention_case(heads=(16, 4), head_dim=64, capacity=2048, rope="none", window=128)[0])
    yield "partly_rotated", _partly_rotated(qwen, 64)


def _with_sinks(match: Any) -> Any:
    from attrs import evolve

    from agentcompile_core.plugin_api import Access, Role, TensorSpec

    spec = TensorSpec(shape=(match.integer("heads"),), dtype=match.need("q").spec.dtype)
    sinks = evolve(match.need("q"), name="sinks", role=Role.WEIGHT, access=Access.READ, spec=spec)
    return evolve(match, operands=(*match.operands, sinks))


def _partly_rotated(match: Any, rotary_dim: int) -> Any:
    from attrs import evolve

    operands = [evolve(one, spec=evolve(one.spec, shape=(1, 1, rotary_dim))) if one.name in ("cos", "sin") else one
                for one in match.operands]
    return evolve(match, operands=tuple(operands))


def _norm() -> Iterator[tuple[str, Any]]:
    from agentcompile_rules_transformers import testing
    from agentcompile_rules_transformers.testing import norm_case

    from agentcompile_core.plugin_api import DType

    yield "row", norm_case(columns=2048)[0]
    yield "residual", norm_case(columns=1000, residual=True)[0]
    yield "layer_f32", norm_case(columns=96, rows=3, norm="layer", dtype=DType.F32)[0]
    if hasattr(testing, "norms_beside_case"):  # not in checkouts from before there were any
        yield "tail_bf16", norm_case(columns=2304, norm="rms_one_plus", tail=("add",), dtype=DType.BF16)[0]
        yield "beside_bf16", testing.norms_beside_case(columns=(2048, 2048), norm="rms_once", dtype=DType.BF16)[0]
    yield "heads_bf16", norm_case(columns=128, rows=16, norm="rms_one_plus", dtype=DType.BF16)[0]


def _small(name: str, variants: Sequence[dict[str, Any]]) -> Any:
    def make() -> Iterator[tuple[str, Any]]:
        import agentcompile_rules_transformers.testing as made

        for variant in variants:
            yield "_".join(f"{key}{value}" for key, value in variant.items()), getattr(made, f"{name}_case")(**variant)[0]

    return make


MAKERS = {
    "gemv": _gemv, "attention": _attention, "norm": _norm,
    "rope": _small("rope", [{"heads": 16, "head_dim": 128}, {"heads": 3, "head_dim": 80, "rotary_dim": 32}]),
    "rope_table": _small("rope_table", [{"half": 64}]),
    "argmax": _small("argmax", [{"n": 151936}, {"n": 151936, "advance": True}]),
    "elementwise": _small("elementwise", [{"columns": 2048}, {"columns": 33, "rows": 3, "operators": ("mul", "add", "gelu")}]),
    "softmax": _small("softmax", [{"shape": (1, 151936)}, {"shape": (4096, 4096), "log": True}, {"shape": (64, 512, 100), "axis": 1}]),
    "reduction": _small("reduction", [{"shape": (1, 151936)}, {"shape": (4096, 4096), "op": "aten.max.dim"},
                                      {"shape": (65536, 256), "op": "aten.std.dim", "dim": 0}]),
    "gemm": _small("matmul", [{"shapes": ((4096, 4096), (4096, 4096))}, {"shapes": ((1021, 2053), (2053, 1531))},
                              {"shapes": ((8, 12, 256, 64), (8, 12, 256, 64)), "turned": "b"}]),
    "gather": _small("gather", [{"columns": 2048, "vocabulary": 50}]),
    "experts": _small("experts", [{"sizes": (128, 8, 768, 2048)}, {"sizes": (128, 8, 2048, 768), "down": True}]),
    "recurrence_step": _small("recurrence_step", [{"heads": 80, "width": 64, "terms": 128}, {"heads": 5120, "width": 1, "terms": 16},
                                                  {"heads": 32, "width": 128, "terms": 128, "groups": 16, "form": "delta"}]),
    "convolution_step": _small("convolution_step", [{"channels": 10496}]),
    "router": _small("router", [{"experts": 128, "slots": 8, "normalized": True}, {"experts": 40, "slots": 8, "after": True}]),
}

if __name__ == "__main__":
    sys.exit(main())
