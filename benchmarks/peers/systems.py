"""What is measured: our compiled model in this process, and its peers in processes of their own."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from agentcompile_core.report import bench
from peers.child import Child, PeerDied
from peers.estimate import Ask

VLLM = "vllm"
FRAMEWORK = ("eager", "torch_compile", "torch_compile_loop")
CUDALINEAR = "cudalinear"  # eager, with linear layers that run compiled kernels
PEERS = (*FRAMEWORK, VLLM)
Prompts = Callable[[int], torch.Tensor]  # the prompt of each length, int64 [1, length]
HERE = Path(__file__).resolve().parent
SHORT_PROMPT = 512  # vLLM captures graphs for prompts up to this many tokens, as its server does


@frozen(kw_only=True)
class Asked:
    """What every peer is started with. ``paths``: folders of environments that hold peers; ``inputs``: lengths of prompts; ``cache``: the
    store of a peer that compiles by ours (None: a new one), ``search_s``: seconds of our own search, which bound its."""

    model: Path
    dtype: str
    device: str
    context: int
    inputs: tuple[int, ...]
    paths: tuple[Path, ...]
    vllm: Mapping[str, Any]
    start_s: float
    answer_s: float
    cache: Path | None = None
    search_s: float = float("inf")


def folder_of(package: str, paths: Sequence[Path]) -> Path | None:
    """The first of ``paths`` that holds ``package``."""
    return next((path for path in paths if (path / package / "__init__.py").is_file()), None)


def begun(name: str, asked: Asked) -> Child:
    """A peer that begins to start.

    Raises:
        PeerDied: its environment is not there.
    """
    terms: dict[str, Any] = {"model": str(asked.model.resolve()), "dtype": asked.dtype, "context": asked.context}
    path, script = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p], "framework_child.py"
    if name == VLLM:
        found = folder_of(VLLM, asked.paths)
        if found is None:
            raise PeerDied("vllm was not started: no folder named by --peer-path holds it")
        path, script = [str(found.resolve()), *path], "vllm_child.py"
        terms |= {"captured": sorted({1, *(n for n in asked.inputs if n <= SHORT_PROMPT)}), "more": dict(asked.vllm)}
    else:
        terms |= {"system": name, "device": asked.device, "cache": str(asked.cache.resolve()) if asked.cache else "",
                  "search_s": asked.search_s}
    return Child(name, [sys.executable, str(HERE / script), json.dumps(terms)],
                 {**os.environ, "PYTHONPATH": os.pathsep.join(path)}, start_s=asked.start_s)


class Peers:
    """Peers that started, and why others did not. They start beside each other; use as a context manager."""

    def __init__(self, names: Sequence[str], asked: Asked) -> None:
        self.dead: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self._answer_s = asked.answer_s
        self._children: dict[str, Child] = {}
        for name in names:
            self._or_dead(name, lambda name=name: self._children.update({name: begun(name, asked)}))
        for name in list(self._children):
            self._or_dead(name, lambda name=name: self.facts.update({name: self._children[name].ready()}))

    def _or_dead(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except PeerDied as exc:
            self.dead[name] = str(exc)

    def ask(self, name: str, prompt_of: Prompts, positions: int) -> Ask:
        """A peer at one workload; what dies once is dead for the workloads to come."""

        def ask(given: int, new_tokens: int) -> float:
            if name in self.dead:
                raise PeerDied(self.dead[name])
            request = {"prompt": prompt_of(given)[0].tolist(), "new": new_tokens, "length": positions}
            try:
                return float(self._children[name].ask(request, self._answer_s)["ms"])
            except PeerDied as exc:
                self.dead[name] = str(exc)
                raise

        return ask

    def log(self, name: str) -> str:
        """What a peer wrote to its error output; nothing where it was not begun."""
        return self._children[name].log() if name in self._children else ""

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children.values():
            child.close()


def ours(model: Any, prompt_of: Prompts) -> Ask:
    """Our compiled model through its public ``generate``."""

    def ask(given: int, new_tokens: int) -> float:
        ids = prompt_of(given)
        return bench.timed(lambda: bench.generate_exactly(model, ids, new_tokens))

    return ask


def prompts(vocabulary: int) -> Prompts:
    """Random prompts, the same for every system."""
    return cache(lambda length: bench.random_prompt(vocabulary, length, seed=length))
