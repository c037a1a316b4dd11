"""The client's side: a ClientApp that trains a LightningModule when it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, Dataset, Subset

from fedrec.clients.lightning import LightningClient
from fedrec.data.datamodule import FederatedDataModule, client_ids
from fedrec.data.lightning import selected_indices
from fedrec.exceptions import ConfigurationError, expected
from fedrec.flower.wire import ASK, VISIT, Answer, Card, Task
from fedrec.functional.kernels._threads import default_threads
from fedrec.parameters import ParameterVector

__all__ = ["client_id_of", "make_client_app"]


def client_id_of(context: Context) -> str:
    """Return the id of the client that a node is, as the node's own settings say.

    That is `client-id` of the node's configuration; in Flower's simulation, where nodes are
    partitions, the partition's in `FederatedDataModule.client_ids`; otherwise nothing, and the
    server names the client by its key.

    Args:
        context: Flower's context of the node.

    Examples:
        >>> from flwr.app import RecordDict
        >>> node = {"partition-id": 3, "num-partitions": 50}
        >>> client_id_of(Context(1, 2, node, RecordDict(), {}))
        'client-03'
    """
    config = context.node_config
    if "client-id" in config:
        return str(config["client-id"])
    if "partition-id" not in config:
        return ""
    number = int(config["partition-id"])
    # Settings written by hand may lack the number of partitions.
    return client_ids(max(int(config.get("num-partitions", 0)), number + 1))[number]


def make_client_app(
    module: Callable[[Context], Any],
    datamodule: Callable[[Context], Any],
    *,
    batch_size: int | None = None,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    local_lr: float | None = None,
    drop_last: bool | None = None,
    num_threads: int | None = None,
    app: ClientApp | None = None,
) -> ClientApp:
    """Make a ClientApp that trains a LightningModule as a `LightningClient` does.

    It answers the messages of a `FlowerExecutor`. These have types of their own, so that an app
    with other handlers can have these, too.

    Args:
        module: Makes the LightningModule, given Flower's context of the node. Its weights do not
            matter: the server sends them.
        datamodule: Makes the client's data, given the context: a LightningDataModule or a data set
            with this client's own data; or, in simulation, a `FederatedDataModule` that has the
            client's id (see `client_id_of`) among its clients.
        batch_size: As in `LightningClient`; `None` for the batch size of the data module's training
            loader, or for the full batch of a data set.
        local_steps: As in `LightningClient`.
        local_epochs: As in `LightningClient`.
        local_lr: As in `LightningClient`.
        drop_last: As in `LightningClient`; `None` for the training loader's.
        num_threads: As in `FederatedLoop`.
        app: A ClientApp that gets the handlers; `None` for a new one.

    Returns:
        The app.

    Examples:
        >>> from fedrec.data import Digits
        >>> from fedrec.models import MLP
        >>> app = make_client_app(
        ...     lambda context: MLP(in_features=64), lambda context: Digits(num_clients=5)
        ... )
    """
    for name, given in (("module", module), ("datamodule", datamodule)):
        if not callable(given):
            requirement = "a function of Flower's context"
            raise ConfigurationError(expected(name, requirement, type(given).__name__))

    def client_of(context: Context) -> LightningClient:
        made = module(context)
        num_parameters = ParameterVector(made).num_parameters
        torch.set_num_threads(
            num_threads or default_threads(num_parameters, torch.get_num_threads())
        )
        client_id = client_id_of(context)
        dataset, size, last, collate = _data(datamodule(context), client_id)
        client = LightningClient(
            client_id or "a client without an id of its own",
            made,
            dataset,
            batch_size=size if batch_size is None else batch_size,
            local_steps=local_steps,
            local_epochs=local_epochs,
            local_lr=local_lr,
            drop_last=last if drop_last is None else drop_last,
            collate_fn=collate,
        )
        client.client_id = client_id  # empty where the server names it by its key
        return client

    app = ClientApp() if app is None else app
    visit_action, ask_action = VISIT.split(".")[1], ASK.split(".")[1]

    @app.query(visit_action)
    def visit(message: Message, context: Context) -> Message:
        client = client_of(context)
        nonce = str(message.content.config_records["visit"]["nonce"])
        content = RecordDict({"card": _card(client, ParameterVector(client.module)).record(nonce)})
        return Message(content, reply_to=message)

    @app.train(ask_action)
    def ask(message: Message, context: Context) -> Message:
        began = time.perf_counter()
        client = client_of(context)
        layout = ParameterVector(client.module)
        card = _card(client, layout)
        task = Task.read(message, layout, client.module)
        if client.client_id and task.client_id != client.client_id:
            raise ConfigurationError(
                f"This is client {client.client_id!r}, but the task is for {task.client_id!r}."
            )
        # A client that its key names draws the batches of the name that the server gave it.
        client.client_id = task.client_id
        update = client.local_update(task.global_weights, task.ctx)
        answer = Answer(update=update, seconds=time.perf_counter() - began)
        return Message(answer.content(task, card), reply_to=message)

    return app


def _card(client: LightningClient, layout: ParameterVector) -> Card:
    return Card(
        client_id=client.client_id,
        num_samples=client.num_samples,
        fingerprint=layout.fingerprint,
        training=client.training_args(),
    )


def _data(data: Any, client_id: str) -> tuple[Dataset[Any], int | None, bool, Any]:
    """Return a client's data set, with batch size, `drop_last` and `collate_fn` of its loader."""
    if isinstance(data, FederatedDataModule):
        datasets = data.client_datasets()
        if client_id not in datasets:
            raise ConfigurationError(
                expected("client-id", "a client of the data module", client_id, known=datasets)
            )
        return datasets[client_id], data.client_batch_size, data.client_drop_last, None
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        loader, method = data.train_dataloader(), f"{type(data).__name__}.train_dataloader"
        sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
        if sampler is None:
            requirement = "a method that returns one DataLoader with a `batch_size`"
            raise ConfigurationError(expected(method, requirement, loader))
        indices = selected_indices(method, loader)
        dataset = loader.dataset
        if len(indices) < len(dataset):
            dataset = Subset(dataset, indices)
        size = getattr(sampler, "batch_size", None)
        last = bool(getattr(sampler, "drop_last", False))
        return dataset, size if isinstance(size, int) else None, last, loader.collate_fn
    return data, None, False, None
