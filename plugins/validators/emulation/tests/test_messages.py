"""Messages between the blocks of a cluster: right in every order and however late they land; every misuse is refused for its reason."""

import attrs
import numpy as np
import pytest
from agentcompile_validator_emulation.engine import Mode
from agentcompile_validator_emulation.module import SCHEDULES, Access, EmulationError, LaunchOptions
from emulation_fixtures import buffer, module

CLUSTERS, BLOCKS, WIDTH = 3, 4, 64


def run(entry: str, options: LaunchOptions, mode: Mode = Mode.CHECKED) -> tuple[np.ndarray, np.ndarray]:
    """Launch a kernel of messages.cu; return its input and output."""
    values = np.random.default_rng(5).standard_normal((CLUSTERS, BLOCKS, WIDTH)).astype(np.float32)
    out = np.zeros((CLUSTERS, WIDTH), np.float32)
    module("messages.cu", mode).launch(
        entry, (CLUSTERS * BLOCKS,), (WIDTH,), [buffer("in", values), buffer("out", out, Access.WRITE)],
        4 * BLOCKS * WIDTH + 8 if "dynamic" in entry else 0, attrs.evolve(options, deadline_s=20.0), BLOCKS)
    return values, out


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
@pytest.mark.parametrize("entry", ["clean_messages", "clean_early_expect", "clean_messages_dynamic"])
def test_sum_by_messages_is_right_in_every_order(entry, mode):
    for lazy in (False, True):
        for options in SCHEDULES:
            values, out = run(entry, attrs.evolve(options, lazy_copies=lazy), mode)
            np.testing.assert_allclose(out, values.sum(1), rtol=1e-5, atol=1e-6)


IN_FLIGHT = "message of the cluster into its shared memory is in flight|send_to_cluster: block . of the cluster has exited"
BUGS = {
    "bug_before_start": r"send_to_cluster before a cluster barrier says that block \d has started",
    "bug_no_init": "block . of the cluster has no mbarrier there|mbarrier is used before ac::mbarrier_init",
    "bug_no_init_fence": r"no cluster barrier lies between ac::mbarrier_init_fence\(\) in block .|used before ac::mbarrier_init_fence",
    "bug_fence_after_barrier": r"no cluster barrier lies between ac::mbarrier_init_fence\(\) in block .",
    "bug_exits_early": "block 3 of the cluster has exited|deadlock: .*mbarrier 0 in phase 0: 0 arrivals and 64 bytes missing",
    "bug_no_wait": f"message in flight: static.*without waiting for that mbarrier's phase|uninitialised read|{IN_FLIGHT}",
    "bug_wait_of_block": r"ac::mbarrier_wait does not acquire what other blocks sent; use ac::mbarrier_wait_cluster\(\)",
    "bug_one_thread_waits": f"message in flight: static.*without waiting for that mbarrier's phase|uninitialised read|{IN_FLIGHT}",
    "bug_less_expected": f"{IN_FLIGHT}|message in flight: static|uninitialised read|received 8 bytes that it does not expect|"
                         "deadlock: .*phase 0: 0 arrivals and -8 bytes missing",
    "bug_more_expected": "deadlock: .*mbarrier 0 in phase 0: 0 arrivals and 8 bytes missing",
    "bug_one_slot": "race: static shared memory of block . of the cluster.*message by this thread and access by a message on mbarrier 0",
    "bug_misaligned": "send_to_cluster: the address must be aligned to 8 bytes",
    "bug_not_shared": "send_to_cluster: the address is not in shared memory",
    "bug_onto_barrier": "message onto an mbarrier object of block . of the cluster",
    "bug_nobody_waits": IN_FLIGHT,
    "bug_lanes_parted": r"a cluster barrier is executed by whole warps: join the lanes by __syncwarp\(\)",
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("entry", BUGS)
def test_misuse_of_messages_is_refused_for_its_reason(entry, lazy):
    for options in SCHEDULES:
        with pytest.raises(EmulationError, match=BUGS[entry]):
            run(entry, attrs.evolve(options, lazy_copies=lazy))


@pytest.mark.parametrize("entry", ["bug_no_wait", "bug_one_thread_waits", "bug_less_expected"])
def test_a_missing_wait_shows_without_checks_too(entry):
    """What is not there yet is NaN, so the plain build errs in some order."""
    good = 0
    for options in SCHEDULES:
        try:
            values, out = run(entry, options, Mode.PLAIN)
        except EmulationError:
            continue
        good += np.allclose(out, values.sum(1), rtol=1e-5, atol=1e-5)
    assert good < len(SCHEDULES)
