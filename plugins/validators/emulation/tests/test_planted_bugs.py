"""Every planted mistake is refused for its own reason in every thread order, and the same kernel without it passes."""

import attrs
import numpy as np
import pytest
from agentcompile_validator_emulation.engine import Mode, build
from agentcompile_validator_emulation.module import SCHEDULES, Access, EmulationError, LaunchOptions
from agentcompile_validator_emulation.toolchain import find_toolchain
from emulation_fixtures import buffer, integer, launch, module

from agentcompile_core.plugin_api import BuildError

BLOCKS, THREADS = 2, 64


def run(entry: str, options: LaunchOptions, mode: Mode = Mode.CHECKED, *, count: int = BLOCKS * THREADS, grid: int = BLOCKS,
        block: int = THREADS, extra: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Launch a kernel of planted.cu on ``count`` elements; return its input and output."""
    values = np.random.default_rng(7).standard_normal(count).astype(np.float32)
    out = np.zeros(count, np.float32)
    arguments = [buffer("in", values), buffer("out", out, Access.WRITE), integer(count)]
    keep = []
    if extra == "merge":
        keep = [np.zeros(grid * THREADS, np.float32), np.zeros(1, np.uint32)]
        arguments += [buffer("partial", keep[0], Access.WRITE), buffer("counter", keep[1], Access.READ_WRITE)]
    if extra == "weight":
        keep = [np.full(count, 3.0, np.float32)]
        arguments.append(buffer("weight", keep[0], constant=True))
        options = attrs.evolve(options, programmatic_launch=True)
    dynamic = 256 if entry == "bug_dynamic_shared_too_small" else 512
    launch(module("planted.cu", mode), entry, arguments, grid=grid, block=block, dynamic_shared_bytes=dynamic, options=options)
    return values, out


# entry, what the message must say, launch
BUGS = [
    ("bug_missing_barrier", "race: static shared memory.*no barrier between|uninitialised read: static shared", {}),
    ("bug_missing_trailing_barrier", "race: static shared memory.*no barrier between", {}),
    ("bug_read_past_end", "out of bounds: read of 4 bytes.*argument 'in'", {}),
    ("bug_write_past_end", "out of bounds: write of 4 bytes.*argument 'out'", {"count": 100}),
    ("bug_write_read_only", "write to the read-only argument 'in' at byte 12", {}),
    ("bug_dynamic_shared_too_small", "out of bounds: write of 4 bytes", {}),
    ("bug_misaligned_vector", "misaligned 16-byte", {}),
    ("bug_misaligned_vector_of_elements", "misaligned 16-byte access to .*uint4", {}),
    ("bug_reads_its_output", "uninitialised read: argument 'out'", {}),
    ("bug_uninitialised_shared", "uninitialised read: static shared memory", {}),
    ("bug_missing_warp_barrier", "race: static shared memory|uninitialised read: static shared", {}),
    ("bug_divergent_barrier", "divergent __syncthreads: thread 0 waits at line", {}),
    ("bug_barrier_after_exit", "divergent __syncthreads: .* threads exited while", {"count": 100}),
    ("bug_divergent_shuffle", "deadlock: thread .* warp shuffle|exits while other lanes wait|have exited", {}),
    ("bug_shuffle_after_exit", "names lanes 0x80000000 that have exited|exits while other lanes wait for it in a warp shuffle", {}),
    ("bug_shared_histogram", "race: static shared memory", {}),
    ("bug_missing_cp_async_wait", "cp.async in flight", {"count": 4 * BLOCKS * THREADS}),
    ("bug_missing_bulk_wait", "bulk copy in flight|uninitialised read: dynamic", {"grid": 1}),
    ("bug_ring_refilled_too_early", "race: dynamic shared memory|bulk copy in flight|more than 1 arrivals", {"grid": 1, "count": 256}),
    ("bug_one_consumer_skips_wait", "bulk copy in flight|uninitialised read: dynamic", {"grid": 1}),
    ("bug_wrong_expected_bytes", "deadlock: .*mbarrier 0 in phase 0: 0 arrivals and 256 bytes missing", {"grid": 1}),
    ("bug_missing_init_barrier", "race: an mbarrier is used by this thread and initialised by thread 0|used before ac::mbarrier_init",
     {"grid": 1}),
    ("bug_missing_init_fence", "before ac::mbarrier_init_fence", {"grid": 1}),
    ("bug_named_barrier_count", "deadlock: thread .* named barrier 1, to which 64 of 96 threads came",
     {"grid": 1, "block": 96, "count": 64}),
    ("bug_two_blocks_write", "race: argument 'out' at byte 0.*no fence and atomic operation", {}),
    ("bug_merge_without_fence", "race: argument 'partial'.*no fence and atomic operation", {"extra": "merge"}),
    ("bug_merge_without_second_fence", "race: argument 'partial'.*no fence and atomic operation", {"extra": "merge"}),
    ("bug_merge_without_barrier", "race: argument 'partial'.*no fence and atomic operation", {"extra": "merge"}),
    ("bug_read_before_dependency_wait", r"read of argument 'in' before ac::grid_dependency_wait\(\)", {"extra": "weight"}),
    ("bug_write_before_dependency_wait", r"write of argument 'out' before ac::grid_dependency_wait\(\)", {"extra": "weight"}),
    ("bug_exit_without_dependency_wait", r"exits without ac::grid_dependency_wait\(\)", {"extra": "weight", "count": 100}),
]


@pytest.mark.parametrize(("entry", "reason", "shape"), BUGS, ids=[entry for entry, _, _ in BUGS])
def test_planted_bug_is_refused_for_its_reason_in_every_order(entry, reason, shape):
    for options in SCHEDULES:
        with pytest.raises(EmulationError, match=reason):
            run(entry, options, **shape)


def test_the_message_names_block_thread_and_source_line():
    with pytest.raises(EmulationError, match=r"block \(0,0,0\) thread \(3,0,0\): write to the read-only argument.*kernel\.cu:61\]"):
        run("bug_write_read_only", SCHEDULES[0])


CLEAN = [
    ("clean_mirror", {}, lambda x: x.reshape(-1, THREADS)[:, ::-1].ravel()),
    ("clean_two_rounds", {}, lambda x: 2 * x.reshape(-1, THREADS)[:, ::-1].ravel() + 1),
    ("clean_warp_barrier", {}, lambda x: x.reshape(-1, 2)[:, ::-1].ravel()),
    ("clean_shared_histogram", {}, lambda x: np.tile(x.reshape(-1, 8, 8).sum(1), (1, 8)).ravel()),
    ("clean_cp_async", {"count": 4 * BLOCKS * THREADS}, lambda x: x),
    ("clean_ring", {"grid": 1, "count": 640}, lambda x: x),
    ("clean_named_barrier", {"grid": 1, "block": 96, "count": 64}, lambda x: x[::-1]),
    ("clean_dependency", {"extra": "weight", "count": 100}, lambda x: 3 * x),
]


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
@pytest.mark.parametrize(("entry", "shape", "expected"), CLEAN, ids=[entry for entry, _, _ in CLEAN])
def test_clean_kernel_is_right_in_every_order(entry, shape, expected, mode):
    for options in SCHEDULES:
        values, out = run(entry, options, mode, **shape)
        np.testing.assert_allclose(out, expected(values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
def test_last_arriver_merge_is_right_in_every_order(mode):
    for options in SCHEDULES:
        values, out = run("clean_last_arriver", options, mode, extra="merge", count=250, grid=4)
        assert out[0] == pytest.approx(values.sum(dtype=np.float64), abs=1e-4)


@pytest.mark.parametrize(("entry", "twin"), [
    ("bug_missing_barrier", "clean_mirror"), ("bug_missing_trailing_barrier", "clean_two_rounds"),
    ("bug_missing_cp_async_wait", "clean_cp_async"), ("bug_ring_refilled_too_early", "clean_ring")])
def test_plain_build_gives_a_wrong_result_in_some_order(entry, twin):
    """Without instrumentation a synchronisation bug still shows in at least one of the six orders."""
    shape, expected = next((shape, expected) for name, shape, expected in CLEAN if name == twin)
    good = 0
    for options in SCHEDULES:
        try:
            values, out = run(entry, options, Mode.PLAIN, **shape)
        except EmulationError:
            continue
        good += np.allclose(out, expected(values), rtol=1e-5, atol=1e-5)
    assert good < len(SCHEDULES)


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
def test_what_a_thread_reads_before_it_sets_it_shows_in_the_result(mode):
    """No address tells of a register. Where g++ cannot fill it (before version 12), it holds what the stack held."""
    toolchain = find_toolchain()
    version = int(toolchain.version.rsplit(maxsplit=1)[-1].split(".")[0])
    assert bool(toolchain.poison_flags) == (version >= 12)
    for options in SCHEDULES:
        _, out = run("bug_first_load_left_out", options, mode)
        assert not toolchain.poison_flags or (out[:BLOCKS * THREADS // 2] < -1e38).all()


NEVER_SET = """
#include <agentcompile/ptx.cuh>
struct Span { int first, length; };
extern "C" __global__ void copy(const float* in, float* out, int count) {
  Span span%s;
  float ahead = 0.0f;
  if (threadIdx.x < span.length) ahead = in[span.first];  // what was read ahead where the guess was right
  if (span.first != 0 || span.length != count) { span.first = 0; span.length = count; ahead = in[0]; }
  for (int i = threadIdx.x; i < span.length; i += blockDim.x) out[i] = i ? in[i] : ahead;
}
"""


def test_a_variable_that_nothing_can_have_set_is_refused_though_results_are_right():
    """Whatever it holds here, the kernel sets it anew before it counts; on a device it may read anywhere."""
    with pytest.raises(BuildError, match=r"(?m)^kernel\.cu:\d+:\d+: error: .*span.*is used uninitialized"):
        build(NEVER_SET % "", {}, ("copy",), Mode.CHECKED)
    build(NEVER_SET % " = {0, 0}", {}, ("copy",), Mode.CHECKED)
    build(NEVER_SET % "", {}, ("copy",), Mode.PLAIN)


def test_messages_name_files_as_sources_do():
    text = '#include "own/mistaken.cuh"\nextern "C" __global__ void copy(const float* in, float* out, int count) {}\n'
    for mistake in ("int first = second;", "#include <agentcompile/ptx.cuh>\nint first = ac::no_such_thing;"):
        with pytest.raises(BuildError, match="refused the kernel") as caught:
            build(text, {"own/mistaken.cuh": mistake}, ("copy",), Mode.PLAIN)
        assert "own/mistaken.cuh:" in str(caught.value) and "agentcompile-private" not in str(caught.value)


def test_a_variable_that_may_have_been_set_is_not_guessed_about():
    text = NEVER_SET.replace("Span span%s;", "Span span; if (blockDim.x) { span.first = 0; span.length = 0; }")
    build(text, {}, ("copy",), Mode.CHECKED)


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
@pytest.mark.parametrize("entry", ["bug_misaligned_vector", "bug_misaligned_vector_of_elements"])
def test_a_vector_at_an_address_that_a_device_refuses_is_refused_in_every_build(entry, mode):
    for options in SCHEDULES:
        with pytest.raises(EmulationError, match="misaligned 16-byte"):
            run(entry, options, mode)


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
def test_hang_ends_at_the_deadline_and_the_module_stays_usable(mode):
    with pytest.raises(EmulationError, match=r"deadline: the launch did not end within 0\.2 s"):
        run("bug_hang", LaunchOptions(deadline_s=0.2), mode)
    values, out = run("clean_mirror", LaunchOptions(), mode)
    np.testing.assert_array_equal(out, values.reshape(-1, THREADS)[:, ::-1].ravel())


def test_exit_with_a_bulk_copy_in_flight_is_refused():
    with pytest.raises(EmulationError, match="exits while a bulk copy into its shared memory is in flight"):
        run("bug_exit_with_copy_in_flight", LaunchOptions(lazy_copies=True), count=64, grid=1)


@pytest.mark.parametrize("lazy", [False, True])
def test_exit_with_a_cp_async_in_flight_is_refused(lazy):
    """What was brought and never waited for was counted wrongly."""
    values, out = run("clean_exit_behind_cp_async", LaunchOptions(lazy_copies=lazy), count=64, grid=1)
    np.testing.assert_array_equal(out[:64], values.ravel()[:64])
    with pytest.raises(EmulationError, match=r"exits while a copy of its cp\.async into shared memory is in flight"):
        run("bug_exit_with_cp_async_in_flight", LaunchOptions(lazy_copies=lazy), count=64, grid=1)


def test_random_preemption_does_not_change_a_clean_kernel():
    for seed in range(5):
        values, out = run("clean_two_rounds", LaunchOptions(preempt_per_million=20_000, seed=seed))
        np.testing.assert_allclose(out, 2 * values.reshape(-1, THREADS)[:, ::-1].ravel() + 1, rtol=1e-5)
