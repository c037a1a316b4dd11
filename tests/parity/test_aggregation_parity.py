"""Aggregation rules against float64 NumPy written from the papers, and against known mistakes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrec.aggregators import FedAvg, Median, TrimmedMean
from fedrec.exceptions import AggregationError, ConfigurationError
from fedrec.functional import coordinate_median, trimmed_mean, weighted_mean

# d = 1500 is several of the blocks in which 100 rows are sorted, and a part of one.
SIZES = [(1, 1), (2, 5), (3, 1), (9, 4), (10, 33), (80, 1500), (100, 1500), (101, 700)]


def updates_of(m: int, d: int, seed: int = 0) -> np.ndarray:
    """Heavy tails, and exact ties in a third of the columns, as zero gradients are."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, size=(m, d)).astype(np.float32)
    x[rng.random((m, d)) < 0.3] = 0.0
    return x


def median_by_definition(x: np.ndarray) -> np.ndarray:
    out = []
    for column in x.astype(np.float64).T:
        ordered = sorted(column)
        m = len(ordered)
        out.append((ordered[(m - 1) // 2] + ordered[m // 2]) / 2)
    return np.array(out)


def trimmed_mean_by_definition(x: np.ndarray, k: int) -> np.ndarray:
    out = []
    for column in x.astype(np.float64).T:
        kept = sorted(column)[k : len(column) - k]
        out.append(sum(kept) / len(kept))
    return np.array(out)


@pytest.mark.parametrize(("m", "d"), SIZES)
def test_median_is_the_middle_or_the_mean_of_the_two_middle_values(m: int, d: int) -> None:
    x = updates_of(m, d)
    np.testing.assert_allclose(
        coordinate_median(torch.from_numpy(x)).numpy(), median_by_definition(x), rtol=1e-6
    )


@pytest.mark.parametrize(("m", "d"), SIZES)
def test_trimmed_mean_drops_k_at_each_end_of_every_coordinate(m: int, d: int) -> None:
    x = updates_of(m, d)
    for k in {0, (m - 1) // 5, (m - 1) // 2}:
        np.testing.assert_allclose(
            trimmed_mean(torch.from_numpy(x), k).numpy(),
            trimmed_mean_by_definition(x, k),
            rtol=1e-6,
            atol=1e-7,
        )


@pytest.mark.parametrize(("m", "d"), SIZES)
def test_fedavg_weighs_by_size(m: int, d: int) -> None:
    x = updates_of(m, d)
    sizes = np.random.default_rng(1).integers(1, 900, size=m)
    expected = sum(n * row.astype(np.float64) for n, row in zip(sizes, x, strict=True))
    np.testing.assert_allclose(
        weighted_mean(torch.from_numpy(x), torch.from_numpy(sizes)).numpy(),
        expected / sizes.sum(),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_agree(dtype: torch.dtype) -> None:
    x = torch.from_numpy(updates_of(10, 40)).clamp(-50, 50).to(dtype)
    wide = x.double().numpy()
    tolerance = {torch.float64: 1e-14, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for got, expected in (
        (coordinate_median(x), median_by_definition(wide)),
        (trimmed_mean(x, 2), trimmed_mean_by_definition(wide, 2)),
    ):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("m", [2, 8, 80])
def test_median_of_an_even_number_is_neither_the_lower_nor_the_upper_value(m: int) -> None:
    # torch.median gives the lower one, a slice at m // 2 the upper one; both are biased.
    x = torch.arange(m, dtype=torch.float32)[:, None]
    assert coordinate_median(x).item() == (m - 1) / 2
    assert coordinate_median(-x).item() == -(m - 1) / 2


def test_nothing_trimmed_is_the_mean_not_zero() -> None:
    # A slice [k:-k] is empty, or everything, for k = 0; floor(0.1 * 9) is 0.
    x = torch.arange(1.0, 10.0)[:, None]
    assert TrimmedMean(trim=0.1).num_trim(9) == 0
    assert TrimmedMean(trim=0.1)(x).item() == 5.0


@pytest.mark.parametrize("m", [4, 10])
def test_half_is_refused_instead_of_a_mean_of_nothing(m: int) -> None:
    # With m even, trimming a half at each end leaves an empty slice, whose mean is NaN.
    with pytest.raises(ConfigurationError, match="trim"):
        TrimmedMean(trim=0.5)
    with pytest.raises(AggregationError, match=f"Cannot trim 2\\*{m // 2}={m} of m={m} updates"):
        TrimmedMean(trim=m // 2)(torch.ones(m, 3))


def test_values_are_trimmed_not_clients() -> None:
    # Sorting clients by their number of samples is not a trimmed mean: each coordinate has its
    # own extremes, and sizes play no part.
    x = torch.tensor([[9.0, 1.0, 2.0], [1.0, 9.0, 3.0], [2.0, 2.0, 9.0], [3.0, 3.0, 1.0]])
    expected = torch.tensor([2.5, 2.5, 2.5])
    for sizes in ([1, 2, 3, 4], [4, 3, 2, 1]):
        assert torch.equal(TrimmedMean(trim=1)(x, torch.tensor(sizes)), expected)
        assert torch.equal(Median()(x, torch.tensor(sizes)), expected)


def test_weights_that_are_all_zero_are_refused_by_every_rule() -> None:
    for rule in (FedAvg(), FedAvg(weighted=False), Median(), TrimmedMean(trim=1)):
        with pytest.raises(AggregationError, match="positive finite sum"):
            rule(torch.ones(3, 2), torch.zeros(3))


def test_fraction_is_the_decimal_number_as_written() -> None:
    # The float product 0.29 * 100 is 28.999999999999996.
    for hundredths in range(50):
        assert TrimmedMean(trim=hundredths / 100).num_trim(100) == hundredths
    assert TrimmedMean(trim=0.2).num_trim(80) == 16
    assert TrimmedMean(trim=0.2).num_trim(99) == 19
