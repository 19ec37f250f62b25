"""What ``compile`` and ``load`` return: a model with its programs, ready to generate or to be called."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import pipeline
from ..errors import UsageError
from ..ir.bundle import Bundle
from ..ir.timeline import TimeLine
from ..runtime import calls
from ..runtime.as_captured import as_captured
from ..runtime.framework_session import EagerModule, EagerSession
from ..runtime.generation import serve
from ..runtime.generation.request import Asked, request
from ..runtime.generation.settings import check_seed, check_streamer
from ..runtime.module_session import ModuleSession
from ..runtime.session import Session
from ..runtime.tracing import trace
from ..stages import emit
from .manners import HuggingFaceManners
from .parts import Parts
from .siblings import parts_over

if TYPE_CHECKING:
    import torch


class CompiledModel(HuggingFaceManners):
    """A model that generates through its programs. ``compilation`` is None for one that was loaded from a bundle."""

    def __init__(self, parts: Parts) -> None:
        self.loaded, self.graphs, self.session = parts.loaded, parts.graphs, parts.session
        self.compilation, self.context = parts.compilation, parts.context
        self._parts = parts
        self.notes = tuple(dict.fromkeys((*parts.notes, *parts.context.store.warnings)))

    @property
    def bundle(self) -> Bundle | None:
        """What ``save`` writes, made when it is asked for first: of a deep model that takes a second. None for one that was loaded."""
        return self._parts.bundle() if self._parts.bundle is not None else None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.loaded.tokenizer

    def generate(self, input_ids: Any = None, max_new_tokens: Any = None, *, attention_mask: Any = None, streamer: Any = None,
                 seed: int | None = None, **options: Any) -> Any:
        """Continue prompts as transformers' ``generate`` does with the same arguments (docs/generate.md).

        Args:
            input_ids: int64 [rows, n], padded before the tokens where prompts differ in length; or lists of ids, of different lengths too;
                one dimension is one prompt; None: ``bos_token_id``. Also by the name ``inputs``. A model that was not captured takes its
                main input as transformers does: token ids for the encoder of T5 and BART, input_features for Whisper.
            max_new_tokens: at most this many; None: what the model's ``generation_config`` says, else 128 or what fits the context.
            attention_mask: [rows, n], 0 for padding, as tokenizers return it.
            streamer: object with ``put`` and ``end`` like transformers' streamers.
            seed: of the random numbers where ``do_sample`` holds; the same as ``torch.manual_seed(seed)`` before transformers' own.
            options: a ``generation_config`` for this call, its fields by name (``do_sample``, ``temperature``, ``num_beams``, ...) and
                whatever else transformers' ``generate`` takes: ``logits_processor``, ``stopping_criteria``, ``stop_strings`` with
                ``tokenizer``, ``custom_generate``, ... On top of the model's ``generation_config``, as transformers merges them.
                Without ``eos_token_id`` that of ``generation_config`` ends the request; None, an empty list or -1: nothing does.

        Returns:
            int64 [rows, n + m], m <= max_new_tokens, on the device of ``input_ids`` (the CPU for lists); or what transformers returns where
            ``return_dict_in_generate`` holds. A warning and ``notes`` say where a loop of transformers runs the request, and why.

        Raises:
            UsageError: no such request is possible; see Session.generate and runtime.generation.request.
        """
        import torch

        session = self._generating()
        check_seed(seed)
        check_streamer(streamer)
        asked = Asked(input_ids=input_ids, max_new_tokens=max_new_tokens, attention_mask=attention_mask, options=options)
        if isinstance(session, EagerSession):
            found = session.generate(asked, streamer=streamer, seed=seed)
        else:
            with as_captured():
                wanted = request(self.loaded.module, asked, self.graphs)
            for note in wanted.notes:
                self._say(note)
            found = serve.serve(self.loaded.module, session, wanted, seed=seed, streamer=streamer, say=self._say)
        if not isinstance(found, torch.Tensor):
            return found
        given = options.get("inputs") if input_ids is None else input_ids
        return found.to(given.device if isinstance(given, torch.Tensor) else "cpu")

    def trace(self, position: int = 192, *, layer: int | None = None, repetitions: int = 15) -> TimeLine:
        """The time line of one layer (default: the middle one) in the decode step that reads the token at ``position``: when the blocks
        of its kernels start, are released, have their first and last bytes, and end; and what is lost, largest first.

        Raises:
            UsageError: there is no session with generated kernels, no such position or layer, or the backend traces nothing.
        """
        if not isinstance(self.session, Session):
            raise UsageError("nothing to trace: this model decodes by no session of generated kernels; compile a language model on a GPU")
        return trace(self.session, self.context.target, position, layer=layer, repetitions=repetitions)

    @property
    def custom_generate(self) -> Callable[..., Any]:
        """For ``custom_generate`` of HuggingFace's own model: it prepares a request of one prompt or several, and these kernels run it.

        Raises:
            UsageError: this model does not generate, or was not captured.
        """
        session = self._generating()
        if isinstance(session, EagerSession):
            raise UsageError(f"{self.loaded.name} was not captured, so HuggingFace's own loop is all there is; leave custom_generate out")
        return serve.custom_loop(session, self._say)

    def _generating(self) -> Session | EagerSession:
        """The session, if it generates.

        Raises:
            UsageError: it does not.
        """
        if isinstance(self.session, ModuleSession | EagerModule):
            raise UsageError(f"{self.loaded.name} is a plain module and does not generate; call the compiled object with its inputs")
        if self.session is None:
            raise UsageError("this model was compiled without weights or with run_on='nothing', so it cannot generate; "
                             "load its bundle, or compile it where its weights are")
        return self.session

    def _say(self, note: str) -> None:
        """One sentence about a request: a Python warning, and once among ``notes``."""
        self.notes = tuple(dict.fromkeys((*self.notes, note)))
        warnings.warn(note, UserWarning, stacklevel=3)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run a plain module: what ``module(*args, **keywords)`` returns, for arguments of the shapes and types it was compiled for.

        Raises:
            UsageError: it is a language model, torch.func transforms it, or the arguments differ from those of the capture; see
                forward.ModuleSession.
        """
        session = self.session
        if isinstance(session, ModuleSession):
            if session.is_transformed:
                raise UsageError("a compiled module was called inside of a transform of torch.func (vmap, jvp, grad), and programs follow "
                                 "none; transform the module itself, which is loaded.module, or compile it for the whole batch")
            if session.under_autocast:
                self._say("inside of torch.autocast the module itself runs: a program computes in the types of its capture")
                session = EagerModule(self.loaded.module, self.graphs, session.device)
            elif session.takes(args, keywords):
                return session(*args)
        if not isinstance(session, ModuleSession | EagerModule):
            raise UsageError(f"{self.loaded.name} is a language model (or has no weights); use generate")
        args, keywords = calls.canonical(self.loaded.module, args, keywords)
        return session(*args, **keywords)

    def sibling(self, module: "torch.nn.Module") -> "CompiledModel":
        """The same programs over the parameters of ``module``, for which nothing is captured, searched or built again.

        ``module``: live, and equal to the compiled plain module in everything but the values of its tensors, such as the same layer of
        another block; its memory is its own. Its graphs are compared with it, and what is installed with the framework, as for
        ``compile``; it is moved to the device. Both go on serving, each with its own weights.

        Raises:
            UsageError: this is no plain module that was compiled in this process, or ``module`` is another one; nothing is installed.
        """
        return type(self)(parts_over(self._parts, module))

    def __copy__(self) -> "CompiledModel":
        """Another name for the same session."""
        found = type(self).__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused.

        Raises:
            UsageError: programs are bound to their memory, so nobody copies or pickles them.
        """
        raise UsageError(f"the compiled {self.loaded.name} cannot be copied or pickled: its programs are bound to memory of this process; "
                         "save its bundle and load that, or compile the model again")

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
