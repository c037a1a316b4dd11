"""Following the pages of an LMDB file before LMDB does, which trusts them.

One flipped bit in a page can make LMDB hand out a value that ends beyond the file, and reading
that kills the process; or let it write over what is in use. The pages of keys are few, so all of
them are read here, and only they: values have checksums of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

__all__ = ["require_sound_pages"]

# The file format of LMDB 0.9, on a little-endian machine with 64 bits.
_META = np.dtype(
    {
        "names": ["free", "main", "last_page", "txn_id"],
        "formats": ["V48", "V48", "<u8", "<u8"],
        "offsets": [40, 88, 136, 144],
        "itemsize": 152,
    }
)
_PAGE_HEADER_BYTES = 16
_NODE_BYTES, _NO_PAGE = 8, 2**64 - 1
_BRANCH, _LEAF = 1, 2  # kinds of pages
_BIG, _TREE = 1, 2  # kinds of nodes: the value has pages of its own, or is another tree
_ATTEMPTS = 100
_DEEPEST = 32  # what LMDB allows
_META_PAGES, _DATABASE_BYTES = 2, 48


class _Leaf(NamedTuple):
    """A page of keys, and where their values are, one entry for each."""

    page: NDArray[np.uint8]
    starts: NDArray[np.int64]  # bytes in the page; where a value has pages of its own, their number
    sizes: NDArray[np.int64]
    kinds: NDArray[np.int64]
    last_key: bytes  # the first 8 bytes of it


def require_sound_pages(env: lmdb.Environment, path: Path, page_bytes: int) -> None:
    """Check that everything LMDB follows in a file lies inside it, and nothing in use is free.

    Args:
        env: The open environment.
        path: Its file.
        page_bytes: Size of its pages.

    Raises:
        lmdb.CorruptedError: If it does not.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        for _ in range(_ATTEMPTS):
            metas = [
                np.frombuffer(os.pread(file, _META.itemsize, k * page_bytes), _META)[0]
                for k in range(2)
            ]
            numbers = [int(meta["txn_id"]) for meta in metas]
            with env.begin() as txn:  # what it sees is not overwritten meanwhile
                # LMDB goes by the larger number: a wrong one could hide the last transaction.
                if txn.id() in numbers and abs(numbers[0] - numbers[1]) == 1:
                    meta = metas[numbers.index(txn.id())]
                    _Walk(file, page_bytes, int(meta["last_page"])).check(meta)
                    return
        raise _broken("its two meta pages are not those of the last two transactions")
    finally:
        os.close(file)


class _Walk:
    """One walk through the pages that a meta page leads to."""

    def __init__(self, file: int, page_bytes: int, last_page: int) -> None:
        self._file = file
        self._page_bytes = page_bytes
        self._num_pages = last_page + 1
        self._seen: set[int] = set()
        # First page in use, and the page behind the last.
        self._runs = [np.array([[0, _META_PAGES]])]

    def check(self, meta: np.void) -> None:
        """Raise `lmdb.CorruptedError` if something that is led to cannot be."""
        free = [np.empty(0, np.int64)]
        freed_by = 1
        for leaf in self._leaves(meta["free"].tobytes()):
            free += self._free_pages(leaf)
            freed_by = int.from_bytes(leaf.last_key, "little")
        # All but the first transaction free pages: those of the root that they replace.
        if freed_by != int(meta["txn_id"]):
            raise _broken("what the last transaction freed is that of another")
        for leaf in self._leaves(meta["main"].tobytes()):
            self._require_kinds(leaf, 0, _BIG, _TREE)
            if (leaf.sizes[leaf.kinds == _TREE] != _DATABASE_BYTES).any():
                raise _broken("a named database is none")
            for start in leaf.starts[leaf.kinds == _TREE]:
                for values in self._leaves(leaf.page[start : start + _DATABASE_BYTES].tobytes()):
                    self._require_kinds(values, 0, _BIG)
        self._require_not_in_use(np.concatenate(free))

    def _leaves(self, database: bytes) -> list[_Leaf]:
        """Follow the tree of a database."""
        root = int.from_bytes(database[-8:], "little")
        leaves = []
        level = [] if root == _NO_PAGE else [root]
        for _ in range(_DEEPEST):
            below: list[int] = []
            for number in level:
                page, kind, nodes = self._page(number)
                words = page.view("<u2").astype(np.int64)
                at = nodes // 2
                if kind == _BRANCH:
                    below += (words[at] | words[at + 1] << 16 | words[at + 2] << 32).tolist()
                else:
                    sizes = words[at] | words[at + 1] << 16
                    data = nodes + _NODE_BYTES + words[at + 3]
                    last_key = page[nodes[-1] + _NODE_BYTES :][:8].tobytes()
                    leaves.append(self._leaf(page, data, sizes, words[at + 2], last_key))
            level = below
            if not level:
                return leaves
        raise _broken("a tree is too deep")

    def _page(self, number: int) -> tuple[NDArray[np.uint8], int, NDArray[np.int64]]:
        """Read a page of a tree; return it, its kind, and where its nodes are."""
        if not _META_PAGES <= number < self._num_pages or number in self._seen:
            raise _broken(f"page {number} cannot be where it is looked for")
        self._seen.add(number)
        self._runs.append(np.array([[number, number + 1]]))
        page = np.frombuffer(self._read(number, self._page_bytes), np.uint8)
        words = page.view("<u2")
        kind, lower, upper = (int(word) for word in words[5:8])
        if (
            int(page[:8].view("<u8")[0]) != number
            or kind not in (_BRANCH, _LEAF)
            or not _PAGE_HEADER_BYTES < lower <= upper <= self._page_bytes
            or lower % 2
        ):
            raise _broken(f"page {number} is not a page of keys")
        nodes = words[_PAGE_HEADER_BYTES // 2 : lower // 2].astype(np.int64)
        if (nodes % 2).any() or (nodes < upper).any():
            raise _broken(f"page {number} has keys outside of it")
        self._require_inside(nodes + _NODE_BYTES)
        self._require_inside(nodes + _NODE_BYTES + words[nodes // 2 + 3])
        return page, kind, nodes

    def _leaf(
        self,
        page: NDArray[np.uint8],
        data: NDArray[np.int64],
        sizes: NDArray[np.int64],
        kinds: NDArray[np.int64],
        last_key: bytes,
    ) -> _Leaf:
        """Check where the values of a leaf are."""
        big = kinds == _BIG
        self._require_inside(data + np.where(big, 8, sizes))
        words = page[data[big, None] + np.arange(8)].view("<u8")[:, 0]
        first = np.minimum(words, self._num_pages).astype(np.int64)
        behind = first - -(_PAGE_HEADER_BYTES + sizes[big]) // self._page_bytes
        if (first < _META_PAGES).any() or (behind > self._num_pages).any():
            raise _broken("a value is beyond the end")
        self._runs.append(np.stack([first, behind], axis=1))
        starts = data.copy()
        starts[big] = first
        return _Leaf(page, starts, sizes, kinds, last_key)

    def _free_pages(self, leaf: _Leaf) -> list[NDArray[np.int64]]:
        """Return the lists of free pages in a leaf: each is a count, and as many numbers."""
        lists = []
        for start, size, kind in zip(leaf.starts, leaf.sizes, leaf.kinds, strict=True):
            data = leaf.page[start : start + size].tobytes()
            if kind == _BIG:
                data = self._read(int(start), _PAGE_HEADER_BYTES + int(size))[_PAGE_HEADER_BYTES:]
            count = int.from_bytes(data[:8], "little")
            if size % 8 or 8 * count + 8 > size:
                raise _broken("a list of free pages is cut")
            numbers = np.frombuffer(data, "<u8")[1 : count + 1]
            lists.append(np.minimum(numbers, self._num_pages).astype(np.int64))
        return lists

    def _require_not_in_use(self, free: NDArray[np.int64]) -> None:
        used = np.concatenate(self._runs)
        used = used[used[:, 0].argsort()]
        # Of all that begins at or before a free page, nothing may go on behind it.
        ends = np.maximum.accumulate(used[:, 1])
        if (free < _META_PAGES).any() or (free >= self._num_pages).any():
            raise _broken("a free page is none")
        if (ends[np.searchsorted(used[:, 0], free, side="right") - 1] > free).any():
            raise _broken("a page in use counts as free")

    def _read(self, number: int, num_bytes: int) -> bytes:
        data = os.pread(self._file, num_bytes, number * self._page_bytes)
        if len(data) != num_bytes:
            raise _broken(f"page {number} is beyond the end")
        return data

    def _require_kinds(self, leaf: _Leaf, *kinds: int) -> None:
        if not np.isin(leaf.kinds, kinds).all():
            raise _broken("a value is neither in its page nor in pages of its own")

    def _require_inside(self, ends: NDArray[np.int64]) -> None:
        if (ends > self._page_bytes).any():
            raise _broken("a page has entries that end outside of it")


def _broken(why: str) -> lmdb.CorruptedError:
    return lmdb.CorruptedError(f"its pages lead astray ({why})")
