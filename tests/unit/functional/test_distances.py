from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrec.functional import pairwise_squared_distances


def by_definition(x: torch.Tensor) -> np.ndarray:
    rows = x.double().numpy()
    return np.array([[((a - b) ** 2).sum() for b in rows] for a in rows])


@pytest.mark.parametrize(("m", "d"), [(1, 1), (2, 3), (7, 4096), (10, 9000), (30, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_against_the_definition(m: int, d: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, d, generator=torch.Generator().manual_seed(m)).to(dtype)
    got = pairwise_squared_distances(x)
    assert got.shape == (m, m)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), by_definition(x), rtol=1e-12, atol=1e-9)


def test_small_differences_of_large_updates_are_not_cancelled() -> None:
    # Squared norms of 1e12 and distances of 2: in float32 products nothing would be left of these.
    generator = torch.Generator().manual_seed(0)
    x = 1e4 + 1e-2 * torch.randn(6, 10_000, generator=generator)
    expected = by_definition(x)
    bound = 1e-14 * 2 * float(x.double().square().sum(dim=1).max())
    assert bound < 0.025  # of distances of 2
    assert np.abs(pairwise_squared_distances(x).numpy() - expected).max() <= bound


def test_a_huge_update_leaves_the_distances_of_the_others_alone() -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    alone = pairwise_squared_distances(x)
    got = pairwise_squared_distances(torch.cat([x, torch.full((1, 300), 3e38)]))
    torch.testing.assert_close(got[:5, :5], alone, rtol=1e-13, atol=0)
    assert torch.isfinite(got).all()


def test_symmetric_with_an_exact_zero_diagonal_and_never_negative() -> None:
    x = torch.randn(9, 700, generator=torch.Generator().manual_seed(0))
    x[4] = x[2]
    x[5] = x[2] * (1 + 1e-7)
    got = pairwise_squared_distances(x)
    assert torch.equal(got, got.T)
    assert torch.equal(got.diagonal(), torch.zeros(9, dtype=torch.float64))
    assert (got >= 0).all()
    assert got[2, 4] < 1e-12
