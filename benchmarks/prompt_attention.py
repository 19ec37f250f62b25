"""Times our attention of prompt chunks (attend.cu), in several shapes of its blocks, beside cuDNN's and flash attention.

    python benchmarks/prompt_attention.py                                         # Qwen3-1.7B's heads, blocks of 128 and of 192 keys
    python benchmarks/prompt_attention.py --heads 32x8x64 --calls 8192+0 --keys 128,192 --groups 2,3 --out found.json

A call ``4096+16384`` is a chunk of 4,096 rows behind 16,384 others. Each way is compared with fp32 first, in the last rows of one head.
Microseconds of a launch, twice: rested (captured, a second after anything else ran) and held (the same launches behind each other for
some seconds, of which the second half counts: a card that multiplies lowers its clock). Ways take turns.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from agentcompile_runtime_cuda import attending
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.own_attention import DeviceScoring, OwnAttention, Shape, form_of

CALLS = "2048+0,8192+0,8192+8192,4096+16384"
COMPARED, OFF = 64, 2e-2  # rows at the end of the chunk, and how far they may be from fp32 (the numbers are normal)
RUNS, TURNS = 8, 3
REGISTERS = {2: (240, 24), 3: (160, 32)}  # by warpgroups: of threads that multiply, and of those that copy
Way = Callable[[], Any]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--heads", default="16x8x128", help="heads of Q x heads of K and V x channels (default: %(default)s)")
    made.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    made.add_argument("--calls", default=CALLS, help="rows + rows behind which they are, by commas (default: %(default)s)")
    made.add_argument("--keys", default="128,192", help="of a block, by commas (default: %(default)s)")
    made.add_argument("--groups", default="2", help="warpgroups that multiply, by commas (default: %(default)s)")
    made.add_argument("--held-s", type=float, default=1.0, help="how long each way runs without a pause (default: %(default)s)")
    made.add_argument("--out", type=Path, help="results as JSON")
    return made


def shapes(options: argparse.Namespace) -> dict[str, Shape]:
    """Those that the command line names."""
    found = {}
    for groups in map(int, options.groups.split(",")):
        multiplying, copying = REGISTERS[groups]
        for keys in map(int, options.keys.split(",")):
            found[f"{groups} x 64 rows, {keys} keys"] = Shape(groups=groups, registers=multiplying, copier_registers=copying, keys=keys)
    return found


def ways(own: OwnAttention, tensors: "attending.Operands", tried: Mapping[str, Shape], room: int) -> dict[str, Way]:
    """What writes, or returns, the result of a call: each shape that fits a block, and the libraries where they serve the whole call."""
    q, k, v, _ = tensors
    scores = DeviceScoring(scale=q.shape[3] ** -0.5)
    form = form_of(q.shape[3], v.shape[3], scores)
    assert form is not None
    found: dict[str, Way] = {name: lambda shape=shape: own(tensors, scores, shape) for name, shape in tried.items()
                             if shape.shared_bytes(form) <= room}
    if q.shape[2] == k.shape[2]:
        found["cuDNN"] = lambda: attending._by_cudnn(q, k, v, True, scores.scale)[0]
        found["flash"] = lambda: attending._by_flash(q, k, v, True, scores.scale)[0]
    return found


def off(tensors: "attending.Operands", way: Way) -> float:
    """How far the last rows of the last head are from fp32."""
    q, k, v, out = tensors
    out.fill_(float("nan"))
    found = way()
    found = out if found is None else found
    wanted, _ = attending._formula(q[:, -1:, -COMPARED:], k[:, -1:], v[:, -1:], True, DeviceScoring(scale=q.shape[3] ** -0.5))
    return float((found[:, -1:, -COMPARED:].float() - wanted).abs().max().nan_to_num(float("inf")))


def rested_us(graph: torch.cuda.CUDAGraph) -> float:
    """Of a launch, a second after anything else ran."""
    torch.cuda.synchronize()
    time.sleep(1.0)
    return _replayed_us(graph, 1)


def held_us(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Of a launch that follows others of its kind for some seconds."""
    first = _replayed_us(graph, 1)
    count = max(1, round(seconds / 2 * 1e6 / first / RUNS))
    _replayed_us(graph, count)
    return _replayed_us(graph, count)


def _replayed_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(count):
        graph.replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1e3 / count / RUNS


def captured(way: Way) -> torch.cuda.CUDAGraph:
    """Some runs of it."""
    for _ in range(2):
        way()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            way()
    return graph


def measured(options: argparse.Namespace, call: str, own: OwnAttention, room: int) -> list[dict[str, Any]]:
    """A row for each way of one call.

    Raises:
        SystemExit: one is wrong.
    """
    count, start = map(int, call.split("+"))
    heads, kv_heads, dim = map(int, options.heads.split("x"))
    sizes = ((count, heads), (start + count, kv_heads), (start + count, kv_heads), (count, heads))
    q, k, v, out = (torch.randn(1, rows, number, dim, device="cuda", dtype=getattr(torch, options.dtype)).transpose(1, 2)
                    for rows, number in sizes)
    found = ways(own, (q, k, v, out), shapes(options), room)
    for name, way in found.items():
        error = off((q, k, v, out), way)
        if not error <= OFF:
            raise SystemExit(f"{call}: {name} is off by {error:.1e}")
    graphs = {name: captured(way) for name, way in found.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            times[name].append((rested_us(graph), held_us(graph, options.held_s)))
    operations = 4 * heads * dim * (count * start + count * (count + 1) / 2)
    rows = []
    for name, of_way in times.items():
        rested, held = (sorted(column)[TURNS // 2] for column in zip(*of_way, strict=True))
        rows.append({"call": call, "heads": options.heads, "dtype": options.dtype, "way": name, "rested_us": rested, "held_us": held,
                     "rested_tflops": operations / rested / 1e6, "held_tflops": operations / held / 1e6})
        print(f"{call:>12} {name:<22} rested {rested:8.1f} us ({rows[-1]['rested_tflops']:.0f} TFLOP/s), "
              f"held {held:8.1f} ({rows[-1]['held_tflops']:.0f})", flush=True)
    return rows


def main() -> int:
    """Measure every call."""
    options = parser().parse_args()
    backend = CudaBackend()
    target = backend.live_target()
    if target is None:
        raise SystemExit("no CUDA device that a preset describes; run this on a GPU machine")
    own = OwnAttention(backend, backend.live_target)
    rows = [row for call in options.calls.split(",") for row in measured(options, call, own, target.shared_bytes_per_block)]
    if options.out:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
