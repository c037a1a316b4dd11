"""A LightningModule's trainable parameters as one flat vector, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedrec.exceptions import ConfigurationError, ShapeError, expected

__all__ = ["ParameterVector", "averageable_buffers", "keeps_running_statistics"]


def keeps_running_statistics(layer: nn.Module) -> bool:
    """Whether training changes the layer's buffers (BatchNorm and its kin, unless frozen)."""
    is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)
    return is_norm and bool(layer.track_running_stats) and layer.training


def averageable_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers with floating-point or complex numbers, persistent or not."""
    return [
        name
        for name, buffer in module.named_buffers()
        if (buffer.is_floating_point() or buffer.is_complex()) and buffer.numel() > 0
    ]


def _running_statistics(module: nn.Module) -> list[str]:
    """Return the names of the averageable buffers of layers that keep running statistics."""
    layers = [layer for layer in module.modules() if keeps_running_statistics(layer)]
    statistics = {id(buffer) for layer in layers for buffer in layer.buffers()}
    buffers = dict(module.named_buffers())
    return [name for name in averageable_buffers(module) if id(buffers[name]) in statistics]


class ParameterVector:
    r"""The layout of a module's trainable parameters in one vector of $d$ numbers.

    Parameters travel between server, clients and history as one float32 vector. This class knows
    which slice of the vector belongs to which parameter. Buffers are not parameters. With
    `Federation(buffers="average")`, buffers that training changes (running statistics, say) are
    averaged and travel in a second vector of $b$ numbers, see `buffers`. All other buffers stay as
    they are, in every client.

    Args:
        module: Any module with at least one trainable float32 parameter.

    Raises:
        ConfigurationError: If the module has no trainable parameter, or one that is not float32 or
            has no memory of its own.

    Examples:
        >>> from torch import nn
        >>> layout = ParameterVector(nn.Linear(2, 1))
        >>> layout.num_parameters, layout.names
        (3, ('weight', 'bias'))
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ConfigurationError(
                f"{type(module).__name__} has no trainable parameter. "
                "HINT: build its layers in `__init__` and leave `requires_grad` on."
            )
        wrong = {n: str(p.dtype) for n, p in parameters.items() if p.dtype != torch.float32}
        if wrong:
            raise ConfigurationError(
                f"Expected every trainable parameter to be float32, but got {wrong}. HINT: keep "
                'the module in float32 and choose the precision with `precision="bf16-mixed"`.'
            )
        shared = [n for n, p in parameters.items() if p.is_meta or _overlaps(p)]
        if shared:
            raise ConfigurationError(
                f"Expected every trainable parameter to have memory of its own, but got {shared}, "
                "which are on the meta device, or expanded. HINT: make them with `to_empty` and "
                "`reset_parameters`, or with `.clone()`."
            )
        self.names = tuple(parameters)
        self.shapes = tuple(p.shape for p in parameters.values())
        self.sizes = tuple(p.numel() for p in parameters.values())
        self.buffer_spec: dict[str, dict[str, Any]] = {}
        self.select_buffers(module, _running_statistics(module))

    @property
    def num_parameters(self) -> int:
        """$d$, the length of the vector."""
        return sum(self.sizes)

    @property
    def num_buffers(self) -> int:
        """$b$, the number of values in the averaged buffers; a complex number is two values."""
        return sum(self._buffer_sizes)

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Names of the averaged buffers; before `select_buffers`, those of running statistics."""
        return tuple(self.buffer_spec)

    @property
    def fingerprint(self) -> str:
        """A hash of names and shapes: modules with the same fingerprint can share a history."""
        parts = [[n, list(s)] for n, s in zip(self.names, self.shapes, strict=True)]
        text = json.dumps(parts, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _check(self, vector: Tensor, size: int, what: str) -> None:
        if vector.shape[-1:] != (size,):
            raise ShapeError(
                f"Expected {what} to end in {size} entries, one for each of this model's, "
                f"but got shape {tuple(vector.shape)}."
            )

    def flatten(self, module: nn.Module) -> Tensor:
        """Copy the module's trainable parameters into a new vector.

        Args:
            module: A module of this layout.

        Returns:
            Shape $(d,)$, float32, on the module's device, detached.
        """
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[n].detach().reshape(-1) for n in self.names])

    def load(self, module: nn.Module, vector: Tensor) -> dict[str, Tensor]:
        """Copy a vector into the module's trainable parameters, in place.

        Args:
            module: A module of this layout.
            vector: Shape $(d,)$.

        Returns:
            The vector's parts by parameter name, see `unflatten`.

        Raises:
            ShapeError: If the vector has another length.
        """
        self._check(vector, self.num_parameters, "the vector")
        parameters = dict(module.named_parameters())
        parts = self.unflatten(vector)
        with torch.no_grad():
            torch._foreach_copy_([parameters[name] for name in parts], list(parts.values()))
        return parts

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """View a vector as named parameters.

        Args:
            vector: Shape $(..., d)$; leading dimensions are kept.

        Returns:
            One view per parameter name, shape $(..., *shape)$.

        Raises:
            ShapeError: If the last dimension is not $d$.
        """
        self._check(vector, self.num_parameters, "the vector")
        parts, leading = vector.split(self.sizes, dim=-1), vector.shape[:-1]
        return {
            name: part.reshape(leading + shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def flatten_dict(self, named: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Copy named tensors (gradients, say) into rows of the vector form.

        Args:
            named: One tensor per parameter name, shape $(..., *shape)$.
            out: Shape $(..., d)$, written in place.

        Returns:
            `out`.
        """
        for name, view in zip(self.names, out.split(self.sizes, dim=-1), strict=True):
            view.copy_(named[name].reshape(view.shape))
        return out

    def select_buffers(
        self, module: nn.Module, names: Iterable[str] | Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Choose which buffers are averaged.

        Args:
            module: A module of this layout.
            names: Names of the buffers in the order of the vector, or a `buffer_spec`, as the
                manifest of a history has it.

        Raises:
            ConfigurationError: If the module has no such buffer, or one of another shape or dtype.
        """
        known = dict(module.named_buffers())
        averageable = averageable_buffers(module)
        chosen = names if isinstance(names, Mapping) else dict.fromkeys(names)
        spec = {}
        for name, recorded in chosen.items():
            if name not in averageable:
                raise ConfigurationError(
                    expected("buffers", "names of buffers with numbers", name, known=averageable)
                )
            buffer = known[name]
            spec[name] = {
                "dtype": str(buffer.dtype).removeprefix("torch."),
                "shape": list(buffer.shape),
            }
            if recorded is not None and spec[name] != dict(recorded):
                raise ConfigurationError(
                    f"Expected the buffer `{name}` to be as in the recording, {dict(recorded)}, "
                    f"but the model has {spec[name]}. HINT: use the model that was recorded with."
                )
        self.buffer_spec = spec
        buffers = [known[name] for name in spec]
        self._buffer_sizes = [b.numel() * (2 if b.is_complex() else 1) for b in buffers]
        self._buffer_dtypes = [b.real.dtype if b.is_complex() else b.dtype for b in buffers]
        self.buffer_dtype = torch.float32
        if torch.float64 in self._buffer_dtypes:
            self.buffer_dtype = torch.float64

    def buffers(self, module: nn.Module) -> Tensor:
        """Copy the averaged buffers into a new vector.

        Returns:
            Shape $(b,)$, float32, or float64 if a buffer is, so that no digit is lost.
        """
        known = dict(module.named_buffers())
        parts = [_reals(known[n].detach()).reshape(-1) for n in self.buffer_names]
        if not parts:
            return torch.zeros(0)
        return torch.cat([part.to(self.buffer_dtype) for part in parts])

    def load_buffers(self, module: nn.Module, vector: Tensor) -> None:
        """Copy a vector of $b$ values into the averaged buffers, in place.

        Raises:
            ShapeError: If the vector has another length, as where other buffers were averaged.
        """
        self._check(vector, self.num_buffers, "the buffers")
        known = dict(module.named_buffers())
        with torch.no_grad():
            for name, part in zip(self.buffer_names, vector.split(self._buffer_sizes), strict=True):
                target = _reals(known[name].detach())
                target.copy_(part.reshape(target.shape))

    def round_buffers(self, vector: Tensor) -> Tensor:
        """Round every value of a vector, shape $(b,)$, to the dtype of its buffer."""
        parts = zip(vector.split(self._buffer_sizes), self._buffer_dtypes, strict=True)
        return torch.cat([part.to(dtype).to(self.buffer_dtype) for part, dtype in parts])

    def changed_buffers(self, before: Tensor, after: Tensor) -> list[str]:
        """Return the names of the buffers that differ between two vectors, shape $(b,)$ each."""
        differs = (before != after) & ~(before.isnan() & after.isnan())
        parts = zip(self.buffer_names, differs.split(self._buffer_sizes), strict=True)
        return [name for name, part in parts if bool(part.any())]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParameterVector) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_parameters={self.num_parameters})"


def _overlaps(parameter: Tensor) -> bool:
    """Whether entries of a tensor share memory, as in an expanded tensor."""
    sizes = zip(parameter.shape, parameter.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _reals(buffer: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
