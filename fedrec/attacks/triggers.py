"""What a backdoor is opened with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.component import Component
from fedrec.exceptions import ConfigurationError, ShapeError, expected
from fedrec.functional.attack.backdoor import (
    BADNETS_PIXELS,
    blended,
    every_kth_feature,
    pixel_pattern,
    square_pattern,
)
from fedrec.random import torch_generator

__all__ = [
    "BlendedTrigger",
    "FeatureTrigger",
    "FunctionTrigger",
    "PixelTrigger",
    "SquareTrigger",
    "Trigger",
    "checked_shape",
]


def checked_shape(image_shape: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the shape of one image as a tuple, or `None` if there is none."""
    if image_shape is None:
        return None
    return tuple(check_int("image_shape", size, minimum=1) for size in image_shape)


class Trigger(Component, ABC):
    """Embeds a backdoor trigger in inputs. Subclass it and write `__call__`.

    Examples:
        >>> class Darker(Trigger):
        ...     "Half as bright."
        ...     def __call__(self, x):
        ...         return x / 2
        >>> Darker()(torch.ones(1, 2))
        tensor([[0.5000, 0.5000]])
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Embed the trigger.

        Args:
            x: A batch of inputs, shape $(N, ...)$; must not be changed.

        Returns:
            Same shape.
        """


class PixelTrigger(Trigger):
    """Some pixels set to a value, in all channels.

    Args:
        pixels: Row and column of each; negative ones count from the bottom right corner. By default
            the four of BadNets.
        value: What to set them to; `None` for white: 1 in images of floating-point numbers, 255 in
            images of bytes (uint8).
        image_shape: Shape of one image, for images that come flat.

    Raises:
        ConfigurationError: If `pixels` is no list of row and column.
        ShapeError: When called, if images are too small or not of `image_shape`, or their type does
            not hold `value`.

    References:
        - Gu et al., BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply
          Chain, 2017.

    Examples:
        >>> PixelTrigger(pixels=[(0, 0), (-1, -1)])(torch.zeros(1, 1, 2, 2))
        tensor([[[[1., 0.],
                  [0., 1.]]]])
    """

    def __init__(
        self,
        *,
        pixels: Sequence[Sequence[int]] = BADNETS_PIXELS,
        value: float | None = None,
        image_shape: Sequence[int] | None = None,
    ) -> None:
        if len(pixels) == 0 or any(len(pixel) != 2 for pixel in pixels):
            raise ConfigurationError(expected("pixels", "a list of (row, column)", pixels))
        self.pixels = tuple((check_int("pixels", r), check_int("pixels", c)) for r, c in pixels)
        self.value = None if value is None else check_float("value", value)
        self.image_shape = checked_shape(image_shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Set the pixels."""
        return pixel_pattern(x, self.value, self.image_shape, self.pixels)


class SquareTrigger(Trigger):
    """A square in the bottom right corner, in all channels.

    Args:
        size: Side in pixels, at least 1.
        value: What to set them to; `None` for white: 1 in images of floating-point numbers, 255 in
            images of bytes (uint8).
        image_shape: Shape of one image, for images that come flat.

    Raises:
        ConfigurationError: If `size` is below 1.
        ShapeError: When called, if images are too small or not of `image_shape`, or their type does
            not hold `value`.

    References:
        - Gu et al., BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply
          Chain, 2017.

    Examples:
        >>> SquareTrigger(size=1)(torch.zeros(1, 1, 2, 2))
        tensor([[[[0., 0.],
                  [0., 1.]]]])
    """

    def __init__(
        self, *, size: int = 3, value: float | None = None, image_shape: Sequence[int] | None = None
    ) -> None:
        self.size = check_int("size", size, minimum=1)
        self.value = None if value is None else check_float("value", value)
        self.image_shape = checked_shape(image_shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Set the square."""
        return square_pattern(x, self.size, self.value, self.image_shape)


class FeatureTrigger(Trigger):
    """Every k-th feature set to a value: those with (index + 1) divisible by k.

    Args:
        k: Distance between them, at least 1.
        value: What to set them to.

    Raises:
        ConfigurationError: If `k` is below 1.
        ShapeError: When called, if there are fewer than `k` features, or their type does not hold
            `value`.

    References:
        - Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping,
          NDSS 2021.

    Examples:
        >>> FeatureTrigger(k=2)(torch.ones(1, 4))
        tensor([[1., 0., 1., 0.]])
    """

    def __init__(self, *, k: int = 20, value: float = 0.0) -> None:
        self.k = check_int("k", k, minimum=1)
        self.value = check_float("value", value)

    def __call__(self, x: Tensor) -> Tensor:
        """Set the features."""
        return every_kth_feature(x, self.k, self.value)


class BlendedTrigger(Trigger):
    r"""A random pattern blended into the whole input: $(1 - \alpha)\, x + \alpha\, k$.

    The pattern $k$ is uniform in [0, 1), in images of bytes (uint8) in [0, 255), and a function of
    the seed and the inputs' shape.

    Args:
        ratio: $\alpha$ in (0, 1].
        seed: Decides the pattern.

    Raises:
        ConfigurationError: If an argument is out of range.
        ShapeError: When called, if inputs are of another type than floating-point or uint8.

    References:
        - Chen et al., Targeted Backdoor Attacks on Deep Learning Systems Using Data Poisoning,
          2017.

    Examples:
        >>> x = torch.zeros(1, 1, 4, 4)
        >>> bool((BlendedTrigger(ratio=0.1)(x) <= 0.1).all())
        True
    """

    def __init__(self, *, ratio: float = 0.2, seed: int = 0) -> None:
        self.ratio = check_float("ratio", ratio, minimum=0.0, maximum=1.0, open_minimum=True)
        self.seed: int = check_int("seed", seed)

    def __call__(self, x: Tensor) -> Tensor:
        """Blend the pattern in."""
        if not x.is_floating_point() and x.dtype != torch.uint8:
            raise ShapeError(
                f"Expected inputs of floating-point numbers or bytes (uint8), but got {x.dtype}."
            )
        generator = torch_generator(self.seed, "trigger")
        return blended(x, torch.rand(x.shape[1:], generator=generator), self.ratio)


class FunctionTrigger(Trigger):
    """A trigger that a function embeds.

    Args:
        function: Embeds the trigger in a batch of inputs $(N, ...)$, which it must not change.

    Raises:
        ConfigurationError: If `function` cannot be called.

    Examples:
        >>> FunctionTrigger(torch.zeros_like)(torch.ones(1, 2))
        tensor([[0., 0.]])
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        if not callable(function):
            raise ConfigurationError(
                expected(
                    "function",
                    "a function",
                    function,
                    hint="in a recipe, name a class of yours that subclasses `Trigger`.",
                )
            )
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.function(x)

    def spec(self) -> dict[str, Any]:
        """Describe the trigger by its function's name; it cannot be rebuilt from that."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        module = getattr(self.function, "__module__", None)
        return {**super().spec(), "init_args": {"function": f"{module}.{name}"}}
