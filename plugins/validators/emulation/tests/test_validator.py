"""The plugin's two offers: what the validator refuses, and kernels run through the backend as the core runs them."""

import ctypes
import os
import re
import shutil
from pathlib import Path

import attrs
import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS, preset
from agentcompile_validator_emulation import backend as backend_module
from agentcompile_validator_emulation import engine, toolchain
from agentcompile_validator_emulation.backend import EmulationBackend
from agentcompile_validator_emulation.checking import run_checked
from agentcompile_validator_emulation.module import Buffer, EmulatedModule
from agentcompile_validator_emulation.validator import EmulationValidator

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import (
    BuildError,
    Cause,
    ContractError,
    DType,
    Feature,
    Outcome,
    Reject,
    Role,
    Tiling,
    UsageError,
    argument_values,
    check_source,
    f32,
    i64,
    tiles,
)
from agentcompile_core.worker.execution import Execution


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this module's own without kernels; the emulator itself, ten seconds of a compiler, is the one that others build with."""
    folder = tmp_path_factory.mktemp("cache")
    engine.prepare()
    for made in (path for path in engine.default_cache_folder().iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)):
        shutil.copytree(made, folder / made.name)
    return folder


def inputs_of(trial):
    return Execution(trial, EmulationBackend(), None).inputs(trial.cases[0], "cpu")


GOOD, BAD = EmulationValidator().controls(EmulationBackend())


def test_plugin_offers_backend_and_validator_through_the_loader():
    import agentcompile_validator_emulation as plugin

    catalog = load_catalog(only=(), strict=True, extra=[("emulation", plugin)])
    assert [b.name for b in catalog.backends.values()] == ["emulation"]
    assert "emulation" in [v.name for v in catalog.validators.values()]


@pytest.mark.parametrize("trial", [*GOOD, *BAD])
def test_controls_meet_the_cores_rules_for_sources(trial):
    check_source(trial.match, trial.source, trial.target)
    trial.graph.verify()


@pytest.mark.parametrize("trial", GOOD)
def test_good_controls_pass_both_thread_orders(trial):
    verdict = EmulationValidator().check(trial, Execution(trial, EmulationBackend(), None))
    assert verdict.outcome is Outcome.PASS
    assert len(verdict.checks) == 2


@pytest.mark.parametrize(("trial", "reason", "cause"), [
    (BAD[0], r"kernel twice_kernel_\w+, block \(0,0,0\) thread \(\d+,0,0\): uninitialised read: static shared memory", Cause.CONTRACT),
    (BAD[1], r"kernel twice_kernel_\w+, block \(7,0,0\) thread \(103,0,0\): out of bounds: write of 4 bytes, 0 bytes past the end of "
             r"argument 'out' \(element 1000\)", Cause.MEMORY_FAULT),
    (BAD[2], r"block \(0,0,0\).* read of argument 'in' before ac::grid_dependency_wait\(\)", Cause.CONTRACT)],
    ids=["barrier", "bounds", "dependency"])
def test_bad_controls_are_refused_for_their_reason(trial, reason, cause):
    verdict = EmulationValidator().check(trial, Execution(trial, EmulationBackend(), None))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.cause is cause
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(verdict.message)


def test_on_a_backend_of_another_language_it_says_so_in_one_clause():
    other = type("Other", (EmulationBackend,), {"name": "other", "languages": ("c",)})()
    with pytest.raises(ContractError, match=r"^it judges cuda sources alone, and the backend other builds c$"):
        EmulationValidator().controls(other)


def test_validator_leaves_large_and_unknown_sources_to_others():
    validator, trial = EmulationValidator(), GOOD[0]
    assert validator.applies(trial)
    later = attrs.evolve(trial.source, features=(Feature.WGMMA, "tcgen05"))
    assert not validator.applies(attrs.evolve(trial, source=later))
    operand = trial.match.operands[0]
    huge = attrs.evolve(operand, spec=attrs.evolve(operand.spec, shape=(1 << 24,)))
    assert not validator.applies(attrs.evolve(trial, match=attrs.evolve(trial.match, operands=(huge, trial.match.operands[1]))))


def test_backend_can_build_for_every_target():
    assert all(EmulationBackend().can_build(preset(name)) is True for name in PRESETS)


def test_backend_builds_loads_and_computes(cache, tmp_path):
    backend, trial = EmulationBackend(cache), GOOD[0]
    kernel = backend.build(trial.source, preset("b200"))
    tensors = {**inputs_of(trial), "out": torch.zeros(1000)}
    handle = EmulationBackend(tmp_path / "elsewhere").load(kernel)  # from the binary alone
    launch = trial.source.launches[0]
    run = backend.prepare_launch(handle, launch, argument_values(launch, {name: t.data_ptr() for name, t in tensors.items()}), pdl=True)
    run(0)
    torch.testing.assert_close(tensors["out"], 2 * tensors["in0"], rtol=0, atol=0)
    tensors["in0"].neg_()
    run(0)
    torch.testing.assert_close(tensors["out"], 2 * tensors["in0"], rtol=0, atol=0)


def test_backend_never_times():
    answer = EmulationBackend().time(lambda stream: None, repetitions=1, runs_per_repetition=1)
    assert isinstance(answer, Reject)
    assert "provisional" in answer.reason


def test_backend_refuses_what_it_cannot_emulate(cache):
    backend, source = EmulationBackend(cache), GOOD[0].source
    with pytest.raises(BuildError, match="the emulator has no tcgen05"):
        backend.build(attrs.evolve(source, features=(Feature.WGMMA, "tcgen05")), preset("h200"))
    tiling = Tiling(extents=(8,) * 5, steps=(1, 8, 64, 512, 4096), tile=(8,) * 5)
    launch = attrs.evolve(source.launches[0], arguments=(tiles("in", Role.INPUT, DType.F16, tiling),))
    with pytest.raises(BuildError, match=r"the emulator fetches tiles of at most 4 axes, not of 5 \(in\)"):
        backend.build(attrs.evolve(source, launches=(launch,)), preset("h200"))
    with pytest.raises(BuildError, match=r"(?s)g.. refused the kernel.*kernel.cu:.*error"):
        backend.build(attrs.evolve(source, code=source.code.replace("const int last", "const in last")), preset("h200"))


def test_backend_refuses_a_damaged_binary(cache, tmp_path):
    kernel = EmulationBackend(cache).build(GOOD[0].source, preset("h200"))
    broken = attrs.evolve(kernel, binary=kernel.binary[:-1] + b"\0\0")
    with pytest.raises(UsageError, match="is damaged; build it again"):
        EmulationBackend(tmp_path / "other").load(broken)
    with pytest.raises(UsageError, match="backend 'cuda' was given to backend emulation"):
        EmulationBackend(cache).load(attrs.evolve(kernel, backend="cuda"))


def test_missing_compiler_gives_one_sentence(monkeypatch):
    toolchain.find_toolchain.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    answer = EmulationBackend().available()
    toolchain.find_toolchain.cache_clear()
    assert isinstance(answer, Reject)
    assert answer.reason == "the emulator needs g++ (12 or newer recommended), which is not on PATH; install the package g++"


def configured(compiler: str) -> EmulationBackend:
    backend = EmulationBackend()
    backend.configure(attrs.evolve(backend.settings, compiler=compiler))
    return backend


def test_the_compiler_is_a_setting_and_what_is_no_gxx_is_refused_in_one_sentence(tmp_path):
    answers = {}
    for name, said in {"clang++": "clang version 18.1.3", "silent": "", "g++-42": None}.items():
        path = tmp_path / name
        if said is not None:
            path.write_text(f"#!/bin/sh\necho '{said}'\n")
            path.chmod(0o755)
        answers[name] = configured(str(path)).available()
    assert all(isinstance(answer, Reject) for answer in answers.values())
    assert all(answer.reason.startswith("compiler of [plugin.emulation] is '") for answer in answers.values())
    assert "no g++ (it calls itself 'clang version 18.1.3'); name a g++" in answers["clang++"].reason
    assert "which is no program; name a g++ on PATH or by its path" in answers["g++-42"].reason


def test_kernels_are_built_by_the_compiler_that_is_set(tmp_path, cache):
    wrapped = tmp_path / "my-g++"
    wrapped.write_text(f'#!/bin/sh\necho used >> {tmp_path}/log\nexec {shutil.which("g++")} "$@"\n')
    wrapped.chmod(0o755)
    engine.prepare(cache)  # the emulator itself, which takes this compiler ten seconds, is here already; no kernel is
    for folder in (path for path in cache.iterdir() if path.is_dir()):
        shutil.copytree(folder, tmp_path / "cache" / folder.name, copy_function=os.link)
    backend = EmulationBackend(tmp_path / "cache")
    backend.configure(attrs.evolve(backend.settings, compiler=str(wrapped)))
    assert backend.available() is True and backend.compiler() == EmulationBackend(cache).compiler(), "the same g++ under another name"
    backend.build(GOOD[0].source, preset("h200"))
    assert len((tmp_path / "log").read_text().splitlines()) >= 2, "it compiled and linked the kernel"


def test_missing_headers_give_one_sentence(monkeypatch, tmp_path):
    toolchain.find_toolchain.cache_clear()
    monkeypatch.setattr(toolchain, "_header_candidates", lambda: [tmp_path])
    answer = EmulationBackend().available()
    toolchain.find_toolchain.cache_clear()
    assert isinstance(answer, Reject)
    assert answer.reason.startswith("the emulator found no CUDA headers")


def test_a_cache_that_others_can_write_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(BuildError, match="writable for others; set AGENTCOMPILE_CACHE_DIR"):
        EmulationBackend(shared).build(GOOD[0].source, preset("h200"))


def test_run_checked_needs_every_operand():
    trial = GOOD[0]
    tensors = {o.name: torch.zeros(o.spec.shape) for o in trial.match.operands if o.role is Role.INPUT}
    with pytest.raises(UsageError, match="argument out needs a contiguous CPU tensor 'out', which is missing"):
        run_checked(trial.source, tensors)


def test_scalars_are_passed_by_kind():
    assert isinstance(backend_module.launch_argument(f32("x", 0.0), 1.5), ctypes.c_float)
    assert backend_module.launch_argument(i64("x", 0), 1 << 40).value == 1 << 40


def test_many_modules_share_one_set_of_stacks(cache):
    """A worker loads hundreds of kernels into one process: mappings must not grow with the threads of each."""
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)

    trial = GOOD[0]
    tensors = {**inputs_of(trial), "out": torch.zeros(1000)}
    grown = []
    for number in range(3):
        source = attrs.evolve(trial.source, code=trial.source.code + f"// {number}\n")
        before = mappings()
        run_checked(source, tensors, cache_folder=cache)
        grown.append(mappings() - before)
    assert grown[-1] < 40


def test_cache_forgets_what_was_unused_for_a_month(tmp_path):
    import time

    old, recent = tmp_path / "old.so", tmp_path / "recent.so"
    for path, days in ((old, 31), (recent, 5)):
        path.write_bytes(b"")
        os.utime(path, (time.time() - days * 86400,) * 2)
    engine._forget_unused(tmp_path)  # as before it compiles itself anew
    assert not old.exists()
    assert recent.exists()


def test_a_compiler_is_stopped_at_the_deadline(cache):
    from agentcompile_validator_emulation.engine import build

    build('extern "C" __global__ void nothing() {}', {}, ["nothing"], cache_folder=cache)  # the emulator itself
    with pytest.raises(BuildError, match=r"did not finish within 0\.001 s"):
        build('extern "C" __global__ void slow() {}', {}, ["slow"], cache_folder=cache, deadline_s=0.001)


def test_the_sweep_of_the_cache_passes_over_folders_that_another_process_removes(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "old.so").touch()
        os.utime(tmp_path / name / "old.so", (0, 0))
    is_file = Path.is_file

    def beside_another_process(path):
        for folder in (tmp_path / name for name in "ab" if path.name == "old.so"):
            if folder != path.parent:
                shutil.rmtree(folder, ignore_errors=True)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", beside_another_process)
    engine._forget_unused(tmp_path)
    assert list(tmp_path.glob("*/*.so")) == []


def test_a_kernel_is_linked_where_the_faster_linker_is_not_for_this_compiler(cache, monkeypatch):
    found = attrs.evolve(toolchain.find_toolchain(), linker_flags=("-fuse-ld=none_such",))
    monkeypatch.setattr(engine, "find_toolchain", lambda compiler: found)
    library = engine.build('extern "C" __global__ void linked(int* out) { *out = 3; }', {}, ["linked"], cache_folder=cache)
    out = torch.zeros(1, dtype=torch.int32)
    EmulatedModule(library, checked=False).launch("linked", (1,), (1,), [Buffer(name="out", address=out.data_ptr(), nbytes=4)])
    assert out.item() == 3
