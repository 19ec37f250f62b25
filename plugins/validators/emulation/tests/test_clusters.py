"""Blocks of a cluster run as one group with distributed shared memory; every misuse is refused for its reason."""

import attrs
import numpy as np
import pytest
from agentcompile_validator_emulation.engine import Mode
from agentcompile_validator_emulation.module import SCHEDULES, Access, EmulationError, LaunchOptions
from emulation_fixtures import buffer, module

CLUSTERS, BLOCKS, THREADS = 3, 4, 64


def run(entry: str, options: LaunchOptions, mode: Mode = Mode.CHECKED, cluster: int = BLOCKS) -> tuple[np.ndarray, np.ndarray]:
    """Launch a kernel of clusters.cu; return its input and output."""
    values = np.random.default_rng(5).standard_normal((CLUSTERS, BLOCKS, THREADS)).astype(np.float32)
    out = np.zeros((CLUSTERS, THREADS), np.float32)
    module("clusters.cu", mode).launch(
        entry, (CLUSTERS * BLOCKS,), (THREADS,), [buffer("in", values), buffer("out", out, Access.WRITE)],
        4 * BLOCKS * THREADS if "dynamic" in entry else 0, attrs.evolve(options, deadline_s=20.0), cluster)
    return values, out


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CHECKED])
@pytest.mark.parametrize("entry", ["clean_cluster", "clean_cluster_dynamic"])
def test_sum_over_a_cluster_is_right_in_every_order(entry, mode):
    for options in SCHEDULES:
        values, out = run(entry, options, mode)
        np.testing.assert_allclose(out, values.sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("entry", "reason"), [
    ("bug_store_before_start", r"store_to_cluster before a cluster barrier says that block \d has started"),
    ("bug_no_barrier_after_stores", "race: static shared memory.*no cluster barrier|uninitialised read|block . of the cluster has exited"),
    ("bug_relaxed_arrival", r"cluster_arrive_relaxed\(\) does not publish"),
    ("bug_block_exits_early", "block 3 of the cluster has exited|race: static shared memory|uninitialised read"),
    ("bug_one_slot_for_all", "race: static shared memory of block .*no cluster barrier between"),
    ("bug_missing_arrival", r"ac::cluster_wait\(\) without an arrival|deadlock: thread .* cluster barrier")])
def test_misuse_of_clusters_is_refused_for_its_reason(entry, reason):
    for options in SCHEDULES:
        with pytest.raises(EmulationError, match=reason):
            run(entry, options)


def test_a_module_goes_back_to_single_blocks():
    values, out = run("clean_cluster", SCHEDULES[0])
    with pytest.raises(EmulationError, match="store_to_cluster: block 1 of a cluster of 1"):
        run("clean_cluster", SCHEDULES[0], cluster=1)
    values, out = run("clean_cluster", SCHEDULES[3])
    np.testing.assert_allclose(out, values.sum(1), rtol=1e-5, atol=1e-6)


def test_a_grid_that_the_cluster_does_not_divide_is_refused():
    with pytest.raises(EmulationError, match="clusters of 8 blocks in a grid of 12: use 1 to 16, dividing the grid"):
        run("clean_cluster", SCHEDULES[0], cluster=8)
