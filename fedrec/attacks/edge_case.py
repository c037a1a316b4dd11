"""The edge-case backdoor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, TensorDataset

from fedrec._checks import check_float, check_int
from fedrec.attacks._datasets import WithExtraSamples, pairs_of
from fedrec.attacks._rows import replaced
from fedrec.attacks.base import Attack, AttackContext
from fedrec.attacks.triggers import checked_shape
from fedrec.exceptions import ConfigurationError, ShapeError, expected
from fedrec.functional.aggregation.clipping import clip_factors
from fedrec.functional.distances import squared_norms

__all__ = ["EdgeCaseBackdoor"]


class EdgeCaseBackdoor(Attack):
    r"""Targeted attack: rare inputs, which benign clients do not have, are to get a wrong label.

    There is no trigger. The attacker has inputs from the tail of the distribution, the *edge
    cases*. Malicious clients append some of them to their data, labelled as the target, so that no
    benign client teaches the model otherwise. Their updates are projected onto a ball
    ($\lVert g \rVert \le$ `max_norm`) and multiplied by `scale`, which makes the paper's three
    attacks: poisoned data alone, with projected gradient descent (PGD), and with PGD and
    replacement.

    The edge cases at even places are trained on. Those at odd places are held out for the attack
    success rate: `trigger` puts them in the place of the inputs that it gets.

    Without a `path`, edge cases are the images of one digit of another collection than MNIST, the
    one bundled with scikit-learn, enlarged to the size of the inputs. This stands in for the
    paper's, the sevens of Swedish church books (ARDIS), which are labelled as ones. They are edge
    cases for MNIST, and for data of the same kind; for `Digits` itself they are ordinary samples,
    and the attack is a flip of labels.

    The paper projects after local steps. For one step of SGD that is the same; of several steps it
    is their sum that is projected here.

    Args:
        path: A NumPy file (`.npy`) with inputs, shape $(N, ...)$, $N \ge 2$, of the shape and kind
            that the data have; `None` for the bundled digits.
        source_label: Which of the bundled digits, from 0 to 9; not used with `path`.
        target_label: Class index that edge cases are to be given.
        ratio: Edge cases as a multiple of a client's own samples, above 0; they are repeated where
            there are fewer.
        max_norm: Length of the longest update before it is scaled, above 0; `None` for no limit. In
            weights, the radius of the ball is the local learning rate times this.
        scale: Factor $\lambda > 0$ on malicious updates.
        image_shape: Shape of one image, for images that come flat; not used with `path`.

    Raises:
        ConfigurationError: If an argument is out of range, there is no such file, or the data to
            poison is not made of (input, class index) pairs.
        ShapeError: If the edge cases do not fit the inputs.

    References:
        - Wang et al., Attack of the Tails: Yes, You Really Can Backdoor Federated Learning, NeurIPS
          2020.

    Examples:
        >>> data = TensorDataset(torch.zeros(3, 1, 28, 28), torch.tensor([5, 6, 7]))
        >>> poisoned = EdgeCaseBackdoor(target_label=1).poison_dataset(data, "client-0")
        >>> poisoned[:][1]
        tensor([5, 6, 7, 1, 1, 1])
    """

    target_label: int

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        source_label: int = 7,
        target_label: int = 1,
        ratio: float = 1.0,
        max_norm: float | None = None,
        scale: float = 1.0,
        image_shape: Sequence[int] | None = None,
    ) -> None:
        self.path = None if path is None else str(path)
        self.source_label = check_int("source_label", source_label, minimum=0)
        if self.source_label > 9:
            raise ConfigurationError(expected("source_label", "a digit", source_label))
        self.target_label = check_int("target_label", target_label, minimum=0)
        self.ratio = check_float("ratio", ratio, minimum=0, open_minimum=True)
        if max_norm is not None:
            max_norm = check_float("max_norm", max_norm, minimum=0, open_minimum=True)
        self.max_norm = max_norm
        self.scale = check_float("scale", scale, minimum=0, open_minimum=True)
        self.image_shape = checked_shape(image_shape)

    def edge_cases(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return all edge cases.

        Args:
            shape: Shape of one input.
            dtype: Type of inputs; those of bytes (uint8) have values up to 255, others up to 1.

        Returns:
            Shape $(N, ...)$.
        """
        if self.path is not None:
            found = _read(self.path)
        else:
            found = _bundled(self.source_label, self.image_shape or tuple(shape)).clone()
            if not dtype.is_floating_point:
                found = (255 * found).round()
            if self.image_shape is not None:
                found = found.flatten(start_dim=1)
        if found.shape[1:] != torch.Size(shape):
            raise ShapeError(
                f"Expected edge cases of shape {tuple(shape)}, that of the inputs, but got "
                f"{tuple(found.shape[1:])}. HINT: give `image_shape` for images that come flat."
            )
        return found.to(dtype)

    def trigger(self, x: Tensor) -> Tensor:
        """Put held-out edge cases in the place of inputs, in order and over again.

        Args:
            x: Shape $(N, ...)$.

        Returns:
            Same shape.
        """
        held_out = self.edge_cases(x.shape[1:], x.dtype)[1::2].to(x.device)
        return held_out[torch.arange(len(x), device=x.device) % len(held_out)]

    def poison_dataset(self, dataset: Dataset[Any], client_id: str) -> Dataset[Any]:
        """Append edge cases with the target label.

        Args:
            dataset: Map-style data set of (input, class index); inputs are tensors or arrays.
            client_id: Its owner.

        Returns:
            A longer data set, the original samples first; a `TensorDataset` if `dataset` is one.
        """
        size = len(dataset)  # type: ignore[arg-type]
        count = max(1, round(self.ratio * size))
        if type(dataset) is not TensorDataset:
            first = torch.as_tensor(dataset[0][0])
            extra = self._training(first.shape, first.dtype, count)
            return WithExtraSamples(dataset, extra, self.target_label)
        x, y = pairs_of(dataset)
        extra = self._training(x.shape[1:], x.dtype, count)
        labels = torch.full_like(y[:1], self.target_label).expand(count, *y.shape[1:])
        return TensorDataset(torch.cat([x, extra.to(x.device)]), torch.cat([y, labels]))

    def _training(self, shape: Sequence[int], dtype: torch.dtype, count: int) -> Tensor:
        known = self.edge_cases(shape, dtype)[::2]
        return known[torch.arange(count) % len(known)]

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Project and scale the malicious updates."""
        rows = updates[malicious]
        if self.max_norm is not None:
            factors = clip_factors(squared_norms(rows).sqrt(), self.max_norm)
            rows = factors.to(rows)[:, None] * rows
        return replaced(updates, malicious, self.scale * rows, updates)


@lru_cache(maxsize=4)
def _read(path: str) -> Tensor:
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Expected `path` to be a NumPy file of inputs, but got {path!r} ({error}). "
            "HINT: `numpy.save` writes one."
        ) from error
    if not isinstance(values, np.ndarray) or values.ndim < 2 or len(values) < 2:
        raise ConfigurationError(
            expected("path", "a file with two inputs or more, one a row", np.shape(values))
        )
    return torch.from_numpy(values)


@lru_cache(maxsize=4)
def _bundled(label: int, shape: tuple[int, ...]) -> Tensor:
    """Return the bundled images of a digit in this shape, (H, W) or (C, H, W), values in [0, 1]."""
    from sklearn.datasets import load_digits  # takes a second to import

    if len(shape) not in (2, 3):
        raise ShapeError(
            f"Expected inputs to be images, of shape (H, W) or (C, H, W), but got {shape}. "
            "HINT: give `image_shape` for images that come flat, or a `path` to edge cases."
        )
    digits = load_digits()
    images = torch.from_numpy(digits.images[digits.target == label] / 16.0).float()[:, None]
    images = interpolate(images, size=shape[-2:], mode="bilinear", align_corners=False)
    return images[:, 0] if len(shape) == 2 else images.expand(-1, shape[0], -1, -1)
