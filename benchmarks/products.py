"""Times the schedules of the gemm family beside torch.matmul: isolated products on one GPU, each schedule checked first.

    python benchmarks/products.py                                        # 4096^3 fp16, 1024 x 4096 x 4096 bf16, 512^3 fp32
    python benchmarks/products.py --shapes 8192x8192x8192:float16 --points 56 --out found.json
    python benchmarks/products.py --arch sm_90a                          # with the schedules that only this variant of sm_90 has (wgmma)
    python benchmarks/products.py --arch sm_90a --paths wgmma,tensor --match "'columns': 256" --all

Weights [n, k] as linear layers have them. Times are medians of CUDA graphs of several runs, microseconds per run; TF32 is off. One
line per product, and with ``--all`` one per schedule.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from agentcompile_cuda_kit.targets import capabilities
from agentcompile_rules_transformers.testing import rows_case
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_templates_cuda_gemm import GemmFamily
from attrs import evolve, frozen

from agentcompile_core.plugin_api import DType, Kernel, Match, Schedule, StepSource, Target

SHAPES = "4096x4096x4096:float16,1024x4096x4096:bfloat16,512x512x512:float32"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}  # of the largest result
RUNS, REPETITIONS = 10, 9


@frozen(kw_only=True, eq=False)
class Product:
    """One product with its tensors: x [m, k] times weight [n, k] transposed."""

    name: str
    match: Match
    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    wanted: torch.Tensor


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default=SHAPES, help="m x n x k and type, by commas (default: %(default)s)")
    made.add_argument("--points", type=int, default=24, help="schedules of each product, best guess first (default: %(default)s)")
    made.add_argument("--paths", default="", help="only schedules of these paths, by commas (simt, bf16x6, tensor, wgmma)")
    made.add_argument("--match", default="", help="only schedules whose text has one of these parts, separated by |")
    made.add_argument("--all", action="store_true", help="print a line per schedule as well")
    made.add_argument("--arch", default="", help="build for this variant of the device's architecture")
    made.add_argument("--without", default="", help="capabilities that the device is taken to lack, by commas (wgmma: more of mma.sync)")
    made.add_argument("--out", type=Path, help="results as JSON")
    return made


def product(text: str) -> Product:
    """The product that ``4096x4096x4096:float16`` names, with random factors on the GPU."""
    sizes, dtype = text.split(":")
    m, n, k = (int(size) for size in sizes.split("x"))
    match, _ = rows_case(rows=(m,), n=n, k=k, dtype=DType(dtype))
    of = getattr(torch, dtype)
    x, weight = torch.randn(m, k, device="cuda").to(of), (torch.randn(n, k, device="cuda") * k**-0.5).to(of)
    return Product(name=text, match=match, x=x, weight=weight, out=torch.empty(m, n, device="cuda", dtype=of),
                   wanted=x.float() @ weight.float().t())


def chosen(given: Product, options: argparse.Namespace, target: Target) -> list[tuple[int, Schedule]]:
    """Schedules of a product that the command line asks for, each with its rank."""
    paths, parts = options.paths.split(",") if options.paths else [], options.match.split("|")
    ranked = enumerate(GemmFamily().space(given.match, target).points)
    found = [(rank, point) for rank, point in ranked
             if (not paths or point["path"] in paths) and any(part in str(dict(point.items)) for part in parts)]
    return found[:options.points]


def built(given: Product, schedules: Sequence[Schedule], backend: CudaBackend, target: Target) -> list[tuple[StepSource, Kernel]]:
    """Sources and kernels of the schedules, built side by side."""
    sources = [GemmFamily().lower(given.match, schedule, target) for schedule in schedules]
    with ThreadPoolExecutor() as pool:
        return list(zip(sources, pool.map(lambda source: backend.build(source, target), sources), strict=True))


def prepared(given: Product, source: StepSource, kernel: Kernel, backend: CudaBackend) -> Callable[[int], None]:
    """What runs one schedule on a stream."""
    handle = backend.load(kernel)
    parts = {w.name: torch.zeros(w.nbytes, device="cuda", dtype=torch.uint8) for w in source.workspaces}
    tensors = {"a": given.x, "b": given.weight, "out": given.out, **parts}
    launches = [backend.prepare_launch(handle, launch, [tensors[a.operand].data_ptr() if a.operand else a.value for a in launch.arguments],
                                       pdl=index > 0) for index, launch in enumerate(source.launches)]

    def run(stream: int, kept: object = parts) -> None:
        for launch in launches:
            launch(stream)

    return run


def microseconds(backend: CudaBackend, run: Callable[[int], None]) -> float:
    """The median of some repetitions of a captured run.

    Raises:
        SystemExit: nothing can be timed here.
    """
    times = backend.time(run, repetitions=REPETITIONS, runs_per_repetition=RUNS)
    if not isinstance(times, tuple):
        raise SystemExit(times.reason)
    return sorted(times)[len(times) // 2]


def error(given: Product) -> float:
    """The largest error of the result over the largest element."""
    return float((given.out.float() - given.wanted).abs().max() / given.wanted.abs().max())


def measured(given: Product, options: argparse.Namespace, backend: CudaBackend, target: Target) -> dict[str, Any]:
    """The framework's time and that of every schedule, the fastest right one first."""
    theirs = microseconds(backend, lambda stream: torch.matmul(given.x, given.weight.t(), out=given.out))
    rows = []
    points = chosen(given, options, target)
    for (rank, schedule), (source, kernel) in zip(points, built(given, [point for _, point in points], backend, target), strict=True):
        run = prepared(given, source, kernel, backend)
        given.out.fill_(float("nan"))
        run(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        off = error(given)
        right = off <= TOLERANCE[given.x.dtype]
        rows.append({"rank": rank, "us": microseconds(backend, run), "right": right, "error": off, "registers": kernel.resources.registers,
                     "schedule": dict(schedule.items)})
    rows.sort(key=lambda row: (not row["right"], row["us"]))
    m, n, k = *given.wanted.shape, given.x.shape[1]
    best = rows[0]
    return {"product": given.name, "device": torch.cuda.get_device_name(), "torch_us": theirs, "us": best["us"],
            "tflops": 2e-6 * m * n * k / best["us"], "torch_tflops": 2e-6 * m * n * k / theirs, "of_torch": theirs / best["us"],
            "wrong": sum(not row["right"] for row in rows), "best": best, "rows": rows}


def main() -> int:
    """Measure every product; 1 where a schedule is wrong."""
    options = parser().parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    backend = CudaBackend()
    target = backend.live_target()
    if target is None:
        raise SystemExit("no CUDA device that a preset describes; run this on a GPU machine")
    if options.arch:
        target = evolve(target, arch=options.arch, capabilities=capabilities(options.arch))
    lacks = options.without.split(",")
    target = evolve(target, capabilities=tuple(word for word in target.capabilities if word not in lacks))
    found = []
    for text in options.shapes.split(","):
        found.append(measured(product(text), options, backend, target))
        one = found[-1]
        print(f"{text}: {one['us']:.1f} us ({one['tflops']:.1f} TFLOP/s) against {one['torch_us']:.1f} us ({one['torch_tflops']:.1f}): "
              f"{one['of_torch']:.2f}x torch; {one['wrong']} of {len(one['rows'])} wrong; {one['best']['schedule']}", flush=True)
        for row in one["rows"] if options.all else ():
            print(f"  {row['us']:9.1f} us, rank {row['rank']:2}, {row['registers']} registers, error {row['error']:.1e}, {row['schedule']}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(one["wrong"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
