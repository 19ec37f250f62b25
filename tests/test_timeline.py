"""What a time line says was lost, and how it is told: as text, as a document, as a picture."""

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.cli import main
from agentcompile_core.ir.timeline import (
    BEYOND,
    FIRST_BYTES,
    HAND_OVER,
    UNEVEN,
    WORDS,
    PhaseTimes,
    TimeLine,
    TracedLaunch,
    clock_step_ns,
    losses,
    medians,
    phase_times,
)
from agentcompile_core.plugin.phases import PHASES
from agentcompile_core.report import trace


def times(phase: str, least: float, mean: float, most: float) -> PhaseTimes:
    return PhaseTimes(phase=phase, least_us=least, mean_us=mean, most_us=most)


def launch(label: str, layer: int = 14, floor_us: float = 3.0, **phases: tuple[float, float, float]) -> TracedLaunch:
    return TracedLaunch(step=f"family/{label}", label=label, layer=layer, blocks=264, nbytes=10_000_000, floor_us=floor_us,
                        phases=tuple(times(phase, *phases[phase]) for phase in PHASES if phase in phases))


QKV = launch("qkv", start=(-4.0, -3.0, -2.0), released=(0.0, 0.0, 0.1), first=(0.2, 0.4, 0.9), last=(2.0, 3.5, 4.2), end=(3.0, 4.0, 5.0))
ATTENTION = launch("attention", floor_us=0.5, start=(1.0, 1.0, 1.0), released=(5.7, 5.8, 5.9), merged=(7.0, 7.5, 8.0), end=(6.0, 8.0, 8.5))
NEXT = launch("qkv", layer=15, start=(8.0, 8.0, 8.0), released=(9.0, 9.0, 9.0), end=(12.0, 13.0, 14.0))
HEAD = launch("head", layer=-1, floor_us=100.0, start=(20.0, 20.0, 20.0), released=(30.0, 30.0, 30.0), end=(130.0, 140.0, 150.0))
LINE = TimeLine(model="<a & b>", program="decode", position=192, layer=14, layers=28, layer_us=9.0, layer_floor_us=3.5, token_us=250.0,
                noted_us=252.0, clock_ns=32, launches=(QKV, ATTENTION, NEXT, HEAD), losses=losses((QKV, ATTENTION, NEXT, HEAD), 14, 28))


def test_losses_are_what_the_times_say_and_come_by_token() -> None:
    found = {(loss.label, loss.what): (round(loss.us, 6), round(loss.token_us, 6)) for loss in LINE.losses}
    assert found == {
        ("qkv", UNEVEN): (1.0, 28.0), ("qkv", HAND_OVER): (0.8, 22.4), ("qkv", FIRST_BYTES): (0.4, 11.2), ("qkv", BEYOND): (0.6, 16.8),
        ("attention", UNEVEN): (0.5, 14.0), ("attention", HAND_OVER): (0.5, 14.0), ("attention", BEYOND): (1.7, 47.6),
        ("head", UNEVEN): (10.0, 10.0), ("head", BEYOND): (10.0, 10.0)}
    assert [loss.token_us for loss in LINE.losses] == sorted((loss.token_us for loss in LINE.losses), reverse=True)
    assert {loss.what for loss in LINE.losses} <= WORDS.keys()


def test_nothing_is_claimed_of_what_was_not_noted() -> None:
    bare = launch("split", start=(0.0, 0.0, 0.0), end=(1.0, 2.0, 3.0))
    assert [(loss.what, loss.us) for loss in losses((bare, bare), 14, 2)] == [(UNEVEN, 1.0)] * 2
    assert losses((evolve(bare, phases=()),), 14, 2) == ()


@given(st.lists(st.lists(st.integers(0, 10**12), min_size=len(PHASES), max_size=len(PHASES)).map(tuple), min_size=1, max_size=6))
def test_phases_are_those_that_some_block_passed(blocks: list[tuple[int, ...]]) -> None:
    found = phase_times(tuple(blocks), PHASES, 0)
    for index, name in enumerate(PHASES):
        passed = [times[index] / 1e3 for times in blocks if times[index]]
        assert [t.phase for t in found].count(name) == bool(passed)
        if passed:
            one = next(t for t in found if t.phase == name)
            assert one.least_us == min(passed) and one.most_us == max(passed) and min(passed) <= one.mean_us * (1 + 1e-9)
    assert medians([found, found]) == found
    different = sorted({time for block in blocks for time in block if time})
    assert clock_step_ns([tuple(blocks)]) == min((b - a for a, b in pairwise(different)), default=0)


def test_text_names_the_layer_the_floor_and_three_losses() -> None:
    said = trace.trace_text(LINE)
    assert "layer 14 of 28 takes 9.00 us, its bytes need 3.50 us" in said and "the 3 largest losses:" in said
    assert said.count("per token") == 3 and "attention runs longer than its bytes" in said
    assert "qkv (next layer)" in said and "head (behind the layers)" in said
    assert "nothing was lost" in trace.trace_text(evolve(LINE, losses=()))


def test_the_document_is_json_and_the_picture_is_xml() -> None:
    document = json.loads(json.dumps(trace.trace_document(LINE)))
    assert document["layer_us"] == 9.0 and len(document["launches"]) == 4 and document["meaning"]["losses"][UNEVEN] == WORDS[UNEVEN]
    picture = ElementTree.fromstring(trace.trace_picture(LINE))
    texts = [e.text or "" for e in picture.iter() if e.tag.endswith("text")]
    assert any("<a & b>" in text for text in texts) and sum("us per token" in text for text in texts) == 3
    ElementTree.fromstring(trace.trace_picture(evolve(LINE, launches=(), losses=())))


@pytest.mark.parametrize(("given", "said"), [
    (["trace"], "trace needs a model, or --bundle DIR and the model"),
    (["trace", "m", "--position", "0"], "--position is 0; it must be at least 1"),
    (["trace", "m", "--layer", "-1"], "--layer is -1; it must be at least 0"),
    (["trace", "m", "--repetitions", "0"], "--repetitions is 0; it must be at least 1"),
    (["trace", "m", "--svg", "no/such/folder/a.svg"], "does not exist; make it, or name another file"),
])
def test_the_command_refuses_before_a_model_is_opened(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    assert said in capsys.readouterr().err
