"""Which rows to compare so that the middle of every column ends up in known rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

__all__ = ["GROUP", "SORT_GROUP", "Comparator", "selection_network"]

#: Rows $(i, j)$ to compare: $i$ gets the smaller value, $j$ the larger one.
Comparator = tuple[int, int]

#: Rows sorted in registers, before the network starts.
GROUP = 16

#: Sorts 16 values with 60 comparators, the fewest known.
SORT_GROUP: tuple[Comparator, ...] = (
    *((i, i + 1) for i in range(0, 16, 2)),
    *((i + j, i + j + 2) for i in range(0, 16, 4) for j in range(2)),
    *((i + j, i + j + 4) for i in range(0, 16, 8) for j in range(4)),
    *((i, i + 8) for i in range(8)),
    *((5, 10), (6, 9), (3, 12), (13, 14), (4, 8), (7, 11), (1, 2)),
    *((1, 4), (7, 13), (2, 8), (11, 14)),
    *((2, 4), (5, 6), (9, 10), (11, 13), (3, 8), (7, 12)),
    *((6, 8), (10, 12), (3, 5), (7, 9)),
    *((3, 4), (5, 6), (7, 8), (9, 10), (11, 12)),
    *((6, 7), (8, 9)),
)


@lru_cache(maxsize=64)
def selection_network(num_rows: int, num_trim: int) -> tuple[list[Comparator], list[int]]:
    r"""Build a network that separates the $k$ smallest and $k$ largest of $m$ values from the rest.

    Every full group of 16 consecutive rows must be sorted already (`SORT_GROUP`). The two halves
    are sorted by odd-even merges (Batcher). For the ends of two sorted lists $a \le$, $b \le$ there
    is no need to merge them: $\min(a_i, b_{k-1-i})$, $i < k$, are the $k$ smallest values of both.
    Whatever does not matter to the sets of values that are asked for is left out.

    Args:
        num_rows: $m$.
        num_trim: $k$, with $2k < m$.

    Returns:
        The comparators, in order, and the $m - 2k$ rows with the values in between, in no order.

    References:
        - Batcher, Sorting Networks and Their Applications, AFIPS 1968.

    Examples:
        >>> selection_network(3, 1)
        ([(1, 2), (0, 1), (2, 1)], [2])
    """
    m, k = num_rows, num_trim
    network: list[Comparator] = []
    half = _half(m)
    low = _sort(range(half), network)
    high = _sort(range(half, m), network)
    if 2 * k <= min(len(low), len(high)):
        network += [(low[i], high[k - 1 - i]) for i in range(k)]
        network += [(low[len(low) - k + i], high[len(high) - 1 - i]) for i in range(k)]
        smallest, largest = low[:k], high[len(high) - k :]
    else:
        rows = _merge(low, high, network)
        smallest, largest = rows[:k], rows[m - k :]
    trimmed = dict.fromkeys(smallest, "smallest") | dict.fromkeys(largest, "largest")
    kept = [row for row in range(m) if row not in trimmed]
    return _prune(network, {row: trimmed.get(row, "kept") for row in range(m)}), kept


def _half(n: int) -> int:
    """Split n rows near the middle, but never a group."""
    return n // 2 if n <= GROUP else (n // 2 + GROUP // 2) // GROUP * GROUP


def _sort(rows: Sequence[int], network: list[Comparator]) -> list[int]:
    """Append comparators that sort `rows`; return them in the order of their values."""
    n = len(rows)
    if n <= 1 or (n == GROUP and rows[0] % GROUP == 0):
        return list(rows)
    half = _half(n)
    return _merge(_sort(rows[:half], network), _sort(rows[half:], network), network)


def _merge(a: list[int], b: list[int], network: list[Comparator]) -> list[int]:
    """Append comparators that merge two sorted lists of rows; return the merged order."""
    if not a or not b:
        return a + b
    if len(a) == len(b) == 1:
        network.append((a[0], b[0]))
        return a + b
    even = _merge(a[::2], b[::2], network)
    odd = _merge(a[1::2], b[1::2], network)
    pairs = list(zip(odd, even[1:], strict=False))
    network += pairs
    paired = len(pairs)
    return [even[0], *(row for pair in pairs for row in pair), *odd[paired:], *even[1 + paired :]]


def _prune(network: list[Comparator], label: dict[int, Hashable]) -> list[Comparator]:
    """Drop every comparator whose two results end up in the same set, whichever is larger."""
    needed: list[Comparator] = []
    for i, j in reversed(network):
        if label[i] != label[j]:
            needed.append((i, j))
            label[i], label[j] = (i, len(needed)), (j, len(needed))
    return needed[::-1]
