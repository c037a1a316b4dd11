"""What recording and recovery share: asking clients, the attack, the checks, the server step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.attacks.base import Attack, AttackContext
from fedrec.clients.base import Client
from fedrec.clients.batches import is_plain
from fedrec.clients.fake import FakeClient
from fedrec.clients.lightning import LightningClient
from fedrec.clients.local import random_numbers
from fedrec.clients.objective import LocalWork
from fedrec.clients.state import state_of
from fedrec.component import Component
from fedrec.exceptions import AggregationError, ConfigurationError, UpdateError
from fedrec.executors.base import Executor
from fedrec.executors.sequential import SequentialExecutor
from fedrec.federation import Federation
from fedrec.functional.aggregation.order_statistics import choose_kernel
from fedrec.functional.kernels._finite import nonfinite_rows
from fedrec.loop.server import require_lightning, server_client, trained
from fedrec.parameters import ParameterVector, averageable_buffers
from fedrec.types import CohortUpdates, Phase, RoundContext

__all__ = ["Engine"]

T = TypeVar("T", bound=Component)

# Relative differences that the order of summation explains: in float32 on a CPU, and elsewhere,
# where it changes from time to time, and many local steps make more of it.
_REPEATS = 1e-3
_REPEATS_ROUGHLY = 5e-2


@dataclass(kw_only=True, eq=False)
class Engine:
    """One round's parts, for one phase of one federation.

    Args:
        federation: Clients and model.
        phase: `"record"` or `"recover"`.
        executor: Computes honest updates.
        aggregator: The aggregation rule.
        server_lr: Learning rate of the server step.
        attack: What malicious clients do, or `None`.
        malicious: Malicious clients that take part in this phase.
        seed: Seed of the recording.
        device: Where tensors live.
        autocast: Context manager of the chosen precision.
        batch_policy: `"replay"` or `"fresh"`.
        on_bad_update: `"raise"` or `"drop"`.
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
    last_aggregate: Tensor | None = None
    buffers: Tensor | None = None
    clients: dict[str, Client] = field(init=False)
    _fakes: frozenset[str] = field(init=False)
    _server: Client | None = field(init=False, default=None)
    _crafted: tuple[int, CohortUpdates] | None = field(init=False, default=None)
    _new_buffers: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.aggregator = _fresh(self.aggregator)
        if self.attack is not None:
            self.attack.reset(self.federation.malicious)
        self.clients = {c.client_id: self._poisoned(c) for c in self.federation.clients}
        self._fakes = frozenset(c for c, one in self.clients.items() if isinstance(one, FakeClient))
        if self.aggregator.needs_server_update:
            self._server = server_client(self.federation, type(self.aggregator).__name__)
        for client in self.clients.values():
            if isinstance(client, LightningClient):
                client.module.to(self.device)
        self.federation.module.to(self.device)

    def average_buffers(self, names: Iterable[str] | Mapping[str, Mapping[str, Any]]) -> None:
        """Let these buffers be averaged, from what the module has now.

        Args:
            names: Their names, or what a manifest says of them.

        Raises:
            ConfigurationError: If the module does not have them so, or the federation refuses.
        """
        names = names if isinstance(names, Mapping) else list(names)
        if names and self.federation.buffers == "refuse":
            raise ConfigurationError(
                f"Training changes buffers of {type(self.federation.module).__name__}, which are "
                f"not part of a client update: {', '.join(f'`{name}`' for name in names)}. HINT: "
                'keep them as they are in training, or pass `buffers="average"` to average them '
                "over the clients asked in a round."
            )
        layout, module = self.federation.layout, self.federation.module
        layout.select_buffers(module, names)
        self.buffers = layout.buffers(module) if names else None

    def check_repeatable(self, global_weights: Tensor) -> None:
        """Refuse data that cannot be read again as they were, as one client's first batch shows.

        Raises:
            ConfigurationError: If it is another batch when it is read again.
        """
        clients = [c for c in self.federation.clients if isinstance(c, LightningClient)]
        client = next((c for c in clients if not is_plain(c.dataset, c.collate_fn)), None)
        if client is None:
            return
        ctx = self.context(0, self.federation.client_ids, global_weights, lambda name, value: None)
        indices, batches = client.batches(ctx)[0], list[Any]()
        for _ in range(3):  # the first may make what is kept, a generator say
            with random_numbers(ctx, client.client_id, client.generators()):
                batches.append(client.read(indices, torch.device("cpu")))
            if len(batches) > 1 and _are_equal(*batches[-2:]):
                return
        raise ConfigurationError(
            f"Client {client.client_id!r} gives another batch each time the same samples are read, "
            "with the same seeds, so that no recovery can replay its training. HINT: draw from "
            "torch, NumPy's global generator, Python's `random`, or generators that the data set "
            "or its transforms hold, and keep no count of samples read."
        )

    def rehearse(self, global_weights: Tensor) -> list[str]:
        """Return the buffers that one client's local training changes in the first two rounds.

        Two, since some follow from weights, and change only once those have. Nothing else comes of
        it. Running statistics are known without.
        """
        module, layout = self.federation.module, ParameterVector(self.federation.module)
        statistics, names = set(layout.buffer_names), averageable_buffers(module)
        client = next((c for c in self.federation.clients if isinstance(c, LightningClient)), None)
        if client is None or statistics.issuperset(names):
            return list(layout.buffer_names)
        layout.select_buffers(module, names)
        before = layout.buffers(module)
        changed, weights = statistics, global_weights
        with _on_trial(client):
            for t in (0, 1):
                ctx = self.context(t, self.federation.client_ids, weights, lambda name, value: None)
                ctx = dataclasses.replace(ctx, layout=layout, buffers=before)
                sent = client.local_update(weights, ctx)
                if sent.buffers is not None:
                    changed = changed.union(layout.changed_buffers(before, sent.buffers))
                weights = self.apply(weights, sent.update)
        return [name for name in names if name in changed]

    def _poisoned(self, client: Client) -> Client:
        if self.attack is None or client.client_id not in self.malicious:
            return client
        if not self.attack.poisons_data or isinstance(client, FakeClient):
            return client
        if not isinstance(client, LightningClient):
            raise ConfigurationError(
                f"{type(self.attack).__name__} poisons data, but client {client.client_id!r} is a "
                f"{type(client).__name__}, whose data fedrec cannot reach. HINT: make malicious "
                "clients LightningClients, or let their `local_update` train on poisoned data."
            )
        dataset = self.attack.poison_dataset(client.dataset, client.client_id)
        return client if dataset is client.dataset else client.with_dataset(dataset)

    def context(
        self,
        t: int,
        client_ids: Sequence[str],
        global_weights: Tensor,
        logger: Callable[[str, float], None],
    ) -> RoundContext:
        """Make the context that clients of this round get."""
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
            buffers=self.buffers,
        )

    def ask(
        self, ctx: RoundContext, client_ids: Sequence[str], work: LocalWork | None = None
    ) -> CohortUpdates:
        """Get what these clients send: honest updates, attacked where malicious, then checked.

        A full-knowledge attacker sees the honest updates of the whole cohort, also where only some
        clients are asked. Those are computed once per round, as part of the simulation. Attackers
        that collude see each other's.
        """
        asked = list(client_ids)
        attacks = (
            self.attack is not None
            and self.attack.crafts_updates
            and self.attack.is_active(ctx.round)
            and not self.malicious.isdisjoint(asked)
        )
        if attacks and self.attack is not None and self.attack.full_knowledge:
            if work is None and self._crafted is not None and self._crafted[0] == ctx.round:
                sent = self._crafted[1]
            else:
                honest = self._check(self._compute(ctx, ctx.client_ids, work), asked)
                sent = self._craft(ctx, honest)
                self._crafted = (ctx.round, sent) if work is None else self._crafted
        else:
            seen = asked
            if attacks and self.attack is not None and self.attack.colludes:
                others = self.malicious.difference(asked)
                seen = asked + [c for c in ctx.client_ids if c in others]
            sent = self._check(self._compute(ctx, seen, work), asked)
            if attacks:
                sent = self._craft(ctx, sent)
        if attacks:
            sent = self._check(_part(sent, asked), asked)
        self.keep_buffers(sent)
        return sent

    def keep_buffers(self, sent: CohortUpdates) -> None:
        """Let these buffers count in the mean at the end of the round."""
        if sent.buffers is not None and self.buffers is not None:
            self._new_buffers.append((sent.num_samples, sent.buffers))

    def _compute(
        self, ctx: RoundContext, client_ids: Sequence[str], work: LocalWork | None
    ) -> CohortUpdates:
        if work is not None:
            ctx = dataclasses.replace(ctx, work=work)
            require_lightning(work, [self.clients[c] for c in client_ids])
        clients = self.clients
        if self.attack is not None and not self.attack.is_active(ctx.round):
            clients = {c.client_id: c for c in self.federation.clients}
        if self._fakes.isdisjoint(client_ids):
            asked = [clients[c] for c in client_ids]
            return self.executor.compute(asked, ctx.global_weights, ctx)
        real = [clients[c] for c in client_ids if c not in self._fakes]
        fake = [clients[c] for c in client_ids if c in self._fakes]
        # They would keep the executor from computing the others together.
        sent = SequentialExecutor().compute(fake, ctx.global_weights, ctx)
        if real:
            sent = _joined(self.executor.compute(real, ctx.global_weights, ctx), sent)
        return _part(sent, client_ids)

    def _craft(self, ctx: RoundContext, sent: CohortUpdates) -> CohortUpdates:
        attackers = [c in self.malicious for c in sent.client_ids]
        if self.attack is None or not any(attackers):
            return sent
        fields = {f.name: getattr(ctx, f.name) for f in dataclasses.fields(RoundContext)}
        aggregator = self.aggregator
        if aggregator.has_memory:  # of which an attacker that tries the rule out must not be part
            aggregator = copy.deepcopy(aggregator)
        attack_ctx = AttackContext(
            **{**fields, "purpose": "attack", "client_ids": sent.client_ids},
            aggregator=aggregator,
            server_lr=self.server_lr,
            last_aggregate=self.last_aggregate,
            num_malicious=len(self.malicious),
            num_malicious_total=len(self.federation.malicious),
            cohort_size=len(ctx.client_ids),
            cohort_malicious=len(self.malicious.intersection(ctx.client_ids)),
        )
        mask = torch.tensor(attackers, device=self.device)
        crafted = self.attack.craft(sent.updates, mask, attack_ctx)
        if crafted.shape != sent.updates.shape:
            raise UpdateError(
                f"Expected {type(self.attack).__name__}.craft to return shape "
                f"{tuple(sent.updates.shape)}, but got {tuple(crafted.shape)}."
            )
        return dataclasses.replace(sent, updates=crafted)

    @property
    def attack_has_memory(self) -> bool:
        """Whether what malicious clients send depends on earlier rounds."""
        return self.attack is not None and self.attack.has_memory

    def remember(self, ctx: RoundContext, sent: CohortUpdates) -> None:
        """Show an attack with a memory what was recorded of a round."""
        if self.attack is not None and self.attack_has_memory and self.attack.is_active(ctx.round):
            self._craft(ctx, sent)

    def _check(self, sent: CohortUpdates, asked: Sequence[str]) -> CohortUpdates:
        """Refuse by name what is not finite, mis-shaped or not an update at all."""
        refused: dict[str, str] = dict(sent.refused)
        parts = {"update": sent.updates}
        if sent.buffers is not None and self.buffers is not None:
            parts["buffers"] = sent.buffers
        for what, rows in parts.items():
            for i in nonfinite_rows(rows):
                refused[sent.client_ids[i]] = f"the {what} has NaN or infinity"
        if len(refused) > len(sent.refused):
            keep = [c for c in sent.client_ids if c not in refused]
            sent = dataclasses.replace(sent.select(keep), refused=refused)
        # What was only computed for an attacker to look at stops nothing.
        blamed = {c: why for c, why in refused.items() if c in asked}
        if blamed and self.on_bad_update == "raise":
            reasons = "; ".join(f"client {c!r}: {why}" for c, why in blamed.items())
            raise UpdateError(
                f"Refused updates: {reasons}. Nothing of this round was stored. HINT: lower the "
                "learning rate if training diverges, or leave such clients out with "
                '`on_bad_update="drop"`.'
            )
        return sent

    def server_step(
        self,
        ctx: RoundContext,
        updates: Tensor,
        num_samples: Tensor,
        client_ids: Sequence[str],
        global_weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Aggregate, then step.

        Returns:
            The next global weights and the aggregate, each of shape $(d,)$.
        """
        aggregate_ctx = self._aggregation_context(ctx, client_ids, global_weights)
        weights = num_samples.to(updates) / num_samples.sum().to(updates)
        aggregate = self.aggregator(updates, weights, aggregate_ctx)
        return self.apply_checked(ctx, global_weights, aggregate), aggregate

    def apply_checked(self, ctx: RoundContext, global_weights: Tensor, aggregate: Tensor) -> Tensor:
        """Return the next global weights, shape $(d,)$, unless they are not finite."""
        new = self.apply(global_weights, aggregate)
        if nonfinite_rows(new[None]):
            raise AggregationError(
                f"The server step of round {ctx.round} gave non-finite global weights. Nothing of "
                "this round was stored. HINT: training diverges; lower `server_lr`."
            )
        self.last_aggregate = aggregate
        return new

    def coefficients(self, num_samples: Tensor) -> Tensor | None:
        """Return the rule's coefficients of the rows of these clients, if it has fixed ones."""
        rule = type(self.aggregator)
        methods = ("coefficients", "aggregate", "__call__")
        where = [next(k for k, c in enumerate(rule.__mro__) if m in vars(c)) for m in methods]
        if where[0] > min(where[1:]):
            return None  # they are those of a class whose `aggregate` has been replaced
        return self.aggregator.coefficients(num_samples.float() / num_samples.sum())

    def _aggregation_context(
        self, ctx: RoundContext, client_ids: Sequence[str], global_weights: Tensor
    ) -> AggregationContext:
        server_update = None
        if self._server is not None:
            server_update = trained(self._server, global_weights, ctx).updates[0]
        fields = {f.name: getattr(ctx, f.name) for f in dataclasses.fields(RoundContext)}
        own = {"purpose": "aggregator", "client_ids": tuple(client_ids)}
        return AggregationContext(
            **{**fields, **own, "global_weights": global_weights}, server_update=server_update
        )

    def apply(self, global_weights: Tensor, aggregate: Tensor) -> Tensor:
        """Return `global_weights - server_lr * aggregate`."""
        return global_weights - self.server_lr * aggregate

    def end_round(self) -> None:
        """Average the buffers of the clients asked in this round, weighted by samples.

        A value that all of them left as it was keeps its bits.
        """
        self._crafted = None
        if self._new_buffers and self.buffers is not None:
            weights = torch.cat([w for w, _ in self._new_buffers]).double()
            values = torch.cat([b for _, b in self._new_buffers]).cpu()
            before = self.buffers.cpu()
            mean = self.federation.layout.round_buffers((weights / weights.sum()) @ values.double())
            kept = (values == before).all(dim=0)
            self.buffers = torch.where(kept, before, mean).to(self.device)
            self._new_buffers.clear()

    def execution_of(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return the execution plan, with what became of it."""
        departure = self.executor.departure
        return {**plan} if departure is None else {**plan, "departure": dict(departure)}

    def plan(self, global_weights: Tensor, client_ids: Sequence[str]) -> dict[str, Any]:
        """Let the executor choose its path for these clients; describe it and the kernel."""
        ids = list(client_ids)
        ctx = self.context(0, ids, global_weights, lambda name, value: None)
        clients = [self.clients[c] for c in ids]
        real = [c for c in clients if not isinstance(c, FakeClient)]
        return {
            **self.executor.plan(real or clients, global_weights, ctx),
            "kernel": choose_kernel(self.device, len(ids), global_weights.numel()),
        }


@contextmanager
def _on_trial(client: LightningClient) -> Iterator[None]:
    """Let a client train before round 0, and leave no trace of it in its module."""
    state = state_of(client.module)
    try:
        yield
    except Exception as error:
        error.add_note(f"while client {client.client_id!r} trained, before round 0")
        raise
    finally:
        state.restore()


def _fresh(component: T) -> T:
    """Make the component anew, without whatever it remembers."""
    arguments = {
        name: _fresh(value) if isinstance(value, Component) else value
        for name, value in component.init_args().items()
    }
    return type(component)(**arguments)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether the tensors of two batches have the same values."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.layout == torch.strided
    )


def _joined(first: CohortUpdates, second: CohortUpdates) -> CohortUpdates:
    """Put what two groups of clients sent together, with the metrics of the first."""
    buffers = None
    if first.buffers is not None and second.buffers is not None:
        buffers = torch.cat([first.buffers, second.buffers])
    return dataclasses.replace(
        first,
        client_ids=first.client_ids + second.client_ids,
        updates=torch.cat([first.updates, second.updates]),
        num_samples=torch.cat([first.num_samples, second.num_samples]),
        refused={**first.refused, **second.refused},
        buffers=buffers,
    )


def _part(sent: CohortUpdates, asked: Sequence[str]) -> CohortUpdates:
    """Return what these clients sent, in this order, and which of them were refused."""
    there = set(sent.client_ids)
    refused = {c: why for c, why in sent.refused.items() if c in asked}
    return dataclasses.replace(sent.select([c for c in asked if c in there]), refused=refused)
