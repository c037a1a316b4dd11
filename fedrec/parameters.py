"""A LightningModule's trainable parameters as one flat vector, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedrec.exceptions import ConfigurationError, ShapeError

__all__ = ["ParameterVector", "keeps_running_statistics"]


def keeps_running_statistics(layer: nn.Module) -> bool:
    """Whether training changes the layer's buffers (BatchNorm and its kin, unless frozen)."""
    is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)
    return is_norm and bool(layer.track_running_stats) and layer.training


class ParameterVector:
    r"""The layout of a module's trainable parameters in one vector of $d$ numbers.

    Parameters travel between server, clients and history as one float32 vector. This class knows
    which slice of it belongs to which parameter. Buffers (such as BatchNorm statistics) are not
    parameters; they travel in a second vector of $b$ numbers, see `buffers`.

    Args:
        module: Any module with at least one trainable float32 parameter.

    Raises:
        ConfigurationError: If the module has no trainable parameter, or one that is not float32.

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
        self.names = tuple(parameters)
        self.shapes = tuple(p.shape for p in parameters.values())
        self.sizes = tuple(p.numel() for p in parameters.values())
        buffers = {n: b for n, b in module.named_buffers() if n in module.state_dict()}
        self.buffer_names = tuple(buffers)
        self.buffer_shapes = tuple(b.shape for b in buffers.values())
        self.buffer_sizes = tuple(b.numel() for b in buffers.values())

    @property
    def num_parameters(self) -> int:
        """$d$, the length of the vector."""
        return sum(self.sizes)

    @property
    def num_buffers(self) -> int:
        """$b$, the number of values in persistent buffers."""
        return sum(self.buffer_sizes)

    @property
    def fingerprint(self) -> str:
        """A hash of names and shapes: two modules with the same one can share a history."""
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

    def load(self, module: nn.Module, vector: Tensor) -> None:
        """Copy a vector into the module's trainable parameters, in place.

        Args:
            module: A module of this layout.
            vector: Shape $(d,)$.

        Raises:
            ShapeError: If the vector has another length.
        """
        self._check(vector, self.num_parameters, "the vector")
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, part in self.unflatten(vector).items():
                parameters[name].copy_(part)

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
        parts = vector.split(self.sizes, dim=-1)
        return {
            name: part.reshape(vector.shape[:-1] + shape)
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

    def buffers(self, module: nn.Module) -> Tensor:
        """Copy the module's persistent buffers into a new vector.

        Returns:
            Shape $(b,)$, float32.
        """
        buffers = dict(module.named_buffers())
        parts = [buffers[n].detach().reshape(-1).float() for n in self.buffer_names]
        return torch.cat(parts) if parts else torch.zeros(0)

    def load_buffers(self, module: nn.Module, vector: Tensor) -> None:
        """Copy a vector of $b$ values into the module's persistent buffers, in place."""
        self._check(vector, self.num_buffers, "the buffers")
        buffers = dict(module.named_buffers())
        for name, part in zip(self.buffer_names, vector.split(self.buffer_sizes), strict=True):
            buffer = buffers[name]
            value = part.reshape(buffer.shape)
            buffer.copy_(value if buffer.is_floating_point() else value.round())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParameterVector) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_parameters={self.num_parameters})"
