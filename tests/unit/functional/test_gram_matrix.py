from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrec.functional import gram_matrix
from fedrec.functional.distances import squared_norms


@pytest.mark.parametrize(("m", "d"), [(1, 1), (3, 5), (6, 9000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_against_the_definition(m: int, d: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, d, generator=torch.Generator().manual_seed(d)).to(dtype)
    center = torch.linspace(-1, 2, d).to(dtype)
    rows = x.double().numpy()
    for given, y in ((None, rows), (center, rows - center.double().numpy())):
        got = gram_matrix(x, given)
        assert torch.equal(got, got.T)
        np.testing.assert_allclose(got.numpy(), y @ y.T, rtol=1e-12, atol=1e-9)
        np.testing.assert_allclose(squared_norms(x, given).numpy(), (y**2).sum(axis=1), rtol=1e-12)


def test_around_a_center_nothing_is_cancelled() -> None:
    x = torch.tensor([[1e8], [1e8 + 8], [1e8 - 16]])
    assert gram_matrix(x, x[0]).tolist() == [[0, 0, 0], [0, 64, -128], [0, -128, 256]]


def test_largest_float32_values_do_not_overflow() -> None:
    x = torch.full((2, 5000), 3e38)
    assert torch.isfinite(gram_matrix(x)).all()
    assert torch.isfinite(squared_norms(x)).all()
