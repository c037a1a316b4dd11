"""Entries: what the record of a round says, as JSON.

An entry may come from anywhere: that its checksum is right does not mean that it makes sense.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import compress
from typing import Any, NamedTuple

from fedrec.history.lmdb.records import AGGREGATE, BUFFERS, GLOBAL_WEIGHTS, ROUND, StoredManifest
from fedrec.history.rounds import RoundArrays

__all__ = ["Summary", "make_entry", "read_entry"]


class Summary(NamedTuple):
    """What an entry says of a vector; the last two are 0 where it is no client update."""

    checksum: str
    max_error: float
    bound: float


class _Field(NamedTuple):
    """What a field of an entry must look like.

    Numbers are finite and not negative; whole ones fit in 63 bits.

    Args:
        types: Types the value may have, or, of a list, each of its values.
        is_list: Whether the value is a list.
        pattern: What text must match.
        are_clients: Whether the numbers are indices of clients, each one there once.
    """

    types: frozenset[type]
    is_list: bool = False
    pattern: re.Pattern[str] | None = None
    are_clients: bool = False


_NONE = type(None)
_CHECKSUM = re.compile("[0-9a-f]{16}")
_COUNT, _TEXT = _Field(frozenset({int})), _Field(frozenset({str}))
_CLIENTS = _Field(frozenset({int}), is_list=True, are_clients=True)

# Besides `refused` and `departure`, which have fields of their own.
_FIELDS = {
    "round": _COUNT,
    "previous": _TEXT,
    "execution": _TEXT,
    "cohort": _CLIENTS,
    "present": _CLIENTS,
    "num_samples": _Field(frozenset({int}), is_list=True),
    "updates": _Field(frozenset({str, _NONE}), is_list=True, pattern=_CHECKSUM),
    "bounds": _Field(frozenset({int, float, _NONE}), is_list=True),
    "global_weights": _Field(frozenset({str}), pattern=_CHECKSUM),
    "aggregate": _Field(frozenset({str}), pattern=_CHECKSUM),
    "buffers": _Field(frozenset({str, _NONE}), pattern=_CHECKSUM),
}
# `max_error` is `None` where the codec is exact.
_INEXACT_FIELDS = {**_FIELDS, "max_error": _FIELDS["bounds"]}


def make_entry(
    arrays: RoundArrays,
    recording: StoredManifest,
    previous: str,
    summaries: Mapping[int, Summary],
) -> dict[str, Any]:
    """Make the entry of a round.

    Args:
        arrays: The round.
        recording: The recording it belongs to.
        previous: Hash of the record of the round before.
        summaries: Of each vector that is kept, by its index.
    """
    index = recording.indices
    updates = [summaries.get(index[c]) for c in arrays.client_ids]  # `None`: not to be kept
    buffers = summaries.get(BUFFERS)
    departure = arrays.departure
    if departure is not None and departure["client"] is not None:
        departure = {**departure, "client": index[departure["client"]]}
    return {
        "round": arrays.round,
        "previous": previous,
        "execution": recording.execution,
        "cohort": [index[c] for c in arrays.cohort or arrays.client_ids],
        "present": [index[c] for c in arrays.client_ids],
        "num_samples": arrays.num_samples.tolist(),
        "refused": [[index[c], reason] for c, reason in arrays.refused.items()],
        "updates": [None if u is None else u.checksum for u in updates],
        "bounds": [None if u is None else u.bound for u in updates],
        "max_error": (
            None
            if recording.codec.lossless
            else [None if u is None else u.max_error for u in updates]
        ),
        "global_weights": summaries[GLOBAL_WEIGHTS].checksum,
        "aggregate": summaries[AGGREGATE].checksum,
        "buffers": None if buffers is None else buffers.checksum,
        "departure": departure,
    }


def read_entry(
    payload: bytes | memoryview, recording: StoredManifest, t: int, file_bytes: int
) -> dict[str, Any]:
    """Read the entry of round `t`.

    Args:
        payload: Its JSON.
        recording: The recording it belongs to.
        t: Its round.
        file_bytes: Size of the history's file, which every round must fit in.

    Raises:
        HistoryCorruptedError: If it does not make sense.
    """
    manifest, lossless = recording.manifest, recording.codec.lossless
    num_clients = len(recording.client_ids)
    fields = _FIELDS if lossless else _INEXACT_FIELDS
    try:
        entry: dict[str, Any] = json.loads(bytes(payload))
        wrong = [name for name, f in fields.items() if not _fits(entry[name], f, num_clients)]
        if entry["refused"] != [] and not _are_refusals(entry["refused"], num_clients):
            wrong.append("refused")
        if entry["departure"] is not None and not _is_departure(entry["departure"], num_clients):
            wrong.append("departure")
        is_kept = [checksum is not None for checksum in entry["updates"]]
        of_updates = ("bounds",) if lossless else ("bounds", "max_error")
        wrong += [name for name in of_updates if None in compress(entry[name], is_kept)]
        lengths = {len(entry[name]) for name in ("present", "num_samples", "updates", *of_updates)}
        if entry["round"] != t:
            wrong.append("round")
        if (entry["buffers"] is None) != (manifest.num_buffers == 0):
            wrong.append("buffers")
        if lossless and entry["max_error"] is not None:
            wrong.append("max_error")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise recording.corrupted(t, ROUND, f"they cannot be read: {error}") from error
    if wrong or len(lengths) > 1:
        reason = f"they make no sense: {wrong or 'lists of different lengths'}"
        raise recording.corrupted(t, ROUND, reason)
    # Global weights and buffers are stored as they are: more of them than bytes cannot be.
    for size, index in (
        (manifest.num_parameters, GLOBAL_WEIGHTS),
        (manifest.buffer_words, BUFFERS),
    ):
        if 4 * size > file_bytes:
            raise recording.corrupted(t, index, f"the file cannot hold {size} numbers")
    return entry


def _fits(value: Any, field: _Field, num_clients: int) -> bool:
    """Tell whether a value can be that of a field. Lists are long: a few calls check all of one."""
    values = value if field.is_list else [value]
    if not isinstance(values, list) or not field.types.issuperset(map(type, values)):
        return False
    values = [v for v in values if v is not None]
    if not values:
        return True
    if str in field.types:
        return field.pattern is None or all(map(field.pattern.fullmatch, values))
    if float in field.types and not all(map(math.isfinite, values)):
        return False
    if field.are_clients and len(set(values)) < len(values):
        return False
    end = num_clients if field.are_clients else math.inf if float in field.types else 2**63
    result: bool = 0 <= min(values) <= max(values) < end
    return result


def _are_refusals(value: Any, num_clients: int) -> bool:
    return isinstance(value, list) and all(
        _fits([index], _CLIENTS, num_clients) and isinstance(reason, str) for index, reason in value
    )


def _is_departure(value: Any, num_clients: int) -> bool:
    client, difference = value["client"], value["difference"]
    return (
        set(value) == {"round", "reason", "client", "difference"}
        and _fits(value["round"], _COUNT, num_clients)
        and isinstance(value["reason"], str)
        and (client is None or _fits([client], _CLIENTS, num_clients))
        and (difference is None or type(difference) is float)
    )
