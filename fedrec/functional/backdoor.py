"""Backdoor triggers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from fedrec.exceptions import ShapeError

__all__ = ["every_kth_feature", "pixel_pattern"]

# Rows and columns counted from the bottom right corner: (26, 26), (24, 26), (26, 24) and (25, 25)
# of a 28 x 28 image.
_PIXELS = ((-2, -2), (-4, -2), (-2, -4), (-3, -3))


def pixel_pattern(
    x: Tensor, value: float = 1.0, image_shape: Sequence[int] | None = None
) -> Tensor:
    """Set the four pixels of the BadNets pattern near the bottom right corner, in all channels.

    Args:
        x: Images, shape $(..., H, W)$ with at least three dimensions, or flat ones of shape
            $(N, F)$ with `image_shape`; not changed.
        value: What to set them to; 1 is white where pixels are in [0, 1].
        image_shape: Shape of one flat image, ending in $H, W$.

    Returns:
        Shape of `x`.

    Raises:
        ShapeError: If the images are flat and `image_shape` is missing or does not fit, or if they
            are smaller than 4 x 4.

    References:
        - Gu et al., BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply
          Chain, 2017.

    Examples:
        >>> import torch
        >>> pixel_pattern(torch.zeros(1, 1, 5, 5))[0, 0]
        tensor([[0., 0., 0., 0., 0.],
                [0., 0., 0., 1., 0.],
                [0., 0., 1., 0., 0.],
                [0., 1., 0., 1., 0.],
                [0., 0., 0., 0., 0.]])
    """
    shape = tuple(x.shape)
    if x.ndim == 2:
        if image_shape is None or math.prod(image_shape) != shape[1]:
            raise ShapeError(
                f"Expected images of shape (N, ..., H, W), but got {shape} and "
                f"`image_shape`={image_shape!r}. HINT: give the shape of one image, "
                "such as `image_shape=[1, 8, 8]`."
            )
        shape = (shape[0], *image_shape)
    if len(shape) < 3 or min(shape[-2:]) < 4:
        raise ShapeError(f"Expected images of at least 4 x 4 pixels, but got shape {shape}.")
    images = x.clone().reshape(shape)
    for row, column in _PIXELS:
        images[..., row, column] = value
    return images.reshape(x.shape)


def every_kth_feature(x: Tensor, k: int = 20, value: float = 0.0) -> Tensor:
    """Set every k-th feature: those with (index + 1) divisible by k.

    Args:
        x: Shape $(..., F)$ with $F$ at least `k`; not changed.
        k: Distance between the features that are set.
        value: What to set them to.

    Returns:
        Shape of `x`.

    Raises:
        ShapeError: If there are fewer than `k` features.

    References:
        - Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping,
          NDSS 2021.

    Examples:
        >>> import torch
        >>> every_kth_feature(torch.ones(1, 5), k=2)
        tensor([[1., 0., 1., 0., 1.]])
    """
    if x.ndim == 0 or x.shape[-1] < k:
        raise ShapeError(f"Expected at least {k} features, but got shape {tuple(x.shape)}.")
    x = x.clone()
    x[..., k - 1 :: k] = value
    return x
