"""The values that travel between components: the context of a round, updates, records, results.

Letters used in shapes: $n$ all clients, $m$ clients of a round, $d$ trainable parameters,
$b$ values of averaged buffers, $t$ a round (0-based).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fedrec._checks import check_int
from fedrec._frames import data_frame
from fedrec.exceptions import ConfigurationError, expected
from fedrec.parameters import ParameterVector
from fedrec.random import torch_generator

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from torch.utils.data import Dataset

    from fedrec.clients.objective import LocalWork
    from fedrec.metrics.cost import CostLedger

__all__ = [
    "ClientCost",
    "ClientUpdate",
    "CohortUpdates",
    "Detection",
    "EstimateError",
    "Phase",
    "RoundContext",
    "RoundRecord",
    "RunResult",
]

Phase = Literal["record", "recover"]
"""What a round belongs to: a recording or a recovery."""
Context = TypeVar("Context", bound="RoundContext")


def _discard(name: str, value: float) -> None:
    """Log nothing: the default logger, for a context that was made by hand."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundContext:
    """What a component may know about the current round.

    Args:
        round: Round $t$, 0-based.
        phase: `"record"` or `"recover"`.
        client_ids: The cohort, in the order of the rows of every updates tensor.
        global_weights: Global weights at the start of the round, shape $(d,)$.
        layout: Which slice of the $d$ entries is which parameter.
        seed: Seed of the recording; every random draw is a function of it.
        purpose: Name of the component's own stream of random numbers.
        device: Device of the tensors.
        autocast: Makes the context manager of the chosen precision.
        logger: Called with a name and a number, it logs the number for this round.
        server_data: Clean data at the server, or `None`.
        batch_policy: `"replay"` draws the batches of the recording again, `"fresh"` draws others.
        work: Settings of local training in place of the clients' own, or `None`.
        buffers: Values of the averaged buffers to start from, shape $(b,)$, or `None`.
    """

    round: int
    phase: Phase
    client_ids: tuple[str, ...]
    global_weights: Tensor
    layout: ParameterVector
    seed: int = 0
    purpose: str = "component"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    logger: Callable[[str, float], None] = _discard
    server_data: Dataset[Any] | None = None
    batch_policy: str = "replay"
    work: LocalWork | None = None
    buffers: Tensor | None = None

    @cached_property
    def generator(self) -> torch.Generator:
        """A CPU generator seeded by (seed, purpose, round), whatever was drawn in other rounds."""
        return torch_generator(self.seed, self.purpose, self.round)

    @property
    def autocast_is_off(self) -> bool:
        """Whether the round is computed in plain float32."""
        return self.autocast is nullcontext

    def extended(self, kind: type[Context], **more: Any) -> Context:
        """Return a context of another class for the same round, which has more fields.

        Args:
            kind: Class of the new context.
            **more: Values of its further fields, or new values of the fields here.

        Examples:
            >>> from fedrec.attacks import AttackContext
            >>> ctx = RoundContext(
            ...     round=3,
            ...     phase="record",
            ...     client_ids=("a", "b"),
            ...     global_weights=torch.zeros(2),
            ...     layout=ParameterVector(torch.nn.Linear(2, 1, bias=False)),
            ... )
            >>> attack = ctx.extended(AttackContext, purpose="attack", num_malicious=1)
            >>> attack.round, attack.purpose, attack.num_malicious
            (3, 'attack', 1)
        """
        shared = {f.name: getattr(self, f.name) for f in fields(RoundContext)}
        return kind(**{**shared, **more})


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientUpdate:
    """What one client sends.

    Args:
        update: Pseudo-gradient, shape $(d,)$: the server does `w <- w - server_lr * aggregate`.
        num_samples: Size of the client's data set before any poisoning.
        metrics: What the module logged, by name.
        buffers: Averaged buffers after local training, shape $(b,)$, or `None`.
    """

    update: Tensor
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    buffers: Tensor | None = None


class ClientCost(NamedTuple):
    """What asking a client for an update has cost, as it was measured.

    Attributes:
        num_bytes: Bytes sent to and received from the client.
        seconds: Seconds that the client spent, as it says.
    """

    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class CohortUpdates:
    """What the clients of a round sent.

    Args:
        client_ids: The $m$ clients whose updates can be used.
        updates: Shape $(m, d)$, one row per client.
        num_samples: Shape $(m,)$, int64, sizes before any poisoning.
        metrics: Mean over the clients of what their modules logged, by name.
        refused: Clients whose update was refused, with the reason.
        buffers: Shape $(m, b)$, or `None` where the model has none.
        costs: What each client has cost, refused ones included; empty where nothing was measured.
    """

    client_ids: tuple[str, ...]
    updates: Tensor
    num_samples: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    buffers: Tensor | None = None
    costs: Mapping[str, ClientCost] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the updates in this process."""
        return self.updates.nbytes

    def besides(self) -> dict[str, Any]:
        """Return everything but the updates, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "updates"}

    def to(self, device: torch.device) -> CohortUpdates:
        """Return the updates on a device; the object itself if they are there."""
        if self.updates.device == device:
            return self
        return replace(self, updates=self.updates.to(device))

    def refusing(self, reasons: Mapping[str, str]) -> CohortUpdates:
        """Return the updates without those of some clients, who are refused.

        Args:
            reasons: Why, by client.
        """
        if not reasons:
            return self
        kept = self.select([c for c in self.client_ids if c not in reasons])
        return kept.with_besides(refused={**self.refused, **reasons})

    def select(self, client_ids: Sequence[str]) -> CohortUpdates:
        """Return the updates of some clients, in the given order, with all refusals.

        If these are all clients in the order they are in, the object itself is returned.

        Raises:
            KeyError: If a client is not among `client_ids`.
        """
        if tuple(client_ids) == self.client_ids:
            return self
        index = {c: i for i, c in enumerate(self.client_ids)}
        rows = [index[c] for c in client_ids]
        return replace(
            self,
            client_ids=tuple(client_ids),
            updates=self.updates[rows],
            num_samples=self.num_samples[rows],
            buffers=None if self.buffers is None else self.buffers[rows],
        )

    def joined(self, *others: CohortUpdates, client_ids: Sequence[str]) -> CohortUpdates:
        """Return updates that are here or in others, in the given order, and nothing besides.

        Args:
            others: Updates of other clients, spread over processes as these are.
            client_ids: Clients whose updates are in one of them.
        """
        parts = (self, *others)
        return CohortUpdates(
            client_ids=tuple(client_ids),
            updates=rows_of([(part.client_ids, part.updates) for part in parts], client_ids),
            num_samples=rows_of(
                [(part.client_ids, part.num_samples) for part in parts], client_ids
            ),
        )

    # What is done for every client can be done where its update is: several processes have the
    # updates of some clients each (`fedrec.distributed.updates`), one process has all of them.

    def shards(self) -> dict[int | None, CohortUpdates]:
        """Return the updates that this process has, by shard: without shards all, as `None`."""
        return {None: self}

    def in_process(self) -> CohortUpdates:
        """Return the updates that this process has, by shard and in order within each."""
        return self

    def with_rows(self, rows: Sequence[Tensor]) -> CohortUpdates:
        """Return the same with other updates.

        Args:
            rows: For each of `shards()` the updates of its clients, shape $(k, d)$; or all of
                `in_process()`, one tensor.
        """
        return replace(self, updates=rows[0])

    def with_besides(self, **changes: Any) -> CohortUpdates:
        """Return the same updates with something else known besides them.

        Args:
            **changes: Other values of `refused`, `metrics`, `buffers` or `costs`.
        """
        return replace(self, **changes)

    def narrowed(self, columns: Tensor) -> CohortUpdates:
        """Return some columns of the updates.

        Args:
            columns: Their numbers, shape $(c,)$.
        """
        return replace(self, updates=self.updates[:, columns.to(self.updates.device)])

    def gathered(self, values: Sequence[Tensor]) -> Tensor:
        """Return what is known of each client, in the order of `client_ids`, in all processes.

        Args:
            values: For each of `shards()` one small row a client, shape $(k, ...)$, on the CPU.
        """
        return values[0]

    def measured(self, measure: Callable[..., Tensor], *others: CohortUpdates) -> Tensor:
        """Return what is measured of each client's update by itself, in all processes.

        Args:
            measure: Called with some of these updates, and the same clients' updates in `others`,
                it returns one small row a client, shape $(k, ...)$.
            others: Updates of the same clients, in the same order.

        Returns:
            Shape $(m, ...)$, in the order of `client_ids`, on the CPU.
        """
        groups = zip(*(sent.shards().values() for sent in (self, *others)), strict=True)
        return self.gathered([measure(*group).cpu() for group in groups])

    def by_columns(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what a function makes of every column by itself, in all processes.

        Args:
            function: Called with some columns of all updates, shape $(m, c)$, with the clients in
                any order, it returns shape $(c,)$.

        Returns:
            Shape $(d,)$.
        """
        return function(self.updates)


class LazyUpdates(CohortUpdates):
    """Updates that are made when somebody first asks for them: a subclass has a cached property.

    What `dataclasses.replace` makes of it is plain `CohortUpdates`.

    Args:
        like: Has everything but the updates.
    """

    def __new__(cls, *given: Any, **named: Any) -> CohortUpdates:  # type: ignore[misc]
        """Make one; but for `dataclasses.replace`, which gives names, the plain kind."""
        return CohortUpdates(**named) if named else super().__new__(cls)

    def __init__(self, like: CohortUpdates) -> None:
        self.__dict__.update(like.besides())  # the base class is frozen


def rows_of(parts: Sequence[tuple[Sequence[str], Tensor]], client_ids: Sequence[str]) -> Tensor:
    """Return the rows of some clients, in the given order.

    Args:
        parts: Clients, and their rows.
        client_ids: Clients, each of which has a row in one of the parts.

    Raises:
        KeyError: If a client has none.
    """
    place = {c: i for i, c in enumerate(client_ids)}
    if missing := place.keys() - {c for ids, _ in parts for c in ids}:
        raise KeyError(*sorted(missing))
    found = parts[0][1].new_empty(len(place), *parts[0][1].shape[1:])
    for ids, rows in parts:
        there = [(i, place[c]) for i, c in enumerate(ids) if c in place]
        # Rows that follow each other in both are copied at once.
        for _, group in groupby(there, key=lambda pair: pair[1] - pair[0]):
            run = list(group)
            (start, at), size = run[0], len(run)
            found[at : at + size] = rows[start : start + size]
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """One round as the server stored it.

    Args:
        round: Round $t$, 0-based.
        global_weights: Global weights at the start of the round, shape $(d,)$.
        sent: What the clients sent whose updates were aggregated. A record that was read for some
            clients has the updates of these only.
        aggregate: What the aggregation rule returned, shape $(d,)$.
        cohort: Clients that were asked, in order; by default those of `sent`, then those refused.
        buffers: Averaged buffers after the round, shape $(b,)$, or `None`.
        departure: Why the executor had left its plan by this round, see `Executor.departure`; or
            `None`.
    """

    round: int
    global_weights: Tensor
    sent: CohortUpdates
    aggregate: Tensor
    cohort: tuple[str, ...] = ()
    buffers: Tensor | None = None
    departure: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.cohort:
            object.__setattr__(self, "cohort", (*self.client_ids, *self.refused))

    @property
    def client_ids(self) -> tuple[str, ...]:
        """Clients whose updates are here, in row order."""
        return self.sent.client_ids

    @property
    def updates(self) -> Tensor:
        """Updates of `client_ids`, shape $(m, d)$."""
        return self.sent.updates

    @property
    def num_samples(self) -> Tensor:
        """Data set sizes of `client_ids`, shape $(m,)$, int64."""
        return self.sent.num_samples

    @property
    def refused(self) -> Mapping[str, str]:
        """Clients whose update was refused, with the reason."""
        return self.sent.refused

    @property
    def present(self) -> tuple[str, ...]:
        """Clients whose updates were aggregated, those whose updates were not read included."""
        return tuple(c for c in self.cohort if c not in self.refused)

    def select(self, client_ids: Sequence[str]) -> RoundRecord:
        """Return the record with only some clients' updates, in the given order.

        If these are all clients in the order they are in, the record itself is returned.

        Raises:
            KeyError: If a client is not among `client_ids`.
        """
        sent = self.sent.select(client_ids)
        return self if sent is self.sent else replace(self, sent=sent)

    def to(self, device: torch.device) -> RoundRecord:
        """Return the record with its tensors on a device; the record itself if they are there."""
        if self.aggregate.device == device:
            return self
        return replace(
            self,
            global_weights=self.global_weights.to(device),
            sent=self.sent.to(device),
            aggregate=self.aggregate.to(device),
            buffers=None if self.buffers is None else self.buffers.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The verdict of a detector.

    Args:
        malicious: Clients flagged as malicious, sorted.
        seen: All clients the detector saw, sorted.
        round: Round of the decision, or `None` if the detector has not decided.
        scores: Suspicion score per client at the decision, larger is more suspicious.
        round_scores: Scores per client by round, where the detector has any.

    Raises:
        ConfigurationError: If `malicious` or `seen` is a text, or `round` is no integer.

    Examples:
        >>> detection = Detection(
        ...     malicious=("b",), seen=("a", "b"), round=7, scores={"a": 0.1, "b": 0.9}
        ... )
        >>> detection.precision(truth=["b"])
        1.0
        >>> detection.to_pandas()
          client_id  score  flagged
        0         a    0.1    False
        1         b    0.9     True
    """

    malicious: tuple[str, ...]
    seen: tuple[str, ...]
    round: int | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    round_scores: Mapping[int, Mapping[str, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("malicious", "seen"):
            ids = getattr(self, name)
            if isinstance(ids, str):
                raise ConfigurationError(expected(name, "clients in a tuple", ids))
            object.__setattr__(self, name, tuple(ids))
        # Detectors compute with arrays and tensors, whose numbers no file takes.
        if self.round is not None:
            object.__setattr__(self, "round", check_int("round", self.round))
        scores = {client_id: float(score) for client_id, score in self.scores.items()}
        object.__setattr__(self, "scores", scores)

    def precision(self, truth: Sequence[str]) -> float | None:
        """Fraction of the flagged clients that are malicious; `None` if nobody was flagged."""
        if not self.malicious:
            return None
        return len(set(self.malicious) & set(truth)) / len(self.malicious)

    def recall(self, truth: Sequence[str]) -> float | None:
        """Fraction of the malicious clients seen that were flagged; `None` if there is none."""
        missed = self.false_negative_rate(truth)
        return None if missed is None else 1 - missed

    def false_negative_rate(self, truth: Sequence[str]) -> float | None:
        """Fraction of the malicious clients seen that were not flagged; `None` if there is none."""
        malicious = set(truth) & set(self.seen)
        if not malicious:
            return None
        return len(malicious - set(self.malicious)) / len(malicious)

    def false_positive_rate(self, truth: Sequence[str]) -> float | None:
        """Fraction of the benign clients seen that were flagged; `None` if there is none."""
        benign = set(self.seen) - set(truth)
        if not benign:
            return None
        return len(benign & set(self.malicious)) / len(benign)

    def to_pandas(self, *, by_round: bool = False) -> pd.DataFrame:
        """Return the scores as a `DataFrame`.

        Args:
            by_round: `False` for one row per client seen, at the decision; `True` for one row per
                round and client, where the detector has scores by round.

        Returns:
            Columns `client_id`, `score` (larger is more suspicious; NaN if it has none) and
            `flagged` (bool), after `round` (0-based) with `by_round`.

        Raises:
            MissingDependencyError: If pandas is not installed.
        """
        flagged = frozenset(self.malicious)
        if by_round:
            rows = [
                (t, c, score) for t, row in self.round_scores.items() for c, score in row.items()
            ]
        else:
            rows = [(0, c, self.scores.get(c, float("nan"))) for c in self.seen]
        columns = {
            "round": [t for t, _, _ in rows],
            "client_id": [c for _, c, _ in rows],
            "score": [float(score) for _, _, score in rows],
            "flagged": [c in flagged for _, c, _ in rows],
        }
        if not by_round:
            del columns["round"]
        return data_frame(columns)

    def _repr_html_(self) -> str:
        from fedrec.report.notebook import detection_html

        return detection_html(self)


class EstimateError(NamedTuple):
    r"""The error of an estimated update $\hat g$, compared with the exact update $g$.

    Attributes:
        client_id: The client of the update.
        round: Round of the recovery.
        relative_error: $\lVert \hat g - g \rVert / \lVert g \rVert$.
        cosine: Cosine of the angle between $\hat g$ and $g$, in [-1, 1].
    """

    client_id: str
    round: int
    relative_error: float
    cosine: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunResult:
    """What `FederatedLoop.record` and `FederatedLoop.recover` return.

    In a notebook it shows itself: the figures in a table, and their curves.
    `fedrec.report.compare` shows several side by side.

    Args:
        name: `"record"`, or the recoverer's name.
        global_weights: Final global weights, shape $(d,)$.
        rounds: Rounds done, those before an interruption included.
        seconds: Wall-clock seconds of this run, evaluation left out.
        curve: One row per evaluated round: `{"round": ..., "ter": ..., "asr": ..., <metrics>}`.
        execution: The execution plan: executor, threads, device, precision. If the executor left
            its plan, `departure` says why, see `Executor.departure`.
        buffers: Final averaged buffers, shape $(b,)$, or `None`.
        detection: Verdict of the detector, if one ran.
        ledger: Which client was asked for an exact update in which round and why (recoveries only).
        diagnostics: Numbers that the recoverer reports about itself, by name.
        client_seconds: The part of `seconds` spent on computing what clients send (and what a
            full-knowledge attacker sees), by reason; `"record"` in a recording.
        estimate_errors: Estimated updates beside exact ones, where the recoverer compares them.
        trained: The module that was trained, which `module` copies, or `None`.
        layout: Where its parameters and averaged buffers are in the vectors, or `None`.
        checkpoint: The file `model.ckpt` of a recovery with a run folder, or `None`.

    Examples:
        >>> import torch
        >>> result = RunResult(
        ...     name="record",
        ...     global_weights=torch.zeros(2),
        ...     rounds=20,
        ...     seconds=1.5,
        ...     curve=[{"round": 9, "ter": 0.5}, {"round": 19, "ter": 0.25}],
        ... )
        >>> result
        RunResult(record: 20 rounds in 1.5 s, TER 25.0 %)
        >>> result.to_pandas()
           round   ter
        0      9  0.50
        1     19  0.25
    """

    name: str
    global_weights: Tensor
    rounds: int
    seconds: float
    curve: Sequence[Mapping[str, float]] = ()
    execution: Mapping[str, Any] = field(default_factory=dict)
    buffers: Tensor | None = None
    detection: Detection | None = None
    ledger: CostLedger | None = None
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    client_seconds: Mapping[str, float] = field(default_factory=dict)
    estimate_errors: Sequence[EstimateError] = ()
    trained: nn.Module | None = None
    layout: ParameterVector | None = None
    checkpoint: Path | None = None

    def module(self) -> nn.Module:
        """Return a copy of the trained module with the weights and averaged buffers of this result.

        The module that was handed to the `Federation` is not changed. The copy is on the CPU. All
        that is not trained is copied as it is in that module when this is called: frozen
        parameters, other buffers, hyper-parameters, and which layers are in training mode. So call
        `eval()` before you predict, unless Lightning's `Trainer` does it.

        Raises:
            ConfigurationError: If the result was made by hand, without `trained` and `layout`, or
                the module cannot be copied.

        Examples:
            >>> from fedrec import FederatedLoop, Federation
            >>> from fedrec.aggregators import Median
            >>> from fedrec.data import Digits
            >>> from fedrec.history import MemoryHistory
            >>> from fedrec.models import MLP
            >>> federation = Federation.from_data(Digits(num_clients=3), MLP(in_features=64))
            >>> result = FederatedLoop(fast_dev_run=True).record(
            ...     federation, Median(), MemoryHistory(), max_rounds=3, server_lr=0.1
            ... )
            >>> model = result.module().eval()
            >>> type(model).__name__, model(torch.zeros(5, 64)).shape
            ('MLP', torch.Size([5, 10]))
        """
        if self.trained is None or self.layout is None:
            raise ConfigurationError(
                "This result has no module to copy. HINT: load `global_weights` into your own by "
                "`ParameterVector(module).load(module, result.global_weights)`."
            )
        # Of tensors that a layer computed from its parameters (`weight_norm` keeps one), torch
        # copies none: the layer computes them anew.
        computed = {
            id(value): value.detach().clone()
            for layer in self.trained.modules()
            for value in vars(layer).values()
            if isinstance(value, Tensor) and not value.is_leaf
        }
        try:
            module = copy.deepcopy(self.trained, computed)
        except Exception as error:
            raise ConfigurationError(
                f"{type(self.trained).__name__} cannot be copied ({type(error).__name__}: "
                f"{error}). HINT: build another one, and load the weights into it by "
                "`federation.layout.load(module, result.global_weights)`."
            ) from error
        module = module.cpu()
        self.layout.load(module, self.global_weights)
        if self.buffers is not None:
            self.layout.load_buffers(module, self.buffers)
        return module

    def to_pandas(self) -> pd.DataFrame:
        """Return the curve as a `DataFrame`: one row per evaluated round.

        Returns:
            Columns `round` (0-based), `ter` and `asr` (fractions in [0, 1], after the round's
            server step), and one for each of the loop's metrics. Values that are undefined are NaN.

        Raises:
            MissingDependencyError: If pandas is not installed.
        """
        names = dict.fromkeys(["round", *(name for row in self.curve for name in row)])
        nan = float("nan")
        return data_frame({name: [row.get(name, nan) for row in self.curve] for name in names})

    def plot(self, figure: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw a curve by matplotlib.

        Args:
            figure: `"ter"`, `"asr"`, or one of the loop's metrics; `None` for the first there is.
            ax: Where to draw; `None` for a new figure.

        Returns:
            Where it was drawn, to go on with.

        Raises:
            ConfigurationError: If there is no such curve.
            MissingDependencyError: If matplotlib is not installed.
        """
        from fedrec.report.notebook import compare

        return compare(self).plot(figure, ax=ax)

    def __repr__(self) -> str:
        from fedrec.report.notebook import summary

        return f"{type(self).__name__}({summary(self)})"

    def _repr_html_(self) -> str:
        from fedrec.report.notebook import result_html

        return result_html(self)
