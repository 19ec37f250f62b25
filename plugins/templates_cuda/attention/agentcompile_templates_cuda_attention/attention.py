"""The attention family: one decode token against the KV cache, appended in the same launch."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import block_needs, c_type, literal, make_source, operand_pointer
from agentcompile_cuda_kit.limits import MAX_CLUSTER
from attrs import evolve

from agentcompile_core.plugin_api import (
    ATTENTION,
    Access,
    DType,
    Feature,
    KernelArgument,
    Launch,
    Match,
    Needs,
    Reject,
    Role,
    Schedule,
    ScheduleSpace,
    StepSource,
    Target,
    TemplateFamily,
    Workspace,
    f32,
    i32,
    pointer,
)

from .shape import (
    CLUSTERED,
    STAGED_PATHS,
    TENSOR_PATHS,
    TENSOR_POSITIONS,
    WARP,
    Shape,
    in_parts,
    registers,
    shape_of,
    shared_bytes,
    stage_bytes,
    steps_at_once,
    tile_of,
)
from .space import space_of

FOLDER = Path(__file__).parent
DTYPES = (DType.F16, DType.BF16, DType.F32)
NORMS = {"none": 0, "rms": 1, "rms_one_plus": 2, "rms_once": 4}  # as ac::Norm in row.cuh
LOG2_E = 1.4426950408889634
WEIGHT_TERMS = 2  # values of T that together hold a softmax weight: 22 bits in fp16, 16 in bf16
OPERANDS = ("q", "k", "v", "q_norm", "k_norm", "cos", "sin", "k_cache", "v_cache")


class AttentionFamily(TemplateFamily):
    """``attention`` matches: q/k norm, RoPE, append and split-KV attention with GQA packing, in one launch.

    Three templates: ``attention.cu`` (``path=lanes``, fp32 FMA, every type), and with mma.m16n8k16 for fp16 and bf16
    ``attention_tensor.cu`` (``path=tensor``, K and V in registers) and ``attention_staged.cu`` (``path=staged``, in shared
    memory; ``path=whole``, of which a warp takes all its steps at once). Splits merge through global memory and a counter
    (``merge=global``) or through the shared memory of a thread-block cluster (sm_90), by stores and a cluster barrier
    (``merge=cluster``) or by messages whose bytes the block that
    finishes an output waits for (``merge=message``). With ``early_kv`` the first tiles of K and V are loaded before the
    dependency wait, by a hint of the position that is checked after it. Query heads of a KV head that one block does
    not hold are dealt to ``parts``, blocks that share nothing but what they read; the first appends.
    """

    name = "attention"
    version = 6

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for one sequence in one floating point type whose heads and rotary halves are whole 16-byte vectors."""
        if match.kind != ATTENTION:
            return Reject(f"attention serves {ATTENTION} matches, not {match.kind}")
        reason = _type_problem(match) or _shape_problem(match)
        if reason:
            return Reject(reason)
        if not self.space(match, target).points:
            return Reject(f"heads of {_widths(match)} channels do not fit into registers and shared memory, not even one at a time")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 64 points."""
        return space_of(shape_of(match), target)

    def needs(self, match: Match, schedule: Schedule, target: Target) -> Needs:
        """Threads, registers and static shared memory."""
        shape, (lanes, unroll) = in_parts(shape_of(match), schedule), (schedule.integer(name) for name in ("lanes", "unroll"))
        return block_needs(target, threads=schedule.integer("warps") * WARP,
                           shared_bytes=shared_bytes(shape, schedule) + stage_bytes(shape, schedule),
                           registers=registers(shape, str(schedule["path"]), lanes, unroll))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch of (splits, kv_heads, parts) blocks; workspaces for partial results and one arrival counter per part."""
        shape = in_parts(shape_of(match), schedule)
        blocks = shape.kv_heads * shape.parts
        path, unroll = str(schedule["path"]), schedule.integer("unroll")
        tensor = path in TENSOR_PATHS
        splits, warps = schedule.integer("splits"), schedule.integer("warps")
        cluster = splits if schedule["merge"] in CLUSTERED else 0
        sinks = match.operand("sinks")
        pdl = target.has(Feature.GRIDDEPCONTROL)
        constants: dict[str, bool | int | float] = {
            "threads": warps * WARP, "head_dim": shape.head_dim, "value_dim": shape.value_dim,
            "rotary_dim": _rotary_dim(match), "interleaved": match.flag("interleaved"),
            "group": shape.block_heads, "parts": shape.parts, "kv_group": shape.group, "kv_heads": shape.kv_heads,
            "lanes": schedule.integer("lanes"), "unroll": 1 if path in STAGED_PATHS else unroll, "qk_norm": _norm(match), "pdl": pdl,
            "early_kv": bool(schedule["early_kv"]), "cluster": cluster, "messages": schedule["merge"] == "message",
            "has_window": match.integer("window", 0) > 0, "chunk": match.integer("chunk", 0),
            "has_softcap": match.number("softcap", 0.0) > 0, "has_sinks": sinks is not None, "has_alibi": match.flag("alibi"),
        }
        if tensor:
            constants["terms"] = WEIGHT_TERMS
        if path in STAGED_PATHS:
            constants |= {"stages": unroll, "together": steps_at_once(path, unroll)}
        launch = Launch(entry="attention_kernel", grid=(splits, shape.kv_heads, shape.parts), block=(warps * WARP, 1, 1), pdl=pdl,
                        cluster=max(1, cluster), shared_bytes=stage_bytes(shape, schedule), arguments=_arguments(match, shape))
        source = make_source(
            FOLDER / f"attention{'_staged' if path in STAGED_PATHS else '_tensor' if tensor else ''}.cu",
            plan={"T": c_type(shape.dtype), "Sink": c_type(sinks.spec.dtype if sinks else DType.F32), **constants},
            launches=(launch,),
            epilogue=alibi_struct(match),
            features=[Feature.ATOMICS] + [Feature.GRIDDEPCONTROL] * pdl + [Feature.MMA_SYNC] * tensor
            + [Feature.CLUSTER] * (cluster > 0) + [Feature.LARGE_CLUSTER] * (cluster > MAX_CLUSTER),
            workspaces=(
                Workspace(name="workspace", nbytes=4 * blocks * splits * shape.block_heads * (shape.value_dim + 2)),
                Workspace(name="counters", nbytes=4 * blocks, zeroed=True),
            ),
            reduction_depth=_depth(shape, schedule),
        )
        return evolve(source, periods=_periods(schedule))


def alibi_struct(match: Match) -> str:
    """``struct Alibi``, which knows the slope of each query head, in units of log2."""
    if not match.flag("alibi"):
        return "struct Alibi {\n  static __device__ __forceinline__ float slope(int) { return 0.0f; }\n};\n"
    numbers = ", ".join(literal(match.number(f"slope{head}") * LOG2_E) for head in range(match.integer("heads")))
    return (f"namespace {{\n__constant__ float alibi_slopes[] = {{{numbers}}};\n}}\nstruct Alibi {{\n"
            "  static __device__ __forceinline__ float slope(int head) { return alibi_slopes[head]; }\n};\n")


def _type_problem(match: Match) -> str:
    names = [name for name in (*OPERANDS, "out") if match.operand(name) is not None]
    dtypes = {match.need(name).spec.dtype for name in names}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        return f"operands of types {', '.join(sorted(d.value for d in dtypes))}; one of float16, bfloat16, float32 is served"
    if match.need("position").spec.dtype is not DType.I64:
        return f"a {match.need('position').spec.dtype.value} position; int64 is served"
    sinks = match.operand("sinks")
    if sinks is not None and sinks.spec.dtype not in DTYPES:
        return f"{sinks.spec.dtype.value} sinks; float16, bfloat16 and float32 are served"
    return ""


def _shape_problem(match: Match) -> str:
    heads, kv_heads, head_dim = (match.integer(name) for name in ("heads", "kv_heads", "head_dim"))
    vector = 16 // match.need("q").spec.dtype.bytes
    value_dim = match.integer("value_dim", 0) or head_dim
    if heads % kv_heads or head_dim % vector or value_dim % vector:
        return f"{heads} query heads, {kv_heads} KV heads of {_widths(match)}; whole groups and multiples of {vector} are served"
    if match.need("k_cache").spec.shape[0] != 1:
        return f"{match.need('k_cache').spec.shape[0]} sequences; one is served"
    if match.flag("qk_norm") and (match.operand("q_norm") is None or match.operand("k_norm") is None):
        return "a norm of q and k needs both weights"
    if _norm(match) < 0:
        return f"unknown norm {match.text('norm')!r} of q and k; served are {', '.join(NORMS)}"
    rotary_dim = _rotary_dim(match)
    whole = vector if match.flag("interleaved") else 2 * vector
    if rotary_dim % whole or rotary_dim > head_dim:
        return f"a rotary part of {rotary_dim} in heads of {head_dim}; multiples of {whole} inside the head are served"
    return ""


def _widths(match: Match) -> str:
    head_dim, value_dim = match.integer("head_dim"), match.integer("value_dim", 0) or match.integer("head_dim")
    return f"{head_dim}" if value_dim == head_dim else f"{head_dim} (V: {value_dim})"


def _norm(match: Match) -> int:
    return NORMS.get(match.text("norm", "rms"), -1) if match.flag("qk_norm") else NORMS["none"]


def _rotary_dim(match: Match) -> int:
    return match.need("cos").spec.shape[-1] if match.flag("rope") else 0


def _depth(shape: Shape, schedule: Schedule) -> int:
    """The longest chain of roundings: a score's dot product, then the positions of one lane group, then the merges."""
    splits, warps, lanes = (schedule.integer(name) for name in ("splits", "warps", "lanes"))
    if schedule["path"] in TENSOR_PATHS:
        score, owners = shape.head_dim, warps * TENSOR_POSITIONS
    else:
        score, owners = -(-shape.head_vectors // lanes) * shape.vector + lanes.bit_length(), warps * WARP // lanes
    return score + -(-shape.capacity // (splits * owners)) + warps + splits


def _periods(schedule: Schedule) -> tuple[int, ...]:
    """Positions of a block's tile, of one tile of every split, and of as many of these as there are stages."""
    splits, warps, lanes, unroll = (schedule.integer(name) for name in ("splits", "warps", "lanes", "unroll"))
    tile = tile_of(str(schedule["path"]), warps, lanes, unroll)
    return (tile, tile * splits, *([tile * splits * unroll] if schedule["path"] in STAGED_PATHS else []))


def _arguments(match: Match, shape: Shape) -> tuple[KernelArgument, ...]:
    return (
        *(operand_pointer(match, name) for name in OPERANDS),
        operand_pointer(match, "position"),
        operand_pointer(match, "sinks"),
        pointer("out", Role.OUTPUT, shape.dtype, Access.WRITE),
        pointer("workspace", Role.WORKSPACE, DType.F32, Access.READ_WRITE),
        pointer("counters", Role.WORKSPACE, DType.I32, Access.READ_WRITE),
        i32("capacity", shape.capacity),
        f32("scale", match.number("scale")),
        f32("norm_eps", match.number("norm_eps", 0.0)),
        i32("window", match.integer("window", 0)),
        f32("softcap", match.number("softcap", 0.0)),
    )
