"""Tiny random models that read images beside tokens, and prompts for them.

Their configurations hold one for each part, which are shrunk field by field as those of language models are. Nothing is downloaded, and
no processor is needed: a prompt is drawn numbers in the shapes that a processor makes, and as many image tokens as they give features.
"""

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from . import models

PATCH, IMAGE, FIRST_SPECIAL = 4, 16, 100  # pixels; image tokens and their like are numbered from the third on
TYPES = tuple("""
    aya_vision cohere2_vision deepseek_vl gemma3 gemma4 glm4v glm46v got_ocr2 idefics2 idefics3 internvl lighton_ocr llava llava_next
    llava_onevision mistral3 ovis2 paligemma qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm vipllava
""".split())  # noqa: SIM905
_ROPE: dict[str, Any] = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v"), _ROPE),
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}, "text_config": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "pad_token_id": 0}},
    **{name: {"image_grid_pinpoints": [[IMAGE, IMAGE]]} for name in ("llava_next", "llava_onevision")},
    "internvl": {"image_seq_length": 16},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}
_VISION: dict[str, Any] = {"patch_size": PATCH, "image_size": IMAGE, "depth": 2, "num_heads": 2, "out_hidden_size": models.WIDTH,
                           "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1],
                           "window_size": 2 * PATCH, "hidden_size": models.WIDTH, "embed_dim": models.WIDTH,
                           "projection_dim": models.WIDTH}
_COUNTS = {"image_seq_length": 16, "mm_tokens_per_image": 4}


def covered() -> tuple[str, ...]:
    """The types of the sweep that this transformers knows."""
    return tuple(name for name in TYPES if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def options_of(config: Any, special: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a configuration like ``config`` with the sizes of all its parts tiny."""
    found = models.shrunk(config, {})
    known = vars(config)
    if "patch_size" in known or "image_size" in known:
        found |= {name: value for name, value in _VISION.items() if name in known and isinstance(known[name], int | list | tuple)}
    found |= {name: value for name, value in _COUNTS.items() if known.get(name)}
    if isinstance(known.get("layer_types"), list | tuple) and known["layer_types"]:
        kinds = list(dict.fromkeys(known["layer_types"]))
        found["layer_types"] = [kinds[i % len(kinds)] for i in range(found.get("num_hidden_layers", models.LAYERS))]
    if "mrope_section" in (known.get("rope_parameters") or {}):
        found |= {"rope_parameters": {**known["rope_parameters"], "mrope_section": [2, 1, 1]}, "head_dim": 8}
    specials = [name for name, value in known.items() if name.endswith(("token_id", "token_index")) and isinstance(value, int)]
    found |= {name: FIRST_SPECIAL + i for i, name in enumerate(specials) if name not in found}
    found |= {"projection_dim": models.WIDTH} if "projection_dim" in known else {}
    for name in getattr(config, "sub_configs", {}):
        part, own = getattr(config, name, None), special.get(name, {})
        if part is None and own:
            part = transformers.CONFIG_MAPPING[own["model_type"]]()
        if part is not None:
            found[name] = {**options_of(part, {}), "model_type": part.model_type, **own}
    return {**found, **{name: value for name, value in special.items() if name not in getattr(config, "sub_configs", {})}}


def tiny(model_type: str, scale: float = 8.0) -> nn.Module:
    """A random fp32 model whose greedy tokens vary and depend on its images. Always the same one."""
    kind = transformers.CONFIG_MAPPING[model_type]
    config = kind(**options_of(kind(), SPECIAL.get(model_type, {})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1 and not bool(parameter.any()):
                parameter.data.normal_(0, 0.02)  # Gemma 3 would see nothing by its first projection of images
        return models.varied(model, scale)


def image_prompt(model: nn.Module, seed: int = 3, grid: tuple[int, int] = (4, 6)) -> dict[str, Tensor]:
    """Arguments of ``generate`` for two tokens, an image and three tokens, on the model's device.

    ``grid``: rows and columns of patches, for a model that takes images of any size.
    """
    drawn = torch.Generator().manual_seed(seed)
    takes = inspect.signature(model.forward).parameters
    if "image_grid_thw" in takes:
        images = _grid(model, drawn, grid)
    else:
        images = (_patches if "image_position_ids" in takes else _pixels)(model, drawn)
    images = {name: one.to(model.device, model.dtype if one.is_floating_point() else None) for name, one in images.items()}
    with torch.no_grad():
        features = _features(model, images)
    image = next(value for name in ("image_token_id", "image_token_index") if isinstance(value := getattr(model.config, name, None), int))
    ids = torch.cat([torch.tensor([5, 6]), torch.full((features,), image), torch.tensor([8, 9, 10])])[None].to(model.device)
    kinds = {name: (ids == image).long() for name in ("token_type_ids", "mm_token_type_ids")
             if name in takes}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images, **kinds}


def _grid(model: nn.Module, drawn: torch.Generator, size: tuple[int, int]) -> dict[str, Tensor]:
    vision: Any = model.config.vision_config
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or vision.num_channels
    patch = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    grid = torch.tensor([[1, *size]])
    return {"pixel_values": torch.randn(int(grid.prod()), patch, generator=drawn), "image_grid_thw": grid}


def _pixels(model: nn.Module, drawn: torch.Generator) -> dict[str, Tensor]:
    vision: Any = model.config.vision_config
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    pixels = torch.randn(1, 3, size, size, generator=drawn)
    name = type(model).__name__
    if name.startswith(("Idefics", "SmolVLM")):
        return {"pixel_values": pixels[None]}
    if name.startswith(("LlavaNext", "LlavaOnevision")):  # the whole image, and the one part that it is cut into
        return {"pixel_values": pixels.repeat(2, 1, 1, 1)[None], "image_sizes": torch.tensor([[size, size]])}
    sizes = {"image_sizes": torch.tensor([[size, size]])} if name.startswith(("Mistral3", "LightOn")) else {}
    return {"pixel_values": pixels, **sizes}


def _patches(model: nn.Module, drawn: torch.Generator) -> dict[str, Tensor]:
    vision: Any = model.config.vision_config
    side = 2 * vision.pooling_kernel_size
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).reshape(1, -1, 2)
    return {"pixel_values": torch.rand(1, side * side, 3 * vision.patch_size**2, generator=drawn), "image_position_ids": places}


def _features(model: Any, images: dict[str, Tensor]) -> int:
    """How many image tokens the features of ``images`` replace."""
    inner = model.model if hasattr(model.model, "get_image_features") else model
    takes = inspect.signature(inner.get_image_features).parameters
    found = inner.get_image_features(**{name: value for name, value in images.items() if name in takes})
    found = getattr(found, "pooler_output", found)
    found = torch.cat([one.reshape(-1, one.shape[-1]) for one in found]) if isinstance(found, list | tuple) else found
    return int(found.reshape(-1, found.shape[-1]).shape[0])
