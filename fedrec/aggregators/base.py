"""The abstract aggregation rule."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedrec._checks import check_instance
from fedrec._guard import left_alone, returned
from fedrec.component import Component
from fedrec.exceptions import AggregationError, FedrecWarning, ShapeError
from fedrec.functional.kernels._finite import nonfinite_rows
from fedrec.random import torch_generator
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["AggregationContext", "Aggregator", "ColumnRule"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AggregationContext(RoundContext):
    """What the server knows, when it aggregates, on top of a `RoundContext`.

    Args:
        server_update: What the server's own training on its clean data gave in this round, shape
            $(d,)$, for a rule that asks for it with `needs_server_update`; else `None`.
        outputs: Called with weights, shape $(d,)$, and a batch of inputs, it returns what the
            model with these weights says to them, for a rule that asks for it with `needs_outputs`;
            else `None`.
        checked: Updates that were found finite when they arrived, shape $(m, d)$: a rule that is
            called with these, and with the clients' shares, does not look again.
    """

    server_update: Tensor | None = None
    outputs: Callable[[Tensor, Tensor], Tensor] | None = None
    checked: Tensor | None = None


class ColumnRule(NamedTuple):
    r"""What a server step does with every column of the updates, where numbers say all of it.

    It subtracts from a weight $\eta$ times the sum of a column's values with factors; or, without
    factors, times the mean of all but the smallest and the largest values.

    Attributes:
        factors: Shape $(m,)$, float32, or `None`.
        num_trim: How many of the smallest values, and of the largest, are left out.
        server_lr: $\eta$.
    """

    factors: Tensor | None
    num_trim: int
    server_lr: float


class Aggregator(Component, ABC):
    r"""Turns the updates of a round's clients into one.

    Calling the rule checks its input, then calls `aggregate`, the one method to write. The server
    then does $w \leftarrow w - \eta A$, with $\eta$ its learning rate and $A$ the result.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - `client_weights`: $(m,)$, non-negative, with a positive sum; `None` means uniform.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ShapeError: If a shape or dtype does not fit, that of the result included.
        AggregationError: If an update is not finite, the rule cannot work with $m$ clients, or it
            changes `updates`.

    Examples:
        >>> class Largest(Aggregator):
        ...     "The coordinate-wise maximum (not a good idea)."
        ...     def aggregate(self, updates, client_weights=None, ctx=None):
        ...         return updates.amax(dim=0)
        >>> Largest()(torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
        tensor([3., 5.])
    """

    #: Whether the server has to train on its own data in every round (`AggregationContext`).
    needs_server_update: bool = False

    #: Whether the rule tries models out (`AggregationContext.outputs`).
    needs_outputs: bool = False

    #: Whether rows have to be those of clients, whom the rule knows again by their ids.
    needs_client_ids: bool = False

    #: What of updates that are spread over several processes the rule needs at once: `"rows"`, all
    #: of them; `"columns"`, all rows of a block of columns at a time, for a rule that treats every
    #: column alike and alone, and remembers nothing; `"sums"`, sums of rows times their
    #: `coefficients`; `"gram"`, the inner products of all rows, then sums of rows times their
    #: `gram_coefficients`; `"parts"`, what `aggregate_parts` asks for. A subclass that changes
    #: `aggregate` and not this attribute needs rows.
    needs: str = "rows"

    @property
    def has_memory(self) -> bool:
        """Whether what the rule returns depends on earlier rounds."""
        return bool(self.state_dict())

    @abstractmethod
    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Aggregate checked input.

        Args:
            updates: Shape $(m, d)$, finite; must not be changed. The next round may use the same
                memory: a rule that remembers rows copies them.
            client_weights: Shape $(m,)$, or `None` for uniform weights.
            ctx: The round, where there is one.

        Returns:
            Shape $(d,)$, dtype and device of `updates`.
        """

    def check_cohort(self, num_clients: int) -> None:
        """Raise `AggregationError` if the rule cannot work with this many clients.

        Args:
            num_clients: $m$, at least 1.
        """

    def max_byzantine(self, num_clients: int) -> int | None:
        """Return how many malicious rows of $m$ the rule withstands in every coordinate.

        `None` makes no such claim. Where a number is returned, the output stays within the range of
        the benign rows, coordinate by coordinate.
        """
        return None

    def coefficients(self, client_weights: Tensor) -> Tensor | None:
        """Return what `aggregate` multiplies each row with, where the rows do not matter for it.

        Recoverers ask it for the part that a client had in an aggregate. `None`, the default, for
        every other rule. A subclass that changes `aggregate` and not this method counts as such.

        Args:
            client_weights: Shape $(m,)$, non-negative, with a positive sum.

        Returns:
            Shape $(m,)$, or `None`.
        """
        return None

    def trims(self, num_clients: int) -> int | None:
        """Return how many of the smallest and of the largest values of a column are left out.

        That is, if `aggregate` returns the mean of the others, and treats every column alike and
        alone. `None`, the default, for every other rule. A subclass that changes `aggregate` and
        not this method counts as such.

        Args:
            num_clients: $m$, at least 1.
        """
        return None

    def gram_center(self, columns: Tensor) -> Tensor | None:
        """Return what is subtracted from every row before inner products, with `needs = "gram"`.

        Args:
            columns: Some columns of the updates, shape $(m, c)$, with the clients in any order.

        Returns:
            Shape $(c,)$, of every column by itself; `None`, the default, for nothing.
        """
        return None

    def gram_coefficients(self, gram: Tensor, client_weights: Tensor) -> Tensor:
        """Return what each row is multiplied with, for a rule with `needs = "gram"`.

        Args:
            gram: Inner products of every two rows less `gram_center`, shape $(m, m)$, see
                `fedrec.functional.gram_matrix`.
            client_weights: Shape $(m,)$, non-negative, with a positive sum.

        Returns:
            Shape $(m,)$.
        """
        raise NotImplementedError(f"{type(self).__name__} needs {self.needs}")

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Aggregate updates that are spread over processes, for a rule with `needs = "parts"`.

        All processes call it at once, and are to come to the same.

        Args:
            sent: Finite updates. What is `measured` of each client, inner products (`gram`),
                what is made of columns (`by_columns`), and a `weighted_sum` can be asked for.
            client_weights: Shape $(m,)$, non-negative, with a positive sum.
            ctx: The round.

        Returns:
            What `aggregate` does of all rows, but for rounding; shape $(d,)$.
        """
        raise NotImplementedError(f"{type(self).__name__} needs {self.needs}")

    def generator(self, ctx: RoundContext | None) -> torch.Generator:
        """Return this rule's own random numbers of a round: the same each time it is asked.

        Args:
            ctx: The round; without one, it is round 0 of seed 0.
        """
        seed, t = (ctx.seed, ctx.round) if ctx is not None else (0, 0)
        return torch_generator(seed, type(self).__name__, t)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers between rounds; empty for a rule without memory.

        A rule that remembers has the same keys before its first round. Values are tensors, numbers,
        strings, `None`, and lists and dicts of them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    def _global_weights(self, ctx: RoundContext | None) -> Tensor:
        """Return the round's global weights, shape $(d,)$, for a rule that cannot do without.

        Raises:
            AggregationError: If there is no context.
        """
        if ctx is None:
            raise AggregationError(
                f"{type(self).__name__} needs the global weights. HINT: use it in a FederatedLoop, "
                "or pass a RoundContext with them."
            )
        return ctx.global_weights

    def _no_effect(self, reason: str, updates: Tensor) -> Tensor:
        """Warn that no update is used, and return zeros, shape $(d,)$; called by `aggregate`.

        Args:
            reason: What follows the rule's name in the warning.
            updates: Shape $(m, d)$.
        """
        warnings.warn(
            f"{type(self).__name__} {reason}, so this round has no effect.",
            FedrecWarning,
            stacklevel=4,
        )
        return torch.zeros_like(updates[0])

    def __call__(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Check the input, aggregate, check the result."""
        check_instance("updates", updates, Tensor)
        if updates.ndim != 2 or updates.shape[0] == 0 or updates.shape[1] == 0:
            raise ShapeError(
                "Expected `updates` to have shape (m, d) with m, d >= 1, "
                f"but got {tuple(updates.shape)}."
            )
        if not updates.is_floating_point():
            raise ShapeError(f"Expected `updates` to be floating point, but got {updates.dtype}.")
        is_known = isinstance(ctx, AggregationContext) and ctx.checked is updates
        if not is_known:  # looking at values makes the processor wait for a GPU
            if client_weights is not None:
                self._check_weights(client_weights, updates.shape[0])
            self.require_finite(updates, range(len(updates)) if ctx is None else ctx.client_ids)
        self.check_cohort(updates.shape[0])
        rule = f"{type(self).__name__}.aggregate"
        weights = None if ctx is None else ctx.global_weights
        with left_alone(rule, AggregationError, updates=updates, global_weights=weights):
            result = self.aggregate(updates, client_weights, ctx)
        result = returned(rule, result, updates.shape[1:], updates.dtype)
        if result.untyped_storage().data_ptr() == updates.untyped_storage().data_ptr():
            return result.clone()  # updates may be in memory that the next round writes to
        return result

    @staticmethod
    def require_finite(updates: Tensor, names: Sequence[object]) -> None:
        """Raise `AggregationError` if an update is not finite.

        Args:
            updates: Shape $(m, d)$.
            names: What to call each of them.
        """
        bad = [names[i] for i in nonfinite_rows(updates)]
        if bad:
            raise AggregationError(
                f"Expected finite updates, but rows of clients {bad} have NaN or infinity. "
                'HINT: `on_bad_update="drop"` leaves such clients out.'
            )

    @staticmethod
    def _check_weights(client_weights: Tensor, num_clients: int) -> None:
        if client_weights.shape != (num_clients,):
            raise ShapeError(
                f"Expected `client_weights` to have shape ({num_clients},), "
                f"but got {tuple(client_weights.shape)}."
            )
        total = client_weights.sum()
        usable = (client_weights >= 0).all() & (total > 0) & (total < float("inf"))
        if not bool(usable):
            raise AggregationError(
                "Expected `client_weights` to be non-negative with a positive finite sum, "
                f"but got {client_weights.tolist()}."
            )
