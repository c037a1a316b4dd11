"""Backdoor triggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedrec.exceptions import ShapeError

__all__ = [
    "BADNETS_PIXELS",
    "blended",
    "every_kth_feature",
    "part_of_trigger",
    "pixel_pattern",
    "square_pattern",
]

#: Rows and columns counted from the bottom right corner: (26, 26), (24, 26), (26, 24) and (25, 25)
#: of a 28 x 28 image.
BADNETS_PIXELS = ((-2, -2), (-4, -2), (-2, -4), (-3, -3))


def pixel_pattern(
    x: Tensor,
    value: float | None = None,
    image_shape: Sequence[int] | None = None,
    pixels: Sequence[Sequence[int]] = BADNETS_PIXELS,
) -> Tensor:
    """Set some pixels in all channels: by default the BadNets pattern near the bottom right corner.

    Args:
        x: Images, shape $(..., H, W)$ with at least three dimensions, or flat ones of shape
            $(N, F)$ with `image_shape`; not changed.
        value: What to set them to; `None` for white: 1 in images of floating-point numbers, 255 in
            images of bytes (uint8).
        image_shape: Shape of one flat image, ending in $H, W$.
        pixels: Row and column of each; negative ones count from the bottom right corner.

    Returns:
        Shape of `x`.

    Raises:
        ShapeError: If the images are flat and `image_shape` is missing or does not fit, they are
            too small for the pixels, or their type does not hold `value`.

    References:
        - Gu et al., BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply
          Chain, 2017.

    Examples:
        >>> pixel_pattern(torch.zeros(1, 1, 5, 5))[0, 0]
        tensor([[0., 0., 0., 0., 0.],
                [0., 0., 0., 1., 0.],
                [0., 0., 1., 0., 0.],
                [0., 1., 0., 1., 0.],
                [0., 0., 0., 0., 0.]])
    """
    height = max(_extent(row) for row, _ in pixels)
    width = max(_extent(column) for _, column in pixels)
    images = _images(x, image_shape, height, width)
    value = _white(x) if value is None else value
    _require_held(x, value)
    for row, column in pixels:
        images[..., row, column] = value
    return images.reshape(x.shape)


def square_pattern(
    x: Tensor, size: int = 3, value: float | None = None, image_shape: Sequence[int] | None = None
) -> Tensor:
    """Set a square in the bottom right corner, in all channels.

    Args:
        x: Images, as in `pixel_pattern`; not changed.
        size: Side of the square in pixels.
        value: As in `pixel_pattern`.
        image_shape: Shape of one flat image, ending in $H, W$.

    Returns:
        Shape of `x`.

    Raises:
        ShapeError: As in `pixel_pattern`.

    References:
        - Gu et al., BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply
          Chain, 2017.

    Examples:
        >>> square_pattern(torch.zeros(1, 1, 3, 3), size=2)[0, 0]
        tensor([[0., 0., 0.],
                [0., 1., 1.],
                [0., 1., 1.]])
    """
    images = _images(x, image_shape, size, size)
    value = _white(x) if value is None else value
    _require_held(x, value)
    images[..., -size:, -size:] = value
    return images.reshape(x.shape)


def blended(x: Tensor, pattern: Tensor, ratio: float) -> Tensor:
    r"""Blend a pattern into inputs.

    $$(1 - \alpha)\, x + \alpha\, k$$

    Args:
        x: Shape $(N, ...)$, of floating-point numbers or bytes (uint8); not changed.
        pattern: $k$, shape $(...)$, entries in [0, 1]; 1 stands for 255 in bytes.
        ratio: $\alpha$ in (0, 1].

    Returns:
        Shape of `x`.

    References:
        - Chen et al., Targeted Backdoor Attacks on Deep Learning Systems Using Data Poisoning,
          2017.

    Examples:
        >>> blended(torch.zeros(1, 2), torch.tensor([0.0, 1.0]), 0.25)
        tensor([[0.0000, 0.2500]])
    """
    if x.dtype == torch.uint8:
        mixed = (1 - ratio) * x.float() + ratio * _white(x) * pattern.to(x.device)
        return mixed.round().to(torch.uint8)
    return (1 - ratio) * x + ratio * pattern.to(x)


def part_of_trigger(
    trigger: Callable[[Tensor], Tensor], x: Tensor, part: int, num_parts: int
) -> Tensor:
    """Embed one part of a trigger.

    The places that the trigger changes, in reading order, are cut into parts of (nearly) equal
    length. A place is a pixel with all its channels where there are channels, else one entry.

    Args:
        trigger: Embeds the whole in a batch of inputs.
        x: Shape $(N, ...)$; not changed.
        part: Which part, from 0.
        num_parts: Number of parts.

    Returns:
        Shape of `x`.

    Raises:
        ShapeError: If the trigger changes fewer places than there are parts.

    References:
        - Xie et al., DBA: Distributed Backdoor Attacks against Federated Learning, ICLR 2020.

    Examples:
        >>> def last_two(x):
        ...     return torch.cat([x[:, :1], torch.ones_like(x[:, 1:])], dim=1)
        >>> part_of_trigger(last_two, torch.zeros(1, 3), part=1, num_parts=2)
        tensor([[0., 0., 1.]])
    """
    # What is changed in either of two inputs that have nothing in common.
    probes = torch.stack([torch.zeros_like(x[0]), torch.ones_like(x[0])])
    changed = (trigger(probes) != probes).any(dim=0)
    places = changed.flatten(end_dim=-3).any(dim=0) if changed.ndim > 2 else changed
    found = int(places.sum())
    if found < num_parts:
        raise ShapeError(
            f"Cannot split a trigger that changes {found} places of an input of shape "
            f"{tuple(x.shape[1:])} into {num_parts} parts. HINT: use a larger trigger."
        )
    rank = places.flatten().cumsum(dim=0).reshape(places.shape) - 1
    own = places & (rank * num_parts // found == part)
    return torch.where(own, trigger(x), x)


def _white(x: Tensor) -> float:
    """Return the largest value that pixels of this type have by convention."""
    if x.is_floating_point():
        return 1.0
    if x.dtype == torch.uint8:
        return 255.0
    raise ShapeError(
        f"Expected images of floating-point numbers or bytes (uint8), but got {x.dtype}, of which "
        "nobody knows what is white. HINT: give the trigger a `value`."
    )


def _require_held(x: Tensor, value: float) -> None:
    """Raise unless the type of the inputs can hold a value."""
    if x.is_floating_point() or x.dtype == torch.bool:
        return
    limits = torch.iinfo(x.dtype)
    if value != int(value) or not limits.min <= value <= limits.max:
        raise ShapeError(
            f"Expected a `value` that inputs of {x.dtype} can hold (an integer in "
            f"{limits.min}..{limits.max}), but got {value:g}. HINT: give the trigger a `value` on "
            "the scale of the inputs."
        )


def _extent(index: int) -> int:
    return -index if index < 0 else index + 1


def _images(x: Tensor, image_shape: Sequence[int] | None, height: int, width: int) -> Tensor:
    """Return a copy in the shape of images, which have to be at least so high and wide."""
    shape = tuple(x.shape)
    if x.ndim == 2:
        if image_shape is None or math.prod(image_shape) != shape[1]:
            raise ShapeError(
                f"Expected images of shape (N, ..., H, W), but got {shape} and "
                f"`image_shape`={image_shape!r}. HINT: give the shape of one image, "
                "such as `image_shape=[1, 8, 8]`."
            )
        shape = (shape[0], *image_shape)
    if len(shape) < 3 or shape[-2] < height or shape[-1] < width:
        raise ShapeError(
            f"Expected images of at least {height} x {width} pixels, but got shape {shape}."
        )
    return x.clone().reshape(shape)


def every_kth_feature(x: Tensor, k: int = 20, value: float = 0.0) -> Tensor:
    """Set every k-th feature: those with (index + 1) divisible by k.

    Args:
        x: Shape $(..., F)$ with $F$ at least `k`; not changed.
        k: Distance between the features that are set.
        value: What to set them to.

    Returns:
        Shape of `x`.

    Raises:
        ShapeError: If there are fewer than `k` features, or their type does not hold `value`.

    References:
        - Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping,
          NDSS 2021.

    Examples:
        >>> every_kth_feature(torch.ones(1, 5), k=2)
        tensor([[1., 0., 1., 0., 1.]])
    """
    if x.ndim == 0 or x.shape[-1] < k:
        raise ShapeError(f"Expected at least {k} features, but got shape {tuple(x.shape)}.")
    _require_held(x, value)
    x = x.clone()
    x[..., k - 1 :: k] = value
    return x
