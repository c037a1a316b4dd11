"""Messages to nodes that wait for an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

__all__ = ["Mail", "is_lost"]

_LOST = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)


def is_lost(answer: Message) -> bool:
    """Return whether Flower has lost a message or its answer, as when a node has gone."""
    return answer.has_error() and answer.error.code in _LOST


class Mail:
    """Sends messages, and collects each answer once.

    An answer counts only if it is to a message that is still waited for, and from the node that was
    asked: one that is late, or comes twice, is never seen.

    Args:
        grid: Flower's grid.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._waiting: dict[str, tuple[int, float]] = {}  # node and deadline by message id

    def send(self, messages: Mapping[int, Message]) -> list[int]:
        """Send one message to each node.

        Args:
            messages: The messages by node id; each is waited for until its time to live is over.

        Returns:
            Nodes that cannot be reached.
        """
        if not messages:
            return []
        nodes, now = list(messages), time.monotonic()
        ids = list(self._grid.push_messages(list(messages.values())))
        ids += [""] * (len(nodes) - len(ids))
        lost = []
        for node_id, message_id in zip(nodes, ids, strict=True):
            if message_id:
                deadline = now + messages[node_id].metadata.ttl
                self._waiting[message_id] = (node_id, deadline)
            else:
                lost.append(node_id)
        return lost

    def collect(self) -> Iterator[tuple[int, Message]]:
        """Yield the answers that have arrived, with the node that was asked."""
        if not self._waiting:
            return
        for message in self._grid.pull_messages(list(self._waiting)):
            waiting = self._waiting.pop(message.metadata.reply_to_message_id, None)
            if waiting is None:
                continue
            node_id = waiting[0]
            if message.has_error() or message.metadata.src_node_id == node_id:
                yield node_id, message

    def overdue(self) -> list[int]:
        """Return nodes whose time is over, and wait for them no more."""
        now = time.monotonic()
        over = {i: node for i, (node, deadline) in self._waiting.items() if now > deadline}
        for message_id in over:
            del self._waiting[message_id]
        return list(over.values())

    def forget(self, node_id: int) -> None:
        """Wait for a node's answers no more."""
        self._waiting = {i: w for i, w in self._waiting.items() if w[0] != node_id}
