"""Gate and up of prompt chunks, the activation of the one and their product, by the kernel of ``gated.cu``, in one launch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve

from agentcompile_core.plugin_api import (
    Access,
    Backend,
    DType,
    Feature,
    Launch,
    Role,
    StepSource,
    Target,
    Tiling,
    i32,
    pointer,
    tiles,
)

from .gates import GATES, Gate
from .own_kernels import OwnKernels

if TYPE_CHECKING:
    import torch

TEMPLATE = Path(__file__).with_name("gated.cu")
FEATURES = (Feature.WGMMA, Feature.BULK_COPY, Feature.MBARRIER, Feature.CLUSTER)
CLUSTER, ROWS, COLUMNS, DEPTH = 2, 128, 128, 64  # blocks, and what one makes of 64 terms at a time
THREADS, REGISTERS, COPIER_REGISTERS = 384, 240, 24
STAGES = 4  # slices on their way
BAND = 8  # clusters of rows that are taken together
LEAST = 1024  # rows from which on it is faster than a product of the libraries and a pass over its results
VECTOR = 8  # elements of 16 bytes, of which rows are whole ones
CLUSTERS = -1  # which of the scalars is the number of tiles of a cluster


def source(dtype: DType, gate: Gate = GATES[0]) -> StepSource:
    """The kernel for one element type and activation; grid, scalars and tilings are those of a call."""
    inputs = tuple(pointer(name, Role.INPUT, dtype) for name in ("x", "gate", "up"))
    scalars = tuple(i32(name, 0) for name in ("count", "columns", "terms", "tiles"))
    shared_bytes = STAGES * (2 * DEPTH * (ROWS + 2 * COLUMNS) + 16)  # slices of two bytes an element, and barriers
    launch = Launch(entry="gated_rows", grid=(CLUSTER, 1, 1), block=(THREADS, 1, 1), shared_bytes=shared_bytes, cluster=CLUSTER,
                    arguments=(*inputs, pointer("out", Role.OUTPUT, dtype, Access.WRITE), *scalars))
    plan = {"T": c_type(dtype), "threads": THREADS, "stages": STAGES, "band": BAND, "registers": REGISTERS,
            "copier_registers": COPIER_REGISTERS, "activation": gate.number}
    return make_source(TEMPLATE, plan=plan, launches=(launch,), features=FEATURES)


def called(launch: Launch, x: "torch.Tensor", gate: "torch.Tensor", up: "torch.Tensor") -> tuple[Launch, tuple[int, ...]]:
    """A launch of ``source`` with the tilings of a call, and its scalars, of which ``scalars[CLUSTERS]`` is the number of tiles."""
    columns, terms = gate.shape
    count = x.numel() // terms
    dtype = DType(str(x.dtype).removeprefix("torch."))
    boxes = (("x", count, ROWS), ("gate", columns, COLUMNS), ("up", columns, COLUMNS))
    fetched = (tiles(name, Role.INPUT, dtype, Tiling(
        extents=(terms, lines, 1, 1), steps=(1, terms, terms * lines, terms * lines), tile=(DEPTH, box, 1, 1), swizzle=DEPTH * dtype.bytes))
        for name, lines, box in boxes)
    number = -(-count // (CLUSTER * ROWS)) * -(-columns // COLUMNS)
    return evolve(launch, arguments=(*fetched, *launch.arguments[len(boxes):])), (count, columns, terms, number)


class GatedProduct:
    """The kernels by activation and element type, which ``backend`` builds for the target that is live on first use."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._kernels = {gate: OwnKernels(backend, target, partial(source, gate=gate)) for gate in GATES}
        self._likely = GATES[0]

    def expect(self, gate: Gate) -> None:
        """Say which activation the model has that is bound now: ``start`` begins with its kernel."""
        self._likely = gate

    def start(self, like: "torch.Tensor") -> None:
        """Begin to build the kernel for the element type of ``like``, where it may be asked for."""
        if like.dtype.itemsize == 2:
            self._kernels[self._likely].start(like)

    def takes(self, x: "torch.Tensor", gate: "torch.Tensor", up: "torch.Tensor") -> bool:
        """Whether the device has what the kernels need, the tensors are and lie as they read them, and rows are enough."""
        if gate.dim() != 2 or not x.dim():
            return False
        columns, terms = gate.shape
        if gate.shape != up.shape or x.shape[-1] != terms or not gate.numel() or x.numel() < LEAST * terms:
            return False
        if terms % VECTOR or columns % VECTOR:
            return False
        if x.dtype.itemsize != 2 or not x.is_floating_point() or not x.dtype == gate.dtype == up.dtype:
            return False
        if not all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in (x, gate, up)):
            return False
        return self._kernels[self._likely].may_serve(x)

    def __call__(self, x: "torch.Tensor", gate: "torch.Tensor", up: "torch.Tensor", out: "torch.Tensor", by: Gate) -> None:
        """Write by(x gate^T) * (x up^T) of rows x [.., K] and weights [I, K] to out [.., I].

        Raises:
            BuildError: the device has no preset, or nothing builds the kernel.
        """
        kernels = self._kernels[by]
        launch, scalars = called(kernels.launches(x)[0], x, gate, up)
        target = kernels.target(x)
        assert target is not None
        clusters = max(1, min(scalars[CLUSTERS], target.sm_count // CLUSTER))
        kernels.run(x, launch, CLUSTER * clusters, (x, gate, up, out), scalars)
