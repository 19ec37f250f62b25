"""The linear layers of a mixture of experts for many rows by the kernels of ``expert_rows.cu``: only what was chosen is multiplied."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve, frozen

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

from .own_kernels import OwnKernels

if TYPE_CHECKING:
    import torch

TEMPLATE = Path(__file__).with_name("expert_rows.cu")
FEATURES = (Feature.WGMMA, Feature.BULK_COPY, Feature.MBARRIER, Feature.CLUSTER)
COLUMNS, DEPTH = 256, 64  # of a tile, and the terms of a slice
THREADS, REGISTERS, COPIER_REGISTERS = 384, 208, 88
MOST_EXPERTS = 1024  # a thread of the block that deals is one's
PANEL = 64  # columns that one fetch brings of a matrix whose columns lie side by side
VECTOR = 8  # elements of 16 bytes, of which rows are whole ones
WORDS = 4  # of a band's description


Called = tuple[Launch, tuple[int, ...]]  # with its scalars


@frozen
class Height:
    """Rows of a tile and slices of the ring, which are as many as shared memory holds."""

    rows: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Slices of two bytes an element, and barriers."""
        return self.stages * (2 * DEPTH * (self.rows + COLUMNS) + 16)


LOW, TALL = Height(64, 5), Height(128, 4)
MANY = 48  # choices of an expert, on average, from which on tiles are tall


def height_for(pairs: int, experts: int) -> Height:
    """Of tiles, by how many choices an expert has on average."""
    return TALL if pairs > MANY * experts else LOW


def source(dtype: DType, height: Height = LOW, transposed: bool = False) -> StepSource:
    """The kernels for one element type, height of tiles and order of matrices; grids, scalars and tilings are those of a call."""
    deal = Launch(entry="deal_rows", grid=(1, 1, 1), block=(MOST_EXPERTS, 1, 1), pdl=True,
                  arguments=(pointer("chosen", Role.INPUT, DType.I64), pointer("deal", Role.OUTPUT, DType.I32, Access.WRITE),
                             *(i32(name, 0) for name in ("pairs", "most_bands"))))
    given = (pointer("x", Role.INPUT, dtype), pointer("weight", Role.INPUT, dtype), pointer("bias", Role.INPUT, dtype),
             pointer("deal", Role.INPUT, DType.I32), pointer("out", Role.OUTPUT, dtype, Access.WRITE))
    product = Launch(entry="expert_rows", grid=(1, 1, 1), block=(THREADS, 1, 1), shared_bytes=height.shared_bytes, pdl=True,
                     arguments=(*given, *(i32(name, 0) for name in ("share", "columns", "terms", "most_bands"))))
    plan = {"T": c_type(dtype), "threads": THREADS, "rows": height.rows, "stages": height.stages, "registers": REGISTERS,
            "copier_registers": COPIER_REGISTERS, "transposed": transposed, "dealers": MOST_EXPERTS, "most_experts": MOST_EXPERTS}
    return make_source(TEMPLATE, plan=plan, launches=(deal, product), features=FEATURES)


@frozen(kw_only=True)
class Call:
    """One call: its numbers, the launches with the tilings of its matrices, and what these are given."""

    pairs: int
    share: int
    experts: int
    columns: int
    terms: int
    height: Height

    @classmethod
    def of(cls, x: "torch.Tensor", weight: "torch.Tensor", chosen: "torch.Tensor", transposed: bool) -> "Call":
        """``x`` [T, 1 or S, terms], ``weight`` [E, columns, terms] or [E, terms, columns], ``chosen`` [T, S]."""
        terms, columns = weight.shape[1:] if transposed else reversed(weight.shape[1:])
        experts, pairs = weight.shape[0], chosen.numel()
        return cls(pairs=pairs, share=pairs // (x.numel() // terms), experts=experts, columns=columns, terms=terms,
                   height=height_for(pairs, experts))

    @property
    def most_bands(self) -> int:
        """Bands of choices of one expert, at most."""
        return min(self.experts, self.pairs) + self.pairs // self.height.rows

    @property
    def deal_words(self) -> int:
        """Elements of i32 that the dealing leaves: see ``expert_rows.cu``."""
        return WORDS * (1 + self.most_bands) + self.pairs

    @property
    def blocks(self) -> int:
        """Of the product, at most."""
        return self.most_bands * -(-self.columns // COLUMNS)

    def launches(self, of_source: tuple[Launch, ...], transposed: bool) -> tuple[Called, Called]:
        """Both launches of ``source`` with their scalars, that of the product with the tiling of its matrices."""
        deal, product = of_source
        dtype = product.arguments[1].dtype
        assert dtype is not None
        across, down = (self.columns, self.terms) if transposed else (self.terms, self.columns)
        box = (PANEL, DEPTH) if transposed else (DEPTH, COLUMNS)
        whole = across * down
        fetched = tiles("weight", Role.INPUT, dtype, Tiling(
            extents=(across, down, self.experts, 1), steps=(1, across, whole, whole * self.experts), tile=(*box, 1, 1),
            swizzle=DEPTH * dtype.bytes))
        arguments = (product.arguments[0], fetched, *product.arguments[2:])
        return ((deal, (self.pairs, self.most_bands)),
                (evolve(product, arguments=arguments), (self.share, self.columns, self.terms, self.most_bands)))


class ExpertProduct:
    """The kernels by height and order of matrices, which ``backend`` builds for the target that is live on first use."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._kernels = {(height, transposed): OwnKernels(backend, target, partial(source, height=height, transposed=transposed))
                         for height in (LOW, TALL) for transposed in (False, True)}
        self._is_likely = False

    def expect(self) -> None:
        """Say that the model has experts that is bound now: ``start`` begins with the usual kernels."""
        self._is_likely = True

    def start(self, like: "torch.Tensor") -> None:
        """Begin to build the kernels for the element type of ``like``, where they may be asked for."""
        if self._is_likely and like.dtype.itemsize == 2:
            for height in (LOW, TALL):
                self._kernels[height, False].start(like)

    def takes(self, x: "torch.Tensor", weight: "torch.Tensor", chosen: "torch.Tensor", bias: "torch.Tensor | None",
              transposed: bool) -> bool:
        """Whether the device has what the kernels need, and the tensors are and lie as they read them."""
        import torch

        if x.dim() != 3 or weight.dim() != 3 or chosen.dim() != 2 or chosen.shape[0] != x.shape[0] or not chosen.numel():
            return False
        terms, columns = weight.shape[1:] if transposed else reversed(weight.shape[1:])
        if x.shape[2] != terms or x.shape[1] not in (1, chosen.shape[1]) or terms % VECTOR or columns % VECTOR or not weight.numel():
            return False
        if weight.shape[0] > MOST_EXPERTS or chosen.dtype is not torch.int64 or not chosen.is_contiguous():
            return False
        if x.dtype.itemsize != 2 or not x.is_floating_point() or x.dtype is not weight.dtype:
            return False
        if bias is not None and (bias.dtype is not x.dtype or tuple(bias.shape) != (weight.shape[0], columns) or not bias.is_contiguous()):
            return False
        if not all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in (x, weight)):
            return False
        return self._kernels[LOW, transposed].may_serve(x)

    def is_tall(self, chosen: "torch.Tensor", weight: "torch.Tensor") -> bool:
        """Whether tiles are tall for so many choices."""
        return height_for(chosen.numel(), weight.shape[0]) is TALL

    def __call__(self, x: "torch.Tensor", weight: "torch.Tensor", chosen: "torch.Tensor", bias: "torch.Tensor | None",
                 transposed: bool, out: "torch.Tensor") -> None:
        """Write to ``out`` [T, S, columns], dense, what ``agentcompile.expert_linear`` makes of the others.

        Raises:
            BuildError: the device has no preset, or nothing builds the kernels.
        """
        import torch

        call = Call.of(x, weight, chosen, transposed)
        kernels = self._kernels[call.height, transposed]
        target = kernels.target(x)
        assert target is not None
        (deal, of_deal), (product, of_product) = call.launches(kernels.launches(x), transposed)
        dealt = torch.empty(call.deal_words, dtype=torch.int32, device=x.device)
        kernels.run(x, deal, 1, (chosen, dealt), of_deal)
        kernels.run(x, product, max(1, min(call.blocks, target.sm_count)), (x, weight, bias, dealt, out), of_product)


def one_by_one(x: "torch.Tensor", weight: "torch.Tensor", chosen: "torch.Tensor", bias: "torch.Tensor | None",
               transposed: bool) -> "torch.Tensor":
    """The framework's result [T, S, columns]: one product for each expert, whose number the host is told. Nothing can be captured here."""
    from torch.nn.functional import linear

    rows = x.expand(*chosen.shape, x.shape[-1])
    out = x.new_empty((*chosen.shape, weight.shape[2 if transposed else 1]))
    for expert in chosen.unique().tolist():
        mine, matrix = chosen == expert, weight[expert].T if transposed else weight[expert]
        out[mine] = linear(rows[mine], matrix, None if bias is None else bias[expert])
    return out
