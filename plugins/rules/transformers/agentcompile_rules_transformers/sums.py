"""Inputs under which a sum kept in half precision shows, however few terms each accumulator adds and however many there are.

Errors of single accumulators average out over lanes, warps and blocks, so none of them is to be random. Large terms stand
among small ones that lie just below half a step of theirs in 16 bits: whoever adds them there loses every small one, and
all accumulators err to the same side. Towers are values near the end of fp16's range: two of them leave it.

``swamped``: the products of a linear layer are such terms, and the squares of a normed row; of attention, whose positions
all weigh the same, the elements of V. ``swamped_half``: those products for bf16, by steps of fp16, the large ones first.
``swamped_mean``: the elements of a row of layer norm. ``uneven``: the weights of a softmax, and the products of q with the
keys of every second heavy position. ``uneven_half``: the weights of a softmax in bf16, in steps of fp16, the heavy ones first.
"""

import math

import torch
from torch import Tensor

from agentcompile_core.plugin_api import Case, DType, Match, Operand

SWAMPED, SWAMPED_HALF, SWAMPED_MEAN, UNEVEN, UNEVEN_HALF = "swamped", "swamped_half", "swamped_mean", "uneven", "uneven_half"
FAMILIES = (SWAMPED, SWAMPED_HALF, SWAMPED_MEAN, UNEVEN, UNEVEN_HALF)
FP16_HALF_STEP = 2.0**-11
FEW = 1 / 16  # share of large weights where each small one says little
NARROW = (DType.F16, DType.BF16)  # a kernel in float32 that adds in 16 bits shows everywhere; its own sums err to one side as well
LARGE, SMALL = 1.15, 0.8  # a large term, and a small one in half steps of it: errors of some steps leave both where they are
SHARES = (1 / 3, 1 / 8)  # of large terms
TOWER = 3.0e4  # to twice that; fp16 ends at 65,504
HIGH, CAPPED = 12.0, 0.6  # the score of heavy positions; of the soft cap, where that is less
APART = 0.05  # by how much scores of one class differ, so that kernels that round the weights themselves do not err to one side
LIGHT = 0.67  # share of light positions
BEYOND = 0.22  # steps by which means of V lie beyond a number of 16 bits, or short of it: there an error shows first
VECTOR = 8  # elements that a lane loads at once: every second key has one large term in each, first
TURNED_AWAY = 0.3  # elements of q below that carry nothing
SPREAD = 0.05  # by how much elements of a row differ from their size
FIRST_PARTS = (1 / 4, 1 / 8, 1 / 16, 1 / 2)  # of a row, in which large products of ``swamped_half`` lie
WEIGHED = 2.0**-4  # size of the products of a linear layer


def half_step(operand: Operand) -> float:
    """Half a step of 1 in an operand's type, fp16 or bf16."""
    return 2.0**-8 if operand.spec.dtype is DType.BF16 else FP16_HALF_STEP


def seeded(case: Case, number: int, device: str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(case.seed * 37 + number)
    return generator


def large_and_small(shape: tuple[int, ...], share: float, small: float, generator: torch.Generator, device: str) -> Tensor:
    """Terms of both sizes, ``share`` of them large."""
    return torch.where(torch.rand(shape, generator=generator, device=device) < share, LARGE, small)


# ---- norms and linear layers

def of_row(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    """An operand of a norm, or of a linear layer with or without one; None: as the core draws it."""
    if operand.name in ("x", "x_beside"):
        return _row(operand, case, device)
    if operand.name == "residual":
        return torch.zeros(operand.spec.shape, device=device)
    if operand.name in ("norm_weight", "norm_bias"):
        neutral = 0.0 if operand.name == "norm_bias" or match.text("norm", "none") == "rms_one_plus" else 1.0
        return torch.full(operand.spec.shape, neutral, device=device)
    if operand.name != "weight" or match.operand("residual_out") is not None or len(operand.spec.shape) < 2:
        return None
    row = _row(match.need("x"), case, device).reshape(-1)
    if match.text("norm", "none") != "none":
        mean = row.mean() if match.text("norm") == "layer" else 0.0
        row = (row - mean) * torch.rsqrt((row - mean).square().mean() + match.number("norm_eps"))
    if case.family == SWAMPED_HALF:
        products = _large_first(operand.spec.shape, device)
    else:
        products = large_and_small(operand.spec.shape, SHARES[1], SMALL * half_step(operand), seeded(case, 2, device), device)
    return WEIGHED * products / row


def _large_first(shape: tuple[int, ...], device: str) -> Tensor:
    """Products of rows whose large ones come first: of each vector, and all of them in the first part of a row, however long that is for
    whoever cuts it into accumulators."""
    rows, k = math.prod(shape[:-1]), shape[-1]
    column, first = torch.arange(k, device=device), torch.tensor(FIRST_PARTS, device=device) * k
    is_large = (column % VECTOR == 0) & (column < first.repeat(-(-rows // len(first)))[:rows, None])
    return torch.where(is_large, LARGE, SMALL * FP16_HALF_STEP).reshape(shape)


def spread(x: Operand, generator: torch.Generator, device: str) -> Tensor:
    """Factors around 1: equal elements of a normed row would all be rounded to one side, which no budget of many roundings covers."""
    return 1.0 + SPREAD * (2.0 * torch.rand(x.spec.shape, generator=generator, device=device) - 1.0)


def _row(x: Operand, case: Case, device: str) -> Tensor:
    generator, small = seeded(case, 1, device), SMALL * half_step(x)
    if case.family == SWAMPED_MEAN:
        return large_and_small(x.spec.shape, SHARES[1], small, generator, device) * spread(x, generator, device)
    signs = torch.where(torch.rand(x.spec.shape, generator=generator, device=device) < 0.5, -1.0, 1.0)
    return large_and_small(x.spec.shape, SHARES[1], small, generator, device).sqrt() * signs * spread(x, generator, device)


# ---- attention

def of_attention(match: Match, operand: Operand, case: Case, seen: Tensor, device: str) -> Tensor | None:
    """An operand of attention; ``seen`` [D]: ``query`` as the kernel sees it. None: as the core draws it."""
    if operand.name in ("q_norm", "k_norm"):
        return torch.full(operand.spec.shape, 0.0 if match.text("norm", "none") == "rms_one_plus" else 1.0, device=device)
    if operand.name == "q":
        drawn = query(match, case, device) * (0.0 if case.family == SWAMPED else 1.0)
        return drawn.expand(match.integer("heads"), -1).reshape(operand.spec.shape)
    if operand.name in ("v", "v_cache"):
        return (_values if case.family == SWAMPED else _by_class)(match, operand, case, device)
    if operand.name == "k" and case.family == SWAMPED:
        return _row(operand, case, device)
    return _keys(match, operand, case, seen, device) if operand.name == "k_cache" and case.family != SWAMPED else None


def query(match: Match, case: Case, device: str) -> Tensor:
    """The query [D] of all heads in ``uneven``: no element is small."""
    drawn = torch.rand(match.integer("head_dim"), generator=seeded(case, 5, device), device=device)
    return (0.7 + 0.6 * drawn) * torch.where(drawn * 1000 % 2 < 1, -1.0, 1.0)


def _values(match: Match, operand: Operand, case: Case, device: str) -> Tensor:
    kv_heads, dim = match.integer("kv_heads"), match.integer("value_dim", 0) or match.integer("head_dim")
    rows, small = operand.spec.numel // (kv_heads * dim), SMALL * half_step(operand)
    factors = LARGE + 0.7 * torch.rand(kv_heads, dim, generator=seeded(case, 0, device), device=device)  # equal in v and its cache
    drawn = torch.rand(rows, kv_heads, dim, generator=seeded(case, rows, device), device=device)
    shares = torch.tensor((1.0, *SHARES, 0.0), device=device).repeat(dim // 4 + 1)[:dim]
    made = torch.where(drawn < shares, factors, small)
    made[:, :, 0::8] *= TOWER
    made[:, :, 5::8] *= TOWER
    first, seen = first_attended(match, case), case.position + 1
    if rows > 1:  # the large ones first
        made[first : first + -(-(seen - first) // 3), :, 3::4] = factors[:, 3::4]
    return made.reshape(operand.spec.shape)


def first_attended(match: Match, case: Case) -> int:
    """The first position that the window and the chunk hold."""
    window, chunk = match.integer("window", 0), match.integer("chunk", 0)
    return max(0, case.position + 1 - window if window > 0 else 0, case.position - case.position % chunk if chunk > 0 else 0)


def _classes(match: Match, case: Case, rows: int, device: str) -> Tensor:
    """Of each position and KV head [rows, KV]: 0 light, 1 heavy, 2 heavy by a key of swamped products."""
    drawn = torch.rand(rows, match.integer("kv_heads"), generator=seeded(case, 3, device), device=device)
    if case.family == UNEVEN_HALF:  # of every second head anywhere
        first = first_attended(match, case)
        heavy = drawn < FEW
        heavy[:, ::2] = (torch.arange(rows, device=device) < first + FEW * (case.position + 1 - first))[:, None]
        return heavy.long()
    return torch.where(drawn < LIGHT, 0, torch.where(drawn < (1 + LIGHT) / 2, 1, 2))


def _by_class(match: Match, operand: Operand, case: Case, device: str) -> Tensor:
    """Even elements 1 or one step more; odd ones 1 where heavy, -1/2 where heavy by swamped products."""
    kv_heads, dim = match.integer("kv_heads"), match.integer("value_dim", 0) or match.integer("head_dim")
    rows = operand.spec.numel // (kv_heads * dim)
    drawn = torch.rand((rows, kv_heads, dim), generator=seeded(case, rows, device), device=device)
    shares = torch.tensor((BEYOND, 0.0, 1.0 - BEYOND, 0.0), device=device).repeat(dim // 4 + 1)[:dim]
    made = torch.where(drawn < shares, 1.0 + 2.0 * half_step(operand), 1.0)
    worth = torch.tensor([0.0, 1.0, -0.5], device=device)[_classes(match, case, rows, device)]
    made[:, :, 1::2] = worth[..., None]
    return made.reshape(operand.spec.shape)


def _keys(match: Match, operand: Operand, case: Case, seen: Tensor, device: str) -> Tensor:
    rows, dim = operand.spec.shape[-3], operand.spec.shape[-1]
    small = SMALL * (FP16_HALF_STEP if case.family == UNEVEN_HALF else half_step(operand))
    classes, generator = _classes(match, case, rows, device), seeded(case, 4, device)
    swamped = large_and_small((rows, 1, dim), SHARES[1], small, generator, device)
    swamped[::2] = torch.where(torch.arange(dim, device=device) % VECTOR == 0, LARGE, small)
    products = torch.where((classes == 2)[..., None], swamped, 1.0) * (seen.abs() > TURNED_AWAY)  # [rows, KV, D]
    scores = _scores(match, small, device)[classes] - APART * torch.rand(classes.shape, generator=generator, device=device)
    products = products * (before_cap(match, scores) / match.number("scale") / products.sum(-1).clamp_min(small))[..., None]
    return (products / torch.where(seen == 0, 1.0, seen)).reshape(operand.spec.shape)


def _scores(match: Match, light: float, device: str) -> Tensor:
    """The score of each class: a light position weighs ``light`` of a heavy one (more under a soft cap below 10)."""
    high = score_below_cap(match)
    return torch.tensor([high + math.log(light), high, high], device=device)


def score_below_cap(match: Match) -> float:
    """The score of heavy positions, well below the soft cap."""
    cap = match.number("softcap", 0.0)
    return min(HIGH, CAPPED * cap) if cap else HIGH


def before_cap(match: Match, scores: Tensor) -> Tensor:
    """What the soft cap makes these scores of."""
    cap = match.number("softcap", 0.0)
    return cap * torch.atanh((scores / cap).clamp(-0.95, 0.95)) if cap else scores
