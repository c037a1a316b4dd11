"""The abstract rule that wraps another one."""

from __future__ import annotations

from typing import Any

from fedrec.aggregators.base import Aggregator
from fedrec.exceptions import ConfigurationError, expected

__all__ = ["RuleWrapper"]


class RuleWrapper(Aggregator):
    """Base of rules that change what another rule gets, or what it returns.

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
        """Raise `AggregationError` if the wrapped rule cannot work with this many clients."""
        self.rule.check_cohort(num_clients)

    def state_dict(self) -> dict[str, Any]:
        """Return what the wrapped rule remembers."""
        state = self.rule.state_dict()
        return {"rule": state} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the wrapped rule what is its own."""
        if "rule" in state:
            self.rule.load_state_dict(state["rule"])
