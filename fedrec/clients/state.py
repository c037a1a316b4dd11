"""The state of a module besides its trainable parameters: taken, compared, put back."""

from __future__ import annotations

import io
import logging
import pickle
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["GENERATORS", "LEAVES", "ModuleState", "forget_states", "state_of"]

# Types that are compared by value: an equal number that was computed anew is no change.
_VALUES = (bool, int, float, complex, str, bytes, type(None))
#: Types whose objects hold nothing that a user's code would draw from or change in training.
LEAVES = (
    *_VALUES,
    type,
    BuiltinFunctionType,
    ModuleType,
    torch.dtype,
    torch.device,
    torch.Size,
    logging.Logger,
    threading.Thread,
    io.IOBase,
)
# Types that are not followed: they have no state of training, or the state is not the module's.
_OPAQUE = (*LEAVES, Dataset, DataLoader)
# Attributes of a module that are not followed: they lead to Lightning's objects around it.
_LEADS_AWAY = ("_trainer", "_fabric")
# Dictionaries of a module whose own names are left out of dotted names, as torch does.
_UNNAMED = ("_parameters", "_buffers", "_modules")
# A tensor of so many entries or more is compared by its version and a sample of its entries.
_LARGE = 1 << 16
_NUM_SAMPLED = 1024
# Attributes in which a tensor keeps its hooks.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class ModuleState:
    """The state of a module besides the values of its trainable parameters, as it is now.

    The state is every attribute, buffer and frozen parameter of the module and of the objects it
    holds: counters, lists, states of metrics, optimisers, random generators, modes, hooks. Local
    training of every client starts from the same state, so that what a client computes does not
    depend on which clients were asked before.

    Data sets, data loaders and the trainer are not followed.

    Args:
        module: Any module; it is walked once, and its tensors are copied.

    Examples:
        >>> from torch import nn
        >>> layer = nn.BatchNorm1d(1)
        >>> layer.calls = []
        >>> state = ModuleState(layer)
        >>> layer.calls.append("one")
        >>> _ = layer(torch.tensor([[1.0], [3.0]]))
        >>> state.changes()
        ['running_mean', 'running_var', 'num_batches_tracked', 'calls']
        >>> state.restore()
        >>> layer.calls, layer.running_mean
        ([], tensor([0.]))
        >>> state.changes()
        []
    """

    def __init__(self, module: nn.Module) -> None:
        self._seen: dict[int, object] = {}
        self._parts: list[_Part] = []
        self._walk(module, "")
        # Most dictionaries and sets of a module are for hooks, and empty: checked together.
        kinds = _DictPart | _SetPart
        self._empty = [p.value for p in self._parts if isinstance(p, kinds) and not p.held]
        empty = set(map(id, self._empty))
        self._filled = [p for p in self._parts if id(p.value) not in empty]

    @property
    def has_changed(self) -> bool:
        """Whether anything has changed since the state was taken."""
        return any(self._empty) or any(part.has_changed() for part in self._filled)

    def changes(self) -> list[str]:
        """Return the dotted names of the attributes that have changed since the state was taken."""
        return [name for part in self._parts for name in part.changes()]

    def restore(self) -> None:
        """Put the module back into this state."""
        if not self.has_changed:
            return
        for part in self._parts:
            part.restore()

    def _walk(self, value: Any, name: str) -> None:
        if isinstance(value, _OPAQUE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            hooks = _hooks_of(value)
            self._parts.append(_TensorPart(name, value, *_copy_of(value), hooks=hooks))
            for hook in (hook for of_kind in hooks for hook in of_kind.values()):
                self._walk(hook, name)
        elif isinstance(value, np.ndarray):
            self._parts.append(_ArrayPart(name, value, value.copy()))
        elif type(value) in GENERATORS:
            get, put = GENERATORS[type(value)]
            self._parts.append(_GeneratorPart(name, value, get(value), put))
        elif isinstance(value, dict):
            self._parts.append(_DictPart(name, value, dict(value)))
            for key, item in value.items():
                self._walk(item, f"{name}[{key!r}]")
        elif isinstance(value, list | deque):
            self._parts.append(_ListPart(name, value, list(value)))
            for i, item in enumerate(value):
                self._walk(item, f"{name}[{i}]")
        elif isinstance(value, set):
            self._parts.append(_SetPart(name, value, set(value)))
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                self._walk(item, f"{name}[{i}]")
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                self._walk_cell(cell, name)
        elif isinstance(value, MethodType):
            self._walk(value.__self__, name)
        elif isinstance(value, partial):
            self._walk((value.func, value.args, value.keywords), name)
        elif isinstance(value, torch.jit.ScriptModule):
            # Its other attributes are torch's: they look like dictionaries, but are none.
            for own, tensor in (*value.named_parameters(), *value.named_buffers()):
                self._walk(tensor, _joined(name, own))
        elif hasattr(value, "__dict__") and not _is_ours(value):
            self._walk_attributes(value, name)

    def _walk_cell(self, cell: CellType, name: str) -> None:
        """Follow a variable that a function shares with the function it was made in."""
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell
        with suppress(ValueError):  # the variable has no value yet
            self._parts.append(_CellPart(name, cell, cell.cell_contents))
            self._walk(cell.cell_contents, name)

    def _walk_attributes(self, value: Any, name: str) -> None:
        attributes = vars(value)
        self._seen[id(attributes)] = attributes
        self._parts.append(_DictPart(name, attributes, dict(attributes), are_attributes=True))
        for key, attribute in attributes.items():
            if key in _LEADS_AWAY:
                continue
            if key in _UNNAMED and isinstance(value, nn.Module):
                self._seen[id(attribute)] = attribute
                part = _DictPart(name, attribute, dict(attribute), are_attributes=True)
                self._parts.append(part)
                for own, held in attribute.items():
                    self._walk(held, _joined(name, own))
            else:
                self._walk(attribute, _joined(name, key))


def state_of(module: nn.Module) -> ModuleState:
    """Return the state of a module as it is now; the last one taken if nothing has changed."""
    state = _taken(module)
    if state.has_changed:
        forget_states()
        state = _taken(module)
    return state


def forget_states() -> None:
    """Drop the states that `state_of` keeps, and with them their modules."""
    _taken.cache_clear()


@lru_cache(maxsize=4)
def _taken(module: nn.Module) -> ModuleState:
    return ModuleState(module)


def _is_ours(value: object) -> bool:
    """Whether an object is fedrec's or Lightning's, such as a loop, and no module."""
    package = type(value).__module__.partition(".")[0]
    ours = package in ("fedrec", "lightning", "lightning_fabric", "pytorch_lightning")
    return ours and not isinstance(value, nn.Module)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _same(now: Any, before: Any) -> bool:
    """Whether it is the same object, or an equal value of the same plain type."""
    return now is before or (
        type(now) is type(before) and isinstance(now, _VALUES) and bool(now == before)
    )


@dataclass(eq=False)
class _Part(ABC):
    """An object of the module, and a copy of its content when the state was taken (`held`)."""

    name: str
    value: Any
    held: Any

    def changes(self) -> Iterator[str]:
        if self.has_changed():
            yield self.name

    @abstractmethod
    def has_changed(self) -> bool:
        """Whether the object's content differs from `held`."""

    def restore(self) -> None:
        if self.has_changed():
            self.put_back()

    def put_back(self) -> None:
        """Give the object the content `held`."""
        self.value.clear()
        self.value.update(self.held)


@dataclass(eq=False)
class _DictPart(_Part):
    are_attributes: bool = False

    def __post_init__(self) -> None:
        self.keys, self.values = list(self.held), list(self.held.values())

    def has_changed(self) -> bool:
        value, held = self.value, self.held
        if len(value) != len(held):
            return True
        try:  # comparing lists is fast: it compares identities first
            if list(value.values()) == self.values and list(value) == self.keys:
                return False
        except (TypeError, ValueError, RuntimeError):  # `==` of tensors and arrays may raise these
            pass
        return any(key not in value or not _same(value[key], old) for key, old in held.items())

    def changes(self) -> Iterator[str]:
        if not self.has_changed():
            return
        if not self.are_attributes:
            yield self.name
            return
        for key in {**self.held, **self.value}:
            there = key in self.held and key in self.value
            if not there or not _same(self.value[key], self.held[key]):
                yield _joined(self.name, key)


@dataclass(eq=False)
class _CellPart(_Part):
    def has_changed(self) -> bool:
        return not _same(self.value.cell_contents, self.held)

    def put_back(self) -> None:
        self.value.cell_contents = self.held


@dataclass(eq=False)
class _ListPart(_Part):
    def has_changed(self) -> bool:
        return len(self.value) != len(self.held) or not all(map(_same, self.value, self.held))

    def put_back(self) -> None:
        self.value.clear()
        self.value.extend(self.held)


@dataclass(eq=False)
class _SetPart(_Part):
    def has_changed(self) -> bool:
        return bool(self.value != self.held)


@dataclass(eq=False)
class _ArrayPart(_Part):
    def has_changed(self) -> bool:
        return bool(self.value.tobytes() != self.held.tobytes())

    def put_back(self) -> None:
        np.copyto(self.value, self.held)


@dataclass(eq=False)
class _GeneratorPart(_Part):
    put: Callable[[Any, Any], None]

    def has_changed(self) -> bool:
        now = GENERATORS[type(self.value)][0](self.value)
        return pickle.dumps(now) != pickle.dumps(self.held)

    def put_back(self) -> None:
        self.put(self.value, self.held)


@dataclass(eq=False)
class _TensorPart(_Part):
    """A tensor: its values, its hooks and whether it requires a gradient.

    `held` is `None` where values are no state, as those of a trainable parameter.
    """

    version: int
    requires_grad: bool
    memory: Tensor
    hooks: tuple[dict[int, Any], ...]

    def has_changed(self) -> bool:
        value, held = self.value, self.held
        if value.requires_grad != self.requires_grad or _hooks_of(value) != self.hooks:
            return True
        if held is None:
            return False
        if value.shape != held.shape or value.dtype != held.dtype or value.device != held.device:
            return True
        if value._version != self.version:
            return not _equal(value, held)
        # `x.data.add_(1)` leaves the version as it is, so values are compared, too.
        return value.device.type == "cpu" and not _equal(_sample(value), _sample(held))

    def restore(self) -> None:
        # BatchNorm leaves the version as it is, and values are compared on a CPU only.
        may_have_changed = self.held is not None and self.value.device.type != "cpu"
        if may_have_changed or self.has_changed():
            self.put_back()

    def put_back(self) -> None:
        value = self.value
        if self.held is not None:
            value.data = self.memory
            value.data.copy_(self.held)
            self.version = value._version
        value.requires_grad_(self.requires_grad)
        for name, hooks in zip(_HOOKS, self.hooks, strict=True):
            there = getattr(value, name, None)
            if there is not None:
                there.clear()
                there.update(hooks)


def _hooks_of(value: Tensor) -> tuple[dict[int, Any], ...]:
    return tuple(dict(getattr(value, name, None) or {}) for name in _HOOKS)


def _copy_of(value: Tensor) -> tuple[Tensor | None, int, bool, Tensor]:
    """Return `held`, `version`, `requires_grad` and `memory` of a `_TensorPart`."""
    trains = isinstance(value, nn.Parameter) and value.requires_grad
    # A tensor that was made in inference mode cannot be written to.
    no_state = trains or value.is_inference() or not value.is_leaf
    if no_state or isinstance(value, nn.UninitializedParameter):
        return None, 0, value.requires_grad, value.detach()
    return value.detach().clone(), value._version, value.requires_grad, value.data


def _equal(now: Tensor, before: Tensor) -> bool:
    """Whether two tensors have the same values; NaN equals the same NaN."""
    if torch.equal(now, before):
        return True
    if now.layout != torch.strided or not (now.is_floating_point() or now.is_complex()):
        return False
    return now.numel() > 0 and torch.equal(_bits(now), _bits(before))


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _sample(value: Tensor) -> Tensor:
    """Return a part of a large tensor's entries; all of a small one's."""
    value = value.detach()
    if value.numel() < _LARGE:
        return value
    step = value.numel() // _NUM_SAMPLED
    return value.reshape(-1)[::step] if value.is_contiguous() else value[..., :1]


def _put_bit_generator(generator: np.random.Generator, held: Any) -> None:
    generator.bit_generator.state = held


#: For each type of generator, a function that reads its state, and one that sets it.
GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    torch.Generator: (
        lambda g: g.get_state().numpy().tobytes(),
        lambda g, held: g.set_state(torch.frombuffer(bytearray(held), dtype=torch.uint8)),
    ),
    random.Random: (lambda g: g.getstate(), lambda g, held: g.setstate(held)),
    np.random.Generator: (lambda g: g.bit_generator.state, _put_bit_generator),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, held: g.set_state(held)),
}
