"""Who takes part: the clients, their model and the test data; and who is asked in which round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import Dataset

from fedrec._checks import check_choice, check_float
from fedrec.clients.base import Client
from fedrec.clients.lightning import LightningClient
from fedrec.component import Component
from fedrec.exceptions import ConfigurationError, expected
from fedrec.parameters import ParameterVector, keeps_running_statistics
from fedrec.random import numpy_generator

if TYPE_CHECKING:
    from fedrec.data import FederatedDataModule

__all__ = ["ClientSampler", "Federation"]


class Federation:
    """The clients, who among them is malicious, the model and the test data.

    Args:
        clients: At least one; ids are unique and at most 200 characters.
        module: LightningModule whose trainable parameters are the global weights and whose
            `forward` gives logits for testing.
        test_dataset: Map-style data set of (input, label), or `None`.
        malicious: Ids of the clients an attack controls (ground truth of an experiment).
        server_data: Clean data at the server, for methods that need it.
        buffers: What to do about layers that keep running statistics (BatchNorm): `"refuse"`, or
            `"average"` them over the clients asked in a round, weighted by samples.

    Raises:
        ConfigurationError: If ids repeat, a malicious id is unknown, or the model has running
            statistics and `buffers="refuse"`.

    Examples:
        >>> from fedrec.data import Digits
        >>> from fedrec.models import MLP
        >>> federation = Federation.from_data(
        ...     Digits(num_clients=5), MLP(in_features=64), malicious=0.2, batch_size=16
        ... )
        >>> len(federation.clients), len(federation.malicious)
        (5, 1)
    """

    def __init__(
        self,
        clients: Sequence[Client],
        module: nn.Module,
        *,
        test_dataset: Dataset[Any] | None = None,
        malicious: Sequence[str] = (),
        server_data: Dataset[Any] | None = None,
        buffers: str = "refuse",
    ) -> None:
        ids = [client.client_id for client in clients]
        if not ids:
            raise ConfigurationError(expected("clients", "at least one client", []))
        repeated = sorted({i for i in ids if ids.count(i) > 1})
        if repeated:
            raise ConfigurationError(f"Client ids must be unique, but {repeated} repeat.")
        for client_id in ids:
            if not isinstance(client_id, str) or not 0 < len(client_id) <= 200:
                raise ConfigurationError(
                    expected("client_id", "a string of 1 to 200 characters", client_id)
                )
        unknown = sorted(set(malicious) - set(ids))
        if unknown:
            raise ConfigurationError(
                expected("malicious", "ids of clients of this federation", unknown, known=ids[:20])
            )
        check_choice("buffers", buffers, ("refuse", "average"))
        if buffers == "refuse":
            _refuse_running_statistics(module)
        self.clients = tuple(clients)
        self.client_ids = tuple(ids)
        self.module = module
        self.layout = ParameterVector(module)
        self.test_dataset = test_dataset
        self.malicious = tuple(i for i in ids if i in set(malicious))
        self.server_data = server_data
        self.buffers = buffers

    @classmethod
    def from_data(
        cls,
        data: FederatedDataModule,
        module: nn.Module,
        *,
        malicious: int | float | Sequence[str] = 0,
        batch_size: int | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        local_lr: float | None = None,
        seed: int = 0,
        server_data: Dataset[Any] | None = None,
        buffers: str = "refuse",
    ) -> Federation:
        """Make one `LightningClient` per client of a data module, all sharing one module.

        Args:
            data: Training data, partitioned, and test data.
            module: LightningModule.
            malicious: Number of malicious clients, or a fraction in [0, 1), drawn by seed; or ids.
            batch_size: As in `LightningClient`.
            local_steps: As in `LightningClient`.
            local_epochs: As in `LightningClient`.
            local_lr: As in `LightningClient`.
            seed: Decides who is malicious.
            server_data: As in `Federation`.
            buffers: As in `Federation`.
        """
        if not hasattr(data, "client_datasets"):
            raise ConfigurationError(
                expected(
                    "data",
                    "a FederatedDataModule",
                    type(data).__name__,
                    hint="`FederatedDataModule.from_datamodule(data, num_clients=...)` makes one.",
                )
            )
        clients = [
            LightningClient(
                client_id,
                module,
                dataset,
                batch_size=batch_size,
                local_steps=local_steps,
                local_epochs=local_epochs,
                local_lr=local_lr,
            )
            for client_id, dataset in data.client_datasets().items()
        ]
        ids = [client.client_id for client in clients]
        return cls(
            clients,
            module,
            test_dataset=data.test_dataset,
            malicious=_draw_malicious(malicious, ids, seed),
            server_data=server_data,
            buffers=buffers,
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.clients)} clients, {len(self.malicious)} malicious, "
            f"{type(self.module).__name__} with {self.layout.num_parameters} parameters)"
        )


def _draw_malicious(
    malicious: int | float | Sequence[str], ids: Sequence[str], seed: int
) -> Sequence[str]:
    if not isinstance(malicious, (int, float)):
        return malicious
    requirement = f"a count below {len(ids)}, a fraction in [0, 1), or a list of client ids"
    if isinstance(malicious, bool) or malicious < 0:
        raise ConfigurationError(expected("malicious", requirement, malicious))
    if isinstance(malicious, float):
        check_float("malicious", malicious, minimum=0, maximum=1, open_maximum=True)
        count = round(malicious * len(ids))
    else:
        count = malicious
    if count >= len(ids):
        raise ConfigurationError(expected("malicious", requirement, malicious))
    order = numpy_generator(seed, "malicious").permutation(len(ids))
    return [ids[i] for i in sorted(order[:count])]


def _refuse_running_statistics(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if keeps_running_statistics(layer):
            raise ConfigurationError(
                f"Layer `{name}` ({type(layer).__name__}) keeps running statistics, which are not "
                "part of a client update. HINT: use GroupNorm, freeze it with `.eval()`, or pass "
                '`buffers="average"` to average them over the clients asked in a round.'
            )


class ClientSampler(Component):
    """Chooses the clients of a round: a fixed fraction, drawn anew for every round.

    Subclass it and override `sample` for schedules and drop-outs.

    Args:
        fraction: Fraction of the clients that take part, in (0, 1]; at least one does.

    Examples:
        >>> ClientSampler(fraction=0.5).sample(["a", "b", "c", "d"], round=0, seed=0)
        ('a', 'b')
    """

    def __init__(self, fraction: float = 1.0) -> None:
        self.fraction = check_float("fraction", fraction, minimum=0, maximum=1, open_minimum=True)

    def sample(self, client_ids: Sequence[str], round: int, seed: int) -> tuple[str, ...]:
        """Return the cohort of a round, in the order of `client_ids`.

        Args:
            client_ids: All clients.
            round: Round $t$.
            seed: Seed of the recording.
        """
        count = max(1, int(self.fraction * len(client_ids) + 0.5))
        order = numpy_generator(seed, "cohort", round).permutation(len(client_ids))
        return tuple(client_ids[i] for i in sorted(order[:count]))
