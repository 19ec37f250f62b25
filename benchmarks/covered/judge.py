"""One row of coverage.json: compile a model or a module, run it, compare it with HuggingFace or torch."""

import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen

import agentcompile_core as agentcompile
from agentcompile_core.configuration import Config
from agentcompile_core.ops.graph_check import check_graphs
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.runtime.program import Program
from agentcompile_core.stages.capture.states import cache_keyword
from agentcompile_core.store import Store

from . import composite, judging, models
from .case import Case
from .ran import Launches
from .special import SPECIAL

NEW_TOKENS = 32
PROMPT = (5, 17, 99, 3, 42)
CONTEXT = 64


@frozen(kw_only=True)
class Bench:
    """Where and with what everything of one sweep is compiled; one ``store`` for all of it."""

    device: str
    run_on: str
    config: Config
    catalog: Catalog
    store: Store

    def compiled(self, what: Any, **options: Any) -> Any:
        """The compiled form of a live model or module."""
        return agentcompile.compile(what, run_on=self.run_on, config=self.config, catalog=self.catalog, store=self.store, **options)


class TooLong(BaseException):
    """One model or module took longer than it may; no guard of the compiler takes it for a failure of its own."""


class NoReferenceError(Exception):
    """There is nothing to compare with: the tiny configuration is none for the installed transformers."""


Row = dict[str, Any]


def judged(kind: str, name: str, once: Callable[[Launches], tuple[str, Row]], bench: Bench) -> Row:
    """The row of ``once``, which returns why it is wrong (empty: right) and its facts; what it raises is a row, too."""
    launches = Launches(bench.catalog.backends.values())
    began = time.monotonic()
    facts: Row = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            why, facts = once(launches)
        outcome = "wrong" if why else "ok"
    except (Exception, TooLong) as exc:  # the sweep says what happened and goes on
        outcome, why = "raised", f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"
    finally:
        launches.stop()
    return {"kind": kind, "name": name, "outcome": outcome, "why": why, "seconds": round(time.monotonic() - began, 2), **facts}


def model_row(model_type: str, bench: Bench) -> Row:
    """A causal language model: 32 greedy tokens and teacher-forced logits of random tokens."""
    return judged("model", model_type, lambda launches: _model(model_type, bench, launches), bench)


def _model(model_type: str, bench: Bench, launches: Launches) -> tuple[str, Row]:
    special = SPECIAL.get(model_type, {})
    prompt = torch.tensor([PROMPT], device=bench.device)
    random = torch.randint(3, models.VOCABULARY, (1, NEW_TOKENS), generator=torch.Generator().manual_seed(11)).to(bench.device)
    options = {"eos_token_id": None, "do_sample": False}
    try:
        original = models.tiny(model_type, special).to(bench.device)
        wanted = original.generate(prompt, max_new_tokens=NEW_TOKENS, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options)
        with torch.inference_mode():
            logits = original(random, **_positions(original, random)).logits[0]
    except Exception as exc:
        raise NoReferenceError(f"HuggingFace's own model cannot be made or does not generate: {exc}") from exc
    mine = bench.compiled(models.tiny(model_type, special), max_context=CONTEXT)
    found = mine.generate(prompt, NEW_TOKENS, attention_mask=torch.ones_like(prompt), **options)
    is_captured = bool(mine.graphs.graphs)
    with torch.inference_mode():
        own = mine.loaded.module
        forced = mine.session.teacher_forced(random) if is_captured else own(random, **_positions(own, random)).logits[0]
    why = judging.results_differ(forced, logits, "logits")
    if why and is_captured:  # a model's own steps may be off its whole: Nemotron-H's by 3e-4, and ours equal these
        why = judging.results_differ(forced, _by_steps(original, random), "logits")
    why = judging.tokens_differ(found, wanted) or why
    program = mine.session.bound("decode").program if is_captured else None
    return why, {**_facts(mine, launches, program), "class": type(original).__name__, "error": judging.relative_rms(forced, logits),
                 "distinct_tokens": len(set(wanted[0, len(PROMPT):].tolist()))}


def _positions(model: Any, tokens: torch.Tensor, first: int = 0) -> Row:
    """The positions of ``tokens`` [1, n] as generation gives them to ``model``: some count otherwise by themselves (RoBERTa)."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]}


def _by_steps(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocabulary] behind each of ``tokens`` [1, n], by HuggingFace's own steps."""
    rows, keyword = [], cache_keyword(model)
    cache: Any = None
    with torch.inference_mode():
        for at, token in enumerate(tokens.split(1, dim=1)):
            answer = model(input_ids=token, use_cache=True, **{keyword: cache}, **_positions(model, token, at))
            cache = getattr(answer, keyword)
            rows.append(answer.logits[0, -1])
    return torch.stack(rows)


def image_row(model_type: str, bench: Bench) -> Row:
    """A model that reads images: 32 greedy tokens behind one and behind tokens alone, and drawn ones behind an image."""
    return judged("image", model_type, lambda launches: _image(model_type, bench, launches), bench)


def _image(model_type: str, bench: Bench, launches: Launches) -> tuple[str, Row]:
    ways: tuple[Row, ...] = ({"do_sample": False}, {"do_sample": True, "top_k": 8})
    try:
        original = composite.tiny(model_type).to(bench.device)
        given, others = (judging.moved(composite.image_prompt(original, seed), bench.device) for seed in (3, 4))
        alone = {name: given[name][:, -3:] for name in ("input_ids", "attention_mask")}
        asked = [(given, ways[0]), (alone, ways[0]), (others, ways[1])]
        wanted = [_generated(original, *one) for one in asked]
    except Exception as exc:
        raise NoReferenceError(f"HuggingFace's own model cannot be made or does not generate: {exc}") from exc
    mine = bench.compiled(composite.tiny(model_type), max_context=2 * CONTEXT)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = [_generated(mine, *one) for one in asked]
    why = next((why for one, other in zip(found, wanted, strict=True) if (why := judging.tokens_differ(one, other))), "")
    is_captured = bool(mine.graphs.graphs)
    said = {str(one.message) for one in heard if "request" in str(one.message)}
    if is_captured and not why:
        why = next((one for one in said if "without kernels" in one), "")
    program = mine.session.bound("decode").program if is_captured else None
    return why, {**_facts(mine, launches, program), "class": type(original).__name__, "said": sorted(said)}


def _generated(model: Any, given: Row, way: Row) -> Any:
    torch.manual_seed(5)
    return model.generate(**given, **way, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0)


def _facts(mine: Any, launches: Launches, program: Program | None) -> Row:
    """How a compiled model or module ran, in the columns of its row; ``program`` is what is installed (None: nothing of ours)."""
    check_graphs(mine.graphs)  # what is captured here must be readable from a bundle there
    failures = mine.compilation.failures if mine.compilation else ()
    return {"path": "framework" if program is None else "captured", "reason": mine.graphs.eager_reason, "notes": list(mine.notes),
            "failures": [str(failure)[:200] for failure in failures[:5]], **launches.facts(program)}


def module_row(case: Case, bench: Bench) -> Row:
    """A plain module: its example call, then two others, results and what became of the arguments."""
    return judged("module", case.name, lambda launches: _module(case, bench, launches), bench)


def _module(case: Case, bench: Bench, launches: Launches) -> tuple[str, Row]:
    original = case.module().to(bench.device)
    mine = bench.compiled(case.module(), example_inputs=_examples(original, *judging.moved(case.arguments(0), bench.device)))
    kept: list[tuple[Any, Any]] = []
    why = ""
    for seed in (0, 1, 2):
        given, twin = (judging.moved(case.arguments(seed), bench.device) for _ in range(2))
        with torch.inference_mode():
            wanted = original(*given[0], **given[1])
        found = mine(*twin[0], **twin[1])
        kept.append((found, wanted))
        why = why or judging.results_differ(found, wanted) or judging.results_differ(twin, given, "the arguments afterwards")
    for found, wanted in kept:  # a later call must not change what an earlier one returned
        why = why or judging.results_differ(found, wanted, "an earlier result")
    program = None if mine.session.runs_itself else mine.session.program
    return why, {**_facts(mine, launches, program), "class": type(original).__name__}


def _examples(module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """One value for ``example_inputs``: a tuple, or by name where anything is given by name."""
    if not keywords:
        return args
    return dict(inspect.signature(module.forward).bind(*args, **keywords).arguments) if args else keywords
