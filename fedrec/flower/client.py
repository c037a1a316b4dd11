"""What the server knows of a client that is elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedrec.clients.base import Client
from fedrec.clients.batches import num_batches
from fedrec.exceptions import ConfigurationError
from fedrec.flower.wire import Card
from fedrec.types import ClientUpdate, RoundContext

__all__ = ["FlowerClient"]


class FlowerClient(Client):
    """A client that a `FlowerExecutor` asks by messages.

    Args:
        client_id: Its id.
        card: What it said about itself when it joined.
        key: Fingerprint of its key, stored with the recording; `None` if any node may be it.
    """

    def __init__(self, client_id: str, card: Card, *, key: str | None = None) -> None:
        super().__init__(client_id, num_samples=card.num_samples)
        self.card = card
        self.key = key

    def local_update(self, global_weights: Tensor, ctx: RoundContext) -> ClientUpdate:
        """Refuse: only a `FlowerExecutor` can ask it."""
        raise ConfigurationError(
            f"Client {self.client_id!r} is behind a node of Flower. HINT: give the loop the "
            "FlowerExecutor that it joined: `FederatedLoop(executor=executor)`."
        )

    def training_args(self) -> dict[str, Any]:
        """Return the arguments of local training that the client said when it joined."""
        args = dict(self.card.training)
        return args if self.key is None else {**args, "key": self.key}

    def num_local_steps(self, ctx: RoundContext) -> int:
        """Return the number of mini-batches of this round."""
        args, work = self.card.training, ctx.work
        steps, epochs = args.get("local_steps"), args.get("local_epochs")
        size = args.get("batch_size")
        if work is not None:
            if work.local_steps is not None or work.local_epochs is not None:
                steps, epochs = work.local_steps, work.local_epochs
            size = size if work.batch_size is None else work.batch_size
        return num_batches(
            num_samples=self.num_samples,
            batch_size=size,
            local_steps=steps,
            local_epochs=epochs,
            drop_last=bool(args.get("drop_last")),
        )
