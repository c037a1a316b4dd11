"""What is sent: the messages between server and clients, made and read, without pickle.

A message is arrays and plain values. Whatever is read was sent by somebody else: shape, dtype and
size are checked before memory is taken, and numbers before they are used.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedrec.clients.objective import LocalWork
from fedrec.exceptions import ConfigurationError, UpdateError
from fedrec.parameters import ParameterVector
from fedrec.types import ClientUpdate, RoundContext

__all__ = [
    "ASK",
    "VISIT",
    "Answer",
    "Card",
    "Task",
    "array_of",
    "size_of",
    "vector_of",
]

#: Message types; the action keeps them apart from the handlers of a user's own app.
VISIT = "query.fedrec"
ASK = "train.fedrec"

_MOST_LOGGED = 100
_MOST_SAMPLES = 2**40
_NPY_HEADER = 256  # bytes that NumPy's format may add to an array's own
_TEXT = 10_000


def array_of(vector: Tensor) -> Array:
    """Return a vector as it is sent: NumPy's format, float32 or float64."""
    return Array(vector.detach().cpu().numpy())


def vector_of(
    array: object, shape: Sequence[int], dtype: str = "float32", *, finite: bool = True
) -> Tensor:
    """Return the entries of an array that was sent, as a vector.

    Args:
        array: What was sent.
        shape: Shape that it must have.
        dtype: Dtype that it must have.
        finite: Whether its numbers must be finite.

    Raises:
        UpdateError: If it is anything else. Nothing is allocated before shape, dtype and size are
            known to be right.
    """
    shape = tuple(shape)
    if not isinstance(array, Array):
        raise UpdateError(f"expected an array, but got {type(array).__name__}")
    if array.stype != "numpy.ndarray" or array.dtype != dtype or tuple(array.shape) != shape:
        raise UpdateError(
            f"expected an array of shape {shape} and dtype {dtype}, but got "
            f"{tuple(array.shape)[:8]} and {array.dtype[:20]!r}"
        )
    kind = np.dtype(dtype).newbyteorder("<")
    num_bytes = math.prod(shape) * kind.itemsize
    if not num_bytes < len(array.data) <= num_bytes + _NPY_HEADER:
        raise UpdateError(f"expected {num_bytes} bytes of numbers, but got {len(array.data)}")
    header = io.BytesIO(array.data[:_NPY_HEADER])
    try:
        # The header is checked by itself: `np.load` would allocate what it claims.
        if np.lib.format.read_magic(header) != (1, 0):
            raise ValueError("unknown version")
        inner, fortran, found = np.lib.format.read_array_header_1_0(header)
    except (ValueError, EOFError) as error:
        raise UpdateError("expected an array in NumPy's format") from error
    if inner != shape or found != kind or len(array.data) - header.tell() != num_bytes:
        raise UpdateError(f"expected shape {shape} and dtype {dtype} inside the array, too")
    numbers = np.frombuffer(array.data, kind, offset=header.tell())
    if finite and not np.isfinite(numbers).all():
        raise UpdateError("the update has NaN or infinity")
    return torch.from_numpy(numbers.reshape(shape, order="F" if fortran else "C").flatten())


def size_of(message: Message) -> int:
    """Return the bytes of a message's arrays and values, without what transport adds."""
    if not message.has_content():
        return 0
    size = 0
    for name, record in message.content.items():
        size += len(name)
        for key, value in record.items():
            if isinstance(value, Array):
                size += len(key) + len(value.data)
            else:
                size += len(key) + (len(value) if isinstance(value, (str, bytes)) else 8)
    return size


def _config(message: Message, name: str) -> Mapping[str, Any]:
    """Return the plain values of a message."""
    record = message.content.get(name)
    if not isinstance(record, ConfigRecord):
        raise UpdateError(f"expected a record {name!r}")
    return record


def _value(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if type(value) is not kind or (isinstance(value, str) and len(value) > _TEXT):
        raise UpdateError(f"expected {name} to be {kind.__name__}, but got {str(value)[:50]!r}")
    return value


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping, which is sent as JSON."""
    try:
        mapping = json.loads(_value(values, name, str))
    except (ValueError, RecursionError) as error:
        raise UpdateError(f"expected {name} to be JSON") from error
    if not isinstance(mapping, dict):
        raise UpdateError(f"expected {name} to be a mapping")
    return mapping


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a client says about itself when it joins, and again with each answer.

    Args:
        client_id: Its id; empty if it has none of its own.
        num_samples: Size of its data set, at least 1.
        fingerprint: `ParameterVector.fingerprint` of its model.
        training: Arguments of its local training by name.
    """

    client_id: str
    num_samples: int
    fingerprint: str
    training: Mapping[str, Any]

    def record(self, nonce: str) -> ConfigRecord:
        """Return the card as it is sent.

        Args:
            nonce: The nonce of the message that is answered.
        """
        return ConfigRecord(
            {
                "nonce": nonce,
                "client-id": self.client_id,
                "num-samples": self.num_samples,
                "fingerprint": self.fingerprint,
                "training": json.dumps(dict(self.training), sort_keys=True),
            }
        )

    @classmethod
    def read(cls, message: Message, nonce: str) -> Card:
        """Read a card.

        Args:
            message: The message that it came with.
            nonce: The nonce that was sent.

        Raises:
            UpdateError: If there is no card, or the nonce is another one.
        """
        values = _config(message, "card")
        if _value(values, "nonce", str) != nonce:
            raise UpdateError("the answer is to another question (its nonce differs)")
        training = _mapping(values, "training")
        num_samples = _value(values, "num-samples", int)
        if not 0 < num_samples < _MOST_SAMPLES:  # whose sum over clients has 64 bits
            raise UpdateError(f"expected num-samples to be positive, and below {_MOST_SAMPLES}")
        client_id = _value(values, "client-id", str)
        if len(client_id) > 200:
            raise UpdateError("expected client-id to have at most 200 characters")
        return cls(
            client_id=client_id,
            num_samples=num_samples,
            fingerprint=_value(values, "fingerprint", str),
            training=training,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What a client is asked for in a round.

    Args:
        client_id: The client.
        ctx: The round.
        global_weights: Shape $(d,)$.
        nonce: Random text that the answer repeats.
    """

    client_id: str
    ctx: RoundContext
    global_weights: Tensor
    nonce: str

    def content(self, weights: Array) -> RecordDict:
        """Return the content of the message.

        Args:
            weights: The global weights as they are sent, which all clients share.

        Raises:
            ConfigurationError: If the task is none that a message can say.
        """
        ctx = self.ctx
        work = ctx.work or LocalWork()
        if work.objective is not None:
            raise ConfigurationError(
                f"Clients of Flower cannot be asked for {type(work.objective).__name__}: an "
                "objective is code, and messages carry none. HINT: use a recoverer that keeps the "
                "module's own loss, as FedRecover."
            )
        if not ctx.autocast_is_off:
            raise ConfigurationError(
                'Clients of Flower compute in float32. HINT: `precision="32-true"`.'
            )
        values: dict[str, Any] = {
            "nonce": self.nonce,
            "client-id": self.client_id,
            "round": ctx.round,
            "phase": ctx.phase,
            "seed": ctx.seed,
            "batch-policy": ctx.batch_policy,
            "fingerprint": ctx.layout.fingerprint,
            "buffers": list(ctx.layout.buffer_names) if ctx.buffers is not None else [],
        }
        for name in ("local_steps", "local_epochs", "batch_size", "lr"):
            if getattr(work, name) is not None:
                values[name] = getattr(work, name)
        arrays = {"weights": weights}
        if ctx.buffers is not None:
            arrays["buffers"] = array_of(ctx.buffers)
        return RecordDict({"task": ConfigRecord(values), "arrays": ArrayRecord(arrays)})

    @classmethod
    def read(cls, message: Message, layout: ParameterVector, module: Any) -> Task:
        """Read a task.

        Args:
            message: The message.
            layout: Layout of the client's model; its averaged buffers are selected.
            module: The client's model.

        Raises:
            UpdateError: If it is no task, or one for another model.
        """
        values = _config(message, "task")
        if _value(values, "fingerprint", str) != layout.fingerprint:
            raise UpdateError(
                "the task is for another model (its layers or names differ from this client's)"
            )
        record = message.content.get("arrays")
        if not isinstance(record, ArrayRecord):
            raise UpdateError("expected a record 'arrays'")
        weights = vector_of(record.get("weights"), [layout.num_parameters])
        buffers = None
        if names := list(values.get("buffers") or []):
            layout.select_buffers(module, names)
            dtype = str(layout.buffers(module).dtype).removeprefix("torch.")
            buffers = vector_of(record.get("buffers"), [layout.num_buffers], dtype)
        work = LocalWork(
            **{k: values.get(k) for k in ("local_steps", "local_epochs", "batch_size", "lr")}
        )
        client_id, phase = _value(values, "client-id", str), _value(values, "phase", str)
        ctx = RoundContext(
            round=_value(values, "round", int),
            phase="recover" if phase == "recover" else "record",
            client_ids=(client_id,),
            global_weights=weights,
            layout=layout,
            seed=_value(values, "seed", int),
            purpose="client",
            batch_policy=_value(values, "batch-policy", str),
            work=None if work == LocalWork() else work,
            buffers=buffers,
        )
        nonce = _value(values, "nonce", str)
        return cls(client_id=client_id, ctx=ctx, global_weights=weights, nonce=nonce)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a client sends back for a task.

    Args:
        update: What it computed.
        seconds: Seconds that it took, as the client says.
    """

    update: ClientUpdate
    seconds: float = 0.0

    def content(self, task: Task, card: Card) -> RecordDict:
        """Return the content of the message.

        Args:
            task: What is answered.
            card: Who answers.
        """
        arrays = {"update": array_of(self.update.update)}
        if self.update.buffers is not None:
            arrays["buffers"] = array_of(self.update.buffers)
        # One record for all values: Flower sends each by itself, six times on its way.
        values = card.record(task.nonce)
        values["round"], values["phase"] = task.ctx.round, task.ctx.phase
        values["seconds"] = self.seconds
        values["logged"] = json.dumps({n: float(v) for n, v in self.update.metrics.items()})
        return RecordDict({"card": values, "arrays": ArrayRecord(arrays)})

    @classmethod
    def read(cls, message: Message, task: Task, card: Card) -> Answer:
        """Read the answer to a task.

        Args:
            message: The message.
            task: What was asked.
            card: What the client said about itself when it joined.

        Raises:
            UpdateError: If it is no answer to the task, or of somebody else.
        """
        given = Card.read(message, task.nonce)
        if given.client_id != card.client_id:
            raise UpdateError(f"the answer is of another client ({given.client_id[:50]!r})")
        for name in ("num_samples", "fingerprint", "training"):
            then, now = getattr(card, name), getattr(given, name)
            if then != now:
                raise UpdateError(f"{name} was {str(then)[:80]} when it joined, is {str(now)[:80]}")
        values = _config(message, "card")
        t, phase = _value(values, "round", int), _value(values, "phase", str)
        if (t, phase) != (task.ctx.round, task.ctx.phase):
            raise UpdateError(f"the answer is for another round ({t}, {phase[:20]!r})")
        record = message.content.get("arrays")
        if not isinstance(record, ArrayRecord):
            raise UpdateError("expected a record 'arrays'")
        layout = task.ctx.layout
        update, buffers = vector_of(record.get("update"), [layout.num_parameters]), None
        if task.ctx.buffers is not None:
            dtype = str(task.ctx.buffers.dtype).removeprefix("torch.")
            buffers = vector_of(record.get("buffers"), [layout.num_buffers], dtype)
        seconds = _numbers({"seconds": values.get("seconds")})["seconds"]
        logged = _numbers(_mapping(values, "logged"))
        sent = ClientUpdate(
            update=update, num_samples=card.num_samples, metrics=logged, buffers=buffers
        )
        return cls(update=sent, seconds=max(0.0, seconds))


def _numbers(logged: Mapping[str, object]) -> dict[str, float]:
    if len(logged) > _MOST_LOGGED:
        raise UpdateError(f"expected at most {_MOST_LOGGED} logged values, but got {len(logged)}")
    values = {}
    for name, value in logged.items():
        number = math.nan
        if isinstance(value, (int, float)) and len(name) <= 200:
            with contextlib.suppress(OverflowError):  # an integer may have any number of digits
                number = float(value)
        if not math.isfinite(number):
            raise UpdateError(f"expected {name[:50]!r} to be one finite number")
        values[name] = number
    return values
