"""CUDA's built-in functions and ptx.cuh mean in the emulator what they mean on a GPU."""


import numpy as np
import pytest
import torch
from agentcompile_validator_emulation.engine import Mode
from agentcompile_validator_emulation.module import SCHEDULES, Access
from emulation_fixtures import KERNELS, buffer, entries_of, integer, launch, module

LANES = np.arange(32)


def run(entry, inputs, out, *, block=32, options=SCHEDULES[0], extra=()):
    """Launch one kernel of intrinsics.cu in checked mode."""
    arguments = [*(buffer(f"in{i}", array) for i, array in enumerate(inputs)), buffer("out", out, Access.READ_WRITE), *extra]
    launch(module("intrinsics.cu", Mode.CHECKED), entry, arguments, block=block, options=options)
    return out


@pytest.mark.parametrize("options", SCHEDULES)
def test_shuffles_take_the_lanes_that_cuda_defines(options):
    values = LANES.astype(np.int32) * 3
    out = run("shuffles", [values], np.zeros((6, 32), np.int32), options=options)
    segment8, segment16 = LANES // 8 * 8, LANES // 16 * 16
    sources = [np.full(32, 5), LANES ^ 3, np.where(LANES + 2 < 32, LANES + 2, LANES), np.where(LANES >= 2, LANES - 2, LANES),
               segment8 + ((LANES - segment8) ^ 4), segment16 + 1]
    np.testing.assert_array_equal(out, values[np.array(sources)])


def test_votes_matches_and_reductions():
    values = (LANES * 7 % 11).astype(np.int32)
    out = run("votes", [values], np.zeros((6, 32), np.int32)).view(np.uint32)
    for low in (0, 16):
        half = slice(low, low + 16)
        ballot = sum(1 << int(lane) for lane in LANES[half] if values[lane] > 3)
        assert set(out[0, half]) == {ballot}
        assert set(out[1, half]) == {int((values[half] == 7).any())}
        assert set(out[2, half]) == {1}
    for lane in LANES:
        assert out[3, lane] == sum(1 << int(other) for other in LANES if values[other] == values[lane])
    assert set(out[4]) == {values.sum()}
    assert set(out[5].view(np.int32)) == {values.max() - 100}


def test_block_wide_votes():
    values = (np.arange(96) % 8).astype(np.int32)
    out = run("block_votes", [values], np.zeros(96, np.int32), block=96)
    assert set(out) == {int((values > 3).sum()) * 100 + 10}


@pytest.mark.parametrize(("entry", "dtype"), [("multiply_f16", torch.float16), ("multiply_bf16", torch.bfloat16)])
def test_tensor_core_product_from_ldmatrix_fragments(entry, dtype):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 16), (8, 16)))
    out = run(entry, [t.view(torch.int16).numpy() for t in (a, b)], np.zeros((16, 8), np.float32))
    np.testing.assert_allclose(out, (a.double() @ b.double().T + 1).numpy(), rtol=1e-5, atol=1e-5)


def test_ldmatrix_transposed():
    values = np.arange(256, dtype=np.uint16)
    out = run("transpose_matrices", [values], np.zeros((4, 8, 8), np.uint16))
    np.testing.assert_array_equal(out, values.reshape(4, 8, 8).transpose(0, 2, 1))


def test_half_and_bfloat16_round_as_torch_does():
    generator = torch.Generator().manual_seed(4)
    values = torch.cat((torch.randn(500, generator=generator) * 10.0 ** torch.randint(-9, 6, (500,), generator=generator),
                        torch.tensor([0.0, -0.0, 65504.0, 65520.0, 1e-8, float("inf"), float("-inf"), 2.0**-24, 2.0**-25, 3.0 * 2**-25])))
    source, half, bfloat16 = values.numpy(), np.zeros(510, np.float32), np.zeros(510, np.float32)
    arguments = [buffer("in", source), buffer("half", half, Access.WRITE), buffer("bfloat16", bfloat16, Access.WRITE), integer(510)]
    launch(module("intrinsics.cu", Mode.CHECKED), "round_trip", arguments, grid=4, block=128)
    np.testing.assert_array_equal(half, values.half().float().numpy())
    np.testing.assert_array_equal(bfloat16, values.bfloat16().float().numpy())


def test_every_half_and_every_way_to_round_to_one_gives_the_bits_of_a_gpu():
    """Conversions are the processor's own where it has them; all NaN become the one that a GPU writes."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    generator = torch.Generator().manual_seed(5)
    floats = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 16,), generator=generator).int().view(torch.float32)
    exact = torch.from_numpy(halves.view(np.float16).astype(np.float32))
    between = torch.where(exact.isfinite(), exact, 0.0)  # exact ties, and one bit to either side of them
    between = between + (torch.nextafter(exact.half(), torch.tensor(torch.inf).half()).float().nan_to_num(0.0, 0.0, 0.0) - between) / 2
    sets = [floats, exact, between, torch.nextafter(between, torch.tensor(torch.inf)), torch.nextafter(between, torch.tensor(-torch.inf))]
    for given in sets:
        widened, narrowed = np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.uint16)
        arguments = [buffer("halves", halves), buffer("floats", given.numpy()), buffer("widened", widened, Access.WRITE),
                     buffer("narrowed", narrowed, Access.WRITE), integer(1 << 16)]
        launch(module("intrinsics.cu", Mode.PLAIN), "convert_halves", arguments, grid=128, block=256)
        wide = np.where(exact.isnan().numpy(), np.uint32(0x7FFFFFFF), exact.numpy().view(np.uint32))
        np.testing.assert_array_equal(widened.view(np.uint32), wide)
        bits = given.half().numpy().view(np.uint16)
        np.testing.assert_array_equal(narrowed, np.where(given.isnan().numpy(), np.uint16(0x7FFF), bits))


def test_atomics_return_the_old_value_and_wrap():
    out = run("atomics", [], np.zeros(10, np.uint32), block=1)
    # add 5, inc 5 -> 6, inc 6 -> 0 (wraps), inc 0 -> 1, dec 1 -> 0, cas of 0 fails twice, max 0 -> 4, exchange
    np.testing.assert_array_equal(out, [1, 0, 5, 6, 0, 1, 0, 0, 0, 4])


def test_cp_async_zero_fill():
    values = np.arange(1, 129, dtype=np.float32)
    out = run("zero_fill", [values], np.zeros(128, np.float32))
    np.testing.assert_array_equal(out.reshape(32, 4), np.where((LANES % 2 == 0)[:, None], values.reshape(32, 4), 0))


def test_three_dimensional_grids_and_blocks():
    out = np.zeros((12, 2, 3, 4), np.int32)
    module("intrinsics.cu", Mode.PLAIN).launch("coordinates", (3, 2, 2), (4, 3, 2), [buffer("out", out, Access.WRITE)])
    z, y, x = np.meshgrid(range(2), range(3), range(4), indexing="ij")
    np.testing.assert_array_equal(out, np.broadcast_to(z * 100 + y * 10 + x, out.shape))


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_test_kernels_are_real_cuda(arch, tmp_path):
    """What the emulator runs here, nvcc compiles unchanged for every architecture; so ptx.cuh compiles for all of them."""
    import shutil
    import subprocess

    from agentcompile_cuda_kit import include_dir

    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    both = tmp_path / "both.cu"
    both.write_text(f'#include "{KERNELS}/planted.cu"\n#include "{KERNELS}/intrinsics.cu"\n')
    command = [nvcc, "-std=c++17", "-cubin", f"-arch={arch}", f"-I{include_dir()}", str(both), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_kernel_of_the_test_files_is_exported():
    assert len(entries_of((KERNELS / "planted.cu").read_text())) == 45
    assert len(entries_of((KERNELS / "intrinsics.cu").read_text())) == 11
