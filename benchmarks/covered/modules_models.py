"""Whole models that predict no next token: encoders and decoders of transformers by their own classes, and image models of ours.

Tiny and random, in the shapes of what they are called after. Matrices are larger than initialized, so that layers change what they get.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from .case import Of, add, integers, randn

VOCABULARY, WIDTH, INNER, HEADS, LAYERS = 64, 32, 48, 4, 2
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS,
          "num_hidden_layers": LAYERS, "max_position_embeddings": 40}
TEXT = integers(VOCABULARY, 2, 7)
STATES = randn(2, 9, WIDTH)
IMAGE = randn(1, 3, 16, 16)


def padded(generator: torch.Generator) -> Tensor:
    """A mask [2, 7] of two texts, the second of them shorter by one to four tokens."""
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 7 - int(torch.randint(1, 5, (), generator=generator)):] = 0
    return mask


def scaled(model: nn.Module) -> nn.Module:
    """The model with matrices four times as large and vectors that are not all one or zero."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.data.mul_(4.0)
    return model


def of(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A maker of transformers' ``<kind>Model`` of tiny sizes."""
    return lambda: scaled(getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**{**_SIZES, **sizes})))


def decoder_of(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """The same of the decoder of a pair: ids and the encoder's states to the last hidden states, without a cache."""
    def run(holder: nn.Module, ids: Tensor, states: Tensor) -> Tensor:
        return holder.decoder(input_ids=ids, encoder_hidden_states=states, use_cache=False).last_hidden_state  # type: ignore[operator, union-attr]

    return lambda: Of(run, decoder=of(kind, **sizes)().get_decoder())  # type: ignore[operator]


class Residual(nn.Module):
    """Two convolutions with batch norms, and what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(h)))


class ImageClassifier(nn.Module):
    """A stem, residual blocks at two resolutions, the mean of all places, a linear layer."""

    def __init__(self, channels: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(Residual(channels), nn.Conv2d(channels, 2 * channels, 1, stride=2), Residual(2 * channels))
        self.head = nn.Linear(2 * channels, classes)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean, part.running_var = torch.randn(part.num_features), torch.rand(part.num_features) + 0.5

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, classes]."""
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


class Mixing(nn.Module):
    """Group norm, SiLU, convolution, twice, with the time added between them."""

    def __init__(self, given: int, made: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(2, given), nn.GroupNorm(2, made)))
        self.convolutions = nn.ModuleList((nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)))
        self.time, self.beside = nn.Linear(width, made), nn.Conv2d(given, made, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """[B, given, H, W], [B, width] -> [B, made, H, W]."""
        h = self.convolutions[0](F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.beside(x) + self.convolutions[1](F.silu(self.norms[1](h)))


class Denoiser(nn.Module):
    """One resolution down and up again, with what was seen on the way down beside what comes up."""

    def __init__(self, channels: int = 8, width: int = 16) -> None:
        super().__init__()
        self.width, self.embed = width, nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.down = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.above, self.below, self.behind = (Mixing(*io, width) for io in ((channels, channels), (channels, channels),
                                                                            (2 * channels, channels)))
        self.leave = nn.Sequential(nn.GroupNorm(2, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        """[B, 3, H, W] and the step's number [B] -> [B, 3, H, W]."""
        frequencies = torch.exp(-torch.arange(self.width // 2, device=image.device) * (4.0 / self.width))
        angles = step[:, None] * frequencies
        time = self.embed(torch.cat((angles.sin(), angles.cos()), -1))
        seen = self.above(self.enter(image), time)
        h = self.below(self.down(seen), time)
        return self.leave(self.behind(torch.cat((F.interpolate(h, scale_factor=2.0, mode="nearest"), seen), 1), time))


class Mixer(nn.Module):
    """Patches whose places are mixed by one MLP and whose channels by another."""

    def __init__(self, places: int = 16, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        sizes = [(places, 24), (width, 48)] * layers
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(n, inner), nn.GELU(), nn.Linear(inner, n)) for n, inner in sizes)
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, 16, 16] -> [B, 10]."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        for place in range(0, len(self.mlps), 2):
            x = x + self.mlps[place](self.norms[place](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.mlps[place + 1](self.norms[place + 1](x))
        return self.head(self.norms[-1](x).mean(1))


class DiffusionBlock(nn.Module):
    """A transformer block whose norms are shifted and scaled, and whose results are weighted, by what it is conditioned on."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))

    def attention(self, x: Tensor) -> Tensor:
        """[B, T, C] -> the same, every place seeing every other."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, T, C], [B, C] -> [B, T, C]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norms[0](x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norms[1](x) * (1 + scale2) + shift2)


add("bert_encoder", of("Bert"), input_ids=TEXT, attention_mask=padded)
add("minilm_encoder", of("Bert", num_attention_heads=8, num_hidden_layers=3, intermediate_size=4 * WIDTH), input_ids=TEXT,
    attention_mask=padded)
add("roberta_encoder", of("Roberta"), input_ids=lambda g: torch.randint(2, VOCABULARY, (2, 7), generator=g), attention_mask=padded)
add("modernbert_encoder", of("ModernBert", num_hidden_layers=3, local_attention=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                             cls_token_id=1, sep_token_id=2, reference_compile=False), input_ids=TEXT, attention_mask=padded)
add("clip_text_encoder", of("CLIPText", eos_token_id=2), input_ids=TEXT, attention_mask=padded)
add("vit_encoder", of("ViT", image_size=16, patch_size=4), IMAGE)
add("t5_decoder", decoder_of("T5", d_model=WIDTH, d_kv=8, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS), TEXT, STATES)
add("whisper_decoder", decoder_of("Whisper", d_model=WIDTH, decoder_layers=LAYERS, encoder_layers=1, decoder_attention_heads=HEADS,
                                  encoder_attention_heads=HEADS, decoder_ffn_dim=INNER, encoder_ffn_dim=INNER, num_mel_bins=8,
                                  max_source_positions=16, max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                  decoder_start_token_id=1), TEXT, STATES)
add("residual_image_net", ImageClassifier, IMAGE)
add("denoising_net", Denoiser, IMAGE, lambda g: torch.rand(1, generator=g) * 100)
add("mlp_mixer", Mixer, IMAGE)
add("diffusion_block", lambda: scaled(DiffusionBlock()), randn(1, 9, WIDTH), randn(1, WIDTH))
