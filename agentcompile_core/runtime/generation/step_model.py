"""A session as a model that HuggingFace's own ``GenerationMixin`` drives: its preparation, its loops, our step.

transformers prepares every request (settings, processors, criteria, masks, rows) and asks a decoding method for tokens. Ours takes
what a session does alone; everything else is transformers' own method over ``forward``, whose logits come from the compiled step.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import EosTokenCriteria, GenerationMixin, MaxLengthCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...errors import UsageError
from ...ir.frequencies import near_of
from ..holding import hold
from ..prompts import check_length
from ..sampling import Alone, Pick
from ..token_loop import collected
from .cache_name import CACHE_NAME
from .on_scores import alone
from .sequences import Sequences
from .shown import Shown
from .step_cache import StepCache

if TYPE_CHECKING:
    from ..session import Session
    from ..token_maker import Read

Say = Callable[[str], None]


class StepModel(GenerationMixin):
    """For one request of a session that somebody holds exclusively.

    Args:
        module: HuggingFace's model, of which everything that is not about computing is taken.
        settings: the GenerationConfig that holds.
        say: gets one line where a loop of transformers runs.
        read: stands behind the one prompt of the request, where somebody else has read it; None: the session reads prompts.
    """

    main_input_name = "input_ids"

    def __init__(self, module: Any, session: "Session", settings: Any, say: Say, read: "Read | None" = None) -> None:
        self.module, self.session, self.config, self._say, self._read = module, session, module.config, say, read
        self.generation_config = settings
        self.device = session.ids.device  # with its number, as transformers compares it
        self._is_stateful = bool(session.graphs.states)
        self._sequences = Sequences(session)

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *inputs: Any, **keywords: Any) -> CausalLMOutputWithPast:
        """``forward``."""
        return self.forward(*inputs, **keywords)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: StepCache | None = None,
                cache: StepCache | None = None, use_cache: bool | None = None, logits_to_keep: int = 0,
                **others: Any) -> CausalLMOutputWithPast:
        """Logits behind tokens, as the model's own ``forward`` gives them.

        Args:
            input_ids: int64 [rows, n], what is behind ``past_key_values``, or ``cache``: transformers knows one of these names.
            attention_mask: [rows, m >= n], 0 for padding, which is before the tokens; the last n columns are of ``input_ids``.
            logits_to_keep: behind how many of the last tokens; 0: all. One costs no more than the prompt, each further one a step.
            others: ``return_dict``, and what ``generate`` hands to whatever it calls (``tokenizer``). They have no say here: transformers
                refuses arguments for a model that its signature does not name.

        Returns:
            logits [rows, logits_to_keep, vocabulary] in the model's type, and the cache.
        """
        count = input_ids.shape[1]
        shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -count:]
        given = cache if cache is not None else past_key_values
        cache = given if given is not None else StepCache(self._sequences)
        keep = min(logits_to_keep, count) if logits_to_keep else count
        logits = cache.read(input_ids, shown, keep)
        made: dict[str, Any] = {"logits": logits, CACHE_NAME: cache if use_cache is not False else None}
        return CausalLMOutputWithPast(**made)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any],  # type: ignore[override]
                                      *others: Any, **named: Any) -> None:
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = StepCache(self._sequences)

    def _sample(self, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,  # type: ignore[override]
                streamer: Any = None, **others: Any) -> Any:
        """Greedy search and sampling: by the session where it can alone."""
        why = self.beyond_the_session(input_ids, generation_config, others.get("attention_mask"))
        near = near_of(self.session.graphs.frequencies)
        if (why or self._read is not None) and 0 < near < int(generation_config.max_length or 0):
            raise UsageError(f"beyond {near} positions compiled steps serve one prompt of tokens alone, and this request asks for "
                             f"{why or 'more'}; call generate of the compiled model")
        is_plain = not (generation_config.do_sample or len(logits_processor) or self._beyond_length_and_end(stopping_criteria))
        if is_plain and not generation_config.return_dict_in_generate and (streamer is None or len(input_ids) == 1):
            return self._each_row(input_ids, others.get("attention_mask"), stopping_criteria, generation_config, streamer)
        if not why:
            by_device, seen = self._alone(logits_processor, stopping_criteria), Shown()
            pick = Pick(processors=logits_processor if by_device else seen.to(logits_processor), alone=by_device,
                        stops=stopping_criteria if by_device else seen.to(stopping_criteria), do_sample=bool(generation_config.do_sample))
            found = self._tokens(input_ids, self._most(input_ids, stopping_criteria), pick, streamer)
            return found if seen.ids is None else seen.ids.clone().to(input_ids.device)
        self._over_the_step(why)
        if any(isinstance(one, MaxLengthCriteria) for one in stopping_criteria):  # else the cache grows from step to step
            shown = others.get("attention_mask")
            longest = input_ids.shape[1] if shown is None else int(shown.sum(1).max())
            hold(self.session.kv, longest + self._most(input_ids, stopping_criteria))
        return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer, **others)

    def run(self, input_ids: torch.Tensor, processors: Any, criteria: Any, mask: torch.Tensor | None, streamer: Any) -> Any:
        """What ``generate`` returns once transformers has prepared a request for greedy search or sampling, somewhere else."""
        return self._sample(input_ids, processors, criteria, self.generation_config, streamer=streamer, attention_mask=mask,
                            use_cache=True, logits_to_keep=1, **{CACHE_NAME: StepCache(self._sequences)})

    def _beam_search(self, *given: Any, **named: Any) -> Any:
        self._over_the_step("beam search")
        return super()._beam_search(*given, **named)

    def _assisted_decoding(self, *given: Any, **named: Any) -> Any:
        self._over_the_step("assisted generation")
        return super()._assisted_decoding(*given, **named)

    def _over_the_step(self, why: str) -> None:
        self._say(f"transformers' own loop runs this request over compiled steps: {why}")

    @staticmethod
    def beyond_the_session(input_ids: torch.Tensor, config: Any, mask: torch.Tensor | None) -> str:
        """Why the session's own loop over one row cannot run a request; empty: it can."""
        if config.return_dict_in_generate:
            return "outputs beside the tokens (return_dict_in_generate)"
        if config.guidance_scale not in (None, 1, 1.0):
            return "a processor runs the model itself (guidance_scale)"
        if config.is_assistant:
            return "it drafts for another model (is_assistant)"
        if input_ids.shape[0] > 1:
            return f"{input_ids.shape[0]} rows under processors, sampling or criteria"
        return "a padded prompt under processors, sampling or criteria" if mask is not None and not bool((mask == 1).all()) else ""

    @staticmethod
    def _beyond_length_and_end(criteria: Any) -> bool:
        return any(type(one) not in (MaxLengthCriteria, EosTokenCriteria) for one in criteria)

    @staticmethod
    def _ends(criteria: Any) -> frozenset[int]:
        """Tokens that end a request."""
        ends = [one.eos_token_id for one in criteria if isinstance(one, EosTokenCriteria)]
        return frozenset(token for one in ends for token in one.flatten().tolist())

    def _alone(self, processors: Any, criteria: Any) -> Alone | None:
        """What lets the device choose by itself; None where processors or criteria look at more than it keeps."""
        return None if self._beyond_length_and_end(criteria) else alone(processors, self._ends(criteria))

    @staticmethod
    def _most(input_ids: torch.Tensor, criteria: Any) -> int:
        """New tokens at most; transformers asks its criteria behind the first one, so that there is always one."""
        lengths = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
        if not lengths:
            raise UsageError("this request has no greatest length; pass max_new_tokens")
        return max(1, int(min(lengths)) - input_ids.shape[1])

    def _each_row(self, input_ids: torch.Tensor, mask: torch.Tensor | None, criteria: Any, config: Any, streamer: Any) -> torch.Tensor:
        """The most likely tokens of every row, padded behind as transformers pads rows that ended: by steps of several rows where the
        session has such and they win, else one row at a time."""
        count = self._most(input_ids, criteria)
        eos = self._ends(criteria)
        prompts = [(row if mask is None else row[mask[index] == 1]).unsqueeze(0).cpu() for index, row in enumerate(input_ids)]
        for prompt in prompts:
            check_length(prompt.shape[1], count, self.session.max_context)
        together = self.session.rows.tokens(prompts, count, eos) if streamer is None and self._read is None else [None] * len(prompts)
        watched = streamer is not None or bool(eos)
        found = [one if one is not None else collected(self.session.greedy(prompt, count, eos, watched, self._read), streamer)
                 for prompt, one in zip(prompts, together, strict=True)]
        width = max(map(len, found))
        padding = int(config._pad_token_tensor) if eos else 0  # transformers names one wherever a row may end
        new = torch.tensor([[*row, *[padding] * (width - len(row))] for row in found], dtype=torch.int64, device=input_ids.device)
        return torch.cat([input_ids, new], dim=1)

    def _tokens(self, input_ids: torch.Tensor, count: int, pick: Pick, streamer: Any) -> torch.Tensor:
        check_length(input_ids.shape[1], count, self.session.max_context)
        new = collected(self.session.picking(input_ids.cpu(), count, pick, streamer is not None, self._read), streamer)
        return torch.cat([input_ids, torch.tensor([new], dtype=torch.int64, device=input_ids.device)], dim=1)
