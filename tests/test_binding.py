"""Argument values and the core's check of what a source declares."""

import hashlib

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve

from agentcompile_core.errors import ContractError
from agentcompile_core.ir.candidate import Feature, KernelArgument, StepSource, Tiling, Workspace, f32, i32, i64, null, pointer, tiles
from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.region import Access, Role
from agentcompile_core.ir.serial import dumps, loads
from agentcompile_core.ir.source_check import argument_values, check_source
from agentcompile_core.testing.doubles import fake_match, fake_source

MATCH, _ = fake_match()
GOOD = fake_source("honest")
H200 = PRESETS["h200"]


def with_arguments(*arguments: KernelArgument, **changes: object) -> StepSource:
    return evolve(GOOD, launches=(evolve(GOOD.launches[0], arguments=arguments),), **changes)


def with_launch(**changes: object) -> StepSource:
    return evolve(GOOD, launches=(evolve(GOOD.launches[0], **changes),))


IN0, IN1, OUT, COUNT = GOOD.launches[0].arguments
VIEW = Tiling(offset=2, extents=(2, 2), steps=(1, 3), tile=(4, 1))
TILES = tiles("in0", Role.INPUT, DType.F32, VIEW)


def test_values_are_addresses_scalars_and_null():
    launch = evolve(GOOD.launches[0], arguments=(IN0, null("bias"), OUT, i32("n", 7), i64("m", 2**40), f32("eps", 0.5)))
    assert argument_values(launch, {"in0": 4096, "out": 8192, "unused": 1}) == (4096, 0, 8192, 7, 2**40, 0.5)


def test_tiles_get_the_address_of_their_operand_and_change_the_key():
    launch = evolve(GOOD.launches[0], arguments=(TILES, OUT))
    assert argument_values(launch, {"in0": 4096, "out": 8192}) == (4096, 8192)
    with pytest.raises(ContractError, match="needs addresses of in0"):
        argument_values(launch, {"out": 8192})
    check_source(MATCH, with_arguments(TILES, IN1, OUT, COUNT), H200)
    keys = {with_arguments(evolve(TILES, tiling=view), OUT).key for view in (VIEW, evolve(VIEW, offset=1), evolve(VIEW, swizzle=128))}
    assert len(keys) == 3


def test_sources_read_back_are_equal_and_those_without_tiles_have_the_keys_they_had():
    for source in (with_arguments(TILES, OUT), GOOD):
        assert loads(dumps(source), StepSource) == source
    assert dumps(GOOD).count("tiling") == 0 < dumps(with_arguments(TILES, OUT)).count("tiling")
    before = repr((GOOD.launches, GOOD.workspaces))
    assert "tiling" not in before and GOOD.key == f"{GOOD.digest}-{hashlib.sha256(before.encode()).hexdigest()[:16]}"


def test_a_missing_address_is_named():
    with pytest.raises(ContractError, match=r"needs addresses of in1, out; there are addresses of: in0"):
        argument_values(GOOD.launches[0], {"in0": 1})


def test_a_correct_source_passes():
    check_source(MATCH, GOOD, H200)
    scratch = pointer("scratch", Role.WORKSPACE, DType.F32, Access.READ_WRITE)
    check_source(MATCH, with_arguments(IN0, IN1, OUT, scratch, COUNT, workspaces=(Workspace(name="scratch", nbytes=64),)), H200)


def test_a_second_launch_may_read_the_output():
    second = evolve(GOOD.launches[0], arguments=(pointer("out", Role.OUTPUT, DType.F32),))
    check_source(MATCH, evolve(GOOD, launches=(GOOD.launches[0], second)), H200)
    with pytest.raises(ContractError, match="before any launch has written it"):
        check_source(MATCH, evolve(GOOD, launches=(second, GOOD.launches[0])), H200)


@pytest.mark.parametrize(("source", "message"), [
    (evolve(GOOD, launches=()), "there is no launch"),
    (with_arguments(IN0, IN1, COUNT), "no launch writes output out"),
    (with_arguments(IN0, IN1, evolve(OUT, operand="other")), "'other', which is no operand or workspace"),
    (with_arguments(evolve(IN0, role=Role.WEIGHT), OUT), "has the role weight; operand in0 has input"),
    (with_arguments(evolve(IN0, dtype=DType.F16), OUT), "has the dtype float16; operand in0 has float32"),
    (with_arguments(evolve(IN0, access=Access.READ_WRITE), OUT), "writes operand in0, which may only be read"),
    (with_arguments(OUT, evolve(COUNT, value=2**31)), "is i32 but has the value 2147483648"),
    (with_arguments(OUT, evolve(COUNT, role=Role.INPUT)), "is a scalar but names an operand or a role"),
    (with_arguments(OUT, evolve(TILES, tiling=None)), "reads an operand of the match"),
    (with_arguments(OUT, evolve(TILES, operand="")), "reads an operand of the match"),
    (with_arguments(OUT, evolve(IN0, tiling=VIEW)), "belongs to an argument of the kind tiles"),
    (with_arguments(evolve(TILES, role=Role.OUTPUT, operand="out", access=Access.WRITE), OUT), "reads an operand of the match"),
    (with_arguments(evolve(TILES, operand="out", role=Role.OUTPUT), OUT), "before any launch has written it"),
    (with_arguments(evolve(TILES, role=Role.WEIGHT), OUT), "has the role weight; operand in0 has input"),
    (with_arguments(evolve(TILES, tiling=evolve(VIEW, steps=(1,))), OUT), "one number from 1 on for every axis"),
    (with_arguments(evolve(TILES, tiling=evolve(VIEW, tile=(0, 4))), OUT), "one number from 1 on for every axis"),
    (with_arguments(evolve(TILES, tiling=evolve(VIEW, extents=(), steps=(), tile=())), OUT), "one number from 1 on for every axis"),
    (with_arguments(evolve(TILES, tiling=evolve(VIEW, steps=(2, 3))), OUT), "its first step be 1"),
    (with_arguments(evolve(TILES, tiling=evolve(VIEW, offset=-1)), OUT), "must lie in the"),
    (with_arguments(evolve(TILES, tiling=evolve(VIEW, extents=(2, 10**9))), OUT), "must lie in the"),
    (with_arguments(evolve(TILES, tiling=evolve(VIEW, swizzle=96)), OUT), "a swizzle 0 or 128"),
    (with_arguments(OUT, evolve(null("x"), role=Role.INPUT)), "is null but has the role input"),
    (with_arguments(OUT, workspaces=(Workspace(name="w", nbytes=0),)), "workspace w has 0 bytes"),
    (with_arguments(OUT, workspaces=(Workspace(name="out", nbytes=8),)), "workspace names must be unique"),
    (with_launch(block=(0, 1, 1)), "block"),
    (with_launch(grid=(0, 1, 1)), "grid"),
    (with_launch(shared_bytes=300 << 10), "h200 allows"),
    (with_launch(cluster=3, grid=(4, 1, 1)), "cluster of 3"),
    (with_launch(entry="kernel"), "must carry the digest"),
])
def test_each_breach_is_refused_with_what_was_seen(source: StepSource, message: str):
    with pytest.raises(ContractError, match=message):
        check_source(MATCH, source, H200)


def test_features_of_hopper_are_refused_on_older_targets():
    source = evolve(GOOD, features=(Feature.BULK_COPY,))
    check_source(MATCH, source, H200)
    with pytest.raises(ContractError, match=r"bulk_copy, which a100 \(sm_80\) lacks"):
        check_source(MATCH, source, PRESETS["a100"])
