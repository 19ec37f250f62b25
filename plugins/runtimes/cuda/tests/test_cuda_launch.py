"""Launches against a library built from NVIDIA's own cuda.h that writes down what it is given: no GPU needed."""

import ctypes
import gc
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from agentcompile_runtime_cuda import driver, headers, launching
from agentcompile_runtime_cuda.backend import CudaBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import ArgumentKind, ContractError, DType, KernelArgument, Launch, Reject, Role, Tiling, tiles

ARGUMENTS = tuple(KernelArgument(name=kind.value, kind=kind) for kind in
                  (ArgumentKind.POINTER, ArgumentKind.I32, ArgumentKind.I64, ArgumentKind.F32))
BINARY = b"\x7fELF and more"
pytestmark = pytest.mark.usefixtures("young_heap")


class Seen(ctypes.Structure):
    """The struct of the same name in fake_driver.cpp."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("attribute_count", ctypes.c_uint), ("attribute_ids", ctypes.c_uint * 4), ("cluster", ctypes.c_uint * 3),
        ("programmatic", ctypes.c_int), ("attribute", ctypes.c_int), ("attribute_value", ctypes.c_int),
        ("launches", ctypes.c_int), ("loads", ctypes.c_int), ("stream", ctypes.c_ulonglong),
        ("function", ctypes.c_ulonglong), ("pointer", ctypes.c_ulonglong), ("i32", ctypes.c_int),
        ("i64", ctypes.c_longlong), ("f32", ctypes.c_float), ("tiles", ctypes.c_ulonglong * 16),
    )


class Fake:
    """The fake driver and what it saw."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.seen_by_fake.restype = ctypes.POINTER(Seen)
        self.driver = driver.Driver(self.library)

    @property
    def seen(self) -> Seen:
        return self.library.seen_by_fake().contents

    def kernel(self) -> launching.LoadedKernel:
        return launching.LoadedKernel(self.driver, BINARY, "sha")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    include = next((path for path in headers.cuda_includes() if (path / "cuda.h").is_file()), None)
    if include is None or shutil.which("g++") is None:
        pytest.skip("needs cuda.h and g++")
    path = tmp_path_factory.mktemp("fake") / "libfake.so"
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", f"-I{include}", "-o", str(path),
                    str(Path(__file__).with_name("fake_driver.cpp"))], check=True)
    return Fake(path)


def launch(**changes: object) -> Launch:
    values = {"entry": "entry", "grid": (1, 2, 3), "block": (4, 5, 6), "arguments": ARGUMENTS, **changes}
    return Launch(**values)  # type: ignore[arg-type]


def test_a_launch_arrives_as_it_was_prepared(fake: Fake) -> None:
    run = launching.prepare(fake.kernel(), launch(shared_bytes=777), (0xFFFF_8000_DEAD_BEEF, -5, -(2**40), 0.1), False)
    gc.collect()
    before = fake.seen.launches
    run(0x7FFF_0000_1230)
    seen = fake.seen
    assert (tuple(seen.grid), tuple(seen.block), seen.shared_bytes) == ((1, 2, 3), (4, 5, 6), 777)
    assert (seen.pointer, seen.i32, seen.i64) == (0xFFFF_8000_DEAD_BEEF, -5, -(2**40))
    assert seen.f32 == pytest.approx(0.1, rel=1e-6)
    assert (seen.stream, seen.function) == (0x7FFF_0000_1230, 0xFFFF_8000_0000_2000)
    assert seen.attribute_count == 0 and seen.launches == before + 1
    run(0)
    assert fake.seen.stream == 0 and fake.seen.launches == before + 2


def test_addresses_of_a_run_take_the_places_of_those_that_were_prepared(fake: Fake) -> None:
    backend, kernel = CudaBackend(), fake.kernel()
    run = backend.prepare_moving(kernel, launch(), (1, -5, -(2**40), 0.5), False, (0,))
    stays = backend.prepare_launch(kernel, launch(), (7, 8, 9, 0.25), False)
    assert run is not None
    gc.collect()
    for address in (0xFFFF_8000_DEAD_BEEF, 0, 16):
        run(3, address)
        assert (fake.seen.pointer, fake.seen.i32, fake.seen.i64, fake.seen.f32, fake.seen.stream) == (address, -5, -(2**40), 0.5, 3)
        stays(4)
        assert (fake.seen.pointer, fake.seen.i32, fake.seen.stream) == (7, 8, 4)
    with pytest.raises(ValueError, match="size"):
        run(0, 1, 2)


def test_a_launch_whose_tiles_move_is_prepared_anew(fake: Fake) -> None:
    one = launch(arguments=(tiles("x", Role.INPUT, DType.F16, Tiling(offset=0, extents=(8,), steps=(1,), tile=(8,))),))
    assert CudaBackend().prepare_moving(fake.kernel(), one, (256,), False, (0,)) is None


@settings(derandomize=True, database=None, deadline=None, max_examples=40)
@given(address=st.integers(0, 2**64 - 1), i32=st.integers(-(2**31), 2**31 - 1), i64=st.integers(-(2**63), 2**63 - 1),
       f32=st.floats(width=32, allow_nan=False))
def test_every_value_of_a_type_arrives(fake: Fake, address: int, i32: int, i64: int, f32: float) -> None:
    launching.prepare(fake.kernel(), launch(), (address, i32, i64, f32), False)(1)
    assert (fake.seen.pointer, fake.seen.i32, fake.seen.i64, fake.seen.f32) == (address, i32, i64, f32)


def test_numbers_arrive_as_their_types_have_them(fake: Fake) -> None:
    launching.prepare(fake.kernel(), launch(), (2.0**40, -7.0, 2.0**40, 3), False)(1)
    assert (fake.seen.pointer, fake.seen.i32, fake.seen.i64, fake.seen.f32) == (2**40, -7, 2**40, 3.0)
    launching.prepare(fake.kernel(), launch(), (1, 2, 3, 1e300), False)(1)
    assert fake.seen.f32 == float("inf")


def test_launches_of_many_kinds_are_packed_each_by_its_own(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is kept of their layouts is full, and where a tuple lies where another one was."""
    monkeypatch.setattr(launching, "LAYOUTS", 3)
    for turn in range(20):
        turned = [ARGUMENTS[(place + turn) % 4] for place in range(4)]
        values = {ArgumentKind.POINTER: turn, ArgumentKind.I32: -turn, ArgumentKind.I64: -(2**40) - turn, ArgumentKind.F32: turn / 4}
        cells, kept = launching.pack(tuple(turned), [values[one.kind] for one in turned], fake.driver)
        types = {ArgumentKind.POINTER: ctypes.c_uint64, ArgumentKind.I32: ctypes.c_int32, ArgumentKind.I64: ctypes.c_int64,
                 ArgumentKind.F32: ctypes.c_float}
        assert [types[one.kind].from_address(cells[place]).value for place, one in enumerate(turned)] == [values[o.kind] for o in turned]
        del turned, cells, kept


@pytest.mark.parametrize(("index", "value"), [(0, -1), (0, 2**64), (1, 2**31), (1, 1.5), (2, 2**63)])
def test_a_value_that_does_not_fit_is_refused(fake: Fake, index: int, value: float) -> None:
    values = [0, 0, 0, 0.0]
    values[index] = value
    with pytest.raises(ContractError, match=f"argument '{ARGUMENTS[index].name}' is"):
        launching.prepare(fake.kernel(), launch(), values, False)


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    """Views of up to four axes and tiles of them."""
    axes = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(1, 256), min_size=axes, max_size=axes).map(tuple)
    return Tiling(offset=8 * draw(st.integers(0, 9)), extents=draw(sizes), tile=draw(sizes), swizzle=draw(st.sampled_from((0, 128))),
                  steps=(1, *draw(st.lists(st.integers(1, 2**30).map(lambda step: 8 * step), min_size=axes - 1, max_size=axes - 1))))


def encoded(address: int, dtype: DType, tiling: Tiling) -> list[int]:
    """What the fake driver writes into a tensor map."""
    axes = len(tiling.extents)
    words = [address + 2 * tiling.offset, (dtype is DType.BF16) | axes << 1 | bool(tiling.swizzle) << 4 | 3 << 5]
    groups = (tiling.extents, tuple(2 * step for step in tiling.steps[1:]), tuple(1000 + size for size in tiling.tile))
    for values in groups:
        words += [*values, *(0,) * (4 - len(values))]
    return [*words, *(0,) * (16 - len(words))]


@settings(derandomize=True, database=None, deadline=None, max_examples=40)
@given(address=st.integers(1, 2**48).map(lambda value: 16 * value), dtype=st.sampled_from((DType.F16, DType.BF16)), tiling=tilings())
def test_tiles_become_a_tensor_map_of_their_operand(fake: Fake, address: int, dtype: DType, tiling: Tiling) -> None:
    argument = tiles("a", Role.INPUT, dtype, tiling)
    run = launching.prepare(fake.kernel(), launch(arguments=(*ARGUMENTS, argument)), (1, 2, 3, 4.0, address), False)
    gc.collect()
    run(0)
    assert list(fake.seen.tiles) == encoded(address, dtype, tiling)


def test_tiles_that_the_driver_refuses_are_an_error_with_its_name(fake: Fake) -> None:
    eight = Tiling(extents=(8,), steps=(1,), tile=(8,))
    arguments = (*ARGUMENTS, tiles("a", Role.INPUT, DType.F16, eight))
    with pytest.raises(driver.CudaError, match="encoding a tensor map failed"):
        launching.prepare(fake.kernel(), launch(arguments=arguments), (0, 0, 0, 0, 8), False)
    for wrong in (tiles("a", Role.INPUT, DType.BOOL, eight), KernelArgument(name="a", kind=ArgumentKind.TILES)):
        with pytest.raises(ContractError, match="argument 'a' is tiles of"):
            launching.prepare(fake.kernel(), launch(arguments=(*ARGUMENTS, wrong)), (0, 0, 0, 0, 0), False)


def test_the_launcher_of_a_bundle_makes_the_same_tensor_map(fake: Fake, tmp_path: Path) -> None:
    pybind11 = pytest.importorskip("pybind11")
    from agentcompile_runtime_cuda.extension import tiles_of

    source = Path(launching.__file__).parent / "extension" / "files" / "launcher.cpp.in"
    module = tmp_path / f"_launcher{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["g++", "-std=c++17", "-O0", "-shared", "-fPIC", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}",
                    "-x", "c++", str(source), "-o", str(module)], check=True)
    (tmp_path / "libcuda.so.1").symlink_to(fake.path)
    tiling = Tiling(offset=16, extents=(40, 7, 3, 2), steps=(1, 48, 8, 4096), tile=(64, 128, 1, 1), swizzle=128)
    code = ("import ctypes, json, sys, _launcher\n"
            "tiles = json.loads(sys.argv[1])\n"
            "made = _launcher.encode_tiles(4096, **tiles)\n"
            "f = _launcher.Function(b'\\x7fELF', 'entry', 0)\n"
            "f.launch((1, 1, 1), (1, 1, 1), 'pilft', [1, 2, 3, 4.0, made], 0, 1, False)\n"
            "print(json.dumps([int.from_bytes(made[8 * i:8 * i + 8], 'little') for i in range(16)]))\n"
            "library = ctypes.CDLL('libcuda.so.1')\n"
            "library.seen_by_fake.restype = ctypes.POINTER(ctypes.c_char * 400)\n"
            "print(made in bytes(library.seen_by_fake().contents))")
    done = subprocess.run([sys.executable, "-c", code, json.dumps(tiles_of(DType.BF16, tiling))], cwd=tmp_path, text=True, check=False,
                          capture_output=True, env={"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    words, arrived = done.stdout.splitlines()
    assert json.loads(words) == encoded(4096, DType.BF16, tiling) and arrived == "True"


def test_a_wrong_number_of_values_is_refused(fake: Fake) -> None:
    with pytest.raises(ContractError, match="has 4 arguments and was given 3 values"):
        launching.prepare(fake.kernel(), launch(), (0, 0, 0), False)


def test_the_pdl_attribute_needs_the_source_and_the_caller(fake: Fake) -> None:
    for declared, asked in ((True, True), (True, False), (False, True)):
        launching.prepare(fake.kernel(), launch(pdl=declared), (0, 0, 0, 0), asked)(0)
        assert fake.seen.programmatic == int(declared and asked)
        assert fake.seen.attribute_count == int(declared and asked)


def test_clusters_and_pdl_together(fake: Fake) -> None:
    launching.prepare(fake.kernel(), launch(cluster=4, pdl=True), (0, 0, 0, 0), True)(0)
    assert (fake.seen.attribute_count, tuple(fake.seen.cluster), fake.seen.programmatic) == (2, (4, 1, 1), 1)


def test_shared_memory_is_asked_for_and_never_lowered(fake: Fake) -> None:
    kernel = fake.kernel()
    fake.seen.attribute = 0
    kernel.function(launch())
    assert fake.seen.attribute == 0
    kernel.function(launch(shared_bytes=48 << 10))
    assert (fake.seen.attribute, fake.seen.attribute_value) == (8, 48 << 10), "with the kernel's own it is more than the driver gives"
    kernel.function(launch(shared_bytes=200_000))
    assert (fake.seen.attribute, fake.seen.attribute_value) == (8, 200_000)
    kernel.function(launch(shared_bytes=100_000))
    assert fake.seen.attribute_value == 200_000


def test_large_clusters_are_asked_for(fake: Fake) -> None:
    fake.seen.attribute = 0
    fake.kernel().function(launch(cluster=16))
    assert (fake.seen.attribute, fake.seen.attribute_value) == (14, 1)


def test_errors_of_the_driver_have_their_names(fake: Fake) -> None:
    run = launching.prepare(fake.kernel(), launch(), (0, 0, 0, 0), False)
    fake.library.fail_next_launch(700)
    words = r"launching entry failed: an illegal memory access was encountered \(CUDA_ERROR_ILLEGAL_ADDRESS, 700\)"
    with pytest.raises(driver.CudaError, match=words) as caught:
        run(0)
    assert caught.value.code == 700 and isinstance(caught.value, RuntimeError)
    run(0)
    with pytest.raises(driver.CudaError, match=r"looking up kernel absent failed: unknown error \(CUDA_ERROR_NOT_FOUND"):
        fake.kernel().function(launch(entry="absent"))
    with pytest.raises(driver.CudaError, match=r"CUDA_ERROR_INVALID_IMAGE"):
        launching.LoadedKernel(fake.driver, b"garbage", "sha")


def test_a_launch_costs_the_host_little(fake: Fake) -> None:
    run = launching.prepare(fake.kernel(), launch(), (0, 0, 0, 0), True)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(2000):
            run(0)
        best = min(best, (time.perf_counter() - start) / 2000)
    assert best < 10e-6, f"{best * 1e6:.1f} us a launch, without what the driver adds"


def test_a_machine_without_a_gpu_is_told_why() -> None:
    import torch

    backend = CudaBackend()
    answer = backend.available()
    if torch.cuda.is_available():
        assert answer is True
    else:
        assert isinstance(answer, Reject) and answer.reason.startswith("torch")
        assert backend.live_target() is None
        assert backend.time(lambda stream: None, repetitions=1, runs_per_repetition=1) == answer
