"""A strategy of Flower's, and beside it a history of what its clients sent."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedrec._checks import check_client_id, check_float, check_instance, check_int
from fedrec.aggregators import FedAvg, FedAvgM, Krum, Median, TrimmedMean
from fedrec.aggregators.base import Aggregator
from fedrec.clients.hooks import unwrapped
from fedrec.exceptions import (
    ConfigurationError,
    FedrecError,
    FedrecWarning,
    UpdateError,
    expected,
)
from fedrec.flower.nodes import Nodes, error_text, key_fingerprint, key_lists
from fedrec.flower.wire import vector_of
from fedrec.history.base import HistoryStore
from fedrec.history.manifest import Manifest
from fedrec.loop.recording import versions
from fedrec.parameters import ParameterVector
from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["RecordingStrategy"]

_log = logging.getLogger(__name__)

#: Our rule for a strategy of Flower's, by the strategy's class.
_RULES: dict[str, Callable[[Any], Aggregator]] = {
    "FedAvg": lambda strategy: FedAvg(),
    "FedProx": lambda strategy: FedAvg(),
    "FedAvgM": lambda s: FedAvgM(FedAvg(), momentum=s.server_momentum),
    "FedMedian": lambda strategy: Median(),
    "FedTrimmedAvg": lambda strategy: TrimmedMean(trim=strategy.beta),
    "Krum": lambda strategy: Krum(num_byzantine=strategy.num_malicious_nodes),
}

_FLOATS = ("float16", "float32", "float64")

# A strategy that computes in another order, or in float64, differs by rounding only.
_ROUNDING = 1e-3


class RecordingStrategy(Strategy):
    """Wraps a strategy of Flower's, and records every round in a history.

    What the strategy does is unchanged: it gets the same arguments and the same replies, and what
    it returns is passed on. The history can be recovered from later: a client's update is what it
    subtracted from the global weights, divided by `local_lr`.

    A node is the client that its key says, so nodes need keys of their own that last
    (`--auth-supernode-private-key`). For trials, as in Flower's simulation, nodes may say who they
    are: without `keys`, if `clients` names none of the connected nodes by its key, each is asked
    once, which the handlers of `make_client_app` answer.

    Args:
        strategy: The strategy.
        history: The store for the rounds. If it holds a recording of the same, that goes on; see
            `weights_to_go_on_from`.
        module: The model, whose `state_dict` the arrays are, by name or in its order.
        clients: Size of each client's data set by client id: all that may ever take part. Those
            that the history has forgotten stay listed; they are not asked to train any more.
        keys: Fingerprints of the public keys of each client's node by client id, one or several;
            `None` if client ids are `key-` and the fingerprint, as in the log of the first round,
            or what nodes say.
        local_lr: Learning rate of the clients' optimizer. Recovering clients send updates in the
            same unit.
        aggregator: Our rule that does what the strategy does; `None` for that of FedAvg, FedProx,
            FedAvgM, FedMedian, FedTrimmedAvg or Krum, or of the one among them that the strategy
            is derived from. It is compared with the strategy in the first round.
        seed: Seed of a recovery's random draws.

    Raises:
        ConfigurationError: If the strategy is not known and `aggregator` is not given, or an
            argument is out of range.

    Examples:
        >>> from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
        >>> from fedrec.history import MemoryHistory
        >>> from fedrec.models import MLP
        >>> strategy = RecordingStrategy(
        ...     FlowerFedAvg(), MemoryHistory(), module=MLP(in_features=64), local_lr=0.1,
        ...     clients={"hospital-a": 1200, "hospital-b": 340},
        ... )
        >>> strategy.aggregator
        FedAvg(weighted=True)
    """

    def __init__(
        self,
        strategy: Strategy,
        history: HistoryStore,
        *,
        module: nn.Module,
        clients: Mapping[str, int],
        keys: Mapping[str, str | Sequence[str]] | None = None,
        local_lr: float = 1.0,
        aggregator: Aggregator | None = None,
        seed: int = 0,
    ) -> None:
        check_instance("strategy", strategy, Strategy)
        check_instance("history", history, HistoryStore)
        check_instance("aggregator", aggregator, Aggregator, optional=True)
        self.strategy = strategy
        self.history = history
        self.module = unwrapped(module)
        if not isinstance(clients, Mapping) or not clients:
            raise ConfigurationError(
                expected("clients", "a mapping of client ids to numbers of samples", clients)
            )
        self.clients = {
            check_client_id(client_id): check_int(f"clients[{client_id!r}]", size, minimum=1)
            for client_id, size in clients.items()
        }
        self.keys = key_lists(keys)
        self.local_lr = check_float("local_lr", local_lr, minimum=0, open_minimum=True)
        self.aggregator = _rule_of(strategy) if aggregator is None else aggregator
        self.seed = seed
        self.layout = ParameterVector(self.module)
        # As they are before `start` puts this object's in their place.
        self._configure_train = strategy.configure_train
        self._aggregate_train = strategy.aggregate_train
        if self.layout.buffer_names:
            raise ConfigurationError(
                f"{type(self.module).__name__} has running statistics, which are not part of a "
                "client update. HINT: use GroupNorm, or freeze them with `.eval()`."
            )
        self._num_rounds = 0
        self._patience = 3600.0
        self._visited: Nodes | None = None
        self._asked: dict[int, str] = {}
        self._left_out: set[str] = set()
        self._weights: Tensor | None = None
        self._compared = False

    def __getattr__(self, name: str) -> Any:
        # Whatever else callers want of the strategy, it has.
        if name.startswith("__") or name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    # -- what Flower calls ----------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the strategy, by its own `start`, and record."""
        self._num_rounds, self._patience = num_rounds, timeout
        # On the strategy itself, which may keep things and call `super()`; its rounds come by here.
        watched = {
            "configure_train": self.configure_train,
            "aggregate_train": self.aggregate_train,
        }
        vars(self.strategy).update(watched)
        try:
            return self.strategy.start(
                grid,
                initial_arrays,
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                evaluate_fn,
            )
        finally:
            for name in watched:
                delattr(self.strategy, name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy choose clients, and take note of whom it asks, with which weights.

        Clients that the history has forgotten are left out of those that it chose.
        """
        try:
            self._weights = self._vector(arrays)
        except UpdateError as error:
            raise ConfigurationError(
                f"The strategy's arrays are not those of {type(self.module).__name__}: {error}. "
                "HINT: the initial arrays are `ArrayRecord(module.state_dict())`."
            ) from error
        self._begin()
        messages = list(self._configure_train(server_round, arrays, config, grid))
        names = self._names(grid)
        messages = self._without_forgotten(messages, names)
        nodes = [message.metadata.dst_node_id for message in messages]
        asked = {names[node]: node for node in nodes if names.get(node) in self.clients}
        # In the order of the recording, whatever order Flower has drawn.
        self._asked = {asked[c]: c for c in self.clients if c in asked}
        for node in nodes:
            if node not in self._asked:
                _log.warning(
                    "Node %d is not one of the recording's clients (%s): what it sends is used, "
                    "but not recorded. HINT: list it in `clients`, before a recording begins.",
                    node,
                    names.get(node, "it has left"),
                )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy aggregate, and write the round to the history."""
        replies = list(replies)
        sent = self._read(replies)  # first: a strategy may take the replies apart
        arrays, metrics = self._aggregate_train(server_round, replies)
        if arrays is not None:
            self._write(sent, self._vector(arrays), server_round)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Do what the strategy does."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Do what the strategy does."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log what the strategy logs."""
        self.strategy.summary()

    # -- recording ------------------------------------------------------------------------------

    @property
    def server_lr(self) -> float:
        """Learning rate of the server step in a recovery."""
        return self.local_lr * float(getattr(self.strategy, "server_learning_rate", 1.0))

    def weights_to_go_on_from(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return the weights after the last recorded round, for a server that has restarted.

        Args:
            initial_arrays: The weights to begin with if nothing is recorded yet.
        """
        if not self.history.rounds():
            return initial_arrays
        last = self.history.read_round(self.history.rounds()[-1], ())
        weights = last.global_weights - self.history.manifest.server_lr * last.aggregate
        named = self.layout.unflatten(weights)
        keys = self._keys_of(initial_arrays)
        changed = {keys[name]: Array(value.numpy()) for name, value in named.items()}
        return ArrayRecord({key: changed.get(key, a) for key, a in initial_arrays.items()})

    def _begin(self) -> None:
        """Begin the history, or refuse one of another recording."""
        if self.history.is_empty:
            self.history.begin(
                Manifest(
                    model_fingerprint=self.layout.fingerprint,
                    num_parameters=self.layout.num_parameters,
                    clients=self.clients,
                    seed=self.seed,
                    aggregator=self.aggregator.spec(),
                    server_lr=self.server_lr,
                    max_rounds=self._num_rounds,
                    training=self._training(),
                    on_bad_update="drop",
                    execution={"executor": type(self).__name__, "threads": torch.get_num_threads()},
                    versions=versions(),
                )
            )
            return
        recorded = self.history.manifest
        self.history.check_model(self.layout.fingerprint, self.layout.num_parameters)
        same = (recorded.clients, recorded.aggregator, recorded.server_lr)
        if same != (self.clients, self.aggregator.spec(), self.server_lr):
            raise ConfigurationError(
                "The history holds another recording (other clients, rule or learning rate). "
                "HINT: use the recorded settings, or an empty history."
            )

    def _training(self) -> dict[str, dict[str, Any]]:
        if self.keys is None:
            return {"*": {"local_lr": self.local_lr}}
        return {c: {"local_lr": self.local_lr, "key": k[0]} for c, k in self.keys.items()}

    def _without_forgotten(
        self, messages: Sequence[Message], names: Mapping[int, str]
    ) -> list[Message]:
        """Return the messages but those to clients that were forgotten; say once who these are."""
        forgotten = set(self.history.forgotten)
        owners = [names.get(message.metadata.dst_node_id, "") for message in messages]
        new = forgotten.intersection(owners) - self._left_out
        if new:
            self._left_out |= new
            _log.warning(
                "Clients %s were forgotten: they stay in `clients`, and are not asked to train.",
                sorted(new),
            )
        return [m for m, owner in zip(messages, owners, strict=True) if owner not in forgotten]

    def _names(self, grid: Grid) -> dict[int, str]:
        """Return the client ids of nodes, by node id."""
        fingerprints = {n.node_id: key_fingerprint(n.public_key) for n in grid.get_nodes()}
        if self.keys is None:
            names = {node: f"key-{key}" for node, key in fingerprints.items()}
            if not self.clients.keys().isdisjoint(names.values()):
                return names
            # Keys that nobody knows, as those of a simulation, which are new in each run.
            if self._visited is None:
                self._visited = Nodes(grid, None, self._patience)
            self._visited.wait()
            return {node.node_id: c for c, node in self._visited.by_client.items()}
        owners = {key: c for c, keys in self.keys.items() for key in keys}
        return {node: owners[key] for node, key in fingerprints.items() if key in owners}

    def _keys_of(self, arrays: ArrayRecord) -> dict[str, str]:
        """Return the keys in a record of arrays by the names of the module's arrays."""
        names, keys = list(self.module.state_dict()), list(arrays)
        if set(self.layout.names) <= set(keys):
            return {name: name for name in self.layout.names}
        if len(names) == len(keys):  # a list of arrays, in the order of the state
            return dict(zip(names, keys, strict=True))
        raise UpdateError(
            f"expected the {len(names)} arrays of the module's state, but got {len(keys)}: "
            f"{[k[:50] for k in keys[:10]]}"
        )

    def _vector(self, arrays: ArrayRecord) -> Tensor:
        """Return arrays as one vector, shape $(d,)$; its numbers may be NaN or infinite."""
        keys = self._keys_of(arrays)
        parts = []
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            array = arrays[keys[name]]
            # A model may come in other floats than it is kept in, as after Flower's FedAdam.
            dtype = array.dtype if array.dtype in _FLOATS else "float32"
            parts.append(vector_of(array, shape, dtype, finite=False).float())
        return torch.cat(parts)

    def _read(self, replies: Sequence[Message]) -> CohortUpdates:
        """Return the updates that were sent; what cannot be used is refused by name."""
        assert self._weights is not None
        rows: dict[str, Tensor] = {}
        sizes: dict[str, int] = {}
        refused: dict[str, str] = {}
        for message in replies:
            client_id = self._asked.get(message.metadata.src_node_id)
            if client_id is None:
                continue
            try:
                if message.has_error():
                    raise UpdateError(error_text(message))
                records = list(message.content.array_records.values())
                if len(records) != 1:
                    raise UpdateError(f"expected one record of arrays, but got {len(records)}")
                row = (self._weights - self._vector(records[0])) / self.local_lr
                if not row.isfinite().all():
                    raise UpdateError("the update has NaN or infinity")
                sizes[client_id] = self._size(message, client_id)
                rows[client_id] = row
            except UpdateError as error:
                refused[client_id] = str(error)
        for client_id in self._asked.values():
            if client_id not in rows:
                refused.setdefault(client_id, "no reply")
        ids = tuple(c for c in self._asked.values() if c in rows)
        return CohortUpdates(
            client_ids=ids,
            updates=torch.stack([rows[c] for c in ids]) if ids else torch.empty(0),
            num_samples=torch.tensor([sizes[c] for c in ids], dtype=torch.int64),
            refused=refused,
        )

    def _size(self, message: Message, client_id: str) -> int:
        """Return the number of samples that a client weighs in this round."""
        name = getattr(self.strategy, "weighted_by_key", None)
        for record in message.content.metric_records.values():
            size = record.get(name) if isinstance(name, str) else None
            if isinstance(size, (int, float)) and size != self.clients[client_id]:
                raise UpdateError(
                    f"{name} is {size:g}, but the client has {self.clients[client_id]} samples"
                )
        return self.clients[client_id]

    def _write(self, sent: CohortUpdates, after: Tensor, server_round: int) -> None:
        assert self._weights is not None
        aggregate = (self._weights - after) / self.server_lr
        why = None
        if not (self._weights.isfinite().all() and aggregate.isfinite().all()):
            why = "the strategy's weights have NaN or infinity"
        elif not sent.client_ids:
            why = f"no reply in it can be used: {dict(sent.refused)}"
        if why is not None:
            warnings.warn(
                f"Round {server_round} is not recorded, as {why}.", FedrecWarning, stacklevel=3
            )
            return
        if not self._compared:
            self._compare(sent, aggregate)
            self._compared = True
        self.history.write_round(
            RoundRecord(
                round=len(self.history.rounds()),
                global_weights=self._weights,
                sent=sent,
                aggregate=aggregate,
                cohort=tuple(self._asked.values()),
            )
        )

    def _compare(self, sent: CohortUpdates, aggregate: Tensor) -> None:
        """Warn if our rule would not have done what the strategy did."""
        if self.aggregator.has_memory and self.history.rounds():
            return  # its memory is of rounds that it has not seen here
        weights = sent.num_samples / sent.num_samples.sum()
        try:
            ours = type(self.aggregator)(**self.aggregator.init_args())(sent.updates, weights)
        except FedrecError as error:  # it needs more clients, or more than updates
            how = str(error).partition(" HINT:")[0].rstrip(".")
        else:
            difference = float((ours - aggregate).norm() / aggregate.norm().clamp_min(1e-30))
            if difference <= _ROUNDING:
                return
            how = f"relative difference {difference:.2g}"
        warnings.warn(
            f"{type(self.strategy).__name__} did not do what {self.aggregator!r} would have done "
            f"({how}), so that a recovery would not repeat it. HINT: pass the rule that it follows "
            "as `aggregator=`, here or to the recovery.",
            FedrecWarning,
            stacklevel=2,
        )


def _rule_of(strategy: Strategy) -> Aggregator:
    kind = type(strategy)
    flowers = next((c for c in kind.__mro__ if c.__module__.startswith("flwr.")), None)
    make = None if flowers is None else _RULES.get(flowers.__name__)
    if make is None:
        hint = "`aggregator=` names the rule that it follows, for the recovery."
        raise ConfigurationError(
            expected("strategy", "one of a known kind", kind.__name__, known=_RULES, hint=hint)
        )
    return make(strategy)
