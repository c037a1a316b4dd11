"""One round: asking clients, the attack, the checks, the server step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedrec._guard import left_alone
from fedrec.aggregators.base import AggregationContext, Aggregator, ColumnRule
from fedrec.aggregators.shards import aggregate_shards
from fedrec.aggregators.wrapper import ServerStep, needs_of
from fedrec.attacks.base import Attack, AttackContext
from fedrec.clients.base import Client
from fedrec.clients.fake import FakeClient
from fedrec.clients.lightning import LightningClient
from fedrec.clients.objective import LocalWork
from fedrec.component import Component, goes_with
from fedrec.distributed.sharding import Sharding
from fedrec.distributed.updates import ShardedUpdates
from fedrec.exceptions import AggregationError, ConfigurationError, UpdateError
from fedrec.executors.base import Executor
from fedrec.executors.fakes import compute_with_fakes
from fedrec.executors.finite import NONFINITE, nonfinite_clients, refuse_nonfinite
from fedrec.federation import Federation
from fedrec.functional.kernels._finite import are_finite, nonfinite_rows
from fedrec.loop.buffers import AveragedBuffers
from fedrec.loop.crafting import crafted
from fedrec.loop.server import require_lightning, server_client, server_outputs, trained
from fedrec.recoverers.aggregated import AggregatedUpdates
from fedrec.types import CohortUpdates, Phase, RoundContext

__all__ = ["Engine"]

T = TypeVar("T", bound=Component)


@dataclass(kw_only=True, eq=False)
class Engine:
    """Computes rounds, one after another, for one phase of one federation.

    A round is `context`, `ask` as often as needed, `server_step`, `end_round`.

    Args:
        federation: Clients and model.
        phase: `"record"` or `"recover"`.
        executor: Computes honest updates.
        aggregator: The aggregation rule.
        server_lr: Learning rate of the server step.
        attack: The attack of the malicious clients, or `None`.
        malicious: Malicious clients that take part in this phase.
        seed: Seed of the recording.
        device: Device of the tensors.
        autocast: Makes the context manager of the chosen precision.
        batch_policy: `"replay"` or `"fresh"`.
        on_bad_update: `"raise"` or `"drop"`.
        sharding: Which clients this process computes, where there are several; or `None`.

    Attributes:
        last_aggregate: The last result of the aggregation rule, shape $(d,)$, or `None`.
        clients: The clients by id; malicious clients have poisoned data.
        buffers: The averaged buffers.
    """

    federation: Federation
    phase: Phase
    executor: Executor
    aggregator: Aggregator
    server_lr: float
    attack: Attack | None
    malicious: frozenset[str]
    seed: int
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    batch_policy: str = "replay"
    on_bad_update: str = "raise"
    sharding: Sharding | None = None
    last_aggregate: Tensor | None = None
    clients: dict[str, Client] = field(init=False)
    buffers: AveragedBuffers = field(init=False)
    _server: Client | None = field(init=False, default=None)
    _crafted: tuple[int, CohortUpdates] | None = field(init=False, default=None)
    _column_rule: tuple[tuple[str, ...], ColumnRule | None] | None = field(init=False, default=None)
    # Rows that nobody has looked at, in the order in which they came, each with a function that
    # raises an error if they are not finite.
    _unread: tuple[tuple[Tensor, Callable[[], None]], ...] = field(init=False, default=())
    _reads_later: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.aggregator = _fresh(self.aggregator)
        if self.attack is not None:
            self.attack.reset(self.federation.malicious)
        self.clients = {c.client_id: self._poisoned(c) for c in self.federation.clients}
        self.buffers = AveragedBuffers(self.federation, self.device)
        if self.aggregator.needs_server_update:
            self._server = server_client(self.federation, type(self.aggregator).__name__)
        for client in self.clients.values():
            if isinstance(client, LightningClient):
                client.module.to(self.device)
        self.federation.module.to(self.device)

    def _poisoned(self, client: Client) -> Client:
        """Return a malicious client with poisoned data, any other client as it is."""
        if self.attack is None or client.client_id not in self.malicious:
            return client
        if self.sharding is not None and not self.sharding.is_own(client.client_id):
            return client  # its data are read elsewhere
        if not self.attack.poisons_data or isinstance(client, FakeClient):
            return client
        if not isinstance(client, LightningClient):
            raise ConfigurationError(
                f"{type(self.attack).__name__} poisons data, but client {client.client_id!r} is a "
                f"{type(client).__name__}, whose data fedrec cannot reach. HINT: make malicious "
                "clients LightningClients, or let their `local_update` train on poisoned data."
            )
        method = f"{type(self.attack).__name__}.poison_dataset"
        tensors = client.dataset.tensors if isinstance(client.dataset, TensorDataset) else ()
        held = {f"dataset.tensors[{i}]": t for i, t in enumerate(tensors)}
        with left_alone(method, ConfigurationError, **held):
            dataset = self.attack.poison_dataset(client.dataset, client.client_id)
        if dataset is client.dataset:
            return client
        size = len(dataset) if isinstance(dataset, Sized) else None
        if not size:
            found = type(dataset).__name__ if size is None else "one without samples"
            raise ConfigurationError(
                f"Expected {method} to return a data set with samples for client "
                f"{client.client_id!r}, but got {found}. HINT: return the `dataset` that it was "
                "given to leave a client as it is."
            )
        return client.with_dataset(dataset)

    def context(
        self,
        t: int,
        client_ids: Sequence[str],
        global_weights: Tensor,
        logger: Callable[[str, float], None] = lambda name, value: None,
    ) -> RoundContext:
        """Return the context that the clients of a round are given.

        Args:
            t: The round.
            client_ids: The cohort.
            global_weights: Shape $(d,)$.
            logger: Called with a name and a number that is logged; by default nothing is logged.
        """
        return RoundContext(
            round=t,
            phase=self.phase,
            client_ids=tuple(client_ids),
            global_weights=global_weights,
            layout=self.federation.layout,
            seed=self.seed,
            purpose="client",
            device=self.device,
            autocast=self.autocast,
            logger=logger,
            server_data=self.federation.server_data,
            batch_policy=self.batch_policy,
            buffers=self.buffers.values,
        )

    def ask(
        self,
        ctx: RoundContext,
        client_ids: Sequence[str],
        work: LocalWork | None = None,
        *,
        read_later: bool = False,
    ) -> CohortUpdates:
        """Return what clients send: updates that are crafted if malicious, and then checked.

        A full-knowledge attacker sees the honest updates of the whole cohort, even if only some
        clients are asked. These updates are computed once per round, as part of the simulation.
        Attackers that collude see each other's honest updates.

        Args:
            ctx: The round.
            client_ids: The clients.
            work: Other work than their own, or `None`.
            read_later: Whether it is left to the next `server_step` to find out if updates are
                finite, where nobody is dropped for that: the device is read once for both.
        """
        asked = list(client_ids)
        keeps_all = self.on_bad_update == "raise" and self.sharding is None
        later = read_later and self._waits and keeps_all
        self._reads_later = later and self.buffers.values is None
        self._unread = ()
        if self._is_attacked(ctx, asked):
            sent = _part(self._attacked(ctx, asked, work), asked)
            self._require_usable(sent, asked)
        else:
            sent = self._honest(ctx, asked, work, asked)
        self.buffers.add(sent)
        return sent

    def _honest(
        self,
        ctx: RoundContext,
        client_ids: Sequence[str],
        work: LocalWork | None,
        asked: Sequence[str],
    ) -> CohortUpdates:
        """Return the honest updates of clients; updates that are not finite are refused."""
        sent = self._compute(ctx, client_ids, work)
        if self._reads_later:
            self._read_later(sent)
        elif not isinstance(sent, ShardedUpdates):  # of shards, each rank has checked its own
            sent = refuse_nonfinite(sent, buffers=self.buffers.values is not None)
        # An update that is computed only for an attacker to see raises no error.
        self._require_usable(sent, asked)
        return sent

    def _compute(
        self, ctx: RoundContext, client_ids: Sequence[str], work: LocalWork | None
    ) -> CohortUpdates:
        if work is not None:
            ctx = dataclasses.replace(ctx, work=work)
            require_lightning(work, [self.clients[c] for c in client_ids])
        clients = self.clients
        if self.attack is not None and not self.attack.is_active(ctx.round):
            clients = {c.client_id: c for c in self.federation.clients}
        asked = [clients[c] for c in client_ids]
        if self.sharding is not None:
            return self.executor.compute(asked, ctx.global_weights, ctx)
        return compute_with_fakes(self.executor, asked, ctx.global_weights, ctx)

    def _require_usable(self, sent: CohortUpdates, asked: Sequence[str]) -> None:
        """Raise `UpdateError` if an asked client was refused, unless refused ones are dropped."""
        refused = {c: why for c, why in sent.refused.items() if c in asked}
        if refused and self.on_bad_update == "raise":
            reasons = "; ".join(f"client {c!r}: {why}" for c, why in refused.items())
            raise UpdateError(
                f"Refused updates: {reasons}. Nothing of this round was stored. HINT: lower the "
                "learning rate if training diverges, or leave such clients out with "
                '`on_bad_update="drop"`.'
            )

    def _is_attacked(self, ctx: RoundContext, asked: Sequence[str]) -> bool:
        return (
            self.attack is not None
            and self.attack.crafts_updates
            and self.attack.is_active(ctx.round)
            and not self.malicious.isdisjoint(asked)
        )

    def _attacked(
        self, ctx: RoundContext, asked: Sequence[str], work: LocalWork | None
    ) -> CohortUpdates:
        """Return what the asked clients send, and others whose updates the attackers see."""
        sees_all = self.attack is not None and self.attack.full_knowledge
        if sees_all and work is None and self._crafted and self._crafted[0] == ctx.round:
            return self._crafted[1]
        seen = list(ctx.client_ids if sees_all else asked)
        if not sees_all and self.attack is not None and self.attack.colludes:
            others = self.malicious.difference(asked)
            seen += [c for c in ctx.client_ids if c in others]
        honest = self._honest(ctx, seen, work, asked)
        with self._reading_first():
            sent = self._craft(ctx, honest)
        malicious = sent.select([c for c in sent.client_ids if c in self.malicious])
        if self._reads_later:
            self._read_later(malicious)
        else:
            sent = sent.refusing(dict.fromkeys(nonfinite_clients(malicious), NONFINITE))
        if sees_all and work is None:
            self._crafted = (ctx.round, sent)
        return sent

    @property
    def _waits(self) -> bool:
        """Whether this process waits for a device when it looks at a value."""
        return self.device != torch.device("cpu")

    def _read_later(self, sent: CohortUpdates) -> None:
        """Leave it to `server_step` to raise `UpdateError` for updates that are not finite."""

        def read() -> None:
            bad = nonfinite_clients(sent)
            self._require_usable(sent.refusing(dict.fromkeys(bad, NONFINITE)), bad)

        self._unread = (*self._unread, (sent.updates, read))

    def _read(self) -> None:
        """Raise an error if rows that nobody has looked at are not finite."""
        unread, self._unread = self._unread, ()
        for _, read in unread:
            read()

    @contextmanager
    def _reading_first(self) -> Iterator[None]:
        """Of what fails with rows that are not finite, say this, and not how it failed."""
        try:
            yield
        except Exception:
            self._read()
            raise

    def _craft(self, ctx: RoundContext, sent: CohortUpdates) -> CohortUpdates:
        if self.attack is None or self.malicious.isdisjoint(sent.client_ids):
            return sent

        streams: dict[str, tuple[torch.Generator, int]] = {}

        def make_context(client_ids: Sequence[str], columns: slice | None) -> AttackContext:
            aggregator = self.aggregator
            if aggregator.has_memory:  # an attacker that tries it out must not change its memory
                aggregator = copy.deepcopy(aggregator)
            return ctx.extended(
                AttackContext,
                purpose="attack",
                client_ids=tuple(client_ids),
                aggregator=aggregator,
                server_lr=self.server_lr,
                last_aggregate=self.last_aggregate,
                num_malicious=len(self.malicious),
                num_malicious_total=len(self.federation.malicious),
                cohort_size=len(ctx.client_ids),
                cohort_malicious=len(self.malicious.intersection(ctx.client_ids)),
                columns=columns,
                streams=streams,
            )

        keep = needs_of(self.aggregator) in ("columns", "gram")
        return crafted(self.attack, sent, self.malicious, make_context, keep=keep)

    def server_step(
        self,
        ctx: RoundContext,
        sent: CohortUpdates,
        global_weights: Tensor,
        *,
        num_samples: Tensor | None = None,
        is_checked: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Aggregate updates, and do the server step.

        Args:
            ctx: The round.
            sent: What to aggregate.
            global_weights: The weights to step from, shape $(d,)$.
            num_samples: Sizes that count in place of those in `sent`, shape $(m,)$.
            is_checked: Whether it is what `ask` returned, which is finite or in any case looked at.

        Returns:
            The next global weights and the aggregate, each of shape $(d,)$.

        Raises:
            AggregationError: If updates that are not checked, or the next global weights, are not
                finite.
            UpdateError: If updates that `ask` has not looked at are not finite.
        """
        if isinstance(sent, AggregatedUpdates):
            aggregate = sent.aggregate
        else:
            if num_samples is None:
                num_samples = sent.num_samples
            if not is_checked:
                if isinstance(sent, ShardedUpdates) and needs_of(self.aggregator) != "rows":
                    rows, ids = sent.part, tuple(sent.own_ids)
                else:
                    rows, ids = sent.updates, sent.client_ids
                read = partial(self.aggregator.require_finite, rows, ids)
                self._unread = (*self._unread, (rows, read))
                if not self._waits:
                    self._read()
            with self._reading_first():
                aggregate = self._aggregate(ctx, sent, global_weights, num_samples)
        new = self.apply(global_weights, aggregate)
        # Looking at values makes the processor wait for a GPU: once, at all of them.
        if not are_finite(new, *(rows for rows, _ in self._unread)):
            self._read()
            if nonfinite_rows(new[None]):
                raise AggregationError(
                    f"The server step of round {ctx.round} gave non-finite global weights. Nothing "
                    "of this round was stored. HINT: training diverges; lower `server_lr`."
                )
        self._unread = ()
        self.last_aggregate = aggregate
        return new, aggregate

    def _aggregate(
        self,
        ctx: RoundContext,
        sent: CohortUpdates,
        global_weights: Tensor,
        num_samples: Tensor,
    ) -> Tensor:
        """Aggregate updates, with all that the rule needs; see `server_step`."""
        server_update = None
        if self._server is not None:
            server_update = trained(self._server, global_weights, ctx).updates[0]
        outputs = None
        if self.aggregator.needs_outputs:
            outputs = partial(server_outputs, self.federation, self.buffers.values)
        aggregation_ctx = ctx.extended(
            AggregationContext,
            purpose="aggregator",
            client_ids=sent.client_ids,
            global_weights=global_weights,
            server_update=server_update,
            outputs=outputs,
        )
        weights = _shares(num_samples, global_weights)
        rule = self.aggregator
        if isinstance(sent, ShardedUpdates) and needs_of(rule) != "rows":
            return aggregate_shards(rule, sent, weights, aggregation_ctx)
        checked = dataclasses.replace(aggregation_ctx, checked=sent.updates)
        return rule(sent.updates, weights, checked)

    def column_rule(
        self, client_ids: Sequence[str], num_samples: Callable[[Sequence[str]], Tensor]
    ) -> ColumnRule | None:
        """Return what `server_step` does with every column of updates.

        It is made once for the same clients in round after round.

        Args:
            client_ids: The clients, at least one.
            num_samples: Returns the sizes of clients, shape $(m,)$.

        Returns:
            `None` if the rule does something that a `ColumnRule` cannot say.

        Raises:
            AggregationError: If the rule cannot work with so many clients.
        """
        ids = tuple(client_ids)
        if self._column_rule is None or self._column_rule[0] != ids:
            self._column_rule = ids, self._make_column_rule(num_samples(ids))
        return self._column_rule[1]

    def _make_column_rule(self, num_samples: Tensor) -> ColumnRule | None:
        rule, m = self.aggregator, len(num_samples)
        if rule.has_memory:
            return None
        if needs_of(rule) == "sums" and not isinstance(rule, ServerStep):
            rule.check_cohort(m)
            factors = rule.coefficients(_shares(num_samples, torch.empty(0)))
            return ColumnRule(factors, 0, self.server_lr)
        num_trim = rule.trims(m) if _is_of_aggregate(rule, "trims") else None
        if num_trim is None:
            return None
        rule.check_cohort(m)
        return ColumnRule(None, num_trim, self.server_lr)

    def apply(self, global_weights: Tensor, aggregate: Tensor) -> Tensor:
        """Return `global_weights - server_lr * aggregate`."""
        return global_weights - self.server_lr * aggregate

    def end_round(self) -> None:
        """Average the buffers of the clients asked in this round."""
        self._crafted = None
        self.buffers.end_round()

    def coefficients(self, num_samples: Tensor) -> Tensor | None:
        """Return the fixed factors of clients' rows in the aggregation rule, or `None`."""
        if not _is_of_aggregate(self.aggregator, "coefficients"):
            return None
        return self.aggregator.coefficients(_shares(num_samples, torch.empty(0)))

    def simulate(self, ctx: RoundContext, client_ids: Sequence[str]) -> CohortUpdates:
        """Return what `ask` would, without changing any state or raising an `UpdateError`."""
        simulation = copy.copy(self)
        simulation.attack = copy.deepcopy(self.attack)  # crafting may change an attack's memory
        simulation.buffers = copy.copy(self.buffers)
        simulation.on_bad_update = "drop"
        silent = dataclasses.replace(ctx, logger=lambda name, value: None)
        return simulation.ask(silent, client_ids)

    @property
    def attack_has_memory(self) -> bool:
        """Whether the attack has a memory: what it crafts depends on earlier rounds."""
        return self.attack is not None and self.attack.has_memory

    def remember(self, ctx: RoundContext, sent: CohortUpdates) -> None:
        """Let an attack with a memory craft again from a round's updates as they are stored."""
        if self.attack is not None and self.attack_has_memory and self.attack.is_active(ctx.round):
            self._craft(ctx, sent)


def _shares(num_samples: Tensor, like: Tensor) -> Tensor:
    """Return each client's share of all samples, dtype and device of a tensor."""
    return num_samples.to(like) / num_samples.sum().to(like)


def _fresh(component: T) -> T:
    """Return a new component with the same arguments, and without any memory."""
    arguments = {
        name: _fresh(value) if isinstance(value, Component) else value
        for name, value in component.init_args().items()
    }
    made = type(component)(**arguments)
    # Not by a `repr` of the class itself, which may have a memory in it.
    if Component.__repr__(made) != Component.__repr__(component):
        raise ConfigurationError(
            f"Expected {type(component).__name__} to store its arguments as they are given, since "
            f"it is made again from them, but {Component.__repr__(component)} becomes "
            f"{Component.__repr__(made)}. HINT: store what is computed from an argument under "
            "another name."
        )
    return made


def _is_of_aggregate(aggregator: Aggregator, name: str) -> bool:
    """Whether what a rule says of itself goes for its `aggregate`, which no subclass replaced."""
    return goes_with(aggregator, name, "aggregate", "__call__")


def _part(sent: CohortUpdates, asked: Sequence[str]) -> CohortUpdates:
    """Return the updates and refusals of the asked clients only, in the order of `asked`."""
    usable = set(sent.client_ids)
    refused = {c: why for c, why in sent.refused.items() if c in asked}
    return sent.select([c for c in asked if c in usable]).with_besides(refused=refused)
