"""A bundle that is replaced while it is read: what is loaded is one of the two, whole."""

import hashlib
import os
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_generate_manners import CONFIG, QUICK

import agentcompile_core as ac
from agentcompile_core.ir.bundle import Bundle, FileEntry
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.stages import emit


@pytest.fixture(scope="module")
def bundles() -> tuple[Bundle, Bundle]:
    """Two that differ in every file, by white space."""
    torch.manual_seed(1)
    one = ac.compile(transformers.LlamaForCausalLM(CONFIG).eval(), **QUICK).bundle
    assert one is not None
    files = tuple((path, data + b"\n") for path, data in one.files)
    entries = tuple(FileEntry(path=path, sha256=hashlib.sha256(data).hexdigest()) for path, data in files)
    return one, Bundle(manifest=evolve(one.manifest, files=entries), files=files)


@settings(max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.lists(st.integers(0, 20), min_size=1, max_size=3), linked=st.booleans())
def test_a_bundle_that_is_replaced_while_it_is_read_is_one_or_the_other(
        bundles: tuple[Bundle, Bundle], tmp_path_factory: pytest.TempPathFactory, at: list[int], linked: bool) -> None:
    """By a save into the same folder, or by a link that is turned to another one, before any of the reads."""
    place, turn, reads, real = tmp_path_factory.mktemp("replaced"), list(bundles), [0], bundle_reader._content
    folder = place / "b"

    def appear(bundle: Bundle) -> None:
        if not linked:
            return emit.write(bundle, folder)
        made = place / f"v{len(list(place.iterdir()))}"
        emit.write(bundle, made)
        (place / "link").symlink_to(made)
        return os.replace(place / "link", folder)

    def content(*given: Any) -> bytes:
        if reads[0] in at:
            turn.reverse()
            appear(turn[0])
        reads[0] += 1
        return real(*given)

    appear(turn[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_reader, "_content", content)
        found = bundle_reader.read(folder)
    assert found.manifest in (bundles[0].manifest, bundles[1].manifest)
