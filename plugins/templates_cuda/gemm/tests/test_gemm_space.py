"""The schedule space: bounded, legal, sensibly ordered; what is refused; and that every architecture's compiler takes the kernels."""

from pathlib import Path

import pytest
from agentcompile_cuda_kit.targets import PRESETS, capabilities, preset
from agentcompile_rules_transformers.testing import matmul_case, rows_case
from agentcompile_templates_cuda_gemm import GemmFamily
from agentcompile_templates_cuda_gemm.shape import ALONG_LINES, ALONG_TERMS, shape_of
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Expression, Feature, Match, Role, Target, check_source

FAMILY, H200 = GemmFamily(), preset("h200")
H200A = evolve(H200, arch="sm_90a", capabilities=capabilities("sm_90a"))
GOLDEN = Path(__file__).parent / "golden"
SQUARE = rows_case(rows=(4096,), n=4096, k=4096)[0]
SHAPES = {
    "square": SQUARE,
    "square_f32": rows_case(rows=(2048,), n=2048, k=2048, dtype=DType.F32)[0],
    "few_rows": rows_case(rows=(8,), n=4096, k=4096, dtype=DType.BF16)[0],
    "deep": matmul_case(shapes=((192, 65536), (65536, 192)), dtype=DType.F32)[0],
    "ragged": matmul_case(shapes=((1021, 2053), (2053, 1531)))[0],
    "heads": matmul_case(shapes=((8, 12, 256, 64), (8, 12, 256, 64)), turned="b")[0],
    "turned": matmul_case(shapes=((512, 1024), (512, 768)), turned="a", dtype=DType.BF16)[0],
    "one": matmul_case(shapes=((1, 1), (1, 1)))[0],
    "one_row": matmul_case(shapes=((1, 768), (768, 2304)), weight=True, dtype=DType.F32)[0],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_space_is_bounded_distinct_and_legal(shape: str) -> None:
    match = SHAPES[shape]
    for target in map(preset, PRESETS):
        assert FAMILY.accepts(match, target) is True
        points = FAMILY.space(match, target).points
        assert 1 <= len(points) == len(set(points)) <= 68
        for point in points[:10]:
            source = FAMILY.lower(match, point, target)
            check_source(match, source, target)
            launch, tensor = source.launches[0], point["path"] in ("tensor", "bf16x6")
            assert launch.shared_bytes <= target.shared_bytes_per_block and (Feature.MMA_SYNC in source.features) is tensor
            assert len(source.launches) == 1 + (point["splits"] > 1) and launch.grid[1] == point["splits"]


def test_first_choices_fill_the_gpu() -> None:
    first = {name: FAMILY.space(match, H200).points[0] for name, match in SHAPES.items()}
    assert (first["square"]["path"], first["square"]["splits"]) == ("wgmma", 1)
    assert first["square"].integer("rows") * first["square"].integer("columns") == 128 * 256
    assert {FAMILY.space(SHAPES[name], H200).points[0]["path"] for name in ("square_f32", "deep")} == {"bf16x6"}
    assert FAMILY.space(SHAPES["one_row"], H200).points[0]["path"] == "row"
    for name in ("deep", "few_rows"):
        assert FAMILY.lower(SHAPES[name], first[name], H200).launches[0].grid[0] * first[name].integer("splits") >= 100
    assert first["few_rows"].integer("rows") <= 32 and first["one_row"].integer("rows") <= 4


def test_vectors_are_read_where_every_one_begins_at_16_bytes() -> None:
    def read(shapes: tuple[tuple[int, ...], tuple[int, ...]], turned: str = "") -> tuple[tuple[int, int], tuple[int, int]]:
        shape = shape_of(matmul_case(shapes=shapes, turned=turned)[0])
        return (shape.a.along, shape.a.size), (shape.b.along, shape.b.size)

    assert read(((16, 32), (32, 24))) == ((ALONG_TERMS, 8), (ALONG_LINES, 8))
    assert read(((32, 16), (24, 32)), "ab") == ((ALONG_LINES, 8), (ALONG_TERMS, 8))
    assert read(((16, 36), (36, 24))) == ((ALONG_TERMS, 1), (ALONG_LINES, 8))  # rows of 72 bytes
    assert read(((15, 32), (32, 28))) == ((ALONG_TERMS, 8), (ALONG_LINES, 1))


def test_one_build_serves_many_shapes() -> None:
    other = rows_case(rows=(520,), n=1024, k=2048)[0]
    point = next(p for p in FAMILY.space(SQUARE, H200).points if p["path"] == "tensor" and p["splits"] == 1)
    assert FAMILY.lower(SQUARE, point, H200).digest == FAMILY.lower(other, point, H200).digest


def test_steps_beyond_32_bits_are_passed_as_such() -> None:
    match = matmul_case(shapes=((3, 50000, 50000), (3, 50000, 64)))[0]
    point = next(point for point in FAMILY.space(match, H200).points if point["path"] == "tensor")
    arguments = {a.name: a for a in FAMILY.lower(match, point, H200).launches[0].arguments}
    assert arguments["a_inner"].value == 50000 * 50000 and arguments["a_inner"].kind.value == "i64"


def _changed(name: str, **spec: object) -> Match:
    return evolve(SQUARE, operands=tuple(evolve(o, spec=evolve(o.spec, **spec)) if o.name == name else o for o in SQUARE.operands))


@pytest.mark.parametrize(("match", "word"), [
    (evolve(SQUARE, kind="linear"), "linear"),
    (_changed("a", dtype=DType.I8), "int8"),
    (_changed("b", dtype=DType.F32), "one type"),
    (_changed("a", strides=(1, 4096)), "contiguous"),
    (_changed("out", shape=(4096, 4095)), "expected"),
    (evolve(SQUARE, operands=SQUARE.operands[:2]), "'out'"),
    (evolve(SQUARE, epilogue=Expression(arguments=("aux7",))), "aux7"),
    (evolve(SQUARE, operands=(*SQUARE.operands, evolve(SQUARE.operands[1], name="aux0", role=Role.INPUT,
                                                      spec=evolve(SQUARE.operands[1].spec, shape=(3,))))), "repeat"),
])
def test_what_cannot_be_served_is_refused_with_a_reason(match: Match, word: str) -> None:
    verdict = FAMILY.accepts(match, H200)
    assert not verdict and word in verdict.reason


def test_what_fits_into_nothing_is_refused_with_the_target() -> None:
    verdict = FAMILY.accepts(SQUARE, evolve(H200, registers_per_sm=1024, capabilities=()))
    assert not verdict and "registers" in verdict.reason and H200.name in verdict.reason


def test_plan_header_is_golden(request: pytest.FixtureRequest) -> None:
    match = rows_case(rows=(96,), n=256, k=128, bias=True, activation="gelu", residual=True)[0]
    point = next(p for p in FAMILY.space(match, H200).points if p["path"] == "tensor" and p["splits"] == 1)
    source = FAMILY.lower(match, point, H200)
    text = dict(source.headers)["plan.cuh"].replace(source.digest, "DIGEST")
    if request.config.getoption("--update-golden", default=False):
        (GOLDEN / "plan_tensor.cuh").write_text(text, encoding="utf-8")
    assert (GOLDEN / "plan_tensor.cuh").read_text(encoding="utf-8") == text


def test_warpgroups_multiply_where_the_architecture_and_whole_vectors_allow_it() -> None:
    def paths(match: Match, target: Target) -> set[object]:
        return {point["path"] for point in FAMILY.space(match, target).points}

    assert {name for name, target in PRESETS.items() if "wgmma" in paths(SQUARE, target)} == {"h200", "h100"}
    assert paths(SQUARE, H200A) == {"simt", "tensor", "wgmma"} and FAMILY.space(SQUARE, H200A).points[0]["path"] == "wgmma"
    for name in ("square_f32", "ragged", "deep"):
        assert "wgmma" not in paths(SHAPES[name], H200A)
    for point in FAMILY.space(SQUARE, H200A).points:
        source = FAMILY.lower(SQUARE, point, H200A)
        check_source(SQUARE, source, H200A)
        assert (Feature.WGMMA in source.features) is (point["path"] == "wgmma") and len(FAMILY.space(SQUARE, H200A).points) <= 56


def test_the_space_of_warpgroups_has_clusters_and_blocks_that_stay() -> None:
    points = [point for point in FAMILY.space(SQUARE, H200A).points if point["path"] == "wgmma"]
    assert {(point["cluster"], point["resident"]) for point in points} == {(1, False), (1, True), (2, False), (2, True)}
    for point in points:
        launch = FAMILY.lower(SQUARE, point, H200A).launches[0]
        tiles = 4096 // point["rows"] * (4096 // point["columns"])
        assert launch.grid[0] == (132 if point["resident"] else tiles) and launch.cluster == point["cluster"]
        assert [argument.tiling is not None for argument in launch.arguments[:3]] == [True, True, False]
    few = [point for point in FAMILY.space(rows_case(rows=(64,), n=4096, k=4096)[0], H200A).points if point["path"] == "wgmma"]
    assert few and not any(point["resident"] for point in few) and all(point["cluster"] == 1 or point["rows"] < 64 for point in few)


@settings(derandomize=True, database=None, deadline=None, max_examples=40)
@given(data=st.data())
def test_views_reach_every_element_that_the_product_reads(data: st.DataObject) -> None:
    """The steps of a factor's view, axis by axis, against the addresses that the match says."""
    m, n, k = (8 * data.draw(st.integers(1, 4), name) for name in "mnk")
    turned, batch = data.draw(st.sampled_from(("", "a", "b", "ab"))), data.draw(st.sampled_from(((), (3,), (2, 3))))
    weight = data.draw(st.booleans())
    a, b = ((k, m) if "a" in turned else (m, k)), ((n, k) if "b" in turned else (k, n))
    match, _ = matmul_case(shapes=((*batch, *a), (*(() if weight else batch), *b)), turned=turned, weight=weight)
    shape = shape_of(match)
    for name, reading, (line, term) in (("a", shape.a, ("row", "column")), ("b", shape.b, ("column", "row"))):
        assert reading.view is not None
        outer, inner = (data.draw(st.integers(0, match.integer(axis) - 1)) for axis in ("outer", "inner"))
        at_line, at_term = (data.draw(st.integers(0, extent - 1)) for extent in ((m if name == "a" else n), k))
        wanted = match.integer(f"{name}_offset") + sum(match.integer(f"{name}_{axis}") * at for axis, at in (
            ("outer", outer), ("inner", inner), (line, at_line), (term, at_term)))
        places = (at_term, at_line) if reading.along == ALONG_TERMS else (at_line, at_term)
        coordinates = (*places, inner * reading.moves[1], outer * reading.moves[0])
        assert all(at < extent for at, extent in zip(coordinates, reading.view.extents, strict=True))
        assert reading.view.offset + sum(at * step for at, step in zip(coordinates, reading.view.steps, strict=True)) == wanted
        assert reading.view.end <= match.need(name).spec.numel and not any(step % 8 for step in reading.view.steps[1:])


@pytest.mark.parametrize("step,lines", [(0, 16), (-8, 16)])
def test_lines_that_do_not_step_forward_are_not_fetched_by_warpgroups(step: int, lines: int) -> None:
    match = matmul_case(shapes=((lines, 64), (64, 128)))[0]
    match = evolve(match, attributes=tuple({**dict(match.attributes), "a_row": step}.items()))
    assert all(point["path"] != "wgmma" for point in FAMILY.space(match, H200A).points)


@pytest.mark.compile
@pytest.mark.parametrize("cluster,turned", [(1, ""), (2, ""), (1, "ab"), (2, "ab")])
def test_products_of_warpgroups_follow_each_other_and_copies_are_found(cluster: int, turned: str) -> None:
    """Neither spills nor products that wait for each other, of which the compiler would warn; every fetch is known to the sanitizer."""
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    machine_code = pytest.importorskip("agentcompile_runtime_cuda.machine_code")
    compilers = pytest.importorskip("agentcompile_runtime_cuda.compilers")
    if not backend.can_build(H200A):
        pytest.skip(backend.can_build(H200A).reason)
    match = matmul_case(shapes=((2048, 2048),) * 2, turned=turned)[0]
    point = next(p for p in FAMILY.space(match, H200A).points if p["path"] == "wgmma" and p["cluster"] == cluster and p["columns"] == 256)
    source = FAMILY.lower(match, point, H200A)
    binary, log = compilers.choose().compile(source, H200A.arch, 120.0)
    assert "C75" not in log and "warning" not in log.lower() and backend.build(source, H200A).resources.spill_bytes == 0
    boxes = 1 if "a" not in turned else point["rows"] // 64
    boxes += 1 if "b" in turned else 256 // cluster // 64
    assert len(machine_code.bulk_copies(binary)) == boxes


@pytest.mark.compile
@pytest.mark.parametrize("name,shape,path", [
    ("a100", "square", "tensor"), ("rtx3090", "ragged", "tensor"), ("rtx4090", "square_f32", "simt"),
    ("rtx4090", "square_f32", "bf16x6"), ("a100", "deep", "bf16x6"), ("h200", "square_f32", "bf16x6"),
    ("b200", "square_f32", "bf16x6"), ("h200", "square", "tensor"),
    ("b200", "heads", "tensor"), ("rtx5090", "few_rows", "tensor"), ("h200", "square", "wgmma"), ("h200a", "turned", "wgmma")])
def test_builds_without_spills(name: str, shape: str, path: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = H200A if name == "h200a" else preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    point = next(p for p in FAMILY.space(SHAPES[shape], target).points if p["path"] == path)
    assert backend.build(FAMILY.lower(SHAPES[shape], point, target), target).resources.spill_bytes == 0
