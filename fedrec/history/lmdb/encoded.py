"""Updates that were encoded before they are written, so that it is done once."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from fedrec.history.codecs import Codec
from fedrec.history.lmdb.writing import Row, encode_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EncodedUpdates"]


class EncodedUpdates:
    """Rows that `as_stored` encoded, until the updates they come from are written or gone."""

    def __init__(self) -> None:
        # By the identity of the updates.
        self._rows: dict[int, tuple[weakref.ref[Tensor], list[Row]]] = {}

    def add(self, codec: Codec, updates: Tensor) -> Tensor:
        """Encode updates, shape $(m, d)$; return them as they will be read.

        If the codec is lossless, that is `updates` itself, and nothing is encoded.
        """
        if codec.lossless:
            return updates
        import torch

        from fedrec.history.conversion import to_array

        rows, decoded = encode_rows(codec, to_array(updates, pinned=True))
        key, encoded = id(updates), self._rows
        encoded[key] = weakref.ref(updates, lambda _: encoded.pop(key, None)), rows
        return torch.from_numpy(decoded).to(updates.device)

    def pop(self, updates: Tensor) -> list[Row] | None:
        """Return the rows of these updates, once, or `None` if they were not encoded."""
        found = self._rows.pop(id(updates), None)
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
