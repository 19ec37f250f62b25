"""Requests of which transformers decides something late: the way to search, how many tokens there are, which tokens they are at last."""

from typing import Any

import pytest
import torch
import transformers
from test_around_requests import model as drawn
from test_generate_manners import PROMPT, QUICK

import agentcompile_core as ac
from agentcompile_core.errors import UsageError


@pytest.fixture(scope="module")
def model() -> Any:
    return drawn()


@pytest.fixture(scope="module")
def mine(model) -> Any:
    return ac.compile(model, **QUICK)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beside", [{}, {"position_ids": torch.arange(5)[None]}, {"top_k": 4}, {"top_k": 0}, {"top_k": 1}], ids=str)
def test_the_way_to_search_is_what_transformers_finds_with_its_defaults(model, mine, beside: dict[str, Any]) -> None:
    asked = {"penalty_alpha": 0.6, "max_new_tokens": 4, **beside}
    if beside.get("top_k", 50) < 2:
        assert torch.equal(mine.generate(PROMPT, **asked), model.generate(PROMPT, **asked))
        return
    with pytest.raises(ValueError, match="Contrastive Search"):
        model.generate(PROMPT, **asked)
    with pytest.raises(UsageError, match="Contrastive Search"):
        mine.generate(PROMPT, **asked)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("longest", [1, 4, 5, 6, 8])
@pytest.mark.parametrize("values", [{}, {"do_sample": True, "top_k": 1}, {"no_repeat_ngram_size": 2}, {"num_beams": 2},
                                    {"return_dict_in_generate": True}], ids=str)
def test_a_length_that_the_prompt_has_reached_makes_one_token(model, mine, longest: int, values: dict[str, Any]) -> None:
    def found(one: Any) -> Any:
        criteria = [transformers.MaxLengthCriteria(longest)]
        made = one.generate(PROMPT, stopping_criteria=criteria, max_new_tokens=4, eos_token_id=None, **values)
        return made if isinstance(made, torch.Tensor) else made.sequences

    assert torch.equal(found(mine), found(model))


class Writes(transformers.LogitsProcessor):
    """Writes into the tokens that it is shown."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids[:, self.at] = 3
        return scores


class WritesAtTheEnd(transformers.StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **others: Any) -> torch.Tensor:
        ids[:, -1] = 4
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("values", [{}, {"do_sample": True, "top_k": 3}, {"no_repeat_ngram_size": 1}, {"num_beams": 2},
                                    {"return_dict_in_generate": True}, {"stopping_criteria": [WritesAtTheEnd()]}],
                         ids=lambda given: ", ".join(given) or "nothing")
@pytest.mark.parametrize("at", [0, -1])
def test_tokens_that_a_processor_writes_are_those_that_come_back(model, mine, at: int, values: dict[str, Any]) -> None:
    def found(one: Any) -> Any:
        torch.manual_seed(5)
        made = one.generate(PROMPT.clone(), logits_processor=[Writes(at)], max_new_tokens=6, eos_token_id=None, **values)
        return made if isinstance(made, torch.Tensor) else made.sequences

    ours = found(mine)
    assert torch.equal(ours, found(model)) and not ours.is_inference()
