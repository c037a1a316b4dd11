"""The abstract rule that wraps another one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from fedrec.aggregators.base import Aggregator
from fedrec.component import goes_with
from fedrec.exceptions import ConfigurationError, expected
from fedrec.types import RoundContext

__all__ = ["RuleWrapper", "ServerStep", "needs_of"]


class RuleWrapper(Aggregator):
    """Base of rules that change what another rule gets, or what it returns.

    One that says `needs = "columns"` is given a block of columns at a time, of updates that are
    spread over several processes, if that is enough for the wrapped rule, too.

    Args:
        rule: The rule that is wrapped. It may be wrapped several times.

    Raises:
        ConfigurationError: If `rule` is not an `Aggregator`.

    Examples:
        >>> from fedrec.aggregators import Median
        >>> class Halved(RuleWrapper):
        ...     "Returns half of what the rule does."
        ...     def aggregate(self, updates, client_weights=None, ctx=None):
        ...         return self.rule(updates, client_weights, ctx) / 2
        >>> import torch
        >>> Halved(Median())(torch.tensor([[1.0], [2.0], [9.0]]))
        tensor([1.])
    """

    def __init__(self, rule: Aggregator) -> None:
        if not isinstance(rule, Aggregator):
            raise ConfigurationError(expected("rule", "an Aggregator", rule))
        self.rule = rule
        self.needs_server_update = rule.needs_server_update
        self.needs_outputs = rule.needs_outputs
        self.needs_client_ids = rule.needs_client_ids

    def check_cohort(self, num_clients: int) -> None:
        """Raise `AggregationError` if this, or the wrapped rule, cannot work with so many."""
        super().check_cohort(num_clients)
        self.rule.check_cohort(num_clients)

    def state_dict(self) -> dict[str, Any]:
        """Return what the wrapped rule remembers."""
        state = self.rule.state_dict()
        return {"rule": state} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the wrapped rule what is its own."""
        if "rule" in state:
            self.rule.load_state_dict(state["rule"])


class ServerStep(RuleWrapper):
    """Base of rules that make something else of what another rule returns, whatever the updates.

    Write `step`. Updates that are spread over several processes travel as the wrapped rule needs
    them.

    Args:
        rule: The rule that is wrapped.

    Raises:
        ConfigurationError: If `rule` is not an `Aggregator`.

    Examples:
        >>> import torch
        >>> from fedrec.aggregators import Median
        >>> class Halved(ServerStep):
        ...     "Returns half of what the rule does."
        ...     def step(self, aggregate, ctx=None):
        ...         return aggregate / 2
        >>> Halved(Median())(torch.tensor([[1.0], [2.0], [9.0]]))
        tensor([1.])
    """

    @abstractmethod
    def step(self, aggregate: Tensor, ctx: RoundContext | None = None) -> Tensor:
        """Return what the server subtracts.

        Args:
            aggregate: What the wrapped rule returned, shape $(d,)$; must not be changed.
            ctx: The round, where there is one.

        Returns:
            Shape $(d,)$, dtype and device of `aggregate`.
        """

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Return the step that the aggregate of the wrapped rule leads to."""
        return self.step(self.rule(updates, client_weights, ctx), ctx)


def needs_of(rule: Aggregator) -> str:
    """Return what a rule needs, as far as its `aggregate` is the one that says so.

    Columns are enough for a rule around another one if they are enough for that one, too; parts, if
    the other does without rows. What a `ServerStep` needs is what the wrapped rule needs.
    """
    if isinstance(rule, ServerStep) and goes_with(rule, "step", "aggregate", "__call__"):
        return needs_of(rule.rule)
    if not goes_with(rule, "needs", "aggregate", "__call__"):
        return "rows"
    if isinstance(rule, RuleWrapper) and rule.needs == "parts":
        return "rows" if needs_of(rule.rule) == "rows" else "parts"
    if isinstance(rule, RuleWrapper):
        by_columns = needs_of(rule.rule) in ("columns", "sums") and not rule.rule.has_memory
        return rule.needs if by_columns else "rows"
    return rule.needs
