"""The server's side: rounds whose updates are computed by clients elsewhere."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence

import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedrec._checks import check_float, check_int
from fedrec.clients.base import Client
from fedrec.clients.local import mean_logs
from fedrec.exceptions import ConfigurationError, UpdateError, expected
from fedrec.executors.base import Executor
from fedrec.flower.client import FlowerClient
from fedrec.flower.mail import Mail, is_lost
from fedrec.flower.nodes import Node, Nodes, error_text, key_lists
from fedrec.flower.wire import ASK, Answer, Card, Task, array_of, size_of
from fedrec.parameters import ParameterVector
from fedrec.types import ClientCost, CohortUpdates, RoundContext

__all__ = ["FlowerExecutor"]

_log = logging.getLogger(__name__)

_FASTEST, _SLOWEST = 0.05, 1.0  # seconds between two looks for answers


class FlowerExecutor(Executor):
    """Asks clients of Flower for their updates, with one message to each client of a round.

    First `join` waits for clients, then the executor drives them in a loop. A client that is
    not connected, fails, answers too late, or sends what cannot be used, is refused by name: with
    `on_bad_update="drop"` the round goes on without it, and its reason is stored with the round.

    Args:
        grid: Flower's grid, as a ServerApp gets it.
        timeout: Seconds that a client has for its answer.
        reconnect: Seconds that a client which is not connected is waited for in a round.
        keys: Fingerprints of the public keys of each client's node by client id (see
            `node_key_fingerprint`), one, or several of which the first is stored with the
            recording. Needs authenticated nodes. `None` if nodes may say themselves who they are.

    Attributes:
        nodes: The nodes that have joined.

    Raises:
        ConfigurationError: If an argument is out of range.
    """

    live = True

    def __init__(
        self,
        grid: Grid,
        *,
        timeout: float = 3600.0,
        reconnect: float = 30.0,
        keys: Mapping[str, str | Sequence[str]] | None = None,
    ) -> None:
        if not isinstance(grid, Grid):
            raise ConfigurationError(expected("grid", "Flower's Grid", type(grid).__name__))
        self.grid = grid
        self.timeout = check_float("timeout", timeout, minimum=0, open_minimum=True)
        self.reconnect = check_float("reconnect", reconnect, minimum=0)
        self.keys = key_lists(keys)
        self.nodes = Nodes(grid, self.keys, self.timeout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(timeout={self.timeout:g})"

    def join(
        self,
        module: nn.Module,
        *,
        num_clients: int | None = None,
        client_ids: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> list[FlowerClient]:
        """Wait until clients have joined, and return them, sorted by id.

        Args:
            module: The model; clients with another one are not let in.
            num_clients: How many to wait for.
            client_ids: Instead, whom to wait for; others are left out.
            timeout: Seconds to wait; `None` for the executor's timeout.

        Raises:
            ConfigurationError: If they have not joined in time, or have another model.
        """
        if (num_clients is None) == (client_ids is None):
            hint = "give one of them."
            requirement = "given if `client_ids` is not, and only then"
            raise ConfigurationError(expected("num_clients", requirement, num_clients, hint=hint))
        if num_clients is not None:
            num_clients = check_int("num_clients", num_clients, minimum=1)
        timeout = self.timeout if timeout is None else timeout
        deadline, pause = time.monotonic() + timeout, _FASTEST
        while True:
            self.nodes.refresh()
            there = self.nodes.by_client
            wanted = sorted(there) if client_ids is None else sorted(client_ids)
            missing = [c for c in wanted if c not in there]
            if not missing and len(wanted) >= (num_clients or 0):
                break
            if time.monotonic() > deadline:
                raise ConfigurationError(self._absent(missing, num_clients, timeout))
            time.sleep(pause)
            pause = min(_SLOWEST, 1.4 * pause)
        fingerprint = ParameterVector(module).fingerprint
        others = [c for c in wanted if there[c].card.fingerprint != fingerprint]
        if others:
            raise ConfigurationError(
                f"Clients {others[:10]} have another model than the server (other layers, names or "
                "shapes). HINT: let `make_client_app` and the server make the same module."
            )
        return [
            FlowerClient(c, there[c].card, key=None if self.keys is None else self.keys[c][0])
            for c in wanted
        ]

    def _absent(self, missing: Sequence[str], number: int | None, timeout: float) -> str:
        there = sorted(self.nodes.by_client)
        whom = f"clients {list(missing)[:10]}" if missing else f"{number} clients"
        refused = "; ".join(sorted(set(self.nodes.refused.values()))[:5])
        return (
            f"Expected {whom} to join within {timeout:g} seconds, but {len(there)} are there: "
            f"{there[:10]}.{f' Refused: {refused}.' if refused else ''} HINT: start their "
            "SuperNodes, or wait longer (`timeout=`)."
        )

    def compute(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> CohortUpdates:
        """Send each client its task, and wait for the answers."""
        asked = _flower_clients(clients)
        if not asked:
            return _nothing(global_weights, {})
        self.nodes.refresh()
        answers, refused, costs = _Round(self, asked, global_weights, ctx).run()
        ids = [c for c in asked if c in answers]
        if not ids:
            return _nothing(global_weights, refused, costs)
        sent = [answers[c].update for c in ids]
        buffers = [u.buffers for u in sent if u.buffers is not None]
        return CohortUpdates(
            client_ids=tuple(ids),
            updates=torch.stack([u.update for u in sent]).to(ctx.device),
            num_samples=torch.tensor([u.num_samples for u in sent], dtype=torch.int64),
            metrics=mean_logs([dict(u.metrics) for u in sent]),
            refused={c: refused[c] for c in asked if c in refused},
            buffers=torch.stack(buffers).to(ctx.device) if buffers else None,
            costs=costs,
        )


def _nothing(
    weights: Tensor, refused: Mapping[str, str], costs: Mapping[str, ClientCost] | None = None
) -> CohortUpdates:
    return CohortUpdates(
        client_ids=(),
        updates=weights.new_empty(0, weights.numel()),
        num_samples=torch.empty(0, dtype=torch.int64),
        refused=refused,
        costs=costs or {},
    )


def _flower_clients(clients: Sequence[Client]) -> dict[str, FlowerClient]:
    others = [c for c in clients if not isinstance(c, FlowerClient)]
    if others:
        raise ConfigurationError(
            f"A FlowerExecutor asks the clients that `join` returned, but {others[0]!r} is none. "
            "HINT: `Federation(executor.join(...), module)`."
        )
    return {c.client_id: c for c in clients if isinstance(c, FlowerClient)}


class _Round:
    """One call of `FlowerExecutor.compute`."""

    def __init__(
        self,
        executor: FlowerExecutor,
        clients: Mapping[str, FlowerClient],
        global_weights: Tensor,
        ctx: RoundContext,
    ) -> None:
        self.executor, self.clients, self.ctx = executor, clients, ctx
        self.weights = global_weights
        self.array = array_of(global_weights)
        self.mail = Mail(executor.grid)
        self.began = time.monotonic()
        self.tasks: dict[str, Task] = {}
        self.nodes: dict[str, Node] = {}
        self.lost: dict[str, Node] = {}
        self.answers: dict[str, Answer] = {}
        self.refused: dict[str, str] = {}
        self.costs: dict[str, ClientCost] = {}

    def run(self) -> tuple[dict[str, Answer], dict[str, str], dict[str, ClientCost]]:
        """Return the answers, the reasons of those refused, and what was spent on each client."""
        pause = _FASTEST
        while True:
            self._send()
            got = self._collect()
            for client_id in self._open():
                waited = time.monotonic() - self.began
                if waited > self.executor.timeout:
                    self._refuse(client_id, f"no answer within {self.executor.timeout:g} seconds")
                elif client_id not in self.nodes and waited > self.executor.reconnect:
                    self._refuse(client_id, "it is not connected")
            if not self._open():
                return self.answers, self.refused, self.costs
            pause = _FASTEST if got else min(_SLOWEST, 1.4 * pause)
            time.sleep(pause)
            self.executor.nodes.refresh()

    def _open(self) -> list[str]:
        """Return the clients that are still waited for."""
        return [c for c in self.clients if c not in self.answers and c not in self.refused]

    def _send(self) -> None:
        """Send tasks to clients that have none yet, or whose node has restarted since."""
        there, messages, names = self.executor.nodes.by_client, {}, {}
        for client_id in self._open():
            node = there.get(client_id)
            if node is self.nodes.get(client_id):
                continue
            if client_id in self.nodes:  # it left, or restarted, with the task
                self.mail.forget(self.nodes.pop(client_id).node_id)
            if node is None or node is self.lost.get(client_id):
                continue
            reason = _change(self.clients[client_id].card, node.card)
            if reason is not None:
                self._refuse(client_id, reason)
                continue
            task = Task(
                client_id=client_id,
                ctx=self.ctx,
                global_weights=self.weights,
                nonce=secrets.token_hex(16),
            )
            self.tasks[client_id], self.nodes[client_id] = task, node
            messages[node.node_id] = message = Message(
                task.content(self.array),
                node.node_id,
                ASK,
                ttl=self.executor.timeout,
                group_id=str(self.ctx.round),
            )
            names[node.node_id] = client_id
            self._spend(client_id, size_of(message))
        for node_id in self.mail.send(messages):
            self._refuse(names[node_id], "Flower could not send it the task")

    def _collect(self) -> bool:
        """Read answers that have arrived; return whether there were any."""
        names, got = {n.node_id: c for c, n in self.nodes.items()}, False
        for node_id, message in self.mail.collect():
            client_id, got = names[node_id], True
            if is_lost(message):
                # Should it come back, as the same node or another one, it is asked again.
                self.lost[client_id] = self.nodes.pop(client_id)
                continue
            try:
                if message.has_error():
                    raise UpdateError(error_text(message))
                card = self.clients[client_id].card
                answer = Answer.read(message, self.tasks[client_id], card)
            except UpdateError as error:
                self._spend(client_id, size_of(message))
                self._refuse(client_id, str(error))
            else:
                # It says so itself, but nobody has worked for longer than the server has waited.
                seconds = min(answer.seconds, time.monotonic() - self.began)
                self._spend(client_id, size_of(message), seconds)
                self.answers[client_id] = answer
        return got

    def _spend(self, client_id: str, num_bytes: int, seconds: float = 0.0) -> None:
        before = self.costs.get(client_id, ClientCost(0, 0.0))
        self.costs[client_id] = ClientCost(before.num_bytes + num_bytes, before.seconds + seconds)

    def _refuse(self, client_id: str, reason: str) -> None:
        self.refused[client_id] = reason
        _log.warning("Client %r is left out of round %d: %s.", client_id, self.ctx.round, reason)


def _change(then: Card, now: Card) -> str | None:
    """Say what a client that came back says differently about itself, or `None`."""
    for name in ("client_id", "num_samples", "fingerprint", "training"):
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            return f"it came back with {name} {str(after)[:80]}, but had {str(before)[:80]}"
    return None
