"""What operations make of the samples of a batch: what is taken for a mean is one for each client.

Each function gets the samples of three clients at once, features of shape (6, 4, 5) and labels of
shape (6,). Where it is not refused, the gradients of its value are compared with those of the same
function for each client alone.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.executors.kinds import (
    CannotGroupError,
    Constant,
    Count,
    Kind,
    Mean,
    Mixed,
    Samples,
    Sum,
)
from fedrec.executors.watch import SampleWatch, refuse_custom_gradients

CLIENTS, SIZE = 3, 2
WEIGHT = torch.linspace(-1, 1, 25).view(5, 5)
ROW = torch.linspace(0.5, 1.5, 5)
Function = Callable[[Tensor, Tensor], Tensor]


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(CLIENTS * SIZE, 4, 5, generator=generator), torch.tensor([0, 3, 1, 2, 0, 1])


def logits(x: Tensor) -> Tensor:
    return x.mean(1)


def each(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits(x), y, reduction="none")


def gradients_together(function: Function) -> Tensor:
    """Return the gradient of each client's own value, from one pass; shape of the samples."""
    x, y = samples()
    x.requires_grad_()
    with SampleWatch([x, y], len(x)) as watch:
        value = function(x, y)
    refuse_custom_gradients(value, ())
    parts = watch.parts_of_mean("its loss", value, CLIENTS)
    (gradient,) = torch.autograd.grad(value * (CLIENTS // parts), x)
    return gradient


def gradients_alone(function: Function) -> Tensor:
    found = []
    for x, y in zip(*(values.chunk(CLIENTS) for values in samples()), strict=True):
        x.requires_grad_()
        found.append(torch.autograd.grad(function(x, y), x)[0])
    return torch.cat(found)


def kind_of(function: Function) -> Kind | None:
    x, y = samples()
    with SampleWatch([x, y], len(x)) as watch:
        result = function(x, y)
    return watch.kind(result)


def smooth(x: Tensor) -> Tensor:
    return x.sin().mean()


def _twice(x: Tensor) -> Tensor:
    x = x.clone()
    x.mul_(2).add_(1)
    return x


def _all_but_first(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1), torch.ones(len(x) - 1)]).view(-1, 1, 1)


def _ones_and_zero(x: Tensor) -> Tensor:
    weights = torch.ones(len(x), 1, 1)
    weights[0] = 0
    return weights


def _first_row_zero(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = 0
    return x


def _own_columns(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 0] = x[..., 1]
    return x


GROUPED: dict[str, dict[str, Function]] = {
    "entries": {
        "sine": lambda x, y: smooth(x),
        "product": lambda x, y: smooth(x * x.exp()),
        "constant": lambda x, y: smooth(x * ROW + 2),
        "mask": lambda x, y: smooth(x * (x > 0)),
        "where": lambda x, y: smooth(torch.where(x > 0, x, 0.1 * x)),
        "columns written": lambda x, y: smooth(_own_columns(x)),
        "in place": lambda x, y: smooth(_twice(x)),
        "lerp": lambda x, y: smooth(torch.lerp(x, x.cos(), 0.3)),
        "detached": lambda x, y: smooth(x * x.detach()),
        "zeros like": lambda x, y: smooth(torch.maximum(x, torch.zeros_like(x))),
    },
    "shapes": {
        "flat": lambda x, y: smooth(x.flatten(1) * 2),
        "folded": lambda x, y: smooth(x.reshape(-1, 5) @ WEIGHT),
        "folded and back": lambda x, y: smooth((x.reshape(-1, 5) @ WEIGHT).view(-1, 4, 5).sum(1)),
        "positions first": lambda x, y: smooth(x.transpose(0, 1).softmax(-1)),
        "permuted": lambda x, y: smooth(x.permute(2, 0, 1).sum(2)),
        "unsqueezed": lambda x, y: smooth(x[:, None] * WEIGHT[:4]),
        "squeezed": lambda x, y: smooth(x[..., :1].squeeze(-1)),
        "expanded": lambda x, y: smooth(x[:, :, None].expand(-1, -1, 2, -1)),
        "selected": lambda x, y: smooth(x[:, 0] * x[:, -1]),
        "sliced": lambda x, y: smooth(x[:, 1:] - x[:, :-1]),
        "chunks": lambda x, y: smooth(torch.cat(x.chunk(2, 1)[::-1], 1)),
        "stacked": lambda x, y: smooth(torch.stack([x, x.cos()], 1)),
        "repeated": lambda x, y: smooth(x.repeat(1, 2, 1)),
        "unbound": lambda x, y: smooth(sum(x.unbind(1))),
    },
    "dimensions": {
        "softmax": lambda x, y: smooth(x.softmax(-1)),
        "sum": lambda x, y: smooth(x.sum(1)),
        "kept": lambda x, y: smooth(x - x.mean(-1, keepdim=True)),
        "norm": lambda x, y: smooth(F.normalize(x, dim=1)),
        "largest": lambda x, y: smooth(x.amax((1, 2))),
        "sorted": lambda x, y: smooth(x.sort(-1).values),
        "running": lambda x, y: smooth(x.cumsum(1)),
        "rolled": lambda x, y: smooth(x.roll(1, 1)),
        "layer norm": lambda x, y: smooth(F.layer_norm(x, (4, 5))),
        "triangle": lambda x, y: smooth(x.tril()),
        "padded": lambda x, y: smooth(F.pad(x, (1, 1, 0, 2))),
        "pooled": lambda x, y: smooth(F.avg_pool2d(x[:, None], 2)),
        "group norm": lambda x, y: smooth(F.group_norm(x, 2)),
        "convolution": lambda x, y: smooth(F.conv1d(x, torch.ones(2, 4, 3))),
    },
    "products": {
        "weight": lambda x, y: smooth(x @ WEIGHT),
        "from the left": lambda x, y: smooth(torch.ones(3, 4) @ x),
        "of its own": lambda x, y: smooth(x @ x.transpose(1, 2)),
        "einsum": lambda x, y: smooth(torch.einsum("bij,bkj->bik", x, x)),
        "addmm": lambda x, y: smooth(torch.addmm(ROW, logits(x), WEIGHT)),
        "attention": lambda x, y: smooth(F.scaled_dot_product_attention(*3 * [x[:, None]])),
    },
    "look-ups": {
        "embedding": lambda x, y: smooth(F.embedding(y, WEIGHT)[:, None] * x),
        "table": lambda x, y: smooth(WEIGHT[y] * logits(x)),
        "gather": lambda x, y: smooth(logits(x).gather(1, y[:, None])),
        "columns": lambda x, y: smooth(x[..., torch.tensor([2, 0])]),
        "scatter": lambda x, y: smooth(
            torch.zeros_like(logits(x)).scatter(1, y[:, None], 1.0) * x[:, 0]
        ),
    },
    "means": {
        "of means": lambda x, y: x.sin().mean(0).mean(),
        "times": lambda x, y: 3 * x.sin().mean() - 1,
        "two": lambda x, y: x.sin().mean() + x.cos().mean() / 2,
        "picked": lambda x, y: x.sin().mean(0)[0, 0],
        "summed": lambda x, y: x.sin().mean(0).sum(),
        "over samples": lambda x, y: x.sin().sum() / len(x),
        "over entries": lambda x, y: x.sin().sum() / x.numel(),
        "sum": lambda x, y: x.sin().sum(),
        "sum over a constant": lambda x, y: x.sin().sum() / 5,
        "over ones": lambda x, y: x.sin().sum() / torch.ones_like(each(x, y)).sum(),
        "weights that all have": lambda x, y: smooth(x) * (y >= 0).all(),
    },
    "losses": {
        "cross entropy": lambda x, y: F.cross_entropy(logits(x), y),
        "summed": lambda x, y: F.cross_entropy(logits(x), y, reduction="sum"),
        "over samples": lambda x, y: F.cross_entropy(logits(x), y, reduction="sum") / len(x),
        "each": lambda x, y: each(x, y).mean(),
        "smoothed": lambda x, y: F.cross_entropy(logits(x), y, label_smoothing=0.1),
        "class weights, summed": lambda x, y: (
            F.cross_entropy(logits(x), y, weight=ROW, reduction="sum") / len(x)
        ),
        "no label ignored": lambda x, y: F.cross_entropy(logits(x), y, ignore_index=4),
        "squares": lambda x, y: F.mse_loss(logits(x), WEIGHT[y]),
        "huber": lambda x, y: F.huber_loss(logits(x), WEIGHT[y]),
        "binary": lambda x, y: F.binary_cross_entropy_with_logits(logits(x), WEIGHT[y].sigmoid()),
        "divergence": lambda x, y: F.kl_div(
            logits(x).log_softmax(1), WEIGHT[y].softmax(1), reduction="batchmean"
        ),
        "weights of samples": lambda x, y: (each(x, y) * (1 + y)).mean(),
    },
}

POSITION = "by their position in the batch"
READ = "it reads the value of a tensor"
REFUSED: dict[str, dict[str, tuple[Function, str]]] = {
    "entries": {
        "positions": (lambda x, y: smooth(x * torch.arange(len(x)).view(-1, 1, 1)), POSITION),
        "flipped": (lambda x, y: smooth(x * x.flip(0)), "`flip` goes over the samples"),
        "ones but for one": (lambda x, y: smooth(x * _all_but_first(x)), POSITION),
        "ones and a zero": (lambda x, y: smooth(x * _ones_and_zero(x)), "it writes into a part"),
        "of its mean": (lambda x, y: smooth(x - x.mean(0)), "a value of the whole batch change"),
        "detached mean": (lambda x, y: smooth(x / x.detach().std()), "`std` goes over the samples"),
        "mask of the mean": (lambda x, y: smooth(x * (x > x.mean())), "a value of the whole batch"),
        "crossed": (lambda x, y: smooth(x[:, None] - x[None]), "lets samples meet"),
        "first row": (lambda x, y: smooth(x - x[:1]), "`slice` picks samples"),
    },
    "shapes": {
        "samples joined": (lambda x, y: smooth(x.reshape(3, -1).softmax(-1)), "joins samples"),
        "first": (lambda x, y: smooth(x[0]), "`select` picks samples"),
        "half": (lambda x, y: smooth(x[: len(x) // 2]), "`slice` picks samples"),
        "every second": (lambda x, y: smooth(x[::2]), "`slice` picks samples"),
        "in chunks": (lambda x, y: smooth(x.chunk(2)[0]), "picks samples"),
        "doubled": (lambda x, y: smooth(torch.cat([x, x])), "more than the samples"),
        "repeated": (lambda x, y: smooth(x.repeat(2, 1, 1).cumsum(1)), "repeats samples"),
        "written": (lambda x, y: smooth(_first_row_zero(x)), "it writes into a part of a tensor"),
        "strided": (lambda x, y: smooth(x.as_strided((2, 2), (1, 1))), "no rule for what"),
    },
    "dimensions": {
        "softmax": (lambda x, y: smooth(x.softmax(0)), "`_softmax` goes over the samples"),
        "running": (lambda x, y: smooth(x.cumsum(0)), "`cumsum` goes over the samples"),
        "sorted": (lambda x, y: smooth(x.sort(0).values), "`sort` goes over the samples"),
        "largest": (lambda x, y: x.sin().amax(), "`amax` goes over the samples"),
        "variance": (lambda x, y: x.var(), "`var` goes over the samples"),
        "norm": (lambda x, y: x.norm(), "goes over the samples"),
        "batch norm": (
            lambda x, y: smooth(F.batch_norm(x, None, None, training=True)),
            "normalizes over the samples",
        ),
        "as channels": (
            lambda x, y: smooth(F.conv1d(logits(x).t()[None], torch.ones(1, 5, 1))),
            "another place than first",
        ),
    },
    "products": {
        "of samples": (lambda x, y: smooth(x.flatten(1) @ x.flatten(1).t()), "lets samples meet"),
        "covariance": (lambda x, y: smooth(x.flatten(1).t() @ x.flatten(1)), "lets samples meet"),
        "of all": (lambda x, y: smooth(torch.ones(2, len(x)) @ x.flatten(1)), "lets samples meet"),
    },
    "look-ups": {
        "permuted": (lambda x, y: smooth(x[torch.arange(len(x))]), "picks samples by number"),
        "by label": (lambda x, y: smooth(x[y]), "picks samples by number"),
        "by mask": (lambda x, y: smooth(x[y > 0]), READ),
        "masked": (lambda x, y: smooth(x.masked_select(x > 0)), READ),
    },
    "means": {
        "square": (lambda x, y: smooth(x) ** 2, "`pow` of a value of the whole batch"),
        "level": (lambda x, y: (smooth(x) - 1).abs() + 1, "`abs` of a value of the whole batch"),
        "clamped": (lambda x, y: smooth(x).clamp(max=0.1), "`clamp` of a value of the whole"),
        "over its own": (lambda x, y: smooth(x) / x.detach().mean(), "is not linear"),
        "root": (lambda x, y: smooth(x**2).sqrt(), "`sqrt` of a value of the whole batch"),
        "inverse": (lambda x, y: 1 / (3 + smooth(x)), "`reciprocal` of a value"),
        "mean and sum": (lambda x, y: x.mean() + x.sum(), "is not linear"),
        "number of ones": (
            lambda x, y: (each(x, y) * (y > 0)).sum() / (y > 0).sum(),
            "`div` of a value of the whole batch",
        ),
        "twice the number": (
            lambda x, y: x.sin().sum() / (2 * torch.ones_like(each(x, y))).sum(),
            "of a number of samples",
        ),
        "number of samples": (
            lambda x, y: smooth(x) * torch.ones_like(each(x, y)).sum(),
            "of a number of samples",
        ),
    },
    "losses": {
        "label ignored": (
            lambda x, y: F.cross_entropy(logits(x), y, ignore_index=3),
            "leaves out samples with label 3",
        ),
        "class weights": (
            lambda x, y: F.cross_entropy(logits(x), y, weight=ROW),
            "divides by the weights of the classes",
        ),
        "of others": (
            lambda x, y: F.cross_entropy(logits(x), y.flip(0)),
            "`flip` goes over the samples",
        ),
        "weights by position": (
            lambda x, y: (each(x, y) * torch.linspace(0, 1, len(y))).mean(),
            POSITION,
        ),
    },
    "escapes": {
        "item": (lambda x, y: smooth(x) * y[0].item(), "picks samples|" + READ),
        "condition": (lambda x, y: smooth(x) * (2 if (y == 3).any() else 1), READ),
        "tolist": (lambda x, y: smooth(x) * max(y.tolist()), READ),
        "numpy": (lambda x, y: smooth(x) * float(y.numpy().max()), READ),
        "array": (lambda x, y: smooth(x) * float(np.asarray(y).max()), READ),
        "equal": (lambda x, y: smooth(x) * torch.equal(y, y.clone()), READ),
        "text": (lambda x, y: smooth(x) * len(str(y)), READ),
        "list": (lambda x, y: smooth(x) * torch.tensor([[x[:, 0].max().detach()]]).sum(), READ),
        "list of its own": (lambda x, y: smooth(x) * y.new_tensor([y.max()]).sum(), READ),
        "pickled": (lambda x, y: smooth(x) * len(pickle.dumps(y)), READ),
        "deep copy": (lambda x, y: smooth(x) * copy.deepcopy(y).max(), "does not see"),
        "unique": (lambda x, y: smooth(x) * len(y.unique()), READ),
        "drawn": (lambda x, y: smooth(x * torch.rand(5)), "it draws random numbers"),
        "dropout": (lambda x, y: smooth(F.dropout(x, 0.5)), "it draws random numbers"),
        "gradient": (
            lambda x, y: torch.autograd.grad(smooth(x), x, create_graph=True)[0].norm(),
            "it computes a gradient itself",
        ),
    },
}


def cases(table: dict[str, dict[str, object]]) -> list[object]:
    return [
        pytest.param(value, id=f"{group}: {name}")
        for group, entries in table.items()
        for name, value in entries.items()
    ]


@pytest.mark.parametrize("function", cases(GROUPED))
def test_what_is_grouped_gives_the_gradients_of_each_client(function: Function) -> None:
    together, alone = gradients_together(function), gradients_alone(function)
    assert float(alone.norm()) > 0
    assert torch.allclose(together, alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("refused"), cases(REFUSED))
def test_what_is_refused_says_why(refused: tuple[Function, str]) -> None:
    function, reason = refused
    with pytest.raises(CannotGroupError, match=reason):
        gradients_together(function)


KINDS: dict[str, tuple[Function, Kind | None]] = {
    "samples": (lambda x, y: x.sin(), Samples(0)),
    "samples second": (lambda x, y: x.transpose(0, 1), Samples(1)),
    "folded": (lambda x, y: x.reshape(-1, 5), Samples(0, 4)),
    "mean": (lambda x, y: x.mean(0), Mean()),
    "sum of 6 samples, 24 rows, 120 entries": (
        lambda x, y: x.reshape(-1, 5).sum(),
        Sum(frozenset({6, 24, 120})),
    ),
    "divided by one of these": (lambda x, y: x.reshape(-1, 5).sum() / 24, Mean()),
    "constant": (lambda x, y: torch.zeros(len(x)), Constant()),
    "number": (lambda x, y: torch.ones(len(x)).sum(), Count()),
    "no samples": (lambda x, y: WEIGHT.sin(), None),
    "numbers in a row": (lambda x, y: torch.arange(6).float(), None),
    "averaged, channels last": (
        lambda x, y: F.adaptive_avg_pool2d(
            x.reshape(len(x), -1, 1, 1).contiguous(memory_format=torch.channels_last), 1
        ),
        Samples(0),
    ),
    "no rule": (
        lambda x, y: x.as_strided((2, 2), (1, 1)),
        Mixed("fedrec has no rule for what `as_strided` makes of samples"),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    function, kind = KINDS[name]
    assert kind_of(function) == kind
