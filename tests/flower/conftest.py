"""Flower without a network: a grid that hands messages to apps in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedrec import FederatedLoop, Federation
from fedrec.data import Digits
from fedrec.flower import FlowerExecutor, make_client_app
from fedrec.models import MLP

TRAINING = {"batch_size": 16, "local_steps": 1}


def make_module(context: Context | None = None) -> MLP:
    torch.manual_seed(0)
    return MLP(in_features=64)


@dataclasses.dataclass
class FakeNode:
    """A node: what runs there, and what happens to its answers."""

    app: Any
    config: dict[str, Any]
    key: bytes
    started: str = "1"
    silent: bool = False
    tamper: Callable[[Message, Message], Iterable[Message]] | None = None
    asked: list[Message] = dataclasses.field(default_factory=list)


class FakeGrid(Grid):
    """Hands each message to its node's app when it is pushed."""

    def __init__(self) -> None:
        self.nodes: dict[int, FakeNode] = {}
        self.inbox: list[Message] = []

    def add(self, client_id: str, **changes: Any) -> FakeNode:
        number = 100 + len(self.nodes)
        app = make_client_app(make_module, lambda context: Digits(num_clients=4), **TRAINING)
        node = FakeNode(app, {"client-id": client_id}, key=f"key of {client_id}".encode())
        self.nodes[number] = node = dataclasses.replace(node, **changes)
        return node

    def find(self, client_id: str) -> FakeNode:
        return next(n for n in self.nodes.values() if n.config.get("client-id") == client_id)

    def drop(self, client_id: str) -> FakeNode:
        (number,) = [i for i, n in self.nodes.items() if n is self.find(client_id)]
        return self.nodes.pop(number)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=i, last_activated_at=n.started, public_key=n.key)
            for i, n in self.nodes.items()
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        number = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = message.object_id
        node = self.nodes.get(number)
        if node is None:
            return ""
        node.asked.append(message)
        if node.silent:
            return message.metadata.message_id
        context = Context(1, number, node.config, RecordDict(), {})
        try:
            reply = node.app(message, context)
        except Exception as error:  # noqa: BLE001 - as Flower does
            reply = Message(Error(2, str(error)), reply_to=message)
        replies = [reply] if node.tamper is None else node.tamper(message, reply)
        self.inbox.extend(replies)
        return message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        found = [m for m in self.inbox if m.metadata.reply_to_message_id in wanted]
        self.inbox = [m for m in self.inbox if m not in found]
        return found

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(list(messages)))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for nodes that came or left each time, not each second."""
    monkeypatch.setattr("fedrec.flower.nodes._REFRESH", 0.0)
    # What Flower sets in the process that runs a ServerApp.
    for name, value in (("run_id", 1), ("node_id", 1), ("task_id", 1)):
        monkeypatch.setattr(TaskIdentity, f"_{name}", value)


@pytest.fixture
def grid() -> FakeGrid:
    """Four clients of the digits, who have joined."""
    made = FakeGrid()
    for i in range(4):
        made.add(f"client-{i}")
    return made


@pytest.fixture
def make_loop(tmp_path: Any) -> Callable[..., FederatedLoop]:
    def make(executor: Any, **settings: Any) -> FederatedLoop:
        return FederatedLoop(
            executor=executor,
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            **settings,
        )

    return make


@pytest.fixture
def joined(grid: FakeGrid) -> tuple[FlowerExecutor, Federation]:
    """An executor, and the federation of the clients that have joined it."""
    executor = FlowerExecutor(grid, timeout=0.5, reconnect=0)
    module = make_module()
    clients = executor.join(module, num_clients=4)
    return executor, Federation(clients, module, test_dataset=Digits(num_clients=4).test_dataset)


@pytest.fixture
def in_process() -> Federation:
    """The same clients, in this process."""
    return Federation.from_data(Digits(num_clients=4), make_module(), **TRAINING)
