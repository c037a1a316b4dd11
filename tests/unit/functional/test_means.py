from __future__ import annotations

import torch

from fedrec.functional import weighted_mean

UPDATES = torch.tensor([[1.0, -1.0], [4.0, 2.0], [10.0, 0.0]])


def test_weights_of_any_scale_and_dtype() -> None:
    expected = torch.tensor([(1 + 2 * 4 + 10) / 4, (-1 + 2 * 2 + 0) / 4])
    for weights in (
        torch.tensor([1, 2, 1]),
        torch.tensor([1e30, 2e30, 1e30]),
        torch.tensor([0.001, 0.002, 0.001], dtype=torch.float64),
        torch.tensor([2**40, 2**41, 2**40]),
    ):
        torch.testing.assert_close(weighted_mean(UPDATES, weights), expected)


def test_no_weights_and_a_zero_weight() -> None:
    torch.testing.assert_close(weighted_mean(UPDATES), torch.tensor([5.0, 1 / 3]))
    torch.testing.assert_close(
        weighted_mean(UPDATES, torch.tensor([1.0, 1.0, 0.0])), torch.tensor([2.5, 0.5])
    )


def test_dtype_is_kept() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert weighted_mean(UPDATES.to(dtype), torch.tensor([1, 1, 2])).dtype == dtype
