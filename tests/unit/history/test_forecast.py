"""How much room a recording takes, told before and while it is made."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedrec.exceptions import ConfigurationError, HistoryFullError
from fedrec.history import LMDBHistory, Manifest, forecast, info
from fedrec.history.codecs import CODECS
from fedrec.history.rounds import RoundArrays

KIB = 1024


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))


@pytest.mark.parametrize(
    ("keep", "codec", "num_clients", "d"),
    [
        ({}, "float32", 5, 2000),
        ({}, "float32", 40, 300),
        ({}, "int8", 3, 30_000),
        ({"every": 4}, "float16", 8, 5000),
        ({"last": 6}, "float32", 8, 5000),
        ({"clients": 0.25}, "sign", 8, 20_000),
        ({"last": 9, "every": 3, "clients": 2}, "int8+zstd", 4, 20_000),
    ],
)
def test_the_file_is_as_large_as_was_told(
    tmp_path: Path, manifest: Manifest, keep: dict[str, Any], codec: str, num_clients: int, d: int
) -> None:
    rounds = 30
    ids = tuple(f"c{i}" for i in range(num_clients))
    store = LMDBHistory(tmp_path, codec=codec, keep=keep)
    store.begin(
        dataclasses.replace(
            manifest, clients=dict.fromkeys(ids, 1), num_parameters=d, max_rounds=rounds
        )
    )
    store.close()
    told = info(tmp_path).expected_bytes
    generator = np.random.default_rng(1)
    for t in range(rounds):
        vectors = generator.standard_normal((num_clients + 2, d), dtype=np.float32)
        vectors[:, ::5] = 0
        store.append(
            RoundArrays(
                round=t,
                global_weights=vectors[0],
                aggregate=vectors[1],
                client_ids=ids,
                updates=vectors[2:],
                num_samples=np.ones(num_clients, np.int64),
            )
        )
        if t == 14:
            store.close()
            half_way = info(tmp_path).expected_bytes
    taken = store.num_bytes()
    store.close()
    # Whatever is told on top: 256 KiB for what commits replace, 1 MiB where updates are deleted.
    margin = 256 * KIB + (1024 * KIB if "last" in keep else 0)
    assert taken <= told <= 1.06 * taken + margin
    assert half_way == pytest.approx(taken, rel=0.12, abs=margin)
    arguments = {"num_clients": num_clients, "num_parameters": d, "max_rounds": rounds}
    assert forecast(**arguments, codec=codec, keep=keep).num_bytes == told


def test_the_history_of_the_paper() -> None:
    """100 clients, 139,960 parameters, 2,000 rounds: 112 GB of float32 updates and their keys.

    A vector of 559,840 bytes with header and page header takes 137 pages of 4,096.
    """
    paper = {"num_clients": 100, "num_parameters": 139_960, "max_rounds": 2000}
    vector = 137 * 4096
    exact = forecast(**paper)
    assert exact.update_bytes == pytest.approx(vector, rel=1e-3)
    assert exact.num_bytes == pytest.approx(2000 * 102 * vector, rel=2e-3)
    assert exact.round_bytes == pytest.approx(102 * vector, rel=2e-3)
    assert not exact.assumed
    some = forecast(**paper, clients_per_round=10, keep={"last": 98}).num_bytes
    assert some == pytest.approx((100 * 10 + 2000 * 2) * vector, rel=1e-2)
    sampled = forecast(**paper, keep={"clients": 0.2, "every": 10}).num_bytes
    assert sampled == pytest.approx((200 * 20 + 2000 * 2) * vector, rel=1e-2)
    assert forecast(**paper, num_buffers=139_960).num_bytes == pytest.approx(
        2000 * 103 * vector, rel=2e-3
    )


@pytest.mark.parametrize(
    ("codec", "low", "high", "assumed"),
    [
        ("float32", 4.0, 4.0, False),
        ("float16", 2.0, 2.01, False),
        ("int8", 1.03, 1.04, False),
        ("sign", 0.125, 0.13, False),
        ("lz4", 2.9, 3.7, True),
        ("zstd", 2.7, 3.2, True),
        ("int8+zstd", 0.6, 0.95, True),
    ],
)
def test_bytes_per_parameter(codec: str, low: float, high: float, assumed: bool) -> None:
    """What is assumed of codecs that compress is what docs/history.md found on real updates."""
    told = forecast(num_clients=1, num_parameters=10**6, max_rounds=1, codec=codec)
    assert low <= told.update_bytes / 10**6 <= high * 1.003
    assert told.assumed is assumed


def test_every_codec_of_ours_has_a_case() -> None:
    (mark,) = test_bytes_per_parameter.pytestmark
    ours = {name for name, codec in CODECS.items() if codec.id < 128}
    assert {case[0] for case in mark.args[1]} == ours


@pytest.mark.parametrize(
    "changes",
    [
        {"num_clients": 0},
        {"num_parameters": 1.5},
        {"max_rounds": -1},
        {"codec": "float8"},
        {"keep": {"newest": 3}},
        {"clients_per_round": 0},
    ],
)
def test_arguments_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        forecast(**{"num_clients": 2, "num_parameters": 3, "max_rounds": 4, **changes})


def test_a_recording_that_the_disk_cannot_hold_is_not_begun(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = forecast(num_clients=5, num_parameters=2000, max_rounds=100).num_bytes
    assert 100 * 7 * 8192 < needed < 100 * 8 * 8192 + 512 * KIB
    store = LMDBHistory(tmp_path / "a" / "history")
    free(monkeypatch, needed - 1000)
    with pytest.raises(HistoryFullError) as caught:
        store.begin(manifest)
    assert (
        f"has {needed - 1000} bytes free, but 100 rounds of 5 clients and 2000 parameters as "
        f"`float32` need about {needed} bytes: 1000 bytes are missing."
    ) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    # Fewer clients a round, fewer updates, or a smaller codec need less.
    half = {"class_path": "fedrec.federation.ClientSampler", "init_args": {"fraction": 0.5}}
    for codec, keep, sampler in (
        (None, None, half),
        (None, {"every": 2}, None),
        ("int8", None, None),
    ):
        store = LMDBHistory(tmp_path / f"{codec}{keep}", codec=codec, keep=keep)
        store.begin(dataclasses.replace(manifest, sampler=sampler))
        assert store.rounds() == range(0)
        store.close()
    free(monkeypatch, needed)
    store = LMDBHistory(tmp_path / "a" / "history")
    store.begin(manifest)
    store.close()


def test_a_recording_that_the_map_cannot_hold_is_not_begun(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 2**60)
    large = dataclasses.replace(manifest, num_parameters=10**8, max_rounds=2000)
    with pytest.raises(HistoryFullError, match=r"reserves 1099511627776 bytes .*`?map_size="):
        LMDBHistory(tmp_path / "a").begin(large)
    assert not (tmp_path / "a").exists()
    store = LMDBHistory(tmp_path / "a", map_size=2**34)
    store.begin(large)
    store.close()


def test_it_stops_between_rounds_and_says_what_the_rest_needs(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 rounds of 7 vectors with 2 pages each, 40 are stored when the disk is full."""
    store = LMDBHistory(tmp_path)
    store.begin(manifest)
    for t in range(40):
        store.append(arrays(t))
    free(monkeypatch, 100_000)
    with pytest.raises(HistoryFullError) as caught:
        store.append(arrays(40))
    found = re.search(
        r"no room for (\d+) bytes more \(100000 bytes are free; .* for the 60 that are left (\d+)",
        str(caught.value),
    )
    assert found is not None
    assert int(found[1]) == 2 * 7 * 8000
    assert int(found[2]) == pytest.approx(60 * 7 * 8192 - 100_000, rel=0.05)
    assert store.verify() == range(40)
    store.close()


def test_what_two_rounds_need_is_measured(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client's `sign` update takes 250 bytes and a header, not 8,000."""
    store = LMDBHistory(tmp_path, codec="sign")
    store.begin(manifest)
    for t in range(20):
        store.append(arrays(t))
    round_bytes = 2 * 8192 + 5 * 320 + 1000 + 3 * 200
    free(monkeypatch, int(2 * 1.2 * round_bytes))
    store.append(arrays(20))
    free(monkeypatch, int(2 * 0.8 * round_bytes))
    with pytest.raises(HistoryFullError, match="room for two rounds"):
        store.append(arrays(21))
    store.close()


def test_pages_that_are_used_again_count_as_room(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = LMDBHistory(tmp_path, keep={"last": 5})
    store.begin(manifest)
    for t in range(30):
        store.append(arrays(t))
    size = store.num_bytes()
    free(monkeypatch, 16 * KIB)
    store.append(arrays(30))
    assert store.num_bytes() <= size + 2 * 8192 + 2 * 4096  # two vectors of the model, and keys
    assert store.verify() == range(31)
    store.close()
