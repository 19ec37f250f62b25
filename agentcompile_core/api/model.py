"""What ``compile`` and ``load`` return: a model with its programs, ready to generate or to be called."""

import warnings
from pathlib import Path
from typing import Any

from attrs import frozen

from .. import pipeline
from ..context import Context
from ..errors import UsageError
from ..installation import install
from ..ir.bundle import Bundle
from ..ir.graph import GraphSet
from ..pipeline import Compilation
from ..plugin.interfaces import LoadedModel
from ..runtime import calls, generation
from ..runtime.framework_session import EagerModule, EagerSession
from ..runtime.module_session import ModuleSession
from ..stages import emit


@frozen(kw_only=True)
class Parts:
    """What a compiled model is made of; without a session it can be saved and not run."""

    loaded: LoadedModel
    graphs: GraphSet
    context: Context
    session: "install.AnySession | None" = None
    bundle: Bundle | None = None
    compilation: Compilation | None = None
    notes: tuple[str, ...] = ()


class CompiledModel:
    """A model that generates through its programs. ``compilation`` is None for one that was loaded from a bundle."""

    def __init__(self, parts: Parts) -> None:
        self.loaded, self.graphs, self.session = parts.loaded, parts.graphs, parts.session
        self.bundle, self.compilation, self.context = parts.bundle, parts.compilation, parts.context
        self.notes = tuple(dict.fromkeys((*parts.notes, *parts.context.store.warnings)))

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.loaded.tokenizer

    def generate(self, input_ids: Any = None, max_new_tokens: int | None = None, *, attention_mask: Any = None, streamer: Any = None,
                 seed: int | None = None, **options: Any) -> Any:
        """Continue a prompt as transformers' ``generate`` does with the same arguments.

        Args:
            input_ids: one prompt, int64 [1, n] (or its ids as a list or one dimension). A model that was not captured takes its
                main input as transformers does: token ids for the encoder of T5 and BART, input_features for Whisper.
            max_new_tokens: at most this many; None: what the model's ``generation_config`` says, else 128 or what fits the context.
            attention_mask: all ones, as tokenizers return it for one prompt.
            streamer: object with ``put`` and ``end`` like transformers' streamers.
            seed: of the random numbers where ``do_sample`` holds; the same as ``torch.manual_seed(seed)`` before transformers' own.
            options: anything of transformers' GenerationConfig, on top of the model's ``generation_config``: ``do_sample``,
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``eos_token_id``, ... Without
                ``eos_token_id`` that of ``generation_config`` ends the request; None, an empty list or -1: nothing does.

        Returns:
            int64 [1, n + m] on the CPU, m <= max_new_tokens; what transformers returns where its own loop runs the request (which
            a warning and ``notes`` say).

        Raises:
            UsageError: no such request is possible; see Session.generate and the module generation.
        """
        if isinstance(self.session, ModuleSession | EagerModule):
            raise UsageError(f"{self.loaded.name} is a plain module and does not generate; call the compiled object with its inputs")
        if self.session is None:
            raise UsageError("this model was compiled without weights or with run_on='nothing', so it cannot generate; "
                             "load its bundle, or compile it where its weights are")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise UsageError(f"seed is {seed!r}; it must be an integer")
        if isinstance(self.session, EagerSession):
            masked = {} if attention_mask is None else {"attention_mask": attention_mask}
            return self.session.generate(input_ids, max_new_tokens, streamer=streamer, seed=seed, **masked, **options)
        module = self.loaded.module
        prompt = generation.prompt_of(input_ids, self.graphs.model.vocab_size)
        wanted = generation.request(module, prompt, max_new_tokens, attention_mask, options, self.session.max_context)
        generation.check_length(prompt.shape[1], wanted.count, self.session.max_context)
        for note in wanted.notes:
            self._say(note)
        if not wanted.handed_over:
            return generation.by_session(module, self.session, wanted, seed=seed, streamer=streamer)
        self._say(f"transformers' own loop runs this request, without kernels: {wanted.handed_over}")
        with self.session.exclusive():
            return generation.by_framework(module, prompt.to(self.session.device), wanted.count, wanted.options, seed=seed,
                                           streamer=streamer)

    def _say(self, note: str) -> None:
        """One sentence about a request: a Python warning, and once among ``notes``."""
        self.notes = tuple(dict.fromkeys((*self.notes, note)))
        warnings.warn(note, UserWarning, stacklevel=3)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run a plain module: what ``module(*args, **keywords)`` returns, for arguments of the shapes and types it was compiled for.

        Raises:
            UsageError: it is a language model, or the arguments differ from those of the capture; see forward.ModuleSession.
        """
        session = self.session
        if isinstance(session, ModuleSession) and session.takes(args, keywords):
            return session(*args)
        if not isinstance(session, ModuleSession | EagerModule):
            raise UsageError(f"{self.loaded.name} is a language model (or has no weights); use generate")
        args, keywords = calls.canonical(self.loaded.module, args, keywords)
        return session(*args, **keywords)

    def save(self, folder: str | Path) -> Path:
        """Write the bundle as ``folder``; see stages.emit.write."""
        if self.bundle is None:
            raise UsageError("this model was loaded from a bundle already; copy that folder")
        emit.write(self.bundle, Path(folder))
        return Path(folder)

    @property
    def statistics(self) -> dict[str, Any]:
        """The pipeline's counts."""
        return pipeline.statistics(self.compilation, self.bundle) if self.compilation else {}
