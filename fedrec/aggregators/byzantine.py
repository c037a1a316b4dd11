"""What rules share that are told how many clients are malicious."""

from __future__ import annotations

import math
from abc import ABC
from fractions import Fraction
from typing import ClassVar

from fedrec._checks import check_float, check_int, is_fraction
from fedrec.aggregators.base import Aggregator
from fedrec.exceptions import AggregationError

__all__ = ["ByzantineAggregator", "check_count", "count_of"]


def check_count(argument: str, value: int | float) -> int | float:
    """Return `value` if it is a count of clients or a fraction of them in [0, 0.5).

    Args:
        argument: What to name in an error.
        value: An integer is a count, a float a fraction.

    Raises:
        ConfigurationError: If it is negative, or a fraction of 0.5 or more.
    """
    if is_fraction(value):
        return check_float(argument, value, minimum=0.0, maximum=0.5, open_maximum=True)
    return check_int(argument, value, minimum=0, hint="give a fraction as a float below 0.5.")


def count_of(value: int | float, number: int) -> int:
    r"""Return the count itself, or $\lfloor \beta m \rfloor$ for a fraction $\beta$.

    The product is that of the decimal number as written, not of its nearest binary fraction.

    Args:
        value: A count or a fraction.
        number: $m$, such as the clients of a round, or the entries of an update.

    Examples:
        >>> count_of(3, 100), count_of(0.29, 100)
        (3, 29)
    """
    if isinstance(value, int):
        return value
    return math.floor(Fraction(str(value)) * number)


class ByzantineAggregator(Aggregator, ABC):
    r"""Base of rules that are told a bound on the number of malicious clients.

    Args:
        num_byzantine: Malicious clients at most: a count $f$, or a fraction $\beta$ of the cohort
            in [0, 0.5), then $f = \lfloor \beta m \rfloor$. A fraction keeps its meaning when
            clients are left out, as in a recovery; a count can become impossible.

    Raises:
        ConfigurationError: If `num_byzantine` is negative, or a fraction of 0.5 or more.
    """

    #: $(a, b)$ if the rule needs $m \ge a f + b$ clients.
    bound: ClassVar[tuple[int, int]] = (2, 1)

    def __init__(self, *, num_byzantine: int | float) -> None:
        self.num_byzantine = check_count("num_byzantine", num_byzantine)

    def count(self, num_clients: int) -> int:
        """Return $f$ for this many clients."""
        return count_of(self.num_byzantine, num_clients)

    def check_cohort(self, num_clients: int) -> None:
        """Raise `AggregationError` if there are too few clients for so many malicious ones."""
        f = self.count(num_clients)
        factor, offset = self.bound
        if num_clients < factor * f + offset:
            raise AggregationError(
                f"{type(self).__name__} needs m >= {factor}f + {offset} client updates, but got "
                f"m={num_clients} with f={f}, which needs {factor * f + offset}. "
                "HINT: lower `num_byzantine` or let more clients take part."
            )
