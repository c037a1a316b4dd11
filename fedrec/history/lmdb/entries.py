"""Round records, which may come from anywhere: a right checksum does not make them make sense."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import compress
from typing import Any

from fedrec.history.lmdb.records import BUFFERS, GLOBAL_WEIGHTS, ROUND, StoredManifest

__all__ = ["read_entry"]

_CHECKSUM = re.compile("[0-9a-f]{16}")


def read_entry(
    payload: bytes | memoryview, recording: StoredManifest, t: int, file_bytes: int
) -> dict[str, Any]:
    """Read the round record of round `t`.

    Args:
        payload: Its JSON.
        recording: The recording it belongs to.
        t: Its round.
        file_bytes: Size of the history's file, which every round must fit in.

    Raises:
        HistoryCorruptedError: If it does not make sense.
    """
    lossless = recording.codec.lossless
    try:
        entry = json.loads(bytes(payload))
        wrong = [name for name, fits in _FITS.items() if not fits(entry[name], recording)]
        of_updates = ("bounds",) if lossless else ("bounds", "max_error")
        stored = [checksum is not None for checksum in entry["updates"]]
        wrong += [name for name in of_updates if None in compress(entry[name], stored)]
        lengths = {len(entry[name]) for name in ("present", "num_samples", "updates", *of_updates)}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise recording.corrupted(t, ROUND, f"they cannot be read: {error}") from error
    if entry["round"] != t:
        wrong.append("round")
    if (entry["buffers"] is None) != (recording.manifest.num_buffers == 0):
        wrong.append("buffers")
    if (entry["max_error"] is None) != lossless:
        wrong.append("max_error")
    if wrong or len(lengths) > 1:
        reason = f"they make no sense: {wrong or 'lists of different lengths'}"
        raise recording.corrupted(t, ROUND, reason)
    # Global weights and buffers are stored as they are: more of them than bytes cannot be.
    for size, index in (
        (recording.manifest.num_parameters, GLOBAL_WEIGHTS),
        (recording.manifest.buffer_words, BUFFERS),
    ):
        if 4 * size > file_bytes:
            raise recording.corrupted(t, index, f"the file cannot hold {size} numbers")
    result: dict[str, Any] = entry
    return result


Fits = Callable[[Any, StoredManifest], bool]


def _is_text(value: Any, _: StoredManifest) -> bool:
    return isinstance(value, str)


def _is_checksum(value: Any, _: StoredManifest) -> bool:
    return isinstance(value, str) and _CHECKSUM.fullmatch(value) is not None


def _is_size(value: Any, _: StoredManifest) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_refusal(value: Any, recording: StoredManifest) -> bool:
    index, reason = value
    return _are_clients([index], recording) and isinstance(reason, str)


def _is_departure(value: Any, recording: StoredManifest) -> bool:
    client, difference = value["client"], value["difference"]
    return (
        set(value) == {"round", "reason", "client", "difference"}
        and _is_size(value["round"], recording)
        and isinstance(value["reason"], str)
        and (client is None or _are_clients([client], recording))
        and (difference is None or type(difference) is float)
    )


def _may_be(fits: Fits) -> Fits:
    return lambda value, recording: value is None or fits(value, recording)


def _all(fits: Fits) -> Fits:
    return lambda value, recording: (
        isinstance(value, list) and all(fits(one, recording) for one in value)
    )


# These lists are long, and read with every round: a few calls for all that is in one.


def _are(value: Any, *types: type) -> bool:
    return isinstance(value, list) and set(types).issuperset(map(type, value))


def _are_sizes(value: Any, _: StoredManifest) -> bool:
    return _are(value, int) and (not value or (min(value) >= 0 and max(value) < 2**63))


def _are_clients(value: Any, recording: StoredManifest) -> bool:
    return (
        _are(value, int)
        and (not value or (min(value) >= 0 and max(value) < len(recording.client_ids)))
        and len(set(value)) == len(value)
    )


def _are_checksums(value: Any, _: StoredManifest) -> bool:
    return _are(value, str, type(None)) and all(map(_CHECKSUM.fullmatch, _there(value)))


def _are_magnitudes(value: Any, _: StoredManifest) -> bool:
    return (
        _are(value, int, float, type(None))
        and all(map(math.isfinite, _there(value)))
        and min(_there(value), default=0) >= 0
    )


def _there(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


#: What each entry must look like.
_FITS: dict[str, Fits] = {
    "round": _is_size,
    "previous": _is_text,
    "execution": _is_text,
    "cohort": _are_clients,
    "present": _are_clients,
    "num_samples": _are_sizes,
    "refused": _all(_is_refusal),
    "updates": _are_checksums,
    "bounds": _are_magnitudes,
    "max_error": _may_be(_are_magnitudes),
    "global_weights": _is_checksum,
    "aggregate": _is_checksum,
    "buffers": _may_be(_is_checksum),
    "departure": _may_be(_is_departure),
}
