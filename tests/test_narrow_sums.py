"""Sums in half precision of softmax, reductions and normed heads, and what finds every sum of every kernel's text."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from agentcompile_rules_transformers import testing as made
from agentcompile_rules_transformers.row_sums import ROWS_APART
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_half_precision import BY_NAME, lasting, refused
from torch import Tensor

from agentcompile_core.ops.dtypes import torch_dtype
from agentcompile_core.plugin_api import Case, DType, Graph, Match, evaluate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from mutants.narrow import narrowed  # noqa: E402
from mutants.planning import NOT_MUTATED  # noqa: E402
from mutants.sums import MORE, candidates  # noqa: E402
from mutants.text import code_only, line_at  # noqa: E402

TEMPLATES = ROOT / "plugins" / "templates_cuda"
TEXTS = {path.relative_to(TEMPLATES).as_posix(): path.read_text() for end in ("*.cu", "*.cuh") for path in sorted(TEMPLATES.rglob(end))
         if "tests" not in path.parts and not path.as_posix().endswith(NOT_MUTATED)}
ADDING = re.compile(r"[-+*/]= |\bfmaf\(|\w_sum(?:<\w+>)?\(|\bmma_\w+<|\b([\w.\[\]]+) = \1 [-+*/] ")
STEPS = {"offset", "source", "index", "i", "first", "row", "column", "base", "start", "block", "split", "c", "copy", "block_row", "vector",
         "other", "w", "term", "from", "next", "stage", "number", "workspace", "counters", "j", "bit", "round", "cell", "turn"}
VECTOR = 8
NORM = "aten.linalg_vector_norm.default"
FEW = {"derandomize": True, "database": None, "deadline": None, "phases": (Phase.generate,)}
TYPES = st.tuples(st.sampled_from([DType.F16, DType.BF16]), st.sampled_from([torch.float16, torch.bfloat16]))


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).float()


def in_vectors(terms: Tensor, lanes: int, dtype: torch.dtype) -> Tensor:
    """The sum over the last axis of terms that ``lanes`` accumulators of ``dtype`` take eight at a time, by turns."""
    padded = torch.nn.functional.pad(terms.float(), (0, -terms.shape[-1] % (VECTOR * lanes)))
    rounds = padded.reshape(*terms.shape[:-1], -1, lanes, VECTOR).transpose(-1, -2).flatten(-3, -2)
    sums = torch.zeros(rounds.shape[:-2] + rounds.shape[-1:])
    for turn in range(rounds.shape[-2]):
        sums = rounded(sums + rounds[..., turn, :], dtype)
    return sums.sum(-1)


def shown(match: Match, graph: Graph, seed: int, compute: Callable[[dict[str, Tensor]], Tensor], emulated: bool = True) -> bool:
    """Whether any of the cases that are there for sums refuses what ``compute`` makes of the inputs."""
    found = [refused(match, graph, case, compute) for case in lasting(match, seed, emulated)]  # in all of them the framework is right
    return any(found)


# ---- what finds them

@pytest.mark.parametrize("name", TEXTS)
def test_no_statement_of_a_family_that_adds_up_is_missed(name: str) -> None:
    """A sum that ``narrowed`` does not see is one that nobody tries in half precision."""
    code, edits = code_only(TEXTS[name]), [found.edit for found in narrowed(TEXTS[name])]
    for found in ADDING.finditer(code):
        if any(edit.start <= found.start() < edit.end for edit in edits):
            continue
        before = code[: found.start()].rstrip()
        stepped = re.search(r"(\w+)$", before)
        defined = re.search(r"(float|__forceinline__ \w+)\s+\w*$", code[: found.start()])  # a function of that name
        assert defined or (stepped and stepped[1] in STEPS) or found[1] in STEPS, f"{name}: {line_at(code, found.start())}"


NAMES = st.from_regex(r"[a-z][a-z_]{2,8}[a-z]", fullmatch=True).filter(lambda name: name not in ("float", "return", "maximum"))
FORMS = ("{p} += {t};", "{p} -= {t};", "{p} *= {t};", "{p} = {p} + {t};", "{p} = {t} * {p} + {t};", "{p} = {p} * {t} + other * 2.0f;",
         "{p} = fmaf({t}, {t}, {p});", "{p} = ac::warp_sum<4>({p} * {t});", "ac::mma_any<T>({p}, a, b);", "if (e < valid) {p} += {t};",
         "for (int e = 0; e < n; e += 2) {p} += {t};", "each([&](float x) {{ {p} += x; }});")
PLACES = ("{n}", "{o}.{n}", "{o}->{n}", "{n}[i][j + 1]", "{o}.{n}[a[i]]")


@given(name=NAMES, owner=NAMES, form=st.sampled_from(FORMS), place=st.sampled_from(PLACES),
       term=st.sampled_from(["x", "values[i]", "expf(s - m)", "a.b * (c + d)"]))
@settings(max_examples=60, **FEW)
def test_a_sum_is_found_whatever_it_is_called_and_wherever_it_is_kept(name: str, owner: str, form: str, place: str, term: str) -> None:
    kept = place.format(n=name, o=owner)
    statement = form.format(p=kept, t=term)
    found = [one for one in narrowed(f"float before;\n{statement}\nint after;") if one.type == "fp16"]
    assert found and all("__float2half_rn" in one.edit.replacement and kept in one.edit.replacement for one in found)
    assert not list(narrowed(f"int {name};\n{name} += 2;\n{name} = {name} + 1;\nlong long {owner} = {name};"))


# ---- what refuses them

@given(types=TYPES, columns=st.sampled_from([700, 1501, 4096]), per_lane=st.sampled_from([8, 16, 40]), seed=st.integers(0, 99))
@settings(max_examples=10, **FEW)
def test_weights_of_a_softmax_that_are_added_in_half_precision_are_refused(
        types: tuple[DType, torch.dtype], columns: int, per_lane: int, seed: int) -> None:
    match, graph = made.softmax_case(shape=(1, columns), dtype=types[0])

    def compute(tensors: dict[str, Tensor]) -> Tensor:
        weights = (tensors["in0"].float() - tensors["in0"].float().amax(-1, keepdim=True)).exp()
        return weights / in_vectors(weights, max(1, columns // per_lane), types[1])[:, None]

    assert shown(match, graph, seed, compute)


@given(dtype=st.sampled_from([DType.F16, DType.BF16]), columns=st.integers(30, 3000), seed=st.integers(0, 99), scaled=st.booleans())
@settings(max_examples=8, **FEW)
def test_a_softmax_whose_sum_is_rounded_once_is_refused(dtype: DType, columns: int, seed: int, scaled: bool) -> None:
    match, graph = made.softmax_case(shape=(1, columns), scale=0.5 if scaled else 1.0, dtype=dtype)

    def compute(tensors: dict[str, Tensor]) -> Tensor:
        scores = tensors["in0"].float() / (0.5 if scaled else 1.0)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / rounded(weights.sum(-1, keepdim=True), torch_dtype(dtype))

    assert shown(match, graph, seed, compute)


OPS: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]]] = {
    "sum": ("aten.sum.dim_IntList", (), lambda x, add: add(x)), "mean": ("aten.mean.dim", (), lambda x, add: add(x) / x.shape[-1]),
    "l1": (NORM, (1,), lambda x, add: add(x.abs())), "l2": (NORM, (), lambda x, add: add(x.square()).sqrt()),
    "var": ("aten.var.correction", (), lambda x, add: add((x - x.mean(-1, keepdim=True)).square()) / (x.shape[-1] - 1)),
    "mean of var": ("aten.var.correction", (), lambda x, add: (x - add(x)[:, None] / x.shape[-1]).square().sum(-1) / (x.shape[-1] - 1)),
}


@pytest.mark.parametrize("op", OPS)
@given(types=TYPES, columns=st.sampled_from([700, 4096]), per_lane=st.sampled_from([8, 16, 40]), seed=st.integers(0, 99),
       with_product=st.booleans())
@settings(max_examples=4, **FEW)
def test_reductions_that_add_in_half_precision_are_refused(
        op: str, types: tuple[DType, torch.dtype], columns: int, per_lane: int, seed: int, with_product: bool) -> None:
    name, arguments, reduce = OPS[op]
    before = ("mul",) if with_product else ()
    match, graph = made.reduction_case(shape=(1, columns), op=name, arguments=arguments, before=before, dtype=types[0])

    def compute(tensors: dict[str, Tensor]) -> Tensor:
        x = evaluate(match.epilogue, {name: tensor.float() for name, tensor in tensors.items()})
        return reduce(x, lambda terms: in_vectors(terms, max(1, columns // per_lane), types[1]))

    assert shown(match, graph, seed, compute)


def attended(tensors: dict[str, Tensor], case: Case, square_sum: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Tensor:
    """One KV head of 128 elements, two query heads; ``square_sum`` over normed heads, ``total`` over weights [2, positions]."""
    def head(name: str) -> Tensor:
        row = tensors[name].reshape(-1, 128).float()
        if f"{name}_norm" not in tensors:
            return row
        normal = (row * torch.rsqrt(square_sum(row)[:, None] / 128 + 1e-6)).to(tensors[name].dtype).float()
        return (normal * tensors[f"{name}_norm"].float()).to(tensors[name].dtype).float()  # in these cases nothing is rotated

    keys = torch.cat((tensors["k_cache"][0, : case.position, 0].float(), head("k")))
    values = torch.cat((tensors["v_cache"][0, : case.position, 0].float(), tensors["v"].reshape(1, 128).float()))
    scores = head("q") @ keys.T * 128**-0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights @ values / total(weights)[:, None]).reshape(1, 1, 2, 128)


@given(dtype=st.sampled_from([DType.F16, DType.BF16]), capacity=st.sampled_from([100, 160, 255]), seed=st.integers(0, 99))
@settings(max_examples=6, **FEW)
def test_an_attention_whose_denominator_is_rounded_once_is_refused(dtype: DType, capacity: int, seed: int) -> None:
    match, graph = made.attention_case(heads=(2, 1), head_dim=128, capacity=capacity, dtype=dtype)
    case = next(one for one in lasting(match, seed) if one.family == "off_step")
    late = lambda weights: rounded(weights.sum(-1), torch_dtype(dtype))  # noqa: E731
    assert refused(match, graph, case, lambda tensors: attended(tensors, case, lambda row: row.square().sum(-1), late))


@given(dtype=st.sampled_from([DType.F16, DType.BF16]), lanes=st.sampled_from([4, 8]), seed=st.integers(0, 99))
@settings(max_examples=6, **FEW)
def test_squares_of_normed_heads_that_are_added_in_half_precision_are_refused(dtype: DType, lanes: int, seed: int) -> None:
    match, graph = made.attention_case(heads=(2, 1), head_dim=128, capacity=160, rope="rms", dtype=dtype)
    case = next(one for one in lasting(match, seed) if one.family == "normed")
    squares = lambda row: in_vectors(row.square(), lanes, torch_dtype(dtype))  # noqa: E731
    assert refused(match, graph, case, lambda tensors: attended(tensors, case, squares, lambda weights: weights.sum(-1)))


def test_a_long_attention_in_bf16_whose_weights_are_added_in_fp16_is_refused() -> None:
    match, graph = made.attention_case(heads=(2, 1), head_dim=128, capacity=2048, dtype=DType.BF16)
    case = next(one for one in lasting(match, 1, emulated=False) if one.family == "uneven_half")

    def by_turns(weights: Tensor) -> Tensor:
        sums = torch.zeros(2, 64)
        for some in torch.nn.functional.pad(weights, (0, -weights.shape[-1] % 64)).reshape(2, -1, 64).unbind(1):
            sums = rounded(sums + some, torch.float16)
        return sums.sum(-1)

    assert case.position == 2047
    assert refused(match, graph, case, lambda tensors: attended(tensors, case, lambda row: row.square().sum(-1), by_turns))


def test_kernels_in_float32_are_tried_on_no_further_cases() -> None:
    for match, _ in (made.softmax_case(shape=(2, 40), dtype=DType.F32), made.reduction_case(shape=(2, 40), op="aten.amax.default"),
                     made.attention_case(heads=(2, 1), head_dim=16, capacity=64, dtype=DType.F32)):
        assert set(BY_NAME[match.kind].lasting_families(match)) <= {ROWS_APART}  # which is about maxima, not about sums


@pytest.mark.parametrize("family", sorted(MORE))
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=lambda dtype: dtype.value)
def test_the_subjects_whose_sums_are_narrowed_are_in_their_spaces(family: str, dtype: DType) -> None:
    names = {subject.name for subject in candidates(family, dtype)}
    assert {f"{family}_{name}_{dtype.value}" for name, _, _ in MORE[family][1]} <= names
