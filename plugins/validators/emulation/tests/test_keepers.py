"""What a launch leaves behind for others: variables of the module, what is read early; and thread orders of plain runs."""

import numpy as np
import pytest
from agentcompile_validator_emulation.backend import EmulationBackend
from agentcompile_validator_emulation.checking import POSITION
from agentcompile_validator_emulation.engine import Mode
from agentcompile_validator_emulation.module import SCHEDULES, Access, Buffer, EmulationError, LaunchOptions
from agentcompile_validator_emulation.validator import EmulationValidator
from emulation_fixtures import buffer, integer, launch, module

COUNT = 64


def run(entry: str, *more) -> np.ndarray:
    values, out = np.arange(COUNT, dtype=np.float32), np.zeros(COUNT, np.float32)
    launch(module("keepers.cu", Mode.CHECKED), entry, [buffer("in", values), buffer("out", out, Access.WRITE), *more])
    return out


@pytest.mark.parametrize("entry", ["keeps_a_count", "counts_atomically"])
def test_a_kernel_may_keep_nothing_from_one_launch_to_the_next(entry):
    with pytest.raises(EmulationError, match="write to a variable of the module: a kernel may keep nothing"):
        run(entry, integer(COUNT))


def test_constants_of_the_module_may_be_read():
    np.testing.assert_array_equal(run("reads_a_table", integer(COUNT)), np.arange(COUNT) * (np.arange(COUNT) % 4 + 1))


def position(published: bool) -> tuple[np.ndarray, Buffer]:
    value = np.zeros(1, np.int64)
    return value, Buffer(name=POSITION, address=value.ctypes.data, nbytes=8, published=published)


def test_a_counter_that_others_read_early_moves_after_a_fence():
    value, argument = position(published=True)
    run("advances_after_a_fence", argument)
    assert value[0] == 1
    with pytest.raises(EmulationError, match=r"write to 'position' without __threadfence\(\) after this thread's earlier writes"):
        run("advances_without_a_fence", argument)


def test_a_state_that_nobody_reads_early_needs_no_fence():
    value, argument = position(published=False)
    run("advances_without_a_fence", argument)
    assert value[0] == 1


def copied_early(entry: str, count: int, read: int) -> np.ndarray:
    values, out = np.arange(count, dtype=np.int64), np.zeros(5 * read, np.int64)
    launch(module("keepers.cu", Mode.CHECKED), entry, [buffer("in", values, Access.READ), buffer("out", out, Access.WRITE), integer(read)],
           grid=5, block=32, options=LaunchOptions(programmatic_launch=True))
    return out.reshape(5, read)


def test_an_index_that_nobody_calls_complete_is_another_one_in_most_blocks():
    """The right one, the one before, others in some places, none at all; and each block sees what it would see in the next run."""
    found, right = copied_early("copies_unsettled", 6, 6), np.arange(6)
    np.testing.assert_array_equal(found[[0, 4]], [right, right])
    np.testing.assert_array_equal(found[1], right - 1)
    assert 0 < (found[2] != right).sum() < 6 and found[2].min() >= 0
    assert (found[3] > 1 << 31).all() and (found[3].astype(np.int32) == right).all()


def test_an_index_that_nobody_calls_complete_is_read_inside_its_array_and_no_other_way():
    with pytest.raises(EmulationError, match="out of bounds: read of 8 bytes"):
        copied_early("copies_unsettled", 6, 7)
    with pytest.raises(EmulationError, match=r"read of argument 'in' before ac::grid_dependency_wait\(\)"):
        copied_early("copies_as_if_settled", 6, 6)


def test_a_loop_beyond_a_shared_array_is_not_optimised_away():
    with pytest.raises(EmulationError, match=r"out of bounds|uninitialised read: static shared"):
        run("sums_beyond_an_array", integer(COUNT))


def test_every_launch_that_is_prepared_and_every_run_of_it_gets_another_thread_order():
    """Runs of a plain build differ in order of threads and copies, so that whoever compares two of them sees what depends on it."""
    backend, trial = EmulationBackend(), EmulationValidator().controls(EmulationBackend())[0][0]
    seen, seeds = [], []

    class Prepared:
        def reorder(self, order, seed):
            seen.append((order.order, order.warp_skewed, order.lazy_copies))
            seeds.append(seed)

        def __call__(self):
            pass

    class Recorder:
        def prepare(self, entry, grid, block, arguments, shared_bytes, options, cluster):
            return Prepared()

    runs = [backend.prepare_launch(Recorder(), trial.source.launches[0], (0, 0, 0), pdl=True) for _ in range(len(SCHEDULES))]
    for run in runs:
        run(0)
    assert len(set(seen)) == len(SCHEDULES)
    seen.clear()
    for _ in range(len(SCHEDULES)):
        runs[0](0)
    assert len(set(seen)) == len(SCHEDULES)
    seeds.clear()
    for _ in range(100):
        runs[0](0)
    assert len(set(seeds)) == 100
