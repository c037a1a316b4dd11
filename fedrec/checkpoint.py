"""Saving and loading the state of an interrupted recovery, without pickle."""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec.exceptions import HistoryCorruptedError

__all__ = ["load_state", "save_state", "write_atomically"]

# What reading a damaged archive may end in; `zipfile` raises RuntimeError where flags make it
# believe that an entry is encrypted, and its subclass NotImplementedError for unknown methods.
_DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that after a crash either the old or the new content is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Save nested dicts and lists of tensors, numbers, strings, booleans and `None`.

    Args:
        path: File to write, atomically.
        state: What to save.
    """
    tensors: dict[str, np.ndarray] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = f"t{len(tensors)}"
            tensors[name] = value.detach().cpu().numpy()
            return {"__tensor__": name}
        if isinstance(value, dict):
            return {str(k): encode(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [encode(v) for v in value]
        return value

    text = json.dumps(encode(state))
    buffer = io.BytesIO()
    tensors["__json__"] = np.frombuffer(text.encode(), dtype=np.uint8)
    np.savez(buffer, allow_pickle=False, **tensors)
    write_atomically(path, buffer.getvalue())


def load_state(path: Path) -> dict[str, Any]:
    """Load what `save_state` wrote; tuples come back as lists.

    Raises:
        HistoryCorruptedError: If the file is not a state, or is damaged.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        state = json.loads(arrays.pop("__json__").tobytes().decode())
    except _DAMAGE as error:
        raise HistoryCorruptedError(
            f"The checkpoint {path} cannot be read: {error}. HINT: delete it to start over."
        ) from error

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {"__tensor__"}:
                return torch.from_numpy(arrays[value["__tensor__"]])
            return {k: decode(v) for k, v in value.items()}
        if isinstance(value, list):
            return [decode(v) for v in value]
        return value

    decoded: dict[str, Any] = decode(state)
    return decoded
