"""How the results of a product are dealt out: a point of the space."""

from attrs import frozen

from agentcompile_core.plugin_api import Schedule

WARP = 32
TENSOR_PATHS = frozenset({"tensor", "wgmma", "bf16x6"})


@frozen(kw_only=True)
class Tile:
    """How the results of a product are dealt out: ``rows`` x ``columns`` to a block, ``depth`` terms at a time, the terms to ``splits``."""

    path: str
    rows: int
    columns: int
    depth: int
    thread_rows: int = 0  # path simt: sums of a thread
    thread_columns: int = 0
    warp_rows: int = 0  # paths tensor and bf16x6: results of a warp; path wgmma: of a warpgroup
    warp_columns: int = 0
    stages: int = 0  # slices in shared memory
    ahead: bool = False  # path tensor: fragments of the next slice are read at the end of one: more registers
    cluster: int = 1  # path wgmma: blocks below each other that fetch columns of b for each other
    resident: bool = False  # path wgmma: as many blocks as there is room for take tile after tile
    splits: int = 1
    unroll: int = 0  # path row: terms of a thread that are on their way
    row_threads: int = 0

    @property
    def of_one_row(self) -> bool:
        """Whether it is for one row, whose terms the blocks of a cluster share."""
        return self.path == "row"

    @property
    def tensor(self) -> bool:
        """Whether tensor cores multiply, and the slices lie in dynamic shared memory."""
        return self.path in TENSOR_PATHS

    @property
    def in_pieces(self) -> bool:
        """Whether fp32 is split into three numbers of bf16."""
        return self.path == "bf16x6"

    @property
    def by_warpgroups(self) -> bool:
        """Whether four warps multiply together (wgmma)."""
        return self.path == "wgmma"

    @property
    def threads(self) -> int:
        """Of a block."""
        if self.of_one_row:
            return self.row_threads
        if self.tensor:
            warps = self.rows // self.warp_rows * (self.columns // self.warp_columns)
            return WARP * 4 * (warps + 1) if self.by_warpgroups else WARP * warps  # one more warpgroup copies
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)

    @property
    def schedule(self) -> Schedule:
        """The tile as a point of the space."""
        if self.of_one_row:
            return Schedule({"path": self.path, "rows": self.rows, "columns": self.columns, "splits": self.splits,
                             "row_threads": self.row_threads, "unroll": self.unroll, "cluster": self.cluster})
        own = {"warp_rows": self.warp_rows, "warp_columns": self.warp_columns, "stages": self.stages}
        if self.by_warpgroups:
            own |= {"cluster": self.cluster, "resident": self.resident}
        elif not self.in_pieces:
            own |= {"ahead": self.ahead}
        own = own if self.tensor else {"thread_rows": self.thread_rows, "thread_columns": self.thread_columns}
        return Schedule({"path": self.path, "rows": self.rows, "columns": self.columns, "depth": self.depth, "splits": self.splits, **own})


def tile_of(schedule: Schedule) -> Tile:
    """The tile that a point of the space names."""
    values = dict(schedule.items)
    path = str(values.pop("path"))
    return Tile(path=path, depth=1, **values) if path == "row" else Tile(path=path, **values)
