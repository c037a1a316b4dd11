"""The compiled combination against float64 NumPy, whatever the numbers of vectors and threads."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from fedrec.functional._numba_estimates import combine

SIZES = [(1, 1, 1, 5), (4, 3, 2, 3000), (5, 2, 3, 1024), (3, 4, 5, 1025), (9, 7, 1, 2050)]


def problem(c: int, b: int, s: int, d: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(c * d)
    clients = generator.permutation(c + 2)[:c].astype(np.int64)
    slots = generator.integers(b, size=(c, s))
    shapes = ((c, d), (d,), (c,), (b, d), (c, s), (c + 2, s, d), (c, s))
    updates, v, sigma, pool, of_pool, delta_g, own = (
        generator.normal(size=shape).astype(np.float32) for shape in shapes
    )
    return updates, v, sigma, pool, slots, of_pool, delta_g, clients, own


@pytest.mark.parametrize(("c", "b", "s", "d"), SIZES)
def test_against_float64(c: int, b: int, s: int, d: int) -> None:
    arguments = problem(c, b, s, d)
    out = np.full((c, d), np.nan, np.float32)
    largest = combine(*arguments, out, 1)
    updates, v, sigma, pool, slots, of_pool, delta_g, clients, own = arguments
    exact = updates + np.outer(sigma.astype(float), v)
    exact += np.einsum("ks,ksd->kd", of_pool.astype(float), pool[slots])
    exact += np.einsum("ks,ksd->kd", own.astype(float), delta_g[clients])
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    assert np.array_equal(largest, np.abs(out).max(axis=1))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_bits_do_not_depend_on_threads(num_threads: int) -> None:
    arguments = problem(9, 4, 2, 5000)
    one, other = np.empty((9, 5000), np.float32), np.empty((9, 5000), np.float32)
    largest = combine(*arguments, one, 1)
    assert np.array_equal(combine(*arguments, other, num_threads), largest)
    assert np.array_equal(one, other)


def test_what_is_not_finite_is_seen() -> None:
    updates, *rest = problem(4, 3, 2, 3000)
    updates[1, 7], updates[2, 2999] = np.nan, -np.inf
    largest = combine(updates, *rest, np.empty((4, 3000), np.float32), 1)
    assert np.isfinite(largest).tolist() == [True, False, False, True]
    assert np.isnan(largest[1])
    assert largest[2] == np.inf
