"""Who takes part: the clients, their model and the test data; and who is asked in which round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from fedrec._checks import (
    check_choice,
    check_client_id,
    check_float,
    check_instance,
    check_int,
    is_fraction,
    is_integer,
    is_number,
    of_class,
)
from fedrec.clients.base import Client
from fedrec.clients.batches import CollateFn, check_map_style
from fedrec.clients.fake import FakeClient
from fedrec.clients.hooks import check_datamodule, unwrapped
from fedrec.clients.lightning import LightningClient
from fedrec.clients.prepare import prepare
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
        buffers: What to do about floating-point buffers that training changes, as the running
            statistics of BatchNorm, or a moving average in `forward`: `"refuse"` them, or
            `"average"` them over the clients asked in a round, weighted by samples. One client's
            local training before the first round shows which buffers change. All other buffers
            stay as they are.

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
        for client in clients:
            check_instance("clients", client, Client)
        ids = [client.client_id for client in clients]
        if not ids:
            raise ConfigurationError(expected("clients", "at least one client", []))
        repeated = sorted({i for i in ids if ids.count(i) > 1})
        if repeated:
            raise ConfigurationError(f"Client ids must be unique, but {repeated} repeat.")
        for client_id in ids:
            check_client_id(client_id)
        unknown = sorted(set(malicious) - set(ids))
        if unknown:
            raise ConfigurationError(
                expected("malicious", "ids of clients of this federation", unknown, known=ids[:20])
            )
        check_choice("buffers", buffers, ("refuse", "average"))
        for argument, dataset in (("test_dataset", test_dataset), ("server_data", server_data)):
            if dataset is not None:
                check_map_style(argument, dataset)
        module = unwrapped(module)
        trained = {id(c.module): c for c in clients if isinstance(c, LightningClient)}
        for client in trained.values():
            prepare(client.module, client)
        if id(module) not in trained:
            prepare(module)
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
        drop_last: bool | None = None,
        collate_fn: CollateFn | None = None,
        seed: int = 0,
        server_data: Dataset[Any] | None = None,
        buffers: str = "refuse",
        fake_clients: int = 0,
    ) -> Federation:
        """Make one `LightningClient` per client of a data module, all sharing one module.

        Args:
            data: Training data, partitioned, and test data.
            module: LightningModule.
            malicious: Number of malicious clients, or a fraction in [0, 1), drawn by seed; or ids.
            batch_size: As in `LightningClient`, except that `None` means the batch size of the
                training loader where the data come from a LightningDataModule
                (`from_datamodule`), and the full batch otherwise.
            local_steps: As in `LightningClient`.
            local_epochs: As in `LightningClient`.
            local_lr: As in `LightningClient`.
            drop_last: As in `LightningClient`; `None` for the training loader's `drop_last` where
                the data come from a LightningDataModule, and for `False` otherwise.
            collate_fn: As in `LightningClient`. It also makes the batches of the test data.
            seed: Decides who is malicious.
            server_data: As in `Federation`; `None` for the data module's `server_dataset`.
            buffers: As in `Federation`.
            fake_clients: Number of malicious clients without data (`fake-0` and so on) to add to
                the clients of `data`. Each claims as many samples as a client has on average.
        """
        fake_clients = check_int("fake_clients", fake_clients, minimum=0)
        if not hasattr(data, "client_datasets") or isinstance(data, type):
            raise ConfigurationError(
                expected(
                    "data",
                    "a FederatedDataModule",
                    data if isinstance(data, type) else type(data).__name__,
                    hint=of_class(data)
                    or "`FederatedDataModule.from_datamodule(data, num_clients=...)` makes one.",
                )
            )
        check_datamodule(data)
        datasets = data.client_datasets()
        clients = [
            LightningClient(
                client_id,
                module,
                dataset,
                batch_size=data.client_batch_size if batch_size is None else batch_size,
                local_steps=local_steps,
                local_epochs=local_epochs,
                local_lr=local_lr,
                drop_last=data.client_drop_last if drop_last is None else drop_last,
                collate_fn=collate_fn,
            )
            for client_id, dataset in datasets.items()
        ]
        ids = [client.client_id for client in clients]
        average = round(sum(client.num_samples for client in clients) / len(clients))
        fakes = [FakeClient(i, num_samples=average) for i in fake_ids(fake_clients)]
        return cls(
            [*clients, *fakes],
            module,
            test_dataset=data.test_dataset,
            malicious=[*draw_malicious(malicious, ids, seed), *(f.client_id for f in fakes)],
            server_data=data.server_dataset if server_data is None else server_data,
            buffers=buffers,
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.clients)} clients, {len(self.malicious)} malicious, "
            f"{type(self.module).__name__} with {self.layout.num_parameters} parameters)"
        )


def fake_ids(number: int) -> list[str]:
    """Return the ids of `number` fake clients."""
    return [f"fake-{i}" for i in range(number)]


def draw_malicious(malicious: Any, ids: Sequence[str], seed: int) -> Sequence[str]:
    """Return the ids of the malicious clients.

    Args:
        malicious: Their number, their fraction of all clients, or their ids.
        ids: Ids of all clients.
        seed: Seed of the draw.
    """
    requirement = f"a count below {len(ids)}, a fraction in [0, 1), or a list of client ids"
    if not isinstance(malicious, bool) and not is_number(malicious):
        if isinstance(malicious, str | Tensor) or not isinstance(malicious, Iterable):
            raise ConfigurationError(expected("malicious", requirement, malicious))
        return list(malicious)
    if is_fraction(malicious):
        fraction = check_float("malicious", malicious, minimum=0, maximum=1, open_maximum=True)
        count = round(fraction * len(ids))
    else:
        count = int(malicious) if is_integer(malicious) else -1
    if not 0 <= count < len(ids):
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


def _checked_rounds(argument: str, rounds: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(rounds, Mapping):
        raise ConfigurationError(expected(argument, "a dict from client ids to rounds", rounds))
    return {c: check_int(argument, t, minimum=0) for c, t in rounds.items()}


class ClientSampler(Component):
    """Chooses the cohort of every round.

    Clients that have joined and not left are present. Of these, a fraction, a fixed number, or the
    clients that a schedule names are chosen; then some of the chosen drop out. Every draw is a
    function of the seed, the round and, for drop-outs, the client. Override `sample` for any other
    choice.

    Args:
        fraction: Fraction of the present clients to choose, in (0, 1]; at least one client is.
        num_clients: Number of clients to choose, instead of a fraction; all if fewer are present.
        schedule: Cohorts to take in turn, as lists of client ids, instead of drawing them.
        dropout: Probability in [0, 1) that a chosen client drops out of the round, before it is
            asked. If all would drop out, the client with the largest draw stays.
        joins: By client id, the first round of a client that joins late.
        leaves: By client id, the first round that a client that leaves misses.

    Raises:
        ConfigurationError: If an argument is out of range, more than one of `fraction`,
            `num_clients` and `schedule` is given, or, when sampling, an id is unknown or no client
            is present.

    Examples:
        >>> ClientSampler(fraction=0.5).sample(["a", "b", "c", "d"], round=0, seed=0)
        ('a', 'b')
        >>> late = ClientSampler(joins={"b": 2}, leaves={"a": 3})
        >>> [late.sample(["a", "b"], round=t, seed=0) for t in range(4)]
        [('a',), ('a',), ('a', 'b'), ('b',)]
    """

    def __init__(
        self,
        *,
        fraction: float = 1.0,
        num_clients: int | None = None,
        schedule: Sequence[Sequence[str]] | None = None,
        dropout: float = 0.0,
        joins: Mapping[str, int] | None = None,
        leaves: Mapping[str, int] | None = None,
    ) -> None:
        self.fraction = check_float("fraction", fraction, minimum=0, maximum=1, open_minimum=True)
        if num_clients is not None:
            num_clients = check_int("num_clients", num_clients, minimum=1)
        if schedule is not None and (
            len(schedule) == 0 or any(isinstance(c, str) or len(c) == 0 for c in schedule)
        ):
            requirement = "a list of one or more cohorts, each a list of one or more client ids"
            raise ConfigurationError(expected("schedule", requirement, schedule))
        ways = (fraction != 1.0, num_clients is not None, schedule is not None)
        if sum(ways) > 1:
            raise ConfigurationError(
                "Expected one of `fraction`, `num_clients` and `schedule`, but got "
                f"fraction={fraction}, num_clients={num_clients}, schedule={schedule}."
            )
        self.num_clients = num_clients
        self.schedule = None if schedule is None else tuple(tuple(c) for c in schedule)
        self.dropout = check_float("dropout", dropout, minimum=0, maximum=1, open_maximum=True)
        self.joins = None if joins is None else _checked_rounds("joins", joins)
        self.leaves = None if leaves is None else _checked_rounds("leaves", leaves)

    def sample(self, client_ids: Sequence[str], round: int, seed: int) -> tuple[str, ...]:
        """Return the cohort of a round, in the order of `client_ids`.

        Args:
            client_ids: All clients.
            round: Round $t$.
            seed: Seed of the recording.
        """
        self.check_known(client_ids)
        joins, leaves = self.joins or {}, self.leaves or {}
        present = [
            c for c in client_ids if joins.get(c, 0) <= round and round < leaves.get(c, math.inf)
        ]
        chosen = self._choose(present, round, seed)
        if not chosen:
            raise ConfigurationError(
                f"Round {round} has no client: of {len(client_ids)}, {len(present)} are there. "
                "HINT: let more clients join, or fewer leave, or add them to the round's cohort."
            )
        if self.dropout == 0:
            return chosen
        draws = {c: numpy_generator(seed, "dropout", round, c).random() for c in chosen}
        limit = min(self.dropout, max(draws.values()))
        return tuple(c for c in chosen if draws[c] >= limit)

    def _choose(self, present: Sequence[str], round: int, seed: int) -> tuple[str, ...]:
        if self.schedule is not None:
            cohort = set(self.schedule[round % len(self.schedule)])
            return tuple(c for c in present if c in cohort)
        count = max(1, int(self.fraction * len(present) + 0.5))
        if self.num_clients is not None:
            count = self.num_clients
        order = numpy_generator(seed, "cohort", round).permutation(len(present))
        return tuple(present[i] for i in sorted(order[:count]))

    def check_known(self, client_ids: Sequence[str]) -> None:
        """Raise `ConfigurationError` if the schedule, `joins` or `leaves` name unknown clients.

        Args:
            client_ids: All clients.
        """
        named = {
            "schedule": [c for cohort in self.schedule or () for c in cohort],
            "joins": self.joins or {},
            "leaves": self.leaves or {},
        }
        for argument, ids in named.items():
            unknown = sorted(set(ids) - set(client_ids))
            if unknown:
                requirement = "about clients of this federation"
                raise ConfigurationError(
                    expected(argument, requirement, unknown, known=client_ids[:20])
                )
