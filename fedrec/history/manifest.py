"""What a history knows about the recording as a whole."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedrec.exceptions import ConfigurationError, HistoryFormatError

__all__ = ["FLOAT_BYTES", "FORMAT_VERSION", "Manifest"]

FORMAT_VERSION = 1
#: Of a weight or an update's entry where it is sent, held or stored as it is: float32.
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a recording that is not a round. Written once, before round 0.

    Args:
        model_fingerprint: `ParameterVector.fingerprint` of the model.
        num_parameters: $d$.
        buffers: The buffers that are averaged and stored with each round, in the order of the
            vector: `"dtype"` and `"shape"` by name.
        clients: Number of samples by client id; the position is the client's index on disk.
        malicious: Clients that are malicious (ground truth of an experiment; empty in operation).
        seed: Seed that every random draw of the recording is a function of.
        aggregator: `Component.spec` of the aggregation rule.
        server_lr: Learning rate of the server step.
        max_rounds: Number of rounds $T$ the recording is meant to have.
        sampler: `Component.spec` of the client sampler, or `None` if all clients always took part.
        attack: `Component.spec` of the attack, or `None`.
        training: Arguments of local training by client id; under "*" where all have the same.
        on_bad_update: What was done about unusable updates, `"raise"` or `"drop"`.
        execution: The execution plan: executor, threads, device, precision.
        recipe: The resolved recipe, or `None`.
        versions: Versions of fedrec, torch and others, by name.
        codec: Name of the codec that updates are stored with.
        keep: Which updates are stored, as arguments of `Retention`; empty if all are.
        encryption: Cipher of all records but this one, or `None`.
        convention: Sign and unit of a stored update.
        store_id: Hex of 16 random bytes that every record of the store carries.
        format_version: Version of the on-disk format.
    """

    model_fingerprint: str
    num_parameters: int
    clients: Mapping[str, int]
    seed: int
    aggregator: Mapping[str, Any]
    server_lr: float
    max_rounds: int
    buffers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    malicious: tuple[str, ...] = ()
    sampler: Mapping[str, Any] | None = None
    attack: Mapping[str, Any] | None = None
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    on_bad_update: str = "raise"
    execution: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    codec: str = "float32"
    keep: Mapping[str, Any] = field(default_factory=dict)
    encryption: str | None = None
    convention: str = "pseudo-gradient, mean over samples: w <- w - server_lr * aggregate"
    store_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    format_version: int = FORMAT_VERSION

    @cached_property
    def num_buffers(self) -> int:
        """$b$, the values in the buffers that are stored; a complex number is two."""
        return sum(
            math.prod(buffer["shape"]) * (2 if buffer["dtype"].startswith("complex") else 1)
            for buffer in self.buffers.values()
        )

    @cached_property
    def buffer_dtype(self) -> str:
        """The dtype of the vector of buffers, float32, or float64 if that of one is as wide."""
        dtypes = {buffer["dtype"] for buffer in self.buffers.values()}
        return "float32" if dtypes.isdisjoint({"float64", "complex128"}) else "float64"

    @cached_property
    def buffer_words(self) -> int:
        """How many times four bytes the vector of buffers takes."""
        return self.num_buffers * (2 if self.buffer_dtype == "float64" else 1)

    def to_json(self) -> str:
        """Return compact JSON. The order of `clients` is kept: it is their index on disk.

        Raises:
            ConfigurationError: If an entry is nothing that JSON can say.
        """
        try:
            return json.dumps(dataclasses.asdict(self), separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"The manifest of a history cannot be written: {error}. HINT: give components "
                "plain arguments (numbers, text, lists, mappings of these)."
            ) from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            HistoryFormatError: If it is not a manifest, or one of a newer format version.
        """
        try:
            raw = json.loads(text)
            version = raw["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise HistoryFormatError(f"The manifest cannot be read: {error}.") from error
        if version != FORMAT_VERSION:
            raise HistoryFormatError(
                f"The history has format version {version}, but this fedrec reads version "
                f"{FORMAT_VERSION}. HINT: use the fedrec release that wrote it."
            )
        names = {f.name for f in dataclasses.fields(cls)}
        if set(raw) != names:
            odd = sorted(set(raw) ^ names)
            raise HistoryFormatError(f"The manifest has missing or unknown entries: {odd}.")
        wrong = [name for name, fits in _FITS.items() if not fits(raw[name])]
        if wrong:
            raise HistoryFormatError(f"The manifest has entries of the wrong type: {wrong}.")
        return cls(**{**raw, "malicious": tuple(raw["malicious"])})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _may_be(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _are_buffers(value: Any) -> bool:
    return _is_mapping(value) and all(
        _is_mapping(buffer)
        and set(buffer) == {"dtype", "shape"}
        and _is_text(buffer["dtype"])
        and isinstance(buffer["shape"], list)
        and all(_is_count(size) and size > 0 for size in buffer["shape"])
        and math.prod(buffer["shape"]) < 2**62
        for buffer in value.values()
    )


#: What each entry must look like, as a manifest may come from anywhere.
_FITS: dict[str, Callable[[Any], bool]] = {
    "model_fingerprint": _is_text,
    "num_parameters": lambda value: _is_count(value) and value > 0,
    "clients": lambda value: _is_mapping(value) and all(map(_is_count, value.values())),
    "seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "aggregator": _is_mapping,
    "server_lr": lambda value: isinstance(value, (int, float)) and abs(value) < 1e300,
    "max_rounds": _is_count,
    "buffers": _are_buffers,
    "malicious": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "sampler": _may_be(_is_mapping),
    "attack": _may_be(_is_mapping),
    "training": lambda value: _is_mapping(value) and all(map(_is_mapping, value.values())),
    "on_bad_update": _is_text,
    "execution": _is_mapping,
    "recipe": _may_be(_is_mapping),
    "versions": lambda value: _is_mapping(value) and all(map(_is_text, value.values())),
    "codec": _is_text,
    "encryption": _may_be(_is_text),
    "keep": _is_mapping,
    "convention": _is_text,
    "store_id": lambda value: _is_text(value) and bool(re.fullmatch("[0-9a-f]{32}", value)),
}
