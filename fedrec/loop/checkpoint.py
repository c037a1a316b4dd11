"""The files of a recovery: its state, stored without pickle, and the recovered model."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from fedrec._derived import register_derived
from fedrec._files import write_atomically
from fedrec.exceptions import ConfigurationError, FedrecWarning, HistoryCorruptedError
from fedrec.history.base import SEALED, HistoryStore
from fedrec.history.tools.npz import UNREADABLE

__all__ = [
    "ShardFiles",
    "check_state",
    "finished_state",
    "lightning_checkpoint",
    "load_state",
    "on_device",
    "save_state",
]


def save_state(
    path: Path, state: dict[str, Any], history: HistoryStore | None = None, shard: int = 0
) -> None:
    """Save nested dicts and lists of tensors, numbers, strings, booleans and `None`.

    Args:
        path: File to write, atomically.
        state: The nested values.
        history: The history beside which the file lies, which encrypts it if it is encrypted
            itself; `None` for a file that holds nothing of a client.
        shard: Whose file it is, in a history in shards.

    Raises:
        ConfigurationError: If it is something else, as where a component's `state_dict` returns it.
    """
    tensors: dict[str, np.ndarray] = {}
    text = json.dumps(_encoded(state, "", tensors))
    buffer = io.BytesIO()
    tensors["__json__"] = np.frombuffer(text.encode(), dtype=np.uint8)
    np.savez(buffer, allow_pickle=False, **tensors)
    content = buffer.getvalue() if history is None else history.seal(buffer.getvalue(), shard)
    write_atomically(path, content, private=True)  # clients' updates may be in it


def check_state(state: dict[str, Any]) -> None:
    """Raise `ConfigurationError` if `save_state` could not save this."""
    _encoded(state, "", {})


def _encoded(value: Any, place: str, tensors: dict[str, np.ndarray]) -> Any:
    """Return a nested value as JSON has it, and put its tensors aside."""
    if isinstance(value, Tensor) and value.dtype != torch.bfloat16:  # NumPy has none
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu().numpy()
        return {"__tensor__": name}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _encoded(v, f"{place}.{k}" if place else k, tensors) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(v, f"{place}[{i}]", tensors) for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    found = f"a {type(value).__name__}"
    if isinstance(value, dict):
        found = f"a dict with the keys {list(value)[:5]}"
    elif isinstance(value, Tensor):
        found = f"a tensor of {value.dtype}"
    raise ConfigurationError(
        f"Expected `{place}` of a checkpoint to be a tensor, a number, text, true, false or None, "
        f"or a list or dict of them whose keys are texts, but got {found}. HINT: change what "
        "`state_dict` returns."
    )


def load_state(path: Path, history: HistoryStore | None = None, shard: int = 0) -> dict[str, Any]:
    """Return the state that `save_state` wrote; tuples come back as lists.

    Args:
        path: The file.
        history: The history beside which it lies, as in `save_state`.
        shard: Whose file it is, in a history in shards.

    Raises:
        HistoryCorruptedError: If the file is not a state, or is damaged.
    """
    try:
        with path.open("rb") as file:
            archive: Any = file
            if history is not None and _is_sealed(path):
                archive = io.BytesIO(history.unseal(file.read(), shard))
            with np.load(archive, allow_pickle=False) as opened:
                arrays = {name: opened[name] for name in opened.files}
        state = json.loads(arrays.pop("__json__").tobytes().decode())
    except (*UNREADABLE, HistoryCorruptedError) as error:
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


def finished_state(path: Path) -> dict[str, Any] | None:
    """Return the state of a recovery that is finished, for which no history is needed.

    Args:
        path: The checkpoint.

    Returns:
        `None` if the recovery is not finished, or there is no file.

    Raises:
        HistoryCorruptedError: If the file is damaged.
    """
    if not path.exists() or _is_sealed(path):
        return None
    state = load_state(path)
    return state if state["finished"] else None


def _is_sealed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(SEALED)) == SEALED


class ShardFiles:
    """The part of a checkpoint that is of shards of clients: a file for each, in its own process.

    Two files of a shard take turns. A checkpoint says whose turn it was: one that not all processes
    have finished leaves the one before as it is, and any number of processes can go on from it.

    Args:
        folder: Where the files are, or `None` for none.
        without: Clients of whom they hold no data.
        history: The history beside which they lie, which encrypts them if it is encrypted itself.

    Attributes:
        turn: 0 or 1, of the files that were written or read last.
    """

    def __init__(self, folder: Path | None, without: Sequence[str], history: HistoryStore) -> None:
        self._folder, self._without, self._history = folder, without, history
        self.turn = 0

    def write(self, states: Mapping[int, dict[str, Any]], next_round: int) -> bool:
        """Write the states of shards beside those of the last checkpoint.

        Args:
            states: By shard.
            next_round: Round that the checkpoint is before.

        Returns:
            Whether there is a file now.
        """
        self.turn = 1 - self.turn
        if self._folder is None:
            return False
        for shard, state in states.items():
            path = self._path(shard, self.turn)
            register_derived(path, without=self._without)
            save_state(path, {"next": next_round, "state": state}, self._history, shard)
        return bool(states)

    def read(self, shards: Iterable[int], turn: int, next_round: int) -> dict[int, dict[str, Any]]:
        """Return the states of shards, by shard.

        Args:
            shards: Shards that this process has.
            turn: Whose turn it was.
            next_round: Round that the checkpoint is before.

        Raises:
            HistoryCorruptedError: If a file is missing, damaged, or of another checkpoint.
        """
        assert self._folder is not None
        self.turn, states = turn, {}
        for shard in shards:
            path = self._path(shard, turn)
            saved = load_state(path, self._history, shard)
            if saved["next"] != next_round:
                raise HistoryCorruptedError(
                    f"The checkpoint {path} is before round {saved['next']}, and the one that it "
                    f"belongs to before round {next_round}. HINT: delete both to start over."
                )
            states[shard] = saved["state"]
        return states

    def remove(self, all_but: int | None = None) -> None:
        """Remove the files, but for those of one turn."""
        if self._folder is None:
            return
        for turn in {0, 1} - {all_but}:
            for path in self._folder.glob(f"checkpoint-shard-*-{turn}.npz"):
                path.unlink(missing_ok=True)

    def _path(self, shard: int, turn: int) -> Path:
        assert self._folder is not None
        return self._folder / f"checkpoint-shard-{shard:03d}-{turn}.npz"


def on_device(value: Any, device: torch.device) -> Any:
    """Move the float32 tensors of a loaded state to a device."""
    if isinstance(value, Tensor):
        # Integer and float64 tensors are bookkeeping and stay on the CPU.
        return value.to(device) if value.dtype == torch.float32 else value
    if isinstance(value, dict):
        return {k: on_device(v, device) for k, v in value.items()}
    if isinstance(value, list):
        return [on_device(v, device) for v in value]
    return value


def lightning_checkpoint(module: Any, rounds: int) -> bytes:
    """Return a checkpoint that the module's own `load_from_checkpoint` reads.

    It can be loaded with `weights_only=True`, torch's default, which runs no code of the file:
    hyper-parameters that are not plain data are left out with a warning.

    Args:
        module: A LightningModule, or a module of any other class.
        rounds: Number of rounds, stored as `global_step`.
    """
    state_dict = module.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": 0,
        "global_step": rounds,
        "pytorch-lightning_version": version("pytorch-lightning"),
        "state_dict": state_dict,
    }
    parameters = {}
    for name, value in _plain(getattr(module, "hparams", {})).items():
        if _loads(value):
            parameters[name] = value
        else:
            _warn(
                f"Hyperparameter {name!r} of {type(module).__name__} is a "
                f"{type(value).__name__}, which torch does not load from a file, so it is not in "
                "model.ckpt. HINT: give it to `load_from_checkpoint`."
            )
    if parameters:
        checkpoint["hparams_name"] = getattr(module, "_hparams_name", None) or "kwargs"
        # Read by Lightning as its dict whose items are attributes, too, as in a Namespace.
        checkpoint["hparams_type"] = "AttributeDict"
        checkpoint["hyper_parameters"] = parameters
    if hasattr(module, "on_save_checkpoint"):
        own = set(checkpoint)
        module.on_save_checkpoint(checkpoint)
        _check_entries(module, {k: v for k, v in checkpoint.items() if k not in own})
    extra = {k: v for k, v in state_dict.items() if not isinstance(v, Tensor)}
    _check_entries(module, extra)
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()


def _plain(parameters: Any) -> dict[str, Any]:
    """Return hyper-parameters as a dict, those of OmegaConf as plain dicts and lists."""
    if OmegaConf.is_config(parameters):
        parameters = OmegaConf.to_container(parameters, resolve=True)
    plain = {}
    for name, value in dict(parameters).items():
        config = OmegaConf.is_config(value)
        plain[name] = OmegaConf.to_container(value, resolve=True) if config else value
    return plain


def _loads(value: Any) -> bool:
    """Whether `torch.load(weights_only=True)` can load a value."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # noqa: BLE001 - pickling runs the value's own methods
        return False
    return True


def _check_entries(module: Any, entries: dict[str, Any]) -> None:
    """Warn of what the module itself put into its checkpoint and torch loads only if trusted."""
    for name, value in entries.items():
        if not _loads(value):
            _warn(
                f"{type(module).__name__} puts {name!r} into model.ckpt, a "
                f"{type(value).__name__}, which torch loads only from a file that is trusted. "
                "HINT: call `load_from_checkpoint` with `weights_only=False`, or store plain data."
            )


def _warn(text: str) -> None:
    warnings.warn(text, FedrecWarning, stacklevel=4)
