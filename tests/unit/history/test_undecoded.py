"""Updates that stay as they are stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrec.history.codecs import Int8Codec
from fedrec.history.undecoded import UndecodedUpdates
from fedrec.types import CohortUpdates


def stored(*rows: list[float]) -> UndecodedUpdates:
    """Two clients' updates, as the codec takes them apart."""
    codec = Int8Codec()
    vectors = [np.array(row, np.float32) for row in rows]
    parts = [codec.parts(memoryview(codec.encode(v).payload), v.size) for v in vectors]
    codes, steps = (np.stack(part) for part in zip(*parts, strict=True))
    like = CohortUpdates(
        client_ids=tuple("abc"[: len(rows)]),
        updates=torch.empty(0, vectors[0].size),
        num_samples=torch.arange(len(rows)),
        refused={"z": "late"},
    )
    return UndecodedUpdates(codes, steps, like)


def test_they_are_decoded_for_who_asks() -> None:
    # 127 steps of 1, and 127 of 2: what is halfway goes to the even number.
    sent = stored([127.0, 1.4, -0.4], [254.0, -3.0, 5.0])
    assert "updates" not in vars(sent)
    assert torch.equal(sent.updates, torch.tensor([[127.0, 1.0, 0.0], [254.0, -4.0, 4.0]]))
    assert sent.num_bytes == 2 * 3 + 2 * 4
    assert sent.is_plain


def test_some_of_them_and_others_in_their_place() -> None:
    sent = stored([127.0, 1.0], [-127.0, 2.0])
    assert sent.select(("a", "b")) is sent is sent.to(torch.device("cpu"))
    one = sent.select(["b"])
    assert (one.client_ids, one.updates.tolist()) == (("b",), [[-127.0, 2.0]])
    assert dict(one.refused) == {"z": "late"}
    other = replace(sent, updates=torch.zeros(2, 2))
    assert type(other) is CohortUpdates
    assert not other.updates.any()


@pytest.mark.parametrize(("largest", "is_plain"), [(1e36, True), (3e38, False)])
def test_products_beyond_float32(largest: float, is_plain: bool) -> None:
    # 2^120 is about 1.3e36; the step of 3e38 is 2.4e36.
    sent = stored([largest, -largest])
    assert sent.is_plain is is_plain
    assert bool(torch.isfinite(sent.updates).all())
