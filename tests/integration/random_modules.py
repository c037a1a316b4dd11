"""Small random LightningModules that do what research code does, as a function of a seed.

Nearly everything that a fast executor could get wrong is in the tables below, one line each:
layers, losses, and twists, which are what a loss or features are put through. A twist has a gate,
which says when it begins: many do so in a late round, where a rare sample is drawn, weights have
moved, or something has been counted. Most modules are what fast paths are for, with one oddity at
most: of several, only the first would be met. `compare` records the same case along two executors.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import Aggregator, FedAvg
from fedrec.callbacks import Callback
from fedrec.exceptions import FedrecWarning
from fedrec.executors import Executor, VectorizedExecutor
from fedrec.history import MemoryHistory

ROUNDS = 30
LIMIT, LOG_LIMIT = 1e-4, 1e-3  # relative
H, C, LENGTH = 6, 3, 4  # features, classes, positions
IGNORED = -100


# -- layers: functions of (block, features, batch) that keep the shape -----------------------------


class Block(nn.Module):
    """A function of its parts: `do(self, x, info)`."""

    def __init__(self, do: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.do = do
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, info: Any) -> Tensor:
        return self.do(self, x, info)


class OwnLinear(nn.Linear):
    """A Linear that does what it wants."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.5 * g


class Straight(torch.autograd.Function):
    """Rounds by the largest value of the batch; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        step = x.abs().amax() / 8
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Levelled(torch.autograd.Function):
    """Scales the gradient of the batch to norm 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g.norm() + 1e-3)


def lin(bias: bool = True) -> nn.Linear:
    return nn.Linear(H, H, bias=bias)


def par(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.4 * torch.randn(*shape))


def frozen(part: nn.Module) -> nn.Module:
    return part.requires_grad_(False)


def _without_bias(part: nn.Linear) -> nn.Linear:
    part.bias.requires_grad_(False)
    return part


SMOOTH: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "nn.Tanh": nn.Tanh,
    "torch.tanh": lambda: torch.tanh,
    "x.tanh": lambda: lambda x: x.tanh(),
    "x.tanh_": lambda: lambda x: x.tanh_(),
    "F.gelu": lambda: F.gelu,
    "nn.SiLU": lambda: nn.SiLU(inplace=True),
    "F.silu": lambda: F.silu,
    "x.sigmoid": lambda: lambda x: x.sigmoid(),
    "F.softplus": lambda: F.softplus,
    "nn.ELU": nn.ELU,
    "F.elu": lambda: lambda x: F.elu(x, inplace=True),
    "x.sin": lambda: lambda x: x.sin(),
    "x*sigmoid": lambda: lambda x: x * torch.sigmoid(x),
    "x.add_": lambda: lambda x: x.sigmoid().mul(0.9).add_(0.1),
    "out=": lambda: lambda x: torch.logaddexp(x, torch.zeros(())),
}
KINKED: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "nn.ReLU": nn.ReLU,
    "nn.ReLU_": lambda: nn.ReLU(inplace=True),
    "F.relu": lambda: F.relu,
    "x.relu_": lambda: lambda x: x.relu_(),
    "x.clamp": lambda: lambda x: x.clamp(min=0),
    "F.leaky_relu": lambda: F.leaky_relu,
    "maximum": lambda: lambda x: torch.maximum(x, 0.1 * x),
    "x*(x>0)": lambda: lambda x: x * (x > 0),
    "where": lambda: lambda x: torch.where(x > 0, x, 0.2 * x),
    "nn.Hardtanh": nn.Hardtanh,
}


def _halves(b: Any, x: Tensor, i: Any) -> Tensor:
    both = b.a(torch.cat([x, x.flip(-1)], 0))  # all clients, then all clients again
    return both[: len(x)] + both[len(x) :]


def _rare_rows(b: Any, x: Tensor, i: Any) -> Tensor:
    out = x.clone()
    out[i.rare] = b.a(x[i.rare])
    return out


def _usual_rows(b: Any, x: Tensor, i: Any) -> Tensor:
    out = torch.zeros_like(x)
    out[~i.rare] = b.a(x[~i.rare])
    return out


def _rare_first(b: Any, x: Tensor, i: Any) -> Tensor:
    order = torch.argsort((~i.rare).int(), stable=True)
    return b.a(x[order])[torch.argsort(order)]


def _sorted_rows(b: Any, x: Tensor, i: Any) -> Tensor:
    order = torch.argsort(x.flatten(1).norm(dim=1))
    return b.a(x[order])[torch.argsort(order)]


# For features of shape (..., H).
LAYERS: dict[str, Callable[[], Block]] = {
    "linear": lambda: Block(lambda b, x, i: b.a(x), a=lin()),
    "linear_no_bias": lambda: Block(lambda b, x, i: b.a(x), a=lin(False)),
    "own_linear": lambda: Block(lambda b, x, i: b.a(x), a=OwnLinear(H, H)),
    "two_linear": lambda: Block(
        lambda b, x, i: b.a(x), a=nn.Sequential(nn.Linear(H, 4), nn.Tanh(), nn.Linear(4, H))
    ),
    "residual": lambda: Block(lambda b, x, i: x + b.a(x).tanh(), a=lin()),
    "gated": lambda: Block(lambda b, x, i: b.a(x) * b.c(x).sigmoid(), a=lin(), c=lin()),
    "glu": lambda: Block(lambda b, x, i: F.glu(b.a(x), -1), a=nn.Linear(H, 2 * H)),
    "slices": lambda: Block(
        lambda b, x, i: torch.cat([b.a(x[..., :3]), x[..., 3:]], -1), a=nn.Linear(3, 3)
    ),
    "chunks": lambda: Block(
        lambda b, x, i: torch.stack(b.a(x).chunk(2, -1), -1).flatten(-2).roll(1, -1), a=lin()
    ),
    "in_place_slice": lambda: Block(
        lambda b, x, i: b.a(x).clone().index_fill_(-1, torch.tensor([0]), 0.3), a=lin()
    ),
    "layer_norm": lambda: Block(lambda b, x, i: b.a(x), a=nn.LayerNorm(H)),
    "layer_norm_plain": lambda: Block(
        lambda b, x, i: b.c(b.a(x)), a=nn.LayerNorm(H, elementwise_affine=False), c=lin()
    ),
    "f_layer_norm": lambda: Block(
        lambda b, x, i: F.layer_norm(x, (H,), b.c.weight, b.c.bias), c=nn.LayerNorm(H)
    ),
    "twice": lambda: Block(lambda b, x, i: b.a(torch.tanh(b.a(x))), a=lin()),
    "tied": lambda: Block(lambda b, x, i: F.linear(b.a(x).tanh(), b.a.weight.t()), a=lin()),
    "alias": lambda: Block(lambda b, x, i: b.a(x) + b.c(x.sin()), **dict.fromkeys("ac", lin())),
    "weight_norm": lambda: Block(lambda b, x, i: b.a(x), a=parametrizations.weight_norm(lin())),
    "spectral_norm": lambda: Block(lambda b, x, i: b.a(x), a=parametrizations.spectral_norm(lin())),
    "einsum": lambda: Block(lambda b, x, i: torch.einsum("...i,io->...o", x, b.w), w=par(H, H)),
    "matmul": lambda: Block(lambda b, x, i: x @ b.w + b.v, w=par(H, H), v=par(H)),
    "scale": lambda: Block(lambda b, x, i: b.a(x) * (1 + b.v), a=lin(), v=par(H)),
    "f_linear": lambda: Block(lambda b, x, i: F.linear(x, b.a.weight, b.a.bias), a=lin()),
    "low_rank": lambda: Block(lambda b, x, i: F.linear(x, b.w @ b.v), w=par(H, 2), v=par(2, H)),
    "masked_weight": lambda: Block(
        lambda b, x, i: F.linear(x, b.a.weight * torch.ones(H, H).tril(), b.a.bias), a=lin()
    ),
    "bilinear": lambda: Block(lambda b, x, i: b.a(x, x.cos()), a=nn.Bilinear(H, H, H)),
    "prelu": lambda: Block(lambda b, x, i: b.c(b.a(x)), a=lin(), c=nn.PReLU()),
    "frozen": lambda: Block(lambda b, x, i: b.c(b.a(x).tanh()), a=frozen(lin()), c=lin()),
    "frozen_bias": lambda: Block(lambda b, x, i: b.a(x), a=_without_bias(lin())),
    "unused": lambda: Block(lambda b, x, i: b.a(x), a=lin(), c=lin()),
    "zero_times": lambda: Block(lambda b, x, i: b.a(x) + 0 * b.c(x), a=lin(), c=lin()),
    "softmax": lambda: Block(lambda b, x, i: 3 * F.softmax(b.a(x), -1), a=lin()),
    "sort": lambda: Block(lambda b, x, i: b.a(x).sort(-1).values, a=lin()),
    "normalise": lambda: Block(lambda b, x, i: 2 * F.normalize(b.a(x), dim=-1), a=lin()),
    "cumsum": lambda: Block(lambda b, x, i: b.a(x).cumsum(-1) / 2, a=lin()),
    "no_grad_part": lambda: Block(
        lambda b, x, i: b.a(x) + torch.no_grad()(b.c)(x), a=lin(), c=lin()
    ),
    "detached_part": lambda: Block(lambda b, x, i: b.a(x) + b.c(x.detach()), a=lin(), c=lin()),
    "inference_scale": lambda: Block(
        lambda b, x, i: b.a(x) / (1 + b.a.weight.detach().norm()), a=lin()
    ),
    "checkpointed": lambda: Block(lambda b, x, i: checkpoint(b.a, x, use_reentrant=False), a=lin()),
    "module_list": lambda: Block(
        lambda b, x, i: sum(part(x) for part in b.a), a=nn.ModuleList([lin(), lin()])
    ),
    "sample_by_sample": lambda: Block(lambda b, x, i: torch.stack([b.a(r) for r in x]), a=lin()),
    "repeated": lambda: Block(lambda b, x, i: b.a(x.repeat_interleave(2, 0))[::2] + x, a=lin()),
    "halves": lambda: Block(_halves, a=lin()),
    "func_vmap": lambda: Block(lambda b, x, i: torch.vmap(b.a)(x), a=lin()),
    "dropout": lambda: Block(lambda b, x, i: b.c(b.a(x)), a=lin(), c=nn.Dropout(0.3)),
    "rare_rows": lambda: Block(_rare_rows, a=lin()),
    "usual_rows": lambda: Block(_usual_rows, a=lin()),
    "rare_first": lambda: Block(_rare_first, a=lin()),
    "sorted_rows": lambda: Block(_sorted_rows, a=lin()),
}


def _attend(b: Any, x: Tensor, i: Any) -> Tensor:
    q, k, v = b.a(x).chunk(3, -1)
    return (q @ k.transpose(-1, -2) / H**0.5).softmax(-1) @ v


def _fused(b: Any, x: Tensor, i: Any) -> Tensor:
    heads = [t.unflatten(-1, (2, 3)).transpose(1, 2) for t in b.a(x).chunk(3, -1)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


# For features of shape (samples, LENGTH, H).
SEQUENCE_LAYERS: dict[str, Callable[[], Block]] = {
    "conv1d": lambda: Block(
        lambda b, x, i: b.a(x.transpose(1, 2)).transpose(1, 2), a=nn.Conv1d(H, H, 3, padding=1)
    ),
    "conv1d_same": lambda: Block(
        lambda b, x, i: b.a(x.mT).mT, a=nn.Conv1d(H, H, 3, padding="same")
    ),
    "over_length": lambda: Block(lambda b, x, i: b.a(x.mT).mT, a=nn.Linear(LENGTH, LENGTH)),
    "time_first": lambda: Block(lambda b, x, i: b.a(x.transpose(0, 1)).transpose(0, 1), a=lin()),
    "folded": lambda: Block(lambda b, x, i: b.a(x.reshape(-1, H)).view(-1, LENGTH, H), a=lin()),
    "folded_time_first": lambda: Block(
        lambda b, x, i: b.a(x.transpose(0, 1).reshape(-1, H)).view(LENGTH, -1, H).permute(1, 0, 2),
        a=lin(),
    ),
    "position_by_position": lambda: Block(
        lambda b, x, i: torch.stack([part(r) for part, r in zip(b.a, x.unbind(1), strict=True)], 1),
        a=nn.ModuleList(lin() for _ in range(LENGTH)),
    ),
    "group_norm_1d": lambda: Block(lambda b, x, i: b.a(x.mT).mT, a=nn.GroupNorm(2, H)),
    "layer_norm_2d": lambda: Block(lambda b, x, i: b.a(x), a=nn.LayerNorm((LENGTH, H))),
    "attention": lambda: Block(_attend, a=nn.Linear(H, 3 * H)),
    "fused_attention": lambda: Block(_fused, a=nn.Linear(H, 3 * H)),
    "nn_attention": lambda: Block(
        lambda b, x, i: b.a(x, x, x, need_weights=False)[0],
        a=nn.MultiheadAttention(H, 2, batch_first=True),
    ),
    "positions": lambda: Block(lambda b, x, i: b.a(x + b.v), a=lin(), v=par(LENGTH, H)),
    "gru": lambda: Block(lambda b, x, i: b.a(x)[0], a=nn.GRU(H, H, batch_first=True)),
    "shifted": lambda: Block(lambda b, x, i: b.a(x.roll(1, 1)) - x, a=lin()),
}

# For features of shape (samples, H, 4, 4).
IMAGE_LAYERS: dict[str, Callable[[], Block]] = {
    "conv2d": lambda: Block(lambda b, x, i: b.a(x), a=nn.Conv2d(H, H, 3, padding=1)),
    "conv2d_reflect": lambda: Block(
        lambda b, x, i: b.a(x), a=nn.Conv2d(H, H, 3, padding=1, padding_mode="reflect")
    ),
    "depthwise": lambda: Block(lambda b, x, i: b.a(x), a=nn.Conv2d(H, H, 3, padding=1, groups=H)),
    "strided": lambda: Block(
        lambda b, x, i: F.interpolate(b.a(x), size=(4, 4)), a=nn.Conv2d(H, H, 2, stride=2)
    ),
    "dilated": lambda: Block(
        lambda b, x, i: b.a(x), a=nn.Conv2d(H, H, 3, padding=2, dilation=2, bias=False)
    ),
    "upsampled": lambda: Block(
        lambda b, x, i: b.a(F.avg_pool2d(x, 2)), a=nn.ConvTranspose2d(H, H, 2, stride=2)
    ),
    "group_norm": lambda: Block(lambda b, x, i: b.a(x), a=nn.GroupNorm(3, H)),
    "instance_norm": lambda: Block(lambda b, x, i: b.a(x), a=nn.InstanceNorm2d(H, affine=True)),
    "avg_pool": lambda: Block(lambda b, x, i: b.a(F.avg_pool2d(x, 3, 1, 1)), a=nn.Conv2d(H, H, 1)),
    "max_pool": lambda: Block(lambda b, x, i: F.max_pool2d(b.a(x), 3, 1, 1), a=nn.Conv2d(H, H, 1)),
    "channels_last": lambda: Block(
        lambda b, x, i: b.a(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), a=lin()
    ),
    "residual_conv": lambda: Block(
        lambda b, x, i: x + b.a(x).tanh(), a=nn.Conv2d(H, H, 3, padding=1)
    ),
    "batch_as_length": lambda: Block(
        lambda b, x, i: x + b.a(x.mean((2, 3)).t()[None])[0].t()[..., None, None],
        a=nn.Conv1d(H, H, 3, padding=1),
    ),
}

# Layers that one pass over all clients can do, and those that it can do with stacked weights only.
GROUPED = (
    *("linear", "linear_no_bias", "two_linear", "residual", "gated", "glu", "slices", "chunks"),
    *("layer_norm", "frozen", "normalise", "no_grad_part", "detached_part"),
    *("layer_norm_plain", "frozen_bias", "unused", "softmax", "conv1d", "over_length", "folded"),
    *("attention", "shifted", "group_norm_1d", "layer_norm_2d", "conv2d", "strided", "dilated"),
    *("group_norm", "channels_last", "residual_conv", "avg_pool", "max_pool"),
)
STACKED = (
    *("own_linear", "twice", "tied", "alias", "einsum", "matmul", "scale", "f_linear", "low_rank"),
    *("masked_weight", "bilinear", "prelu", "f_layer_norm", "zero_times", "module_list", "sort"),
    *("cumsum", "sample_by_sample", "halves", "weight_norm", "positions", "position_by_position"),
    "repeated",
    *("time_first", "folded_time_first", "sorted_rows", "inference_scale"),
)

BODIES: dict[str, tuple[dict[str, Callable[[], Block]], dict[str, Callable[[Tensor], Tensor]]]] = {
    "vector": ({}, {"as_is": lambda x: x}),
    "sequence": (
        {**SEQUENCE_LAYERS, **LAYERS},
        {
            "mean": lambda x: x.mean(1),
            "last": lambda x: x[:, -1],
            "sum": lambda x: x.sum(1) / 3,
            "logsumexp": lambda x: x.logsumexp(1),
            "einsum": lambda x: torch.einsum("blh->bh", x) / 4,
        },
    ),
    "image": (
        IMAGE_LAYERS,
        {
            "mean": lambda x: x.mean((2, 3)),
            "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
            "flatten": lambda x: x.flatten(1).unflatten(1, (H, 16)).sum(-1) / 4,
            "corner": lambda x: x[:, :, 0, 0],
        },
    ),
}
BODIES["tokens"] = BODIES["sequence"]


# -- losses: functions of (logits (b, C), labels, batch) to a scalar -------------------------------

CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 3.0])


def _one_hot(y: Tensor) -> Tensor:
    return (y[:, None] == torch.arange(C)).float()  # F.one_hot reads the values


def _soft(y: Tensor) -> Tensor:
    return 0.9 * _one_hot(y) + 0.1 / C


def _per_class(each: Tensor, y: Tensor) -> Tensor:
    rows = _one_hot(y)
    found = (rows * each[:, None]).sum(0) / rows.sum(0).clamp(min=1)
    return found.sum() / (rows.sum(0) > 0).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "cross_entropy": lambda z, y, i: F.cross_entropy(z, y),
    "nn.CrossEntropyLoss": lambda z, y, i: nn.CrossEntropyLoss()(z, y),
    "sum/len": lambda z, y, i: F.cross_entropy(z, y, reduction="sum") / len(z),
    "sum/shape": lambda z, y, i: F.cross_entropy(z, y, reduction="sum") / z.shape[0],
    "sum/constant": lambda z, y, i: F.cross_entropy(z, y, reduction="sum") / 4,
    "sum": lambda z, y, i: F.cross_entropy(z, y, reduction="sum"),
    "none.mean": lambda z, y, i: F.cross_entropy(z, y, reduction="none").mean(),
    "none.sum/numel": lambda z, y, i: (lambda e: e.sum() / e.numel())(
        F.cross_entropy(z, y, reduction="none")
    ),
    "label_smoothing": lambda z, y, i: F.cross_entropy(z, y, label_smoothing=0.1),
    "ignore_index": lambda z, y, i: F.cross_entropy(
        z, torch.where(i.rare, torch.tensor(IGNORED), y)
    ),
    "ignore_class": lambda z, y, i: F.cross_entropy(z, y, ignore_index=C - 1),
    "ignore_smoothing": lambda z, y, i: F.cross_entropy(
        z, torch.where(i.rare, torch.tensor(-1), y), ignore_index=-1, label_smoothing=0.1
    ),
    "masked_mean": lambda z, y, i: (
        (F.cross_entropy(z, y, reduction="none") * ~i.rare).sum() / (~i.rare).sum().clamp(min=1)
    ),
    "masked_select": lambda z, y, i: (
        F.cross_entropy(z[~i.rare], y[~i.rare], reduction="sum") / len(z)
    ),
    "selected_mean": lambda z, y, i: F.cross_entropy(z, y, reduction="none")[~i.rare].mean(),
    "class_weights": lambda z, y, i: F.cross_entropy(z, y, weight=CLASS_WEIGHTS),
    "class_weights_sum": lambda z, y, i: (
        F.cross_entropy(z, y, weight=CLASS_WEIGHTS, reduction="sum") / len(z)
    ),
    "class_weights_rare": lambda z, y, i: F.cross_entropy(
        z, y, weight=torch.tensor([1.0, 1.0, 4.0])
    ),
    "soft_weights": lambda z, y, i: F.cross_entropy(z, _soft(y), weight=CLASS_WEIGHTS),
    "soft_targets": lambda z, y, i: F.cross_entropy(z, _soft(y)),
    "one_hot": lambda z, y, i: F.cross_entropy(z, F.one_hot(y, C).float()),
    "soft_by_hand": lambda z, y, i: -(_soft(y) * F.log_softmax(z, 1)).sum(1).mean(),
    "nll": lambda z, y, i: F.nll_loss(F.log_softmax(z, -1), y),
    "nll_weighted": lambda z, y, i: F.nll_loss(z.log_softmax(1), y, weight=CLASS_WEIGHTS),
    "gather": lambda z, y, i: -z.log_softmax(1).gather(1, y[:, None]).mean(),
    "index": lambda z, y, i: (torch.logsumexp(z, 1) - z[torch.arange(len(z)), y]).mean(),
    "mse": lambda z, y, i: F.mse_loss(z, _soft(y)),
    "mse_sum/len": lambda z, y, i: ((z - _soft(y)) ** 2).sum() / len(z),
    "mse_mean_of_means": lambda z, y, i: ((z - _soft(y)) ** 2).mean(0).mean(),
    "rmse": lambda z, y, i: torch.sqrt(F.mse_loss(z, _soft(y)) + 1e-4),
    "norm": lambda z, y, i: torch.linalg.norm(z - _soft(y)) / len(z) ** 0.5,
    "l1": lambda z, y, i: F.l1_loss(z, _soft(y)),
    "smooth_l1": lambda z, y, i: nn.SmoothL1Loss(beta=0.5)(z, _soft(y)),
    "huber": lambda z, y, i: F.huber_loss(z, _soft(y), delta=0.5),
    "log_cosh": lambda z, y, i: torch.log(torch.cosh(z - _soft(y))).mean(),
    "bce": lambda z, y, i: F.binary_cross_entropy_with_logits(z, _soft(y)),
    "bce_pos_weight": lambda z, y, i: F.binary_cross_entropy_with_logits(
        z, _soft(y), pos_weight=CLASS_WEIGHTS
    ),
    "bce_weight": lambda z, y, i: F.binary_cross_entropy(
        z.sigmoid(), _soft(y), weight=torch.linspace(0.5, 1.5, len(z))[:, None]
    ),
    "kl_batchmean": lambda z, y, i: F.kl_div(z.log_softmax(1), _soft(y), reduction="batchmean"),
    "kl_mean": lambda z, y, i: F.kl_div(z.log_softmax(1), _soft(y), reduction="none").mean(),
    "kl_sum/len": lambda z, y, i: F.kl_div(z.log_softmax(1), _soft(y), reduction="sum") / len(z),
    "multi_margin": lambda z, y, i: F.multi_margin_loss(z, y),
    "poisson": lambda z, y, i: F.poisson_nll_loss(z, _soft(y)),
    "gaussian": lambda z, y, i: F.gaussian_nll_loss(z, _soft(y), z.exp().clamp(max=4) + 0.1),
    "cosine": lambda z, y, i: 1 - F.cosine_similarity(z, _soft(y), dim=1).mean(),
    "focal": lambda z, y, i: (lambda e: ((1 - torch.exp(-e)) ** 2 * e).mean())(
        F.cross_entropy(z, y, reduction="none")
    ),
    "gce": lambda z, y, i: ((1 - z.softmax(1).gather(1, y[:, None]) ** 0.7) / 0.7).mean(),
    "per_class_mean": lambda z, y, i: _per_class(F.cross_entropy(z, y, reduction="none"), y),
    "logit_adjusted": lambda z, y, i: F.cross_entropy(z + (_one_hot(y).mean(0) + 0.1).log(), y),
    "dice": lambda z, y, i: (
        1 - (2 * (z.softmax(1) * _soft(y)).sum(0) / (z.softmax(1) + _soft(y)).sum(0)).mean()
    ),
    "auc": lambda z, y, i: F.softplus(z[:, None, 0] - z[None, :, 0])[
        (y[:, None] == 0) | torch.eye(len(z), dtype=torch.bool)
    ].mean(),
    "correlation": lambda z, y, i: (
        1 - F.cosine_similarity(z - z.mean(0), _soft(y) - _soft(y).mean(0) + 0.1, dim=0).mean()
    ),
}


# What most modules have, and what is such a loss until a batch has a rare sample.
USUAL_LOSSES = (
    *("nn.CrossEntropyLoss", "sum/len", "sum/shape", "none.mean", "none.sum/numel"),
    *("label_smoothing", "soft_targets", "soft_by_hand", "nll", "gather", "mse", "mse_sum/len"),
    *("l1", "smooth_l1", "huber", "log_cosh", "bce", "bce_pos_weight", "kl_batchmean", "kl_mean"),
    *("kl_sum/len", "focal", "gce", "poisson", "cosine", "sum", "sum/constant"),
)
RARE_LOSSES = ("ignore_index", "ignore_class", "ignore_smoothing", "masked_mean")

# -- twists of features and losses, and when they begin --------------------------------------------


@dataclass
class Clock:
    """Counts where no attribute of the module changes."""

    count: int = 0

    def tick(self) -> int:
        self.count += 1
        return self.count


# Rounds by what they show, where no walk through a module gets: see `_turn`.
TURNS: set[float] = set()


def _turn(m: Any, seen: set[float]) -> bool:
    """Whether a module has had several weights, as one that is told apart by them has a round.

    However often a round is computed, and by whom, this says the same.
    """
    seen.add(round(float(m.head.weight.detach().double().square().sum()), 4))
    return len(seen) > m.turn


def _closed() -> Callable[[Any], bool]:
    seen: set[float] = set()
    return lambda m: _turn(m, seen)


def _logged_level(m: Any, v: Tensor) -> bool:
    m.log("value", v.detach().mean())
    found = m.trainer.callback_metrics.get("value")
    return found is not None and float(found) < m.level


# What tells whether a twist is on: a bool, or a bool tensor. Levels are drawn for each module.
GATES: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "always": lambda m, v, i: True,
    "counter": lambda m, v, i: m.calls > m.late,
    "clock": lambda m, v, i: m.clock.tick() > m.late,
    "list": lambda m, v, i: (m.seen.append(float(len(m.seen))), len(m.seen) > m.late)[1],
    "buffer": lambda m, v, i: bool(m.ticks.add_(1) > m.late),
    "rare": lambda m, v, i: i.rare.any(),
    "if_rare": lambda m, v, i: bool(i.rare.any()),
    "if_rare_list": lambda m, v, i: any(i.rare.tolist()),
    "if_rare_numpy": lambda m, v, i: bool(i.rare.numpy().any()),
    "if_label": lambda m, v, i: C - 1 in i.y.tolist(),
    "label": lambda m, v, i: (i.y == C - 1).any(),
    "level": lambda m, v, i: v.detach().abs().mean() < m.level,
    "if_level": lambda m, v, i: v.detach().abs().mean().item() < m.level,
    "weights": lambda m, v, i: m.head.weight.detach().norm() > m.grown,
    "if_weights": lambda m, v, i: float(m.head.weight.detach().norm()) > m.grown,
    "late_if": lambda m, v, i: m.clock.tick() > m.late and bool(i.rare.any()),
    "if_gradient_free": lambda m, v, i: not torch.is_grad_enabled(),
    "global_step": lambda m, v, i: m.global_step + m.current_epoch > 12,
    "training": lambda m, v, i: m.training,
    "if_seen": lambda m, v, i: m.remember_labels(i.y),
    "if_logged": lambda m, v, i: _logged_level(m, v),
    "told": lambda m, v, i: m.round > m.turn,
    "turn": lambda m, v, i: _turn(m, TURNS),
    "turn_in_closure": lambda m, v, i: m.closed(m),
    "turn_and_rare": lambda m, v, i: _turn(m, TURNS) and bool(i.rare.any()),
}
# These show nothing to a path that computes all clients in one pass before they are on.
LATE = ("told", "turn", "turn_and_rare", "if_weights", "if_logged")
# These may be on for a sample or a client, and are tensors.
PARTIAL = ("rare", "label", "weights", "level")


def _memory(m: Any, h: Tensor, i: Any) -> Tensor:
    m.mean = 0.8 * m.mean + 0.2 * h.detach().flatten(0, -2).mean(0)
    return h - m.mean


def _buffer_memory(m: Any, h: Tensor, i: Any) -> Tensor:
    m.average.mul_(0.8).add_(0.2 * h.detach().flatten(0, -2).mean(0))
    return h - m.average


def _previous(m: Any, h: Tensor, i: Any) -> Tensor:
    before, m.before = m.before, h.detach().flatten(0, -2).mean(0)
    return h if before is None else h + 0.2 * before


def _queue(m: Any, h: Tensor, i: Any) -> Tensor:
    m.queue.append(h.detach().flatten(0, -2)[0])
    return h + 0.1 * torch.stack(m.queue[-5:]).mean(0)


def _hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor, Any], Tensor]:
    def twist(m: Any, h: Tensor, i: Any) -> Tensor:
        h = h * 1.0
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return twist


def _rows(h: Tensor) -> Tensor:
    return h.flatten(1)


def _row_written(m: Any, h: Tensor, i: Any) -> Tensor:
    h = h.clone()
    h[0] = 0.0
    return h


def _weights_changed(m: Any, h: Tensor, i: Any) -> Tensor:
    with torch.no_grad():
        m.head.weight.mul_(0.9)
    return h


FEATURE_TWISTS: dict[str, Callable[[Any, Tensor, Any], Tensor]] = {
    "centred": lambda m, h, i: h - h.mean(0),
    "centred_keepdim": lambda m, h, i: h - 0.5 * h.mean(dim=0, keepdim=True),
    "centred_detached": lambda m, h, i: h - h.detach().mean(0),
    "over_std": lambda m, h, i: h / (h.std(0, unbiased=False) + 0.5),
    "over_std_detached": lambda m, h, i: h / (h.detach().std(0, unbiased=False) + 0.5),
    "f_batch_norm": lambda m, h, i: (
        h + (h - h.mean(0)) * torch.rsqrt(h.var(0, unbiased=False) + 0.1)
    ),
    "over_max": lambda m, h, i: h / (1 + h.abs().amax()),
    "over_norm": lambda m, h, i: h / (1 + h.norm()),
    "over_len": lambda m, h, i: h * 4 / len(h),
    "rolled": lambda m, h, i: h + 0.3 * h.roll(1, 0),
    "mixed": lambda m, h, i: 0.7 * h + 0.3 * h.flip(0),
    "sorted": lambda m, h, i: h + 0.2 * h.sort(0).values,
    "cumsum": lambda m, h, i: h + 0.1 * h.cumsum(0),
    "cummax": lambda m, h, i: h + 0.3 * h.cummax(0).values,
    "softmax_over_batch": lambda m, h, i: h + h.softmax(0),
    "normalised_over_batch": lambda m, h, i: h + F.normalize(h, dim=0),
    "attention_over_batch": lambda m, h, i: (
        h + 0.3 * (F.softmax(_rows(h) @ _rows(h).t(), 1) @ _rows(h)).view_as(h)
    ),
    "minus_first": lambda m, h, i: h - 0.3 * h[:1],
    "median": lambda m, h, i: h - 0.3 * h.median(0).values,
    "first_sample": lambda m, h, i: (
        h * torch.cat([torch.zeros(1), torch.ones(len(h) - 1)]).view(-1, *[1] * (h.ndim - 1))
    ),
    "memory": _memory,
    "buffer_memory": _buffer_memory,
    "previous": _previous,
    "queue": _queue,
    "noise": lambda m, h, i: h + 0.3 * torch.randn_like(h),
    "uniform": lambda m, h, i: h * (1 + torch.rand(())),
    "bernoulli": lambda m, h, i: h * torch.bernoulli(torch.full_like(h, 0.8)),
    "noise_numpy": lambda m, h, i: h * float(np.random.uniform(0.5, 1.5)),  # noqa: NPY002
    "noise_random": lambda m, h, i: h + random.random(),
    "dropout": lambda m, h, i: F.dropout(h, 0.3, m.training),
    "feature_dropout": lambda m, h, i: F.alpha_dropout(h, 0.3, m.training),
    "permuted": lambda m, h, i: h + 0.3 * h[torch.randperm(len(h))],
    "numpy": lambda m, h, i: h / (1 + float(h.detach().numpy().std())),
    "numpy_mean": lambda m, h, i: h - torch.from_numpy(h.detach().numpy().mean(0)),
    "tolist": lambda m, h, i: h / (1 + max(map(abs, h.detach().flatten().tolist()))),
    "item": lambda m, h, i: h / (1 + h.detach().std(unbiased=False).item()),
    "listed": lambda m, h, i: h - torch.tensor([h.detach().mean(), 0.0])[0],
    "text": lambda m, h, i: h * (1 + len(str(h.detach())) % 3),
    "deep_copied": lambda m, h, i: h - copy.deepcopy(h.detach()).mean(0),
    "row_written": _row_written,
    "weights_changed": _weights_changed,
    "rounded": lambda m, h, i: h + Straight.apply(h),
    "reversed": lambda m, h, i: Reverse.apply(h),
    "levelled": lambda m, h, i: Levelled.apply(h),
    "straight_through": lambda m, h, i: (
        h + (h.detach().sign() * h.detach().abs().mean() - h.detach())
    ),
    "hook_clamp": _hooked(lambda g: g.clamp(-0.05, 0.05)),
    "hook_norm": _hooked(lambda g: g / (0.1 + g.norm())),
    "hook_max": _hooked(lambda g: g * (g.abs() < 0.5 * g.abs().max())),
    "rare_scaled": lambda m, h, i: torch.where(i.rare.view(-1, *[1] * (h.ndim - 1)), 0.5 * h, h),
    "nan_guard": lambda m, h, i: torch.nan_to_num(h),
    "context": lambda m, h, i: torch.cat([h[..., :3], h[..., 3:] * h.mean()], -1),
}


def _parameters(m: Any) -> list[Tensor]:
    return [p for p in m.parameters() if p.requires_grad]


def _penalty(m: Any, v: Tensor, each: Tensor, i: Any) -> Tensor:
    x = i.h.detach().requires_grad_()
    (g,) = torch.autograd.grad(m.head(x).logsumexp(1).sum(), x, create_graph=True)
    return v + 0.1 * (g.norm(dim=1) - 1).pow(2).mean()


def _weight_penalty(m: Any, v: Tensor, each: Tensor, i: Any) -> Tensor:
    (g,) = torch.autograd.grad(v, m.head.weight, create_graph=True)
    return v + 0.1 * g.pow(2).sum()


def _lagrange(m: Any, v: Tensor, each: Tensor, i: Any) -> Tensor:
    m.multiplier = m.multiplier + 0.05 * float(v.detach())
    return v * (1 + m.multiplier)


def _best(m: Any, v: Tensor, each: Tensor, i: Any) -> Tensor:
    m.best = min(m.best, float(v.detach()))
    return v * 2 if m.best < m.level else v


def _history(m: Any, v: Tensor, each: Tensor, i: Any) -> Tensor:
    m.seen.append(float(v.detach()))
    return v / (1 + sum(m.seen[-4:]))


def _teacher(m: Any, v: Tensor, each: Tensor, i: Any) -> Tensor:
    with torch.no_grad():
        target = m.teacher(i.h).softmax(1)
    return v + F.kl_div(m.head(i.h).log_softmax(1), target, reduction="batchmean")


def _ema_teacher(m: Any, v: Tensor, each: Tensor, i: Any) -> Tensor:
    with torch.no_grad():
        for p, q in zip(m.teacher.parameters(), m.head.parameters(), strict=True):
            p.mul_(0.9).add_(0.1 * q)
    return _teacher(m, v, each, i)


def _contrast(h: Tensor) -> Tensor:
    h = F.normalize(_rows(h), dim=1)
    return -F.log_softmax(h @ h.t() * 2, 1).diagonal().mean()


LOSS_TWISTS: dict[str, Callable[[Any, Tensor, Tensor, Any], Tensor]] = {
    "flood": lambda m, v, e, i: (v - m.level).abs() + m.level,
    "clamp_min": lambda m, v, e, i: v.clamp(min=m.level),
    "clamp_max": lambda m, v, e, i: torch.clamp(v, max=m.level + 0.4),
    "maximum": lambda m, v, e, i: torch.maximum(v, 0.5 * v + 0.5 * m.level),
    "relu": lambda m, v, e, i: F.relu(v - m.level),
    "square": lambda m, v, e, i: v**2,
    "log": lambda m, v, e, i: torch.log(v.abs() + 0.1),
    "sqrt": lambda m, v, e, i: (v.abs() + 0.1).sqrt(),
    "exp": lambda m, v, e, i: torch.exp(v.clamp(max=3)),
    "huber_of_mean": lambda m, v, e, i: F.huber_loss(v, torch.zeros(()), delta=m.level),
    "over_detached": lambda m, v, e, i: v / (v.detach().abs() + 0.1),
    "times_numpy": lambda m, v, e, i: v * (1 + float(v.detach().numpy())),
    "times_item": lambda m, v, e, i: v * (1 + e.detach().mean().item()),
    "times_tolist": lambda m, v, e, i: v * (1 + 0.1 * max(e.detach().tolist())),
    "times_accuracy": lambda m, v, e, i: v * (1 + (i.z.argmax(1) == i.y).float().mean()),
    "max": lambda m, v, e, i: e.max(),
    "median": lambda m, v, e, i: e.median(),
    "logsumexp": lambda m, v, e, i: torch.logsumexp(e, 0),
    "softmax_weights": lambda m, v, e, i: (F.softmax(e.detach(), 0) * e).sum(),
    "normalised_weights": lambda m, v, e, i: (e.detach() * e).sum() / (e.detach().sum() + 0.1),
    "positions": lambda m, v, e, i: (torch.linspace(0, 1, len(e)) * e).mean(),
    "first": lambda m, v, e, i: e[0],
    "first_two": lambda m, v, e, i: e[:2].sum(),
    "last": lambda m, v, e, i: e[-1] + v,
    "even": lambda m, v, e, i: e[::2].mean(),
    "halves": lambda m, v, e, i: (e[: (len(e) + 2) // 3].mean() + e[len(e) // 3 :].mean()) / 2,
    "top_k": lambda m, v, e, i: e.topk(max(1, len(e) // 2)).values.mean(),
    "top_two": lambda m, v, e, i: e.topk(1).values.mean(),
    "trimmed": lambda m, v, e, i: (e * (e < e.detach().mean() * 1.5)).mean(),
    "capped": lambda m, v, e, i: e.clamp(max=2.0).mean(),
    "kept": lambda m, v, e, i: (e * (e.detach() < 2)).sum() / (e.detach() < 2).sum().clamp(min=1),
    "focal": lambda m, v, e, i: ((1 - torch.exp(-e.abs())) ** 2 * e).mean(),
    "squares": lambda m, v, e, i: (e**2).mean(),
    "variance": lambda m, v, e, i: v + e.var(unbiased=False),
    "over_constant": lambda m, v, e, i: e.sum() / 5,
    "over_known": lambda m, v, e, i: e.sum() / (i.y != C - 1).sum().clamp(min=1),
    "rare_weights": lambda m, v, e, i: (e * (1 + i.rare.float())).mean(),
    "rare_normalised": lambda m, v, e, i: (e * (1 + i.rare)).sum() / (1 + i.rare.float()).sum(),
    "rare_ignored": lambda m, v, e, i: e[~i.rare].sum() / max(1, int((~i.rare).sum())),
    "rare_nan": lambda m, v, e, i: torch.nanmean(
        torch.where(i.rare, torch.tensor(float("nan")), e)
    ).nan_to_num(),
    "per_class": lambda m, v, e, i: _per_class(e, i.y),
    "l2": lambda m, v, e, i: v + 0.01 * sum(p.pow(2).sum() for p in _parameters(m)),
    "l1": lambda m, v, e, i: v + 0.01 * sum(p.abs().sum() for p in _parameters(m)),
    "l2_head": lambda m, v, e, i: v + 0.1 * m.head.weight.norm(),
    "l2_grown": lambda m, v, e, i: v + F.relu(m.head.weight.norm() - m.grown),
    "proximal": lambda m, v, e, i: v + 0.1 * (m.head.weight - m.teacher.weight).pow(2).sum(),
    "activity": lambda m, v, e, i: v + 0.1 * i.h.pow(2).mean(),
    "activity_of_mean": lambda m, v, e, i: v + 0.3 * i.h.mean(0).pow(2).sum(),
    "entropy_of_mean": lambda m, v, e, i: (
        v + (i.z.softmax(1).mean(0) * i.z.softmax(1).mean(0).log()).sum()
    ),
    "contrast": lambda m, v, e, i: v + 0.3 * _contrast(i.h),
    "distances": lambda m, v, e, i: (
        v + 0.1 * torch.exp(-((i.h[:, None] - i.h[None]) ** 2).sum(-1)).mean()
    ),
    "covariance": lambda m, v, e, i: (
        v + 0.1 * ((i.h - i.h.mean(0)).t() @ (i.h - i.h.mean(0))).triu(1).pow(2).mean()
    ),
    "std_over_batch": lambda m, v, e, i: (
        v + 0.3 * F.relu(1 - torch.sqrt(i.z.var(0, unbiased=False) + 1e-3)).mean()
    ),
    "consistent": lambda m, v, e, i: v + 0.1 * (i.z - i.z.flip(0).detach()).pow(2).mean(),
    "gradient_penalty": _penalty,
    "weight_gradient_penalty": _weight_penalty,
    "lagrange": _lagrange,
    "best": _best,
    "history": _history,
    "teacher": _teacher,
    "ema_teacher": _ema_teacher,
    "optimizers": lambda m, v, e, i: v * (1 + len(m.trainer.optimizers)),
    "two_passes": lambda m, v, e, i: v + 0.1 * (m.net(i.x, i) - i.h.detach()).pow(2).mean(),
    "random_weight": lambda m, v, e, i: v * (0.5 + torch.rand(())),
    "random_numpy": lambda m, v, e, i: v * np.random.uniform(0.5, 1.5),  # noqa: NPY002
    "random_python": lambda m, v, e, i: v * random.uniform(0.5, 1.5),
    "random_weights": lambda m, v, e, i: (torch.rand(len(e)) * e).mean(),
    "detached": lambda m, v, e, i: v.detach() * 0 + m.head.bias.pow(2).sum(),
    "none": lambda m, v, e, i: None,
    "zero": lambda m, v, e, i: v * 0,
}


NEED_TEACHER = ("teacher", "ema_teacher", "proximal")


# What may be done to a sample or a client as well as to all.
PARTIAL_TWISTS = (
    *("rare_weights", "rare_scaled", "over_constant", "capped", "focal", "squares", "activity"),
    *("reversed", "context", "nan_guard", "square", "clamp_min", "l2_head", "consistent"),
)

# What cannot be done with stacked weights.
ESCAPES = (
    *("noise", "dropout", "permuted", "numpy", "tolist", "item", "hook_clamp", "memory", "queue"),
    *("weights_changed", "optimizers", "text"),
    *("noise_numpy", "times_numpy", "times_item", "times_tolist", "weight_gradient_penalty"),
    *("lagrange", "random_weight", "random_python", "rare_ignored", "none"),
)

# -- hooks: put on the module when it is made ------------------------------------------------------


def _counted(m: Any) -> Callable[[Tensor], Tensor]:
    closed = _closed()
    return lambda g: 0.5 * g if closed(m) else g


HOOKS: dict[str, Callable[[Any], Any]] = {
    "clamp": lambda m: [
        p.register_hook(lambda g: g.clamp(-m.tight, m.tight)) for p in _parameters(m)
    ],
    "norm": lambda m: [
        p.register_hook(lambda g: g * (m.tight / g.norm().clamp(min=m.tight)))
        for p in _parameters(m)
    ],
    "mask": lambda m: m.head.weight.register_hook(lambda g: g * (torch.arange(H) > 1)),
    "scale": lambda m: m.head.bias.register_hook(lambda g: 0.1 * g),
    "counted": lambda m: m.head.weight.register_hook(_counted(m)),
    "observer": lambda m: m.head.weight.register_hook(lambda g: m.seen.append(1.0)),
    "post_accumulate": lambda m: m.head.weight.register_post_accumulate_grad_hook(
        lambda p: p.grad.zero_()
    ),
    "forward": lambda m: m.head.register_forward_hook(lambda layer, a, out: out * 1.5),
    "forward_centred": lambda m: m.head.register_forward_hook(
        lambda layer, a, out: out - 0.5 * out.mean(0)
    ),
    "forward_pre": lambda m: m.head.register_forward_pre_hook(lambda layer, a: (a[0].tanh(),)),
    "forward_clamped": lambda m: m.head.register_forward_hook(
        lambda layer, a, out: out.clamp(-m.level, m.level)
    ),
    "backward": lambda m: m.head.register_full_backward_hook(
        lambda layer, gi, go: tuple(None if g is None else g.clamp(-m.tight, m.tight) for g in gi)
    ),
    "backward_pre": lambda m: m.head.register_full_backward_pre_hook(
        lambda layer, go: tuple(g / (0.1 + g.norm()) for g in go)
    ),
    "layers_clamped": lambda m: [
        layer.register_full_backward_hook(
            lambda layer, gi, go: tuple(None if g is None else 0.5 * g for g in gi)
        )
        for layer in m.modules()
        if isinstance(layer, nn.Linear)
    ],
}


# -- what is logged --------------------------------------------------------------------------------

LOGS: dict[str, Callable[[Any, Tensor, Tensor, Any], Any]] = {
    "mean": lambda m, v, e, i: m.log("loss", v),
    "detached": lambda m, v, e, i: m.log("loss", v.detach(), prog_bar=True, on_step=True),
    "item": lambda m, v, e, i: m.log("loss", v.item()),
    "sum": lambda m, v, e, i: m.log("total", e.sum()),
    "max": lambda m, v, e, i: m.log("worst", e.max()),
    "square": lambda m, v, e, i: m.log("square", v**2),
    "count": lambda m, v, e, i: m.log("count", float(len(e))),
    "constant": lambda m, v, e, i: m.log("one", 1.0),
    "accuracy": lambda m, v, e, i: m.log("accuracy", (i.z.argmax(1) == i.y).float().mean()),
    "rare": lambda m, v, e, i: m.log("rare", i.rare.float().max()),
    "metric": lambda m, v, e, i: (m.metric(i.z.detach(), i.y), m.log("metric", m.metric)),
    "dict": lambda m, v, e, i: m.log_dict({"a": v, "b": e.min()}),
    "late": lambda m, v, e, i: m.log("late", v) if m.clock.tick() > m.late else None,
}

USUAL_LOGS = ("mean", "detached", "sum", "constant", "accuracy", "rare")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5, nesterov=True),
    "weight_decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.05),
    "maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, maximize=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": list(m.head.parameters()), "lr": 0.2},
            {"params": [p for n, p in m.named_parameters() if "head" not in n], "lr": 0.05},
        ]
    ),
    "by_round": lambda m: torch.optim.SGD(m.parameters(), lr=0.1 / (1 + m.round)),
    "decays_late": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, weight_decay=0.05 * (m.round > m.turn)
    ),
    "momentum_late": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9 * (m.round > m.turn)
    ),
    "head_only": lambda m: torch.optim.SGD(m.head.parameters(), lr=0.1),
    "step_lr": lambda m: _scheduled(m, "epoch"),
    "step_lr_by_step": lambda m: _scheduled(m, "step"),
}


SIMPLE = ("sgd", "groups", "head_only", "by_round", "decays_late", "momentum_late")


def _scheduled(m: Any, interval: str) -> dict[str, Any]:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


# -- a case ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Twist:
    """What to put where, from when on."""

    table: str
    name: str
    gate: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a module is made of, by the names in the tables."""

    body: str
    layers: tuple[str, ...]
    activations: tuple[str, ...]
    pool: str
    loss: str
    twists: tuple[Twist, ...]
    hook: str | None
    logs: tuple[str, ...]
    optimizer: str
    late: int
    turn: int
    level: float
    tight: float
    growth: float
    returns_dict: bool
    trains_embedding: bool


class RandomModule(pl.LightningModule):
    """What a plan says."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        layers = _layers(plan.body)
        known = {**SMOOTH, **KINKED}
        self.acts = [known[name]() for name in plan.activations]  # modules in a list are not found
        if any(isinstance(act, nn.Module) for act in self.acts):
            self.found = nn.ModuleList(act for act in self.acts if isinstance(act, nn.Module))
        self.blocks = nn.ModuleList(layers[name]() for name in plan.layers)
        if plan.body == "tokens":
            self.embedding = nn.Embedding(7, H)
            self.embedding.requires_grad_(plan.trains_embedding)
        self.head = nn.Linear(H, C)
        if any(twist.name in NEED_TEACHER for twist in plan.twists):
            self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        if "metric" in plan.logs:
            self.metric = torchmetrics.classification.MulticlassAccuracy(C)
        self.register_buffer("average", torch.zeros(H), persistent=False)
        self.register_buffer("ticks", torch.zeros(()), persistent=False)
        self.mean, self.before = torch.zeros(H), None
        self.calls, self.late, self.level, self.tight = 0, plan.late, plan.level, plan.tight
        self.turn, self.round, self.closed = plan.turn, 0, _closed()
        self.needs_each = bool(plan.logs) or any(t.table == "loss twist" for t in plan.twists)
        self.grown = float(self.head.weight.detach().norm()) * plan.growth
        self.multiplier, self.best = 0.0, 9.0
        self.clock, self.seen, self.queue, self.labels = Clock(), [], [], set()
        self.hooked = None if plan.hook is None else HOOKS[plan.hook](self)

    def remember_labels(self, y: Tensor) -> bool:
        """Whether all labels have been seen."""
        self.labels.update(y.tolist())
        return len(self.labels) == C

    def twisted(self, table: str, value: Any, info: Any, *args: Any) -> Any:
        """Put a value through the twists of a table that are on."""
        for twist in self.plan.twists:
            if twist.table != table or value is None:
                continue
            on = GATES[twist.gate](self, value, info)
            do = {"feature twist": FEATURE_TWISTS, "loss twist": LOSS_TWISTS}[table][twist.name]
            if isinstance(on, bool):
                value = do(self, value, *args, info) if on else value
            else:
                other = do(self, value, *args, info)
                value = value if other is None else torch.where(on, other, value)
        return value

    def net(self, x: Tensor, info: Any) -> Tensor:
        """Return features, shape (samples, H)."""
        if self.plan.body == "tokens":
            x = self.embedding(x)
        for act, block in zip(self.acts, self.blocks, strict=True):
            x = block(x, info)
            if not isinstance(getattr(block, "a", None), (nn.Linear, nn.Conv1d, nn.Conv2d)):
                x = x.clone()  # what an activation in place would spoil
            x = act(x)
        return BODIES[self.plan.body][1][self.plan.pool](x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        rare = x.flatten(1)[:, 0] > 5  # token 6 or a large number
        info = SimpleNamespace(x=x, y=y, rare=rare)
        if any(t.gate == "counter" for t in self.plan.twists):
            self.calls += 1
        info.h = self.twisted("feature twist", self.net(x, info), info)
        info.z = self.head(info.h)
        loss = LOSSES[self.plan.loss](info.z, y, info)
        each = F.cross_entropy(info.z, y, reduction="none") if self.needs_each else loss
        loss = self.twisted("loss twist", loss, info, each)
        if loss is not None:
            for name in self.plan.logs:
                LOGS[name](self, loss, each, info)
        return {"loss": loss, "logits": info.z.detach()} if self.plan.returns_dict else loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.plan.optimizer](self)


class Samples(Dataset[Any]):
    """Samples as dicts, some with noise from a generator that everybody shares."""

    def __init__(self, x: Tensor, y: Tensor, noise: str | None) -> None:
        self.x, self.y, self.noise = x, y, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if self.noise == "torch":
            x = x + 0.1 * torch.randn(x.shape)
        elif self.noise == "numpy":
            x = x + np.float32(np.random.uniform(-0.1, 0.1))  # noqa: NPY002
        elif self.noise == "random":
            x = x * random.uniform(0.9, 1.1)
        return {"x": x, "y": self.y[index]}


@dataclass(frozen=True)
class Case:
    """A federation to be made, and how to record it.

    Args:
        seed: What it is a function of.
        plan: The module.
        sizes: Samples of each client.
        rare: Rare samples of each client.
        local: Arguments of every client.
        data: `"tensors"`, or the noise of `Samples` (`"plain"` for none).
        server_lr: Learning rate of the server step.
        chunk_size: Of the executors that compute clients together.
        way: The path to ask `VectorizedExecutor` for.
    """

    seed: int
    plan: Plan
    sizes: tuple[int, ...]
    rare: tuple[int, ...]
    local: dict[str, Any]
    data: str
    server_lr: float
    chunk_size: int | None
    way: str

    @property
    def executor(self) -> Executor:
        """The executor to compare with the sequential one."""
        return Planned(path=self.way, chunk_size=self.chunk_size, warn=False)

    @property
    def features(self) -> frozenset[str]:
        """What the case has, as `table: name`."""
        plan = self.plan
        found = {f"body: {plan.body}", f"loss: {plan.loss}", f"optimizer: {plan.optimizer}"}
        found |= {f"layer: {name}" for name in plan.layers}
        found |= {f"activation: {name}" for name in plan.activations}
        found |= {f"pool: {plan.pool}", f"data: {self.data}"}
        found |= {f"hook: {plan.hook}"} if plan.hook else set()
        found |= {f"log: {name}" for name in plan.logs}
        found |= {f"{twist.table}: {twist.name}" for twist in plan.twists}
        found |= {f"gate: {twist.gate}" for twist in plan.twists}
        found |= {f"setting: {name}" for name in self.local if name != "batch_size"}
        found |= {"setting: returns_dict"} if plan.returns_dict else set()
        found |= {"setting: chunks"} if self.chunk_size else set()
        return frozenset(found)

    def federation(self, nudge: int = 0) -> Federation:
        """Make the clients and their module anew.

        Args:
            nudge: Where not 0, change all weights about as much as rounding does, by this seed.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module = RandomModule(self.plan)
            data = [self._samples(n, rare) for n, rare in zip(self.sizes, self.rare, strict=True)]
            if nudge:
                torch.manual_seed(nudge)
                with torch.no_grad():
                    for p in _parameters(module):
                        p += 3e-7 * (p.abs() + 0.1) * torch.randn_like(p)
        clients = [
            LightningClient(f"client-{i}", module, one, **self.local) for i, one in enumerate(data)
        ]
        return Federation(clients, module)

    def _samples(self, size: int, rare: int) -> Dataset[Any]:
        y = torch.randint(C, (size,))
        if any(self.rare):
            y = y % (C - 1)  # the last class is that of rare samples
        y[size - rare :] = C - 1
        shape = {"vector": (H,), "image": (H, 4, 4)}.get(self.plan.body, (LENGTH, H))
        if self.plan.body == "tokens":
            x = (y[:, None] * 2 + torch.randint(3, (size, LENGTH))) % 6
            x[:, 0] = torch.where(torch.arange(size) < size - rare, x[:, 0], 6)
        else:
            x = torch.randn(size, *shape).clamp(-3, 3) + y.view(-1, *[1] * len(shape)) - 0.5
            x.view(size, -1)[size - rare :, 0] = 6.0
        if self.data == "tensors":
            return TensorDataset(x, y)
        return Samples(x, y, None if self.plan.body == "tokens" else self.data)


def random_case(seed: int) -> Case:
    """Return the case of a seed.

    Of twelve cases five are what one pass over all clients is for, three what stacked weights are
    for, in both with one oddity at most, which most often begins late; four are of any kind, each
    with one thing for sure, so that many have all there is.
    """
    rng = np.random.default_rng([2606, seed])

    def one(names: Iterable[str]) -> str:
        return str(rng.choice(list(names)))

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    kind = ("grouped", "vmap", "any")[sum(seed % 12 >= start for start in (5, 8))]
    wish: dict[str, str] = {}
    if kind == "any":
        wishes = _wishes()
        wish = dict([wishes[(seed // 12 * 4 + seed % 12 - 8) % len(wishes)]])
    bodies = dict(zip(BODIES, (0.6, 0.18, 0.07, 0.15), strict=True))
    if "layer" in wish:
        bodies = {name: p for name, p in bodies.items() if wish["layer"] in _layers(name)}
    odds = np.array(list(bodies.values()))
    body = str(rng.choice(list(bodies), p=odds / odds.sum()))
    layers = _layers(body)
    plain = [name for name in layers if name in GROUPED]
    stacked = [name for name in layers if name in (*GROUPED, *STACKED)]
    names = [one(stacked if kind == "vmap" else plain) for _ in range(int(one("1123")))]
    if "layer" in wish:
        names[-1] = wish["layer"]
    acts = [one({**SMOOTH, **KINKED} if chance(0.16) else SMOOTH) for _ in names]
    loss = "cross_entropy" if chance(0.4) else one(USUAL_LOSSES)
    hook, twists, way = wish.get("hook"), list[Twist](), "auto"
    tables = {"loss twist": LOSS_TWISTS, "feature twist": FEATURE_TWISTS}
    if kind == "any":
        way = one(["auto", "auto", "grouped", "vmap"])
        loss = wish.get("loss", loss)
        table = one(tables)
        if "gate" in wish:
            twists = [Twist(table, one(tables[table]), wish["gate"])]
        for table in tables:
            if table in wish:
                twists = [Twist(table, wish[table], one(GATES) if chance(0.3) else "always")]
    elif chance(0.7 if kind == "grouped" else 0.85):
        oddity = one(["loss", "twist", "twist", "twist", "partial"])
        table = one(tables)
        if oddity == "loss":
            loss = one(RARE_LOSSES)
        elif oddity == "twist":
            gates = LATE if kind == "grouped" else (*["told"] * 6, "level", "global_step")
            known = [name for name in ESCAPES if name in tables[table]]
            name = one(known if kind == "vmap" and chance(0.7) else tables[table])
            twists = [Twist(table, name, one(gates))]
        else:
            table = one(tables)
            known = [name for name in PARTIAL_TWISTS if name in tables[table]]
            twists = [Twist(table, one(known), one(PARTIAL[: 3 if kind == "grouped" else 4]))]
    num_clients = int(rng.choice([2, 3, 4, 6], p=[0.4, 0.57, 0.02, 0.01]))
    sizes = rng.integers(4, 25, num_clients)
    if chance(0.15):
        sizes[rng.integers(num_clients)] = rng.integers(1, 4)  # less than a batch
    rare = np.zeros(num_clients, dtype=int)
    if chance(0.8) or loss in RARE_LOSSES:
        for client in rng.choice(num_clients, rng.integers(1, 3), replace=False):
            sizes[client], rare[client] = rng.integers(16, 40), 1
    local: dict[str, Any] = {"batch_size": int(rng.integers(2, 5)) if chance(0.95) else None}
    optimizer = "sgd"
    if kind == "vmap":
        way = "vmap"
        if chance(0.7):
            way, optimizer = one(["auto", "vmap"]), one(OPTIMIZERS)
            if chance(0.1) or optimizer in SIMPLE:
                local["local_steps"] = 3 if chance(0.15) else 2
    else:
        if "optimizer" in wish or chance(0.1):
            optimizer = wish.get("optimizer", one(SIMPLE))
        if chance(0.1 if kind == "any" else 0.0):
            local["local_steps"] = int(rng.integers(2, 4))
        elif chance(0.06 if kind == "any" else 0.0):
            local["local_epochs"] = 1
            sizes = np.minimum(sizes, 7)
    if optimizer in ("groups", "by_round") or chance(0.1):
        local["local_lr"] = 0.1
    logs: tuple[str, ...] = ()
    if "log" in wish or chance(0.2):
        logs = (wish.get("log", one(USUAL_LOGS if kind == "grouped" else LOGS)),)
    plan = Plan(
        body=body,
        layers=tuple(names),
        activations=tuple(acts),
        pool=one(BODIES[body][1]),
        loss=loss,
        twists=tuple(twists),
        hook=hook,
        logs=logs,
        optimizer=optimizer,
        late=int(rng.integers(3)),
        turn=int(rng.integers(2, 20)),
        level=float(rng.uniform(0.3, 1.1)),
        tight=float(rng.uniform(0.05, 1.0)),
        growth=float(rng.uniform(1.005, 1.3)),
        returns_dict=chance(0.1),
        trains_embedding=chance(0.5) and kind != "grouped",
    )
    return Case(
        seed=seed,
        plan=plan,
        sizes=tuple(map(int, sizes)),
        rare=tuple(map(int, rare)),
        local=local,
        data="tensors" if chance(0.9) else one(["plain", "torch", "numpy", "random"]),
        server_lr=float(rng.choice([0.05, 0.2, 0.5])) if optimizer == "sgd" else 0.02,
        chunk_size=2 if chance(0.3) else None,
        way=way,
    )


def _layers(body: str) -> dict[str, Callable[[], Block]]:
    return LAYERS if body == "vector" else BODIES[body][0]


def _tables() -> dict[str, list[str]]:
    """Return the names of all features by table."""
    known: dict[str, Any] = {
        "body": BODIES,
        "layer": {**LAYERS, **SEQUENCE_LAYERS, **IMAGE_LAYERS},
        "activation": {**SMOOTH, **KINKED},
        "pool": {name: None for _, pools in BODIES.values() for name in pools},
        "loss": LOSSES,
        "loss twist": LOSS_TWISTS,
        "feature twist": FEATURE_TWISTS,
        "gate": GATES,
        "hook": HOOKS,
        "log": LOGS,
        "optimizer": OPTIMIZERS,
        "data": ["tensors", "plain", "torch", "numpy", "random"],
        "setting": ["local_steps", "local_epochs", "local_lr", "returns_dict", "chunks"],
    }
    return {table: list(names) for table, names in known.items()}


@cache
def _wishes() -> list[tuple[str, str]]:
    tables = ("layer", "loss", "loss twist", "feature twist", "gate", "hook", "log", "optimizer")
    found = [(table, name) for table in tables for name in _tables()[table]]
    np.random.default_rng(0).shuffle(found)
    return [(str(table), str(name)) for table, name in found]


def all_features() -> set[str]:
    """Return everything that `Case.features` may name."""
    return {f"{table}: {name}" for table, names in _tables().items() for name in names}


# -- the comparison --------------------------------------------------------------------------------


class Follow(Aggregator):
    """Does what the server did in another recording, so that both have the same weights.

    Args:
        aggregates: Shape (rounds, d).
    """

    def __init__(self, aggregates: Tensor) -> None:
        self.aggregates = aggregates

    def spec(self) -> dict[str, Any]:
        return {"class_path": "Follow", "init_args": {}}

    def aggregate(self, updates: Tensor, client_weights: Any = None, ctx: Any = None) -> Tensor:
        return self.aggregates[ctx.round].clone()


class Planned(VectorizedExecutor):
    """Remembers its plan."""

    def plan(self, clients: Any, global_weights: Any, ctx: Any) -> dict[str, Any]:
        self.planned = super().plan(clients, global_weights, ctx)
        return self.planned

    @property
    def sequential_since(self) -> int | None:
        """The round from which on it computes nothing but one client after another, if any."""
        if self.departure is not None:
            return int(self.departure["round"])
        return 0 if self.planned["path"] == "sequential" else None


class Enough(Exception):
    """Nothing more is to be learned of a recording."""


class Watcher(Callback):
    """Keeps what was sent and logged, and tells the module the round.

    It ends a recording where the executor has computed one client after another for three rounds.

    Args:
        module: The clients' module.
        executor: What computes.
    """

    def __init__(self, module: Any, executor: str | Executor) -> None:
        self.module, self.executor = module, executor
        self.updates: list[Tensor] = []
        self.logged: list[dict[str, float]] = []

    def on_round_start(self, loop: Any, ctx: Any) -> None:
        self.module.round = ctx.round
        if isinstance(self.executor, Planned):
            since = self.executor.sequential_since
            if since is not None and ctx.round > since + 2:
                raise Enough

    def on_updates(self, loop: Any, ctx: Any, updates: Any) -> None:
        self.updates.append(updates.updates.clone())

    def on_round_end(self, loop: Any, ctx: Any, metrics: Any) -> None:
        self.logged.append(dict(metrics))


@dataclass(frozen=True)
class Run:
    """One recording.

    Args:
        updates: Shape (rounds, clients, d).
        logged: What was logged, by round.
        aggregates: Shape (rounds, d).
        path: The path that was planned, if one was.
        departure: That of the executor.
        error: What ended it, or `None`.
        warned: Texts of fedrec's warnings.
    """

    updates: Tensor
    logged: list[dict[str, float]]
    aggregates: Tensor
    path: str
    departure: dict[str, Any] | None
    error: str | None


@cache
def _loop() -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", logger=False, enable_progress_bar=False)


def record(
    case: Case,
    executor: str | Executor,
    like: Run | None = None,
    nudge: int = 0,
    rounds: int = ROUNDS,
) -> Run:
    """Record a case; with the weights of another recording, where one is given."""
    federation, history = case.federation(nudge), MemoryHistory()
    watcher = Watcher(federation.module, executor)
    loop = _loop()  # to make one takes as long as ten rounds
    loop.executor, loop.callbacks, loop.seed = executor, [watcher], case.seed
    aggregator = FedAvg() if like is None else Follow(like.aggregates)
    if like is not None:
        rounds = len(like.aggregates) + (like.error is not None)
    error = None
    TURNS.clear()
    with _own_streams(case.seed), warnings.catch_warnings():
        warnings.simplefilter("ignore", FedrecWarning)
        try:
            loop.record(
                federation, aggregator, history, max_rounds=rounds, server_lr=case.server_lr
            )
        except Enough:
            pass
        except Exception as raised:  # noqa: BLE001 - whatever the module makes of it
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0][:160]}"
    done = history.rounds()
    planned, departure = getattr(executor, "planned", {}), getattr(executor, "departure", None)
    return Run(
        updates=torch.stack(watcher.updates[: len(done)]) if done else torch.zeros(0, 0, 1),
        logged=watcher.logged[: len(done)],
        aggregates=torch.stack([history.read_round(t, ()).aggregate for t in done])
        if done
        else torch.zeros(0, 1),
        path=planned.get("path", ""),
        departure=None if departure is None else dict(departure),
        error=error,
    )


@contextmanager
def _own_streams(seed: int) -> Iterator[None]:
    """Seed the generators that everybody shares, and put them back."""
    numpy_state, state = np.random.get_state(), random.getstate()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(state)


@dataclass(frozen=True)
class Outcome:
    """What came of a comparison.

    Args:
        path: The path taken at first.
        departure: What the executor says of leaving it, if it did.
        verdict: `"agree"`; `"update"` or `"log"` for a difference; `"raises"` if only one of them
            raised; `"both raise"`.
        largest: Largest relative difference of a client's update, or of what is logged.
        round: Where it first was beyond the limit, or -1.
        clients: How many clients it was of in that round.
        rounds: How many rounds had one.
        text: More, for people.
    """

    path: str
    departure: dict[str, Any] | None
    verdict: str
    largest: float = 0.0
    round: int = -1
    clients: int = 0
    rounds: int = 0
    text: str = ""

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong, in the rounds before a departure or after it."""
        return self.verdict in ("agree", "both raise")


def differences(updates: Tensor, reference: Tensor) -> Tensor:
    """Return relative differences by round and client; 0 where both are 0."""
    off, size = (updates - reference).double().norm(dim=-1), reference.double().norm(dim=-1)
    return torch.where(off == 0, off, off / size)


def compare(case: Case, executor: Executor | None = None) -> Outcome:
    """Compare an executor with one client after another, on the same weights in every round.

    A difference beyond the limit counts unless the sequential updates of that client in that round
    change as much by themselves where weights change in the last bit. Likewise for what is logged.

    Args:
        case: What to record.
        executor: How; the case's own executor if left out.
    """
    executor = case.executor if executor is None else executor
    fast = record(case, executor)
    slow = record(case, "sequential", like=fast)
    if slow.error is not None or fast.error is not None:
        text = f"sequential: {slow.error}; fast, after {len(fast.updates)} rounds: {fast.error}"
        alike = slow.error is not None and fast.error is not None
        alike = alike and len(slow.updates) == len(fast.updates)
        alike = alike and slow.error.split(":")[0] == fast.error.split(":")[0]
        if not alike:
            return Outcome(fast.path, fast.departure, "raises", text=text)
    found, logs = differences(fast.updates, slow.updates), _log_differences(fast, slow)
    wrong, wrong_logs = found > LIMIT, logs > LOG_LIMIT
    if bool(wrong.any()) or bool(wrong_logs.any()):
        rounding, rounding_of_logs = _rounding(case, slow)
        wrong &= ~(found <= 3 * rounding)
        wrong_logs &= ~(logs <= 3 * rounding_of_logs)
    if bool(wrong.any()):
        rounds = wrong.any(dim=1).nonzero().flatten()
        first, largest = int(rounds[0]), float(found[wrong].max())
        count = int(wrong[first].sum())
        return Outcome(fast.path, fast.departure, "update", largest, first, count, len(rounds))
    if bool(wrong_logs.any()):
        rounds = wrong_logs.nonzero().flatten()
        largest = float(logs[wrong_logs].max())
        return Outcome(fast.path, fast.departure, "log", largest, int(rounds[0]), 0, len(rounds))
    largest = float(found.max()) if found.numel() else 0.0
    verdict = "agree" if slow.error is None else "both raise"
    return Outcome(fast.path, fast.departure, verdict, largest)


def _log_differences(run: Run, reference: Run) -> Tensor:
    """Return the largest relative difference of a logged value by round."""
    found = [
        max((_off(a.get(name), b.get(name)) for name in {*a, *b}), default=0.0)
        for a, b in zip(run.logged, reference.logged, strict=True)
    ]
    return torch.tensor(found, dtype=torch.float64)


def _rounding(case: Case, slow: Run) -> tuple[Tensor, Tensor]:
    """Return how much updates and logs change where weights change in the last bit."""
    nudged = [record(case, "sequential", slow, nudge) for nudge in range(1, 5)]
    nudged = [run for run in nudged if run.updates.shape == slow.updates.shape]
    if not nudged:
        return torch.zeros(slow.updates.shape[:2]), torch.zeros(len(slow.logged))
    updates = torch.stack([differences(run.updates, slow.updates) for run in nudged])
    logs = torch.stack([_log_differences(run, slow) for run in nudged])
    return updates.amax(0), logs.amax(0)


def _off(value: float | None, expected: float | None) -> float:
    if value is None or expected is None:
        return float("inf")
    return abs(value - expected) / max(abs(expected), 1e-2)
