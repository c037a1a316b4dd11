from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedrec.aggregators import FedAvg
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError
from fedrec.federation import Federation
from fedrec.history import HistoryView, MemoryHistory
from fedrec.loop import FederatedLoop
from fedrec.models import MLP
from fedrec.recoverers import Estimator, FedRecover, PairedLBFGS
from fedrec.testing.problems import quadratic_federation
from fedrec.types import CohortUpdates, RoundRecord

IDS = ("a", "b", "c")


class Context(SimpleNamespace):
    """A recovery of three clients with Hessian I times a number; history gives its own memory."""

    def __init__(self, curvature: float = 1.0) -> None:
        super().__init__(client_ids=IDS, max_rounds=100, reads=[], asked=[], curvature=curvature)
        generator = torch.Generator().manual_seed(0)
        self.records = [
            RoundRecord(
                round=t,
                global_weights=torch.randn(4, generator=generator),
                sent=CohortUpdates(
                    client_ids=IDS,
                    updates=torch.randn(3, 4, generator=generator),
                    num_samples=torch.ones(3, dtype=torch.int64),
                ),
                aggregate=torch.zeros(4),
            )
            for t in range(6)
        ]
        self.t, self.weights, self.refuses = 0, torch.zeros(4), ()

    def history(self, t, client_ids=None, vectors=True):
        self.reads.append(t)
        record = self.records[t]
        return record if client_ids in (None, IDS) else record.select(client_ids)

    def exact(self, client_ids, reason):
        self.asked.append((self.t, tuple(client_ids), reason))
        ids = tuple(c for c in client_ids if c not in self.refuses)
        record = self.records[self.t].select(ids)
        return CohortUpdates(
            client_ids=ids,
            updates=record.updates + self.curvature * (self.weights - record.global_weights),
            num_samples=record.num_samples,
        )

    def column_rule(self, client_ids):
        return None

    def step(self, recoverer, t):
        self.t = t
        return recoverer.round_updates(t, self.weights, self)


def recoverer(estimator: str | Estimator = "paired", final_rounds: int = 0, **kwargs) -> FedRecover:
    made = FedRecover(
        warmup_rounds=3,
        correction_period=None,
        final_rounds=final_rounds,
        tolerance_rate=None,
        estimator=estimator,
        **kwargs,
    )
    made.start(HistoryView(SimpleNamespace(manifest=SimpleNamespace(keep={})), IDS), 100)
    return made


@pytest.mark.parametrize("estimator", ["paired", "history"])
@pytest.mark.parametrize("threshold", [None, 1e-6])
def test_records_are_read_once_a_round_and_never_changed(estimator, threshold) -> None:
    ctx = Context()
    before = [r.updates.clone() for r in ctx.records]
    method = recoverer(estimator=estimator, abnormality_threshold=threshold)
    for t in range(6):
        sent = ctx.step(method, t)
        assert sent.client_ids == IDS
        if estimator == "paired" or (t < 3 or threshold):
            expected = before[t] + (ctx.weights - ctx.records[t].global_weights)
        else:
            expected = before[t]
        torch.testing.assert_close(sent.updates, expected, rtol=1e-4, atol=1e-4)
    assert ctx.reads == [0, 1, 2, 3, 4, 5]
    assert len(ctx.asked) == (6 if threshold else 3)
    assert all(torch.equal(r.updates, b) for r, b in zip(ctx.records, before, strict=True))


def test_only_the_abnormal_client_is_asked_and_adds_a_pair() -> None:
    ctx = Context()
    method = recoverer(abnormality_threshold=100.0)
    for t in range(3):
        ctx.step(method, t)
    ctx.records[3].updates[1, 2] = -1000.0
    sent = ctx.step(method, 3)
    assert ctx.asked[3:] == [(3, ("b",), "abnormality")]
    # Its own pairs were of no use, and the new one takes the place of both.
    assert method.estimator._pairs.stamp.sort(dim=1).values.tolist() == [[1, 2], [-1, 3], [1, 2]]
    expected = ctx.records[3].updates - ctx.records[3].global_weights
    torch.testing.assert_close(sent.updates, expected, rtol=1e-4, atol=1e-4)
    assert sent.num_samples.tolist() == [1, 1, 1]


def test_a_client_that_is_refused_leaves_the_round() -> None:
    ctx = Context()
    method = recoverer(abnormality_threshold=1e-6)
    for t in range(3):
        ctx.step(method, t)
    ctx.refuses = ("b",)
    sent = ctx.step(method, 3)
    assert sent.client_ids == ("a", "c")
    expected = (ctx.records[3].updates - ctx.records[3].global_weights)[[0, 2]]
    torch.testing.assert_close(sent.updates, expected, rtol=1e-4, atol=1e-4)
    assert method.estimator._pairs.stamp.max(dim=1).values.tolist() == [3, 2, 3]


def test_what_stands_in_for_a_client_leaves_the_estimates_of_others_alone() -> None:
    ctx = Context()
    method = recoverer(abnormality_threshold=100.0, on_missing="estimate")
    for t in range(3):
        ctx.step(method, t)
    record = ctx.records[3]
    record.updates[1, 2] = -1000.0
    ctx.refuses = ("b",)
    sent = ctx.step(method, 3)
    assert sent.client_ids == IDS
    expected = record.updates - record.global_weights
    expected[1] = record.updates[1]  # whose estimate exceeds the threshold
    torch.testing.assert_close(sent.updates, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("t", [2, 5])  # warm-up, final tuning
@pytest.mark.parametrize("on_missing", ["drop", "estimate", "historical"])
def test_nothing_stands_in_for_clients_that_answer(on_missing: str, t: int) -> None:
    """The estimate of a client is what it sent last, in round 1."""
    ctx = Context()
    ctx.max_rounds = 6
    method = recoverer(estimator="average", final_rounds=1, on_missing=on_missing)
    exact = [r.updates + (ctx.weights - r.global_weights) for r in ctx.records]
    for before in range(2):
        ctx.step(method, before)
    ctx.refuses = ("b",)
    sent = ctx.step(method, t)
    if on_missing == "drop":
        assert sent.client_ids == ("a", "c")
        assert torch.equal(sent.updates, exact[t][[0, 2]])
        return
    stand_in = exact[1][1] if on_missing == "estimate" else ctx.records[t].updates[1]
    assert sent.client_ids == IDS
    assert torch.equal(sent.updates, torch.stack([exact[t][0], stand_in, exact[t][2]]))


def test_an_answer_counts_if_the_history_did_not_keep_what_the_client_had_sent() -> None:
    ctx = Context()
    ctx.history = lambda t, *_, **__: ctx.records[t].select(("b", "c"))
    ctx.refuses = ("b",)
    sent = ctx.step(recoverer(estimator="average", on_missing="historical"), 0)
    assert sent.client_ids == IDS
    record = ctx.records[0]
    expected = record.updates + (ctx.weights - record.global_weights)
    expected[1] = record.updates[1]
    assert torch.equal(sent.updates, expected)


def test_clients_without_a_pair_are_asked_as_a_fallback() -> None:
    ctx = Context()
    method = recoverer(abnormality_threshold=100.0)
    ctx.weights = ctx.records[0].global_weights
    for t in range(3):
        # No model difference, so no pair.
        ctx.weights = ctx.records[t].global_weights
        ctx.step(method, t)
    ctx.step(method, 3)
    assert ctx.asked[3:] == [(3, IDS, "fallback")]
    assert method.diagnostics()["skipped_pairs"] == 9.0


@pytest.mark.parametrize("negative", [False, True])
def test_negative_curvature_is_used_on_request(negative: bool) -> None:
    ctx = Context(curvature=-1.0)
    method = recoverer(estimator=PairedLBFGS(negative_curvature=negative))
    for t in range(3):
        ctx.step(method, t)
    sent = ctx.step(method, 3)
    asked = [] if negative else [(3, IDS, "fallback")]
    assert ctx.asked[3:] == asked
    expected = ctx.records[3].updates - (ctx.weights - ctx.records[3].global_weights)
    torch.testing.assert_close(sent.updates, expected, rtol=1e-4, atol=1e-4)
    # Whoever was asked alone has a pair now, and is not asked again and again.
    sent = ctx.step(method, 4)
    assert ctx.asked[3:] == asked
    expected = ctx.records[4].updates - (ctx.weights - ctx.records[4].global_weights)
    torch.testing.assert_close(sent.updates, expected, rtol=1e-4, atol=1e-4)


def test_negative_curvature_is_true_or_false() -> None:
    with pytest.raises(ConfigurationError, match="`negative_curvature` to be true or false"):
        PairedLBFGS(negative_curvature="any")


@pytest.mark.parametrize("tolerance_rate", [0.0, 0.01, 0.1, 0.5])
def test_the_threshold_is_found_without_reading_rounds_that_cannot_raise_it(
    tolerance_rate: float,
) -> None:
    class Counting(MemoryHistory):
        def __init__(self) -> None:
            super().__init__()
            self.reads: list[int] = []

        def read_round(self, t: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
            self.reads.append(t)
            return super().read_round(t, client_ids)

    history = Counting()
    loop = FederatedLoop(enable_progress_bar=False, logger=False)
    federation = quadratic_federation(num_clients=6, size=50)
    loop.record(federation, FedAvg(), history, max_rounds=30, server_lr=0.1)
    remaining = federation.client_ids[1:]
    per_round, largest = [], {}
    for t in range(30):
        magnitudes = history.read_round(t, remaining).updates.abs().flatten().double().numpy()
        allowed = int(tolerance_rate * magnitudes.size + 1e-9)
        per_round.append(float(np.sort(magnitudes)[::-1][allowed]))
        largest[t] = float(magnitudes.max())
    history.reads.clear()
    recoverer = FedRecover(tolerance_rate=tolerance_rate)
    recoverer.start(HistoryView(history, remaining), 30)
    threshold = recoverer.diagnostics()["abnormality_threshold"]
    assert threshold == max(per_round)
    order = sorted(largest, key=largest.__getitem__, reverse=True)
    assert history.reads == order[: len(history.reads)]
    assert all(largest[t] <= threshold for t in order[len(history.reads) :])
    if tolerance_rate == 0:  # the largest of all decides, and one more shows that it does
        assert len(history.reads) == 2


class Local(MLP):
    """A model with another optimizer."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(in_features=64, hidden=[4])
        self.choice = optimizer

    def configure_optimizers(self):
        if self.choice == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        momentum = 0.9 if self.choice == "momentum" else 0.0
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=momentum)


@pytest.mark.parametrize(
    ("optimizer", "steps", "estimator", "told"),
    [
        ("sgd", {"local_steps": 1}, "paired", None),
        ("momentum", {"local_steps": 1}, "paired", None),  # its first step is plain SGD's
        ("adam", {"local_steps": 1}, "paired", "3 by a step of Adam"),
        ("momentum", {"local_steps": 2}, "paired", "3 by several steps of SGD"),
        ("sgd", {"local_epochs": 1}, "paired", "3 by several steps of SGD"),
        ("adam", {"local_steps": 1}, "history", None),
    ],
)
def test_updates_that_are_no_gradients_are_told_once(optimizer, steps, estimator, told, caplog):
    data = Digits(num_clients=4)  # 337 samples each
    federation = Federation.from_data(data, Local(optimizer), batch_size=200, **steps)
    loop = FederatedLoop(logger=False, enable_progress_bar=False)
    history = MemoryHistory()
    loop.record(federation, FedAvg(), history, max_rounds=5, server_lr=0.1)
    method = FedRecover(warmup_rounds=3, final_rounds=1, estimator=estimator)
    with caplog.at_level("WARNING", logger="fedrec"):
        loop.recover(federation, history, method, exclude=["client-0"])
    warned = [r.getMessage() for r in caplog.records if "as if they were gradients" in r.msg]
    assert len(warned) == (told is not None)
    assert told is None or f"({told})" in warned[0]
