"""Write the table of docs/generate.md: every argument of transformers' ``generate`` and every field of GenerationConfig, tried.

Each is given to a compiled tiny model beside a value that means something, and the row says who ran the request. A test holds the
page equal to what this writes and lets no name of transformers be missing, so that nothing is ignored in silence.

    python scripts/write_generate_page.py           # writes
    python scripts/write_generate_page.py --check   # fails where the page is not what would be written
"""

import argparse
import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GenerationMixin

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.generation.request import Asked, request
from agentcompile_core.store import Store

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "generate.md"
BEGIN, END = "<!-- who runs what (written by scripts/write_generate_page.py) -->", "<!-- end of who runs what -->"
SIZES: dict[str, Any] = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 7, "bos_token_id": 1, "eos_token_id": 2}
PROMPT = torch.tensor([[5, 17, 42]])
DEVICE, DRAWN_THERE, SESSION, BEHIND, LOOP, FRAMEWORK, UNREAD = (
    "the session alone, the most likely token chosen on the device",
    "the session alone, transformers' processors captured behind the step, so that the device chooses",
    "the session, one step at a time under transformers' processors and criteria",
    "the session behind one prompt that HuggingFace's own model reads, as where it holds images (`pixel_values` and its like)",
    "transformers' own loop over compiled steps", "transformers' own loop over HuggingFace's model, without kernels",
    "nobody: no token depends on it in a session, which has its own cache and chunks")
DRAWN, BEAMS, DRAFTS = {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}
UNREAD_NAMES = ("cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config",
                "decoder_start_token_id", "transformers_version", "num_assistant_tokens", "num_assistant_tokens_schedule",
                "assistant_lookbehind", "target_lookbehind", "trust_remote_code")


def samples(model: Any) -> dict[str, dict[str, Any]]:
    """For each name the arguments of one request in which it means something."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny_model")
    fields: dict[str, Any] = {
        "max_length": 6, "max_new_tokens": 3, "min_length": 5, "min_new_tokens": 2, "max_time": 100.0, "use_mtp": True, "use_cache": False,
        "cache_implementation": "offloaded", "cache_config": {"a": 1}, "max_cache_len": 30, "repetition_penalty": 1.3,
        "encoder_repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "bad_words_ids": [[3]],
        "renormalize_logits": True, "forced_bos_token_id": 3, "forced_eos_token_id": 3, "remove_invalid_values": True,
        "exponential_decay_length_penalty": (1, 1.2), "suppress_tokens": [3], "begin_suppress_tokens": [3], "sequence_bias": [[[3], 1.0]],
        "guidance_scale": 1.5, "watermarking_config": transformers.WatermarkingConfig(), "return_dict_in_generate": True,
        "pad_token_id": 8, "bos_token_id": 3, "eos_token_id": [3, 4], "decoder_start_token_id": 3, "prompt_lookup_num_tokens": 2,
        "assistant_early_exit": 1, "speculation_type": "dflash", "compile_config": transformers.CompileConfig(), "disable_compile": True,
        "continuous_batching_config": None, "penalty_alpha": 0.6, "dola_layers": "low", "constraints": [], "force_words_ids": [[3]],
        "prefill_chunk_size": 2, "transformers_version": "5", "do_sample": True, "num_beams": 2, "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant", "assistant_lookbehind": 3, "target_lookbehind": 3,
    }
    found: dict[str, dict[str, Any]] = {name: {name: value} for name, value in fields.items()}
    for name, value in {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "top_h": 0.5, "typical_p": 0.8, "epsilon_cutoff": 0.01,
                        "eta_cutoff": 0.01}.items():
        found[name] = {**DRAWN, name: value}
    found["num_return_sequences"] = {**DRAWN, "num_return_sequences": 2}
    for name, value in {"early_stopping": True, "length_penalty": 0.5}.items():
        found[name] = {**BEAMS, name: value}
    found["low_memory"] = {**BEAMS, "low_memory": True}
    found["diversity_penalty"] = found["num_beam_groups"] = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
    for name, value in {"max_matching_ngram_size": 3, "assistant_ensemble_weight": 0.5}.items():
        found[name] = {**DRAFTS, name: value}
    found["is_assistant"] = found["assistant_confidence_threshold"] = {"is_assistant": True, "assistant_confidence_threshold": 0.3}
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        found[name] = {"return_dict_in_generate": True, name: True}
    found["stop_strings"] = found["tokenizer"] = {"stop_strings": ["zq"], "tokenizer": tokenizer}
    found["token_healing"] = {"token_healing": True, "tokenizer": tokenizer}
    found["assistant_model"] = {"assistant_model": model}
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "vocab_size": 2048}))
    found["assistant_tokenizer"] = {"assistant_model": other.eval(), "tokenizer": tokenizer, "assistant_tokenizer": tokenizer}
    found["inputs"] = {"inputs": PROMPT}
    found["generation_config"] = {"generation_config": GenerationConfig(top_k=5, do_sample=True)}
    found["logits_processor"] = {"logits_processor": [lambda ids, scores: scores]}
    found["stopping_criteria"] = {"stopping_criteria": [transformers.MaxTimeCriteria(100.0)]}
    found["prefix_allowed_tokens_fn"] = {"prefix_allowed_tokens_fn": lambda row, ids: [3, 4]}
    found["synced_gpus"] = {"synced_gpus": True}
    found["streamer"] = {"streamer": transformers.TextIteratorStreamer(tokenizer)}
    found["negative_prompt_ids"] = {"guidance_scale": 1.5, "negative_prompt_ids": PROMPT}
    found["negative_prompt_attention_mask"] = {**found["negative_prompt_ids"], "negative_prompt_attention_mask": torch.ones_like(PROMPT)}
    found["custom_generate"] = {"custom_generate": lambda model, input_ids, **_: torch.cat([input_ids, input_ids], 1)}
    found["trust_remote_code"] = {"trust_remote_code": True}
    rows = {"input_ids": [[5, 17], [3, 4, 5]]}
    found["several prompts"] = rows
    found["several prompts with anything but the most likely token"] = {**rows, **DRAWN}
    found["attention_mask"] = {"attention_mask": [[0, 1, 1]]}
    found["inputs_embeds"] = {"inputs_embeds": model.get_input_embeddings()(PROMPT)}
    found["past_key_values"] = {"past_key_values": transformers.DynamicCache()}
    found["position_ids"] = {"position_ids": torch.tensor([[0, 1, 2]]), "attention_mask": torch.ones_like(PROMPT)}
    return found


def names() -> set[str]:
    """Every name that transformers knows."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return known | set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}


def runner(mine: Any, name: str, options: dict[str, Any]) -> str:
    """Who runs one request."""
    asked = {"max_new_tokens": 2, **options}
    if not {"input_ids", "inputs", "inputs_embeds"} & set(asked):
        asked["input_ids"] = PROMPT
    if name == "max_length":
        del asked["max_new_tokens"]
    picks: list[Any] = []
    with warnings.catch_warnings(record=True) as heard, seen(mine.session, picks):
        warnings.simplefilter("always")
        try:
            mine.generate(**asked)
        except UsageError as exc:
            if "refused this request" not in str(exc):
                raise
    said = " ".join(str(one.message) for one in heard)
    if "compiled steps make its tokens" in said:
        return BEHIND
    if "over compiled steps" in said:
        return LOOP
    if "without kernels" in said:
        return FRAMEWORK
    given = {key: value for key, value in asked.items() if key not in ("input_ids", "max_new_tokens", "attention_mask", "streamer")}
    wanted = request(mine.loaded.module, Asked(input_ids=asked.get("input_ids"), max_new_tokens=asked.get("max_new_tokens"),
                                               attention_mask=asked.get("attention_mask"), options=given), mine.graphs)
    if name in UNREAD_NAMES:
        assert wanted.runs == "device", f"{name} makes a difference"
        return UNREAD
    plain = wanted.runs == "device" or name in ("several prompts", "attention_mask")
    return DEVICE if plain else DRAWN_THERE if picks and all(pick.alone is not None for pick in picks) else SESSION


@contextlib.contextmanager
def seen(session: Any, picks: list[Any]) -> Iterator[None]:
    """Note how the session is told to choose."""
    picking = session.picking
    session.picking = lambda prompt, count, pick, *others: picks.append(pick) or picking(prompt, count, pick, *others)
    try:
        yield
    finally:
        del session.picking


def table(mine: Any) -> str:
    """The table, one row per way to run."""
    tried = samples(mine.loaded.module)
    missing = sorted(names() - set(tried))
    if missing:
        raise SystemExit(f"transformers {transformers.__version__} knows {', '.join(missing)}: give each a sample in this script")
    by: dict[str, list[str]] = {}
    for name, options in tried.items():
        by.setdefault(runner(mine, name, options), []).append(f"`{name}`" if " " not in name else name)
    rows = [f"| {who} | {', '.join(sorted(by[who]))} |" for who in (DEVICE, DRAWN_THERE, SESSION, BEHIND, LOOP, FRAMEWORK, UNREAD)]
    return "\n".join(["| who runs it | with |", "|---|---|", *rows])


def compiled() -> Any:
    """A random model of one layer."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().requires_grad_(False)
    return ac.compile(model, device="cpu", run_on="framework", store=Store(None), validators=[], origins=[])


def page(mine: Any, text: str) -> str:
    """``text`` with the table between its markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(mine)}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Write the page, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is not up to date; write nothing")
    options = parser.parse_args()
    text = PAGE.read_text()
    fresh = page(compiled(), text)
    if options.check:
        return 0 if fresh == text else 1
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
