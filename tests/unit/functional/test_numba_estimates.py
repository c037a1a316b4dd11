"""The compiled passes against float64 NumPy, whatever the numbers of vectors and threads."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from fedrec.functional.kernels._numba_estimates import Following, combine, reduce, vectors_of
from fedrec.functional.kernels._numba_pairs import dots, push

SIZES = [(1, 1, 1, 5), (4, 3, 2, 9000), (5, 2, 3, 4096), (3, 4, 5, 4097), (9, 7, 1, 8194)]
CASES = [(*size, anchored) for size in SIZES for anchored in (False, True)]
WITHOUT_PAIRS = (4, 3, 0, 9000)


def problem(c: int, b: int, s: int, d: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(c * d)
    clients = generator.permutation(c + 2)[:c].astype(np.int64)
    slots = generator.integers(max(b, 1), size=(c, s))
    which = generator.integers(3, size=c)
    shapes = ((c, d), (3, d), (c,), (b, d), (c, s), (c + 2, s, d), (c, s))
    updates, vectors, sigma, pool, of_pool, delta_g, own = (
        generator.normal(size=shape).astype(np.float32) for shape in shapes
    )
    return updates, vectors, which, sigma, pool, slots, of_pool, delta_g, clients, own


@pytest.mark.parametrize(("c", "b", "s", "d", "anchored"), [*CASES, (*WITHOUT_PAIRS, True)])
def test_against_float64(c: int, b: int, s: int, d: int, anchored: bool) -> None:
    arguments = problem(c, b, s, d)
    out = np.full((c, d), np.nan, np.float32)
    updates, vectors, which, sigma, pool, slots, of_pool, delta_g, clients, own = arguments
    anchors, exact = None, updates.astype(float)
    if anchored:
        a = np.random.default_rng(d).normal(size=(c + 2, d)).astype(np.float32)
        anchors, exact = (a, 0.25), a[clients] + 0.25 * exact
    largest = combine(*arguments, out, 1, anchors)
    if s:
        exact += sigma.astype(float)[:, None] * vectors[which]
    exact += np.einsum("ks,ksd->kd", of_pool.astype(float), pool[slots])
    exact += np.einsum("ks,ksd->kd", own.astype(float), delta_g[clients])
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    assert np.array_equal(largest, np.abs(out).max(axis=1))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("trim", [None, 0, 1])
@pytest.mark.parametrize(("c", "b", "s", "d"), [(4, 3, 2, 9000), (5, 2, 3, 4096), (3, 4, 5, 1025)])
def test_rows_that_are_aggregated_and_what_the_next_round_needs(
    c: int, b: int, s: int, d: int, trim: int | None, num_threads: int
) -> None:
    arguments = problem(c, b, s, d)
    delta_g, clients, which = arguments[7], arguments[8], arguments[2]
    out = np.empty((c, d), np.float32)
    largest = combine(*arguments, out, 1)
    generator = np.random.default_rng(d)
    weights, recorded, step = generator.normal(size=(3, d)).astype(np.float32)
    now, then = generator.normal(size=(2, 3, d)).astype(np.float32)
    factors = generator.random(c).astype(np.float32) if trim is None else np.empty(0, np.float32)
    following = Following(weights, 0.1, recorded, step, now, then, 0.3, 0.7)
    found = reduce(*arguments, factors, trim or 0, following, num_threads)
    assert np.array_equal(found.largest, largest)
    if trim is None:
        exact = factors.astype(float) @ out
    else:
        exact = np.sort(out.astype(float), axis=0)[trim : c - trim].mean(axis=0)
    np.testing.assert_allclose(found.aggregate, exact, rtol=0, atol=1e-6 * np.abs(out).max() * c)
    # From here on bit by bit: float32 of NumPy rounds every operation, and `dots` is the other way.
    new = weights - np.float32(0.1) * found.aggregate
    recorded -= np.float32(0.1) * step
    vectors = np.float32(0.7) * ((new - now) - np.float32(0.3) * (recorded - then))
    assert np.array_equal(found.vectors, vectors)
    assert np.array_equal(vectors_of(new, recorded, now, then, 0.3, 0.7), vectors)
    rows = (clients[:, None] * s + np.arange(s)).ravel()
    products = dots(delta_g.reshape(-1, d), rows, vectors, which.repeat(s)[:, None], 1)
    assert np.array_equal(found.products, products.reshape(c, s))
    every, pool = np.arange(3), arguments[4]
    of_pool = dots(vectors, every, pool, np.tile(np.arange(b), (3, 1)), 1)
    asked = np.zeros_like(of_pool)
    asked[which[:, None], arguments[5]] = 1
    assert np.array_equal(found.of_pool, asked * of_pool)


@pytest.mark.parametrize("trim", [None, 1])
def test_rows_without_pairs_are_aggregated_and_nothing_is_looked_ahead(trim: int | None) -> None:
    arguments, (c, _, _, d) = problem(*WITHOUT_PAIRS), WITHOUT_PAIRS
    updates, clients, out = arguments[0], arguments[8], np.empty((c, d), np.float32)
    a = np.random.default_rng(d).normal(size=(c + 2, d)).astype(np.float32)
    largest = combine(*arguments, out, 1, (a, 0.25))
    factors = np.full(c if trim is None else 0, 1 / c, np.float32)
    nothing = np.empty((0, d), np.float32)
    following = Following(a[0], 0.1, a[1], a[2], nothing, nothing, 0.3, 0.0)
    found = reduce(updates, nothing, *arguments[2:], factors, trim or 0, following, 3, (a, 0.25))
    assert np.array_equal(found.largest, largest)
    rows = np.sort(a[clients] + 0.25 * updates.astype(float), axis=0)
    exact = (rows if trim is None else rows[trim : c - trim]).mean(axis=0)
    np.testing.assert_allclose(found.aggregate, exact, rtol=0, atol=1e-6 * np.abs(rows).max() * c)
    assert found.vectors.size == found.products.size == found.of_pool.size == 0


@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 3), (7, 5, 4096), (9, 9, 9000), (3, 8, 4097)])
def test_dots_against_float64(n: int, k: int, d: int) -> None:
    generator = np.random.default_rng(n)
    matrix, vectors = (generator.normal(size=(size, d)).astype(np.float32) for size in (n, 3))
    rows, which = generator.integers(n, size=k), generator.integers(3, size=(k, 2))
    exact = np.einsum("kd,kqd->kq", matrix[rows].astype(float), vectors[which])
    found = dots(matrix, rows, vectors, which, 1)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * d**0.5)


def test_dots_of_nothing() -> None:
    matrix, vectors = np.zeros((0, 4), np.float32), np.ones((1, 4), np.float32)
    found = dots(matrix, np.zeros(0, np.int64), vectors, np.zeros((0, 1), np.int64), 2)
    assert found.shape == (0, 1)


@pytest.mark.parametrize(("negative", "least"), [(False, 0.5), (True, 1.5)])
def test_push(negative: bool, least: float) -> None:
    """Client 2 gets a pair in column 1, client 0 none, client 1 the second in column 0."""
    delta_g = np.arange(30, dtype=np.float32).reshape(3, 2, 5)
    before = delta_g.copy()
    delta_w = np.array([1, 0, 2, 0, 0], np.float32)
    pool = np.array([[0, 1, 0, 0, 0], [1, 1, 1, 1, 1]], np.float32)
    historical = np.ones((3, 5), np.float32)
    difference = np.array([[3, 2, 1, 0, 5], [-1, 9, 0, 9, 9], [1, 1, 1, 0, 0]], np.float32)
    slots = np.array([[-1, 1], [0, 1], [0, 1]])
    found = push(
        historical + difference, historical, delta_w, pool, slots, least, negative, delta_g,
        np.array([2, 0, 1]), np.array([1, 0, 0]), 1,
    )  # fmt: skip
    own, models, kept = found
    assert kept.tolist() == [True, False, True]
    assert np.array_equal(delta_g[2], [before[2, 0], difference[0]])
    assert np.array_equal(delta_g[0], before[0])
    assert np.array_equal(delta_g[1], [difference[2], before[1, 1]])
    # 3 + 2, with no model in the other slot; 1 + 2, and 1 + 1 + 1 with the model of ones.
    assert own[[0, 2]].tolist() == [[0, 5], [3, 3]]
    assert models[[0, 2]].tolist() == [[20 + 2 * 22, 5], [3, 15 + 2 * 17]]


def test_a_difference_that_is_not_finite_gives_no_pair() -> None:
    delta_g = np.zeros((2, 1, 3), np.float32)
    exact = np.array([[1, np.nan, 1], [np.inf, 1, 1]], np.float32)
    arguments = (exact, np.zeros_like(exact), np.ones(3, np.float32), np.zeros((0, 3), np.float32))
    slots, clients, columns = np.full((2, 1), -1), np.arange(2), np.zeros(2, np.int64)
    kept = push(*arguments, slots, 0.0, True, delta_g, clients, columns, 1)[2]
    assert not kept.any()
    assert not delta_g.any()


@pytest.mark.parametrize("num_threads", [2, 3])
def test_bits_do_not_depend_on_threads(num_threads: int) -> None:
    c, d = 9, 9000
    arguments = problem(c, 4, 2, d)
    one, other = np.empty((c, d), np.float32), np.empty((c, d), np.float32)
    largest = combine(*arguments, one, 1)
    assert np.array_equal(combine(*arguments, other, num_threads), largest)
    assert np.array_equal(one, other)
    vectors, which, rows = arguments[1], arguments[2][:, None], np.arange(c)
    alone, together = (dots(one, rows, vectors, which, n) for n in (1, num_threads))
    assert np.array_equal(alone, together)


def test_what_is_not_finite_is_seen() -> None:
    updates, *rest = problem(4, 3, 2, 9000)
    updates[1, 7], updates[2, 8999] = np.nan, -np.inf
    largest = combine(updates, *rest, np.empty((4, 9000), np.float32), 1)
    assert np.isfinite(largest).tolist() == [True, False, False, True]
    assert np.isnan(largest[1])
    assert largest[2] == np.inf
