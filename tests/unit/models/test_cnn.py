from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, linear, max_pool2d, relu

from fedrec.exceptions import ConfigurationError
from fedrec.models import CNN


@pytest.mark.parametrize(("hidden", "count"), [(100, 139_960), (200, 266_060)])
def test_numbers_of_parameters(hidden: int, count: int) -> None:
    assert sum(p.numel() for p in CNN(hidden=hidden).parameters()) == count


def reference(parameters: list[Tensor], x: Tensor) -> Tensor:
    """The order of the papers: convolution, ReLU, pooling."""
    k1, b1, k2, b2, w3, b3, w4, b4 = parameters
    x = max_pool2d(relu(conv2d(x, k1, b1)), 2)
    x = max_pool2d(relu(conv2d(x, k2, b2)), 2)
    return linear(relu(linear(x.flatten(1), w3, b3)), w4, b4)


@pytest.mark.parametrize("image_size", [28, 13])
def test_pooling_before_relu_changes_neither_outputs_nor_gradients(image_size: int) -> None:
    torch.manual_seed(0)
    module = CNN(in_channels=2, hidden=20, image_size=image_size)
    parameters = list(module.parameters())
    with torch.no_grad():
        for p in parameters:
            p.add_(0.02 * torch.randn_like(p))  # no zero biases, no ties
    x, y = torch.randn(6, 2, image_size, image_size), torch.arange(6)
    ours, theirs = module(x), reference(parameters, x)
    assert torch.equal(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(cross_entropy(ours, y), parameters),
        torch.autograd.grad(cross_entropy(theirs, y), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_colour_images() -> None:
    module = CNN(in_channels=3, image_size=32, num_classes=7)
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"in_channels": 0}, "in_channels"),
        ({"num_classes": 1}, "num_classes"),
        ({"hidden": 0}, "hidden"),
        ({"image_size": 8}, "image_size.*HINT: use `MLP`"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{name}"):
        CNN(**arguments)


def test_the_smallest_image() -> None:
    assert CNN(image_size=10)(torch.zeros(1, 1, 10, 10)).shape == (1, 10)
