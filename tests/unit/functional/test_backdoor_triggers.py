from __future__ import annotations

import pytest
import torch

from fedrec.exceptions import ShapeError
from fedrec.functional import every_kth_feature, pixel_pattern


def test_pattern_is_in_every_channel_and_nothing_else_changes() -> None:
    x = torch.rand(2, 3, 6, 7)
    y = pixel_pattern(x, value=0.5)
    changed = torch.zeros(6, 7, dtype=torch.bool)
    for row, column in ((4, 5), (2, 5), (4, 3), (3, 4)):
        changed[row, column] = True
    assert (y[:, :, changed] == 0.5).all()
    assert torch.equal(y[:, :, ~changed], x[:, :, ~changed])


def test_flat_images_are_the_same_images() -> None:
    x = torch.rand(5, 2, 8, 9)
    flat = pixel_pattern(x.flatten(start_dim=1), image_shape=(2, 8, 9))
    assert flat.shape == (5, 144)
    assert torch.equal(flat.reshape(x.shape), pixel_pattern(x))


def test_images_without_channels() -> None:
    assert pixel_pattern(torch.zeros(3, 4, 4)).sum() == 12


@pytest.mark.parametrize("image_shape", [None, (1, 8, 9)])
def test_flat_images_need_their_shape(image_shape: tuple[int, ...] | None) -> None:
    with pytest.raises(ShapeError, match="image_shape"):
        pixel_pattern(torch.zeros(2, 64), image_shape=image_shape)


@pytest.mark.parametrize("shape", [(2, 1, 3, 8), (2, 1, 8, 3), (9,)])
def test_images_have_room_for_the_pattern(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="4 x 4"):
        pixel_pattern(torch.zeros(shape))


def test_fewer_features_than_the_distance() -> None:
    with pytest.raises(ShapeError, match="at least 20 features"):
        every_kth_feature(torch.zeros(3, 19))


def test_features_other_distance_and_value() -> None:
    assert every_kth_feature(torch.zeros(1, 7), k=3, value=2.0).tolist() == [[0, 0, 2, 0, 0, 2, 0]]
