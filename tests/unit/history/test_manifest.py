from __future__ import annotations

import dataclasses
import json

import pytest

from fedrec.exceptions import ConfigurationError, HistoryFormatError
from fedrec.history import Manifest


def test_json_round_trip(manifest: Manifest) -> None:
    manifest = dataclasses.replace(manifest, clients={"b": 1, "a": 2}, malicious=("a",))
    found = Manifest.from_json(manifest.to_json())
    assert found == manifest
    assert list(found.clients) == ["b", "a"]


def test_every_recording_has_its_own_id(manifest: Manifest) -> None:
    fields = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    del fields["store_id"]
    assert len(bytes.fromhex(manifest.store_id)) == 16
    assert Manifest(**fields).store_id != manifest.store_id


@pytest.mark.parametrize("value", [{1, 2}, object(), float("nan")])
def test_what_json_cannot_say_is_refused(manifest: Manifest, value: object) -> None:
    odd = dataclasses.replace(manifest, aggregator={"init_args": {"x": value}})
    with pytest.raises(ConfigurationError, match="cannot be written"):
        odd.to_json()


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"format_version": 2}', b"\xff"])
def test_what_is_not_a_manifest_is_refused(text: str | bytes) -> None:
    with pytest.raises(HistoryFormatError):
        Manifest.from_json(text)


def test_missing_and_unknown_entries_are_named(manifest: Manifest) -> None:
    raw = json.loads(manifest.to_json())
    del raw["seed"]
    raw["seeds"] = 3
    with pytest.raises(HistoryFormatError, match=r"\['seed', 'seeds'\]"):
        Manifest.from_json(json.dumps(raw))
