"""Modules of one operator or a few: activations, norms, reductions, products, convolutions, pooling."""

import torch
import torch.nn.functional as F
from torch import nn

from .case import add, function, integers, randn

WIDE = randn(16, 256)
IMAGE = randn(2, 4, 12, 12)

for _name, _call in {
    "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "gelu": F.gelu, "silu": F.silu, "softplus": F.softplus,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1), "elu": F.elu, "hardswish": F.hardswish, "mish": F.mish,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "new_gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "squares": lambda x: x.square() + x * 0.3 - torch.rsub(x, 3, alpha=2),
    "clamped": lambda x: x.clamp(-0.5, 1.5).abs().sqrt(), "signs": lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1), "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(0), "mean": lambda x: x.mean(-1, keepdim=True), "maximum": lambda x: x.max(-1), "argmax": lambda x: x.argmax(-1),
    "variance": lambda x: x.var(-1), "product": lambda x: (x * 0.1 + 1).prod(-1), "cumulative_sum": lambda x: x.cumsum(-1),
    "sorted": lambda x: x.sort(-1), "top_five": lambda x: x.topk(5), "frobenius": lambda x: x / torch.linalg.norm(x),
    "l1_norm": lambda x: x / x.abs().sum(1, keepdim=True), "flipped": lambda x: x.flip(1)[:, ::2].contiguous(),
    "hand_rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "constant": lambda x: torch.zeros_like(x) + 3, "identity": lambda x: x, "view_of_input": lambda x: x.view(256, 16).t(),
}.items():
    function(_name, _call, WIDE)

add("layer_norm", lambda: nn.LayerNorm(256), WIDE)
add("rms_norm", lambda: nn.RMSNorm(256, eps=1e-6), WIDE)
add("group_norm", lambda: nn.GroupNorm(2, 4), IMAGE)
add("batch_norm", lambda: nn.BatchNorm2d(4), IMAGE)
add("instance_norm", lambda: nn.InstanceNorm2d(4), IMAGE)
add("linear", lambda: nn.Linear(256, 64), WIDE)
add("linear_one_row", lambda: nn.Linear(256, 64, bias=False), randn(1, 256))
add("linear_relu_scaled", lambda: nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 32)), randn(1, 256))
add("bilinear", lambda: nn.Bilinear(8, 8, 4), randn(3, 8), randn(3, 8))
add("embedding", lambda: nn.Embedding(50, 16), integers(50, 2, 7))
add("conv1d", lambda: nn.Conv1d(4, 8, 3, padding=1), randn(2, 4, 20))
add("conv2d", lambda: nn.Conv2d(4, 8, 3, stride=2), IMAGE)
add("conv3d", lambda: nn.Conv3d(2, 4, 3), randn(1, 2, 6, 6, 6))
add("conv_transposed", lambda: nn.ConvTranspose2d(4, 2, 3, stride=2), IMAGE)
add("conv_depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4, dilation=2), IMAGE)
add("max_pool", lambda: nn.MaxPool2d(2, return_indices=True), IMAGE)
add("average_pool", lambda: nn.AvgPool2d(3, stride=2, padding=1), IMAGE)
add("adaptive_pool", lambda: nn.AdaptiveAvgPool2d(3), IMAGE)
add("upsampled", lambda: nn.Upsample(scale_factor=2, mode="nearest"), IMAGE)
add("dropout_when_evaluating", lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 8)), WIDE)
add("lstm", lambda: nn.LSTM(8, 12, num_layers=2, batch_first=True), randn(2, 5, 8))
add("gru", lambda: nn.GRU(8, 12, batch_first=True), randn(2, 5, 8))
function("matmul", torch.matmul, randn(12, 64), randn(64, 20))
function("matmul_transposed", lambda a, b: a.t() @ b.t(), randn(64, 12), randn(20, 64))
function("batched_matmul", torch.bmm, randn(3, 8, 16), randn(3, 16, 5))
function("vector_matrix", lambda m, v: m @ v, randn(32, 64), randn(64))
function("scalar_product", lambda a, s: a * s, WIDE, 2.5)
function("triangular", lambda a: torch.tril(a) @ torch.triu(a), randn(16, 16))
function("einsum", lambda a, b: torch.einsum("bij,bkj->bik", a, b), randn(2, 4, 8), randn(2, 6, 8))
function("cross_entropy", F.cross_entropy, randn(6, 10), integers(10, 6))
function("smooth_l1", F.smooth_l1_loss, randn(6, 10), randn(6, 10))
function("cosine_similarity", F.cosine_similarity, randn(6, 10), randn(6, 10))
