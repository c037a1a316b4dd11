"""The partition by the users the samples come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec.data.partitioners.base import Partitioner
from fedrec.exceptions import ConfigurationError, ShapeError, expected

__all__ = ["ByUser"]


class ByUser(Partitioner):
    """Keeps the samples of every user together.

    With as many clients as users, every user is a client, in the natural order of their ids:
    numbers inside texts count as numbers, so that `user9` comes before `user10`. With fewer
    clients, users are dealt out at random; the numbers of users of two clients differ by at most
    one.

    Args:
        users: The user of every sample, in the order of the training data: numbers or texts; or the
            path of a text file with one user a line.

    Raises:
        ConfigurationError: If `users` is neither, the file cannot be read, or, when splitting,
            there are fewer users than clients.
        ShapeError: If, when splitting, there is not one user a sample.

    Examples:
        >>> by_user = ByUser(users=["ann", "bob", "ann", "cid"])
        >>> by_user(np.array([0, 1, 1, 0]), 3, np.random.default_rng(0))
        [array([0, 2]), array([1]), array([3])]
    """

    needs_labels = False

    def __init__(self, *, users: Sequence[int | str] | str) -> None:
        if not isinstance(users, str):
            users = tuple(u.item() if isinstance(u, np.generic) else u for u in users)
            kinds = {type(user) for user in users}
            if not users or kinds not in ({int}, {str}):
                raise ConfigurationError(
                    expected("users", "all numbers, all texts, or the path of a file", users[:5])
                )
        self.users = users

    def split(
        self, labels: NDArray[np.integer[Any]], num_clients: int, generator: np.random.Generator
    ) -> Sequence[NDArray[np.integer[Any]]]:
        """Give every user, or group of users, to a client."""
        ids, user = _ranks(self._read())
        if len(user) != len(labels):
            raise ShapeError(
                f"Expected `users` to name one user a sample, but got {len(user)} for "
                f"{len(labels)} samples."
            )
        if len(ids) < num_clients:
            raise ConfigurationError(
                f"Cannot split {len(ids)} users over {num_clients} clients. HINT: "
                f"`num_clients={len(ids)}` makes every user a client."
            )
        client = np.arange(len(ids))
        if len(ids) > num_clients:
            client = generator.permutation(np.arange(len(ids)) % num_clients)
        order = np.argsort(client[user], kind="stable")
        ends = np.cumsum(np.bincount(client[user], minlength=num_clients))
        return np.split(order, ends[:-1])

    def _read(self) -> Sequence[int | str]:
        if not isinstance(self.users, str):
            return self.users
        try:
            return Path(self.users).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            requirement = "a text file with one user a line"
            raise ConfigurationError(expected("users", requirement, self.users)) from error

    def __repr__(self) -> str:
        if isinstance(self.users, str):
            return f"ByUser(users={self.users!r})"
        return f"ByUser(users=<{len(set(self.users))} users of {len(self.users)} samples>)"


def _ranks(users: Sequence[int | str]) -> tuple[list[int | str], NDArray[np.int64]]:
    """Return the distinct users in natural order, and for every sample the position of its user."""
    ids = sorted(set(users), key=lambda u: (u,) if isinstance(u, int) else _natural(u))
    rank = {user: i for i, user in enumerate(ids)}
    return ids, np.array([rank[user] for user in users], dtype=np.int64)


def _natural(user: str) -> tuple[Any, ...]:
    """Return a sort key for natural order."""
    # Texts and digits alternate, so that text is compared with text and numbers with numbers. A
    # number is compared by its length, then by its digits; the whole text decides between 7 and 07.
    pieces = re.split(r"([0-9]+)", user)
    numbers = [piece.lstrip("0") for piece in pieces[1::2]]
    pairs = zip(pieces[::2], [*((len(n), n) for n in numbers), (0, "")], strict=True)
    return (*pairs, user)
