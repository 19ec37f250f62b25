"""Opening HuggingFace models: a folder or an identifier; safetensors only, no code of the model's author is ever run."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils.hub import cached_file

from ...errors import UsageError, bounded
from ...plugin.interfaces import LoadedModel
from ...runtime.device import forked_rng
from .checkpoint_check import INDEX, check_folder, check_index, cleaned, read_json

log = logging.getLogger(__name__)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_pretrained(what: str, *, dtype: str | None, device: str, meta: bool, random_weights: int | None) -> LoadedModel:
    """Open the folder or identifier ``what``.

    Args:
        dtype: torch's name of the element type; None: what the weights (or the configuration) say.
        device: where the parameters go.
        meta: no weights at all; the parameters live on the meta device.
        random_weights: seed; weights are drawn at random, created on the device. Also what happens, with seed 0, to a
            folder that holds a configuration and no weights.

    Raises:
        UsageError: no such folder, a broken configuration, an architecture that is no causal language model, pickled
            or incomplete weights.
    """
    folder = Path(what).expanduser()
    local = folder.is_dir()
    if local:
        _check_configuration(folder)
        check_folder(folder)
    config = _config(what, str(folder) if local else what, local)
    name = folder.resolve().name if local else what
    kind = None if dtype is None else getattr(torch, dtype)
    made_up = meta or random_weights is not None or (local and not _has_weights(folder))
    notes = cleaned(config, name, weights=not made_up)
    if meta:
        module = _from_config(config, name, kind, "meta")
    elif made_up:
        module = _random(config, name, kind, device, random_weights or 0)
        why = "asked for" if random_weights is not None else f"no weights in {folder}"
        notes += (f"{why}: random weights, seed {int(random_weights or 0)}; what it generates means nothing",)
    else:
        module = _with_weights(config, str(folder) if local else what, name, kind, device)
    tokenizer = _tokenizer(folder if local else what)
    if getattr(config, "is_encoder_decoder", False) and _auto_class(config) is transformers.AutoModelForCausalLM:
        notes += (f"{name} is an encoder-decoder model and was opened as its decoder alone, as AutoModelForCausalLM does; "
                  "pass a live model to run both",)
    if hasattr(config, "vision_config") and not hasattr(module.config, "vision_config"):
        notes += (f"{name} was opened as its language model alone, as AutoModelForCausalLM does; pass a live model to read images",)
    return LoadedModel(module=module, name=name, tokenizer=tokenizer, path=folder if local else None, notes=notes)


def _check_configuration(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder} holds no config.json; give a HuggingFace model folder or a folder with model.py")
    config = read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"{path} names no model_type; a HuggingFace configuration has one")


def _config(what: str, source: str, local: bool) -> Any:
    # What is cached is used without asking the network; only a model that is not here is fetched.
    failure: Exception = OSError("the hub cannot be reached")
    for offline in (True,) if local else (True, False):
        if not offline and not _reachable():
            break
        try:
            return transformers.AutoConfig.from_pretrained(source, local_files_only=offline, trust_remote_code=False)
        except Exception as exc:
            failure = exc
            if not isinstance(exc, OSError):
                break
    if isinstance(failure, OSError):
        raise UsageError(f"{what!r} is neither a folder here nor a model that can be fetched; check the name or the network") from failure
    raise UsageError(f"transformers {transformers.__version__} cannot read the configuration of {what!r}: {_line(failure)}") from failure


def _has_weights(folder: Path) -> bool:
    """Whether ``folder`` holds safetensors.

    Raises:
        UsageError: it holds pickled weights only.
    """
    if any(folder.glob("*.safetensors")):
        return True
    pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    if pickles:
        raise UsageError(f"{folder} holds pickled weights ({pickles[0]}), which can run code; convert them to safetensors")
    return False


def _attention(config: Any) -> dict[str, str]:
    """Which attention a model is loaded with: transformers' choice, but where scores have a soft cap its own, since SDPA has none.

    Versions before 5.23 choose SDPA all the same and leave the soft cap out without a word.
    """
    configs = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})))
    return {"attn_implementation": "eager"} if any(getattr(c, "attn_logit_softcapping", None) for c in configs) else {}


def _auto_class(config: Any) -> Any:
    """What opens a model: as a language model, else with what it reads images by."""
    kind = config.model_type
    only_with_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return transformers.AutoModelForImageTextToText if only_with_images else transformers.AutoModelForCausalLM


def _from_config(config: Any, name: str, dtype: torch.dtype | None, device: str) -> nn.Module:
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device(device):
            module = _auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False, **_attention(config))
    except Exception as exc:
        raise UsageError(f"{name} ({config.model_type}) cannot be built as a causal language model: {_line(exc)}") from exc
    return module.eval().requires_grad_(False)


def _random(config: Any, name: str, dtype: torch.dtype | None, device: str, seed: int) -> nn.Module:
    with forked_rng([device]):
        torch.manual_seed(seed)
        return _from_config(config, name, dtype, device)


def _with_weights(config: Any, source: str, name: str, dtype: torch.dtype | None, device: str) -> nn.Module:
    for offline in (True, False):
        try:
            if not Path(source).is_dir():
                _check_remote_index(source, offline)
            with _no_progress_bar():
                found: Any = _auto_class(config).from_pretrained(
                    source, config=config, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True,
                    local_files_only=offline, **_attention(config),
                )
            break
        except UsageError:
            raise
        except OSError as exc:
            if not offline or not _reachable():
                raise UsageError(f"{name} has no safetensors weights that can be read: {_line(exc)}") from exc
        except Exception as exc:
            if "ignore_mismatched_sizes" in str(exc):
                raise UsageError(f"the weights of {name} have other shapes than its config.json says; download both again") from exc
            raise UsageError(f"{name} cannot be loaded as a causal language model: {_line(exc)}") from exc
    module, loading = found
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UsageError(f"the weights of {name} lack {len(missing)} parameters, such as {missing[0]}; download them again")
    return module.eval().requires_grad_(False).to(device)


def _check_remote_index(source: str, offline: bool) -> None:
    found = cached_file(source, INDEX, local_files_only=offline, _raise_exceptions_for_missing_entries=False,
                                           _raise_exceptions_for_connection_errors=False)
    if found is not None:
        check_index(Path(found))


def _tokenizer(source: Path | str) -> Any:
    if isinstance(source, Path) and not any((source / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        local = isinstance(source, Path)
        return transformers.AutoTokenizer.from_pretrained(str(source), local_files_only=local, trust_remote_code=False)
    except Exception as exc:  # a model without its tokenizer still runs on token ids
        log.warning("no tokenizer for %s: %s", source, _line(exc))
        return None


def _reachable() -> bool:
    """Whether the hub's name resolves; without this question its client retries for half a minute."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(huggingface_hub.constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _line(exc: BaseException) -> str:
    """The first line of an error; of a long one its first sentences."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    first = lines[0] if lines else type(exc).__name__
    return bounded(first, 240)
