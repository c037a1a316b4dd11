"""Which node is which client: who has joined, with what, and under which key."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedrec._checks import check_instance
from fedrec.exceptions import ConfigurationError, UpdateError, expected
from fedrec.flower.mail import Mail, is_lost
from fedrec.flower.wire import VISIT, Card

__all__ = ["Node", "Nodes", "error_text", "key_fingerprint", "key_lists"]

_log = logging.getLogger(__name__)

_REFRESH = 1.0  # seconds between two looks at which nodes are connected
_FASTEST = 0.05  # seconds before answers are looked for again, at first


def key_fingerprint(public_key: bytes) -> str:
    """Return a short name of a node's public key, of 32 hexadecimal digits.

    Args:
        public_key: The key as Flower stores it: PEM.

    Examples:
        >>> key_fingerprint(b"-----BEGIN PUBLIC KEY-----")
        '59a58325e88756ac23f5bb454ca0de6a'
    """
    return hashlib.sha256(public_key.strip()).hexdigest()[:32]


def key_lists(
    keys: Mapping[str, str | Sequence[str]] | None,
) -> dict[str, tuple[str, ...]] | None:
    """Return the fingerprints that each client may have, given one or several by client id.

    Raises:
        ConfigurationError: If one is no text, or is listed for two clients.
    """
    if keys is None:
        return None
    check_instance("keys", keys, Mapping)
    lists: dict[str, tuple[str, ...]] = {}
    owners: dict[str, str] = {}
    for client_id, given in keys.items():
        listed = (given,) if isinstance(given, str) else given
        if not (
            isinstance(listed, Sequence)
            and listed
            and all(isinstance(key, str) and key for key in listed)
        ):
            requirement = "a fingerprint, or a list of some"
            raise ConfigurationError(expected(f"keys[{client_id!r}]", requirement, given))
        lists[client_id] = tuple(listed)
        for key in listed:
            owner = owners.setdefault(key, client_id)
            if owner != client_id:
                raise ConfigurationError(
                    f"Expected `keys` to have each fingerprint once, but {key!r} is that of "
                    f"`{owner}` and of `{client_id}`: updates could not be told apart."
                )
    return lists


@dataclass(frozen=True, kw_only=True)
class Node:
    """A connected node, and the client that it is.

    Args:
        node_id: Flower's id of the node; another one after a restart with another key.
        started: When it connected, as Flower's server noted; another time after each restart.
        key: `key_fingerprint` of its public key.
        card: What it says about itself.
    """

    node_id: int
    started: str
    key: str
    card: Card


class Nodes:
    """The nodes that have joined, by client id.

    A node is asked for its card when it appears, and again if it does not answer. A node whose card
    cannot be read, whose key is not the client's, or whose client is there already under another
    key, is refused by name and left alone until it restarts.

    Args:
        grid: Flower's grid.
        keys: Fingerprints of the keys that each client may have, by client id; `None` if any node
            may be any client.
        patience: Seconds that a node has for its card.
    """

    def __init__(
        self, grid: Grid, keys: Mapping[str, tuple[str, ...]] | None, patience: float
    ) -> None:
        self.by_client: dict[str, Node] = {}
        #: Why nodes were refused, by node id.
        self.refused: dict[int, str] = {}
        self._grid = grid
        self._keys = keys
        self._patience = patience
        self._mail = Mail(grid)
        self._nonces: dict[int, str] = {}
        self._infos: dict[int, tuple[str, str]] = {}
        self._looked = float("-inf")

    def refresh(self) -> None:
        """Take note of nodes that came, left or restarted, and of cards that arrived."""
        if time.monotonic() - self._looked >= _REFRESH:
            self._look()
            self._looked = time.monotonic()
        for node_id, message in self._mail.collect():
            nonce = self._nonces.pop(node_id, "")
            if is_lost(message):
                self._ask_again(node_id)
            else:
                self._read(node_id, message, nonce)
        for node_id in self._mail.overdue():
            self._ask_again(node_id)

    def wait(self) -> None:
        """Take note of nodes as `refresh` does, and wait until each has said who it is.

        It waits for at most `patience` seconds.
        """
        deadline, pause = time.monotonic() + self._patience, _FASTEST
        self.refresh()
        while self._nonces and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(_REFRESH, 1.4 * pause)
            self.refresh()

    def _look(self) -> None:
        infos = {n.node_id: n for n in self._grid.get_nodes()}
        now = {i: (n.last_activated_at, key_fingerprint(n.public_key)) for i, n in infos.items()}
        gone = [i for i, known in self._infos.items() if now.get(i) != known]
        for node_id in gone:
            del self._infos[node_id]
            self.refused.pop(node_id, None)
            self._nonces.pop(node_id, None)
            self._mail.forget(node_id)
        self.by_client = {c: n for c, n in self.by_client.items() if n.node_id in self._infos}
        visits = {}
        for node_id, known in now.items():
            if node_id in self._infos:
                continue
            self._infos[node_id] = known
            if self._keys is not None and not self._owners(known[1]):
                self._refuse(node_id, f"its key {known[1]} is no client's")
            else:
                self._nonces[node_id] = nonce = secrets.token_hex(16)
                content = RecordDict({"visit": ConfigRecord({"nonce": nonce})})
                visits[node_id] = Message(content, node_id, VISIT, ttl=self._patience)
        for node_id in self._mail.send(visits):
            self._ask_again(node_id)

    def _ask_again(self, node_id: int) -> None:
        self._refuse(node_id, "it has not said yet who it is")
        self._nonces.pop(node_id, None)
        del self._infos[node_id]  # as if it had just come

    def _read(self, node_id: int, message: Message, nonce: str) -> None:
        started, key = self._infos[node_id]
        try:
            if message.has_error():
                raise UpdateError(error_text(message))
            card = Card.read(message, nonce)
            client_id = self._name(card, key)
        except UpdateError as error:
            self._refuse(node_id, str(error))
            return
        other = self.by_client.get(client_id)
        if other is not None:
            self._refuse(node_id, f"client {client_id!r} is there already, as another node")
            return
        self.refused.pop(node_id, None)
        self.by_client[client_id] = Node(node_id=node_id, started=started, key=key, card=card)

    def _name(self, card: Card, key: str) -> str:
        """Return the id of a client, from its card and its key."""
        if self._keys is None:
            return card.client_id or f"key-{key}"
        names = self._owners(key)
        if card.client_id and card.client_id not in names:
            raise UpdateError(f"it claims to be {card.client_id[:50]!r}, but has another key")
        return card.client_id or names[0]

    def _owners(self, key: str) -> list[str]:
        """Return the clients that may have a key."""
        return [c for c, keys in (self._keys or {}).items() if key in keys]

    def _refuse(self, node_id: int, reason: str) -> None:
        self.refused[node_id] = reason
        _log.warning("Node %d is refused: %s.", node_id, reason)


def error_text(message: Message) -> str:
    """Return why a client's app failed, in one short line."""
    reason = " ".join(str(message.error.reason).split())
    return f"its app failed (code {message.error.code}): {reason[:300]}"
