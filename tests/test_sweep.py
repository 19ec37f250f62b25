"""The sweep beside peers: turns, same prompts, resuming, one commit per file, estimates that say so, and peers that fail."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny_model"
pytestmark = pytest.mark.usefixtures("shared_captures")
COMMIT = "a" * 40
GIB = 2**30
STAND_IN = '''
import json, os, time
from types import SimpleNamespace
LOG = os.environ["PEER_LOG"]

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, fails=None, hangs=False, dies_after=None, **settings):
        print("libraries print what they like", flush=True)
        if fails:
            raise RuntimeError(fails)
        time.sleep(60 if hangs else 0)
        self.left = dies_after

    def generate(self, prompts, asked, use_tqdm):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.write(2, b"Segmentation of memory\\n")
                os._exit(11)
        ids = prompts[0]["prompt_token_ids"]
        with open(LOG, "a") as log:
            print(json.dumps(["vllm", ids, asked.max_tokens]), file=log)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * asked.max_tokens)])]
'''


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with a stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(STAND_IN)
    (folder / "vllm-9.9.dist-info").mkdir()
    (folder / "vllm-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    return folder


@pytest.fixture
def sweep(bench: Any, peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Run the command with a stand-in for our compiled model; returns the rows of the file. ``log()``: every request in its order."""
    module, log = bench("peers.command"), tmp_path / "requests.log"
    monkeypatch.setenv("PEER_LOG", str(log))
    monkeypatch.setattr(module.harness, "machine", lambda: {"gpu": "NVIDIA X", "gpu_uuid": "GPU-1", "driver": "1.2"})
    monkeypatch.setattr(module.harness, "read_ceiling_gbps", lambda: 1000.0)
    monkeypatch.setattr(module, "step_bytes", lambda graphs, positions: 1_000_000 * positions)
    monkeypatch.setattr(module, "accuracy_row", lambda name, model, positions: {"rms_ratio": 0.9})

    def generate(ids: torch.Tensor, new_tokens: int, **how: Any) -> None:
        with log.open("a") as file:
            print(json.dumps(["agentcompile", ids[0].tolist(), new_tokens]), file=file)

    model = SimpleNamespace(generate=generate, graphs=SimpleNamespace(kv=object(), model=SimpleNamespace(vocab_size=500)),
                            context=SimpleNamespace(close=lambda: None), notes=())
    monkeypatch.setattr(module, "compiled_model", lambda name, options, store: (model, 1.0))

    def run(*more: str, commit: str = COMMIT, peers: Path = peer) -> list[dict[str, Any]]:
        log.write_text("")
        given = ["qwen3-1.7b", "--workloads", "12/4", "--systems", "agentcompile,vllm", "--repetitions", "3", "--peer-path", str(peers),
                 "--commit", commit, "--out", str(tmp_path), "--search-s", "1"]
        assert bench("sweep").main([*given, *more]) == 0
        path = tmp_path / "sweep.json"
        return json.loads(path.read_text())["rows"] if path.exists() else []

    run.log = lambda: [json.loads(line) for line in log.read_text().splitlines()]  # type: ignore[attr-defined]
    run.path = tmp_path / "sweep.json"  # type: ignore[attr-defined]
    return run


def test_systems_take_turns_forth_and_back_with_the_same_prompts(sweep: Any) -> None:
    rows = {row["system"]: row for row in sweep()}
    whole = [system for system, _, new in sweep.log() if new == 4][-6:]
    assert whole == ["vllm", "agentcompile", "agentcompile", "vllm", "vllm", "agentcompile"]
    assert len({tuple(ids) for _, ids, _ in sweep.log()}) == 1 and len(sweep.log()[0][1]) == 12
    assert set(rows) == {"agentcompile", "vllm"}
    for row in rows.values():
        assert row["repetitions"] == 3 and row["why"] == "" and row["estimated"] is False and row["workload"] == "12/4"
        assert row["step_ms"] == pytest.approx((row["e2e_ms"] - row["prefill_ms"]) / 3)
        assert row["floor_step_ms"] == pytest.approx(14 * 1e6 / 1000.0 / 1e6) and row["commit"] == COMMIT
    assert rows["vllm"]["versions"]["vllm"] == "9.9" and rows["agentcompile"]["logit_rms_ratio"] == 0.9
    assert rows["vllm"]["settings"]["compilation_config"] == {"cudagraph_capture_sizes": [1, 12]}
    assert json.loads(sweep.path.read_text())["versions"]["vllm"] == "9.9"


@pytest.mark.parametrize("how, why", [
    ({"fails": "out of\nmemory"}, "vllm did not start: RuntimeError: out of memory"),
    ({"dies_after": 0}, "vllm ended while it was measured: exit code 11: Segmentation of memory"),
    ({"dies_after": 7}, "vllm ended while it was measured: exit code 11: Segmentation of memory"),
    ({"hangs": True}, "vllm did not start: within 1 s, so it was ended"),
    (None, "vllm was not started: no folder named by --peer-path holds it")])
def test_a_peer_that_fails_costs_its_own_row(sweep: Any, tmp_path: Path, how: dict[str, Any] | None, why: str) -> None:
    given = ("--vllm", json.dumps(how), "--peer-start-s", "1" if how == {"hangs": True} else "60") if how else ()
    rows = {row["system"]: row for row in (sweep(*given) if how else sweep(peers=tmp_path))}
    assert rows["vllm"]["why"] == why and rows["vllm"]["e2e_ms"] is None and rows["vllm"]["repetitions"] == 0
    assert rows["agentcompile"]["repetitions"] == 3 and rows["agentcompile"]["e2e_ms"] > 0 and rows["agentcompile"]["why"] == ""


def test_the_same_command_measures_what_is_missing_beside_ours(sweep: Any) -> None:
    first = sweep("--vllm", '{"fails": "no"}')
    assert [row["why"] != "" for row in sorted(first, key=lambda row: row["system"])] == [False, True]
    second = sweep()
    assert sorted(row["system"] for row in second) == ["agentcompile", "agentcompile", "vllm"]
    run = next(row["run"] for row in second if row["system"] == "vllm")
    assert {row["system"] for row in second if row["run"] == run} == {"agentcompile", "vllm"}
    assert sweep() == second and sweep.log() == []
    more = sweep("--workloads", "12/4,3/5")
    assert {(row["system"], row["workload"]) for row in more if row not in second} == {("agentcompile", "3/5"), ("vllm", "3/5")}
    assert {len(ids) for _, ids, _ in sweep.log()} == {3}


def test_a_peer_that_fails_again_leaves_what_is_there(sweep: Any) -> None:
    failed = sweep("--vllm", '{"fails": "no"}')
    again = sweep("--vllm", '{"fails": "still no"}')
    assert [row for row in again if row["system"] == "agentcompile"] == [row for row in failed if row["system"] == "agentcompile"]
    assert [row["why"] for row in again if row["system"] == "vllm"] == ["vllm did not start: RuntimeError: still no"]
    assert sweep.log() == []


def test_a_mix_of_commits_or_versions_is_refused(sweep: Any) -> None:
    sweep()
    before = sweep.path.read_text()
    with pytest.raises(SystemExit, match="holds rows of commit aaaaaaaaaa and this is bbbbbbbbbb; rows of one commit fill one file"):
        sweep(commit="b" * 40)
    with pytest.raises(SystemExit, match="name it by --commit"):
        sweep(commit="unknown")
    document = json.loads(before)
    document["versions"]["torch"] = "1.0"
    sweep.path.write_text(json.dumps(document))
    with pytest.raises(SystemExit, match=r"made with torch 1\.0, which are other versions"):
        sweep()
    assert sweep.log() == []


def test_a_budget_that_is_too_small_ends_without_rows(sweep: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--budget-s", "5") == [] and sweep.log() == []
    assert "not complete: qwen3-1.7b 12/4; the same command again" in capsys.readouterr().out


def test_logits_that_err_too_much_are_never_timed(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["peers.command"], "accuracy_row", lambda name, model, positions: {"rms_ratio": 1.3})
    (row,) = sweep()
    assert row["system"] == "agentcompile" and row["e2e_ms"] is None and row["why"].startswith("refused: the logits err 1.30 times")
    assert sweep.log() == []


def test_a_peer_can_be_tried_without_ours(bench: Any, peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PEER_LOG", str(tmp_path / "requests.log"))
    given = ["qwen3-1.7b", "--workload", "8/3", "--peer-path", str(peer)]
    assert bench("peer_check").main(given) == 0
    assert [json.loads(line)[2] for line in (tmp_path / "requests.log").read_text().splitlines()] == [3, 3, 1]
    out = capsys.readouterr().out
    assert '"vllm": "9.9"' in out and "vllm 8/3: cold" in out
    assert bench("peer_check").main([*given, "--vllm", '{"fails": "no kernel"}']) == 1
    out = capsys.readouterr().out
    assert "vllm did not start: RuntimeError: no kernel" in out and "libraries print what they like" in out and "Traceback" in out


@pytest.mark.parametrize("given, says", [
    (("--workloads", "128"), "allowed are tokens of the prompt / new tokens"), (("--workloads", "128/1"), "2 at least"),
    (("--systems", "magic"), "magic: allowed are agentcompile, eager"), (("--context", "10"), "the longest workload needs 16"),
    (("--repetitions", "0"), "at least 1")])
def test_what_cannot_be_measured_is_refused_at_once(sweep: Any, given: tuple[str, ...], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        sweep(*given)


@pytest.fixture(scope="module")
def tiny(bench: Any) -> Any:
    """The tiny model in fp32 on the CPU, with its weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.mark.parametrize("system", ["eager", "torch_compile", "torch_compile_loop"])
def test_the_frameworks_systems_write_what_transformers_writes(bench: Any, tiny: Any, system: str) -> None:
    child = bench("peers.framework_child")
    peer = child.Framework(tiny, system, compiler=lambda step: step)
    for length, count, positions in ((9, 6, 40), (20, 5, 40), (4, 1, 40), (5, 4, 9)):
        prompt = torch.randint(0, 2048, (1, length), generator=torch.Generator().manual_seed(length))
        wanted = tiny.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(prompt))
        answer = peer.answer({"prompt": prompt[0].tolist(), "new": count, "length": positions, "tokens": True})
        assert answer["ms"] > 0 and answer["tokens"] == wanted[0, length:].tolist()
    if system == "torch_compile_loop":
        with pytest.raises(ValueError, match="8 and 4 tokens do not fit 9 positions"):
            peer.answer({"prompt": [1] * 8, "new": 4, "length": 9})


def test_the_frameworks_child_builds_the_model_that_is_named(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child = bench("peers.framework_child")
    monkeypatch.setattr(sys, "argv", ["x", json.dumps({"system": "eager", "model": str(TINY), "dtype": "float32", "device": "cpu"})])
    facts, answer = child.start()
    assert facts["versions"]["torch"] == torch.__version__ and answer({"prompt": [5, 6], "new": 2, "length": 4})["ms"] > 0


class Pieces:
    """torch's allocator over a device of ``free`` bytes: pieces of memory, each in use or idle, which stay until they are given back."""

    def __init__(self, free: int) -> None:
        self.free, self.pieces = free, list[int]()

    def idle(self) -> list[int]:
        return sorted(self.pieces, reverse=True)

    def take(self, nbytes: int) -> Any:
        small = nbytes <= 2**20
        if small and (self.pieces.count(2**21) * 2 > self.halves):
            self.halves += 1
            return
        piece = 2**21 if small else nbytes
        if piece > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.free -= piece
        self.pieces.append(piece)
        self.halves += small

    def empty(self) -> None:
        self.free += sum(self.pieces)
        self.pieces, self.halves = [], 0

    halves = 0  # of small pieces, in use


def test_a_peer_has_again_what_it_gave_back_before_the_clock_starts(bench: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child = bench("peers.framework_child")
    pieces, clocks = Pieces(60 * GIB), list[list[int]]()
    grows = [[3 * 2**20], [2**21, 2**21, 75 * 2**20, 4 * GIB], [], [80 * 2**20], []]

    def timed(call: Any) -> float:
        clocks.append(pieces.idle())
        call()
        for nbytes in grows[len(clocks) - 1]:
            pieces.free -= nbytes
            pieces.pieces.append(nbytes)
        return 1.0

    monkeypatch.setattr(child.bench, "timed", timed)
    peer, kept = child.Framework(tiny, "eager"), list[list[int]]()
    peer._idle = child.idle_memory.IdleMemory(pieces)
    for _ in range(4):
        peer.answer({"prompt": [5, 6], "new": 2, "length": 4})
        kept.append(pieces.idle())
    assert kept == [[3 * 2**20], [], [], []] and pieces.free == 60 * GIB, "little is kept, all else given back"
    first = [4 * GIB, 75 * 2**20, 3 * 2**20, 2**21, 2**21]
    assert clocks == [[], [3 * 2**20], first, first], "as it was, piece by piece"
    pieces.free = 3 * GIB  # somebody else took the rest
    peer.answer({"prompt": [5, 6], "new": 2, "length": 4})
    assert clocks[-1] == [] and child.Framework(tiny, "eager")._idle._allocator is None, "nothing to look after on a host"


def test_what_is_idle_is_what_emptying_the_cache_gives_back(bench: Any) -> None:
    def segment(total: int, active: int, pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
        return {"total_size": total, "active_size": active, "segment_pool_id": pool}

    found = bench("peers.idle_memory").idle_of([segment(2**21, 0), segment(5 * GIB, 0), segment(8 * GIB, 1), segment(2 * GIB, 0, (0, 7))])
    assert found == [5 * GIB, 2**21]


def test_layers_are_searched_no_longer_than_a_model(bench: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child, systems = bench("peers.framework_child"), bench("peers.systems")
    begun: list[dict[str, Any]] = []
    monkeypatch.setattr(systems, "Child", lambda name, command, environment, **more: begun.append(json.loads(command[-1])))
    systems.begun("cudalinear", systems.Asked(model=TINY, dtype="float16", device="cuda", context=8, inputs=(4,), paths=(), vllm={},
                                              start_s=1.0, answer_s=1.0, search_s=40.0))
    assert begun[0]["search_s"] == 40.0
    shapes = {tuple(layer.weight.shape) for layer in tiny.modules() if isinstance(layer, torch.nn.Linear)}
    assert child.layer_search_s(tiny, 40.0) * len(shapes) == pytest.approx(40.0) and len(shapes) > 3
    assert child.layer_search_s(tiny, float("inf")) == child.LAYER_BUDGET_S == child.layer_search_s(torch.nn.ReLU(), 60.0)
