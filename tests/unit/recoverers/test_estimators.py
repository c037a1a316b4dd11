"""What makes FedRecover's estimates: which is meant, what it is shown, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrec.aggregators import FedAvg
from fedrec.component import build
from fedrec.exceptions import ConfigurationError
from fedrec.history import MemoryHistory
from fedrec.loop import FederatedLoop
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts
from fedrec.recoverers import (
    AnchoredLBFGS,
    Estimates,
    Estimator,
    FedRecover,
    HistoricalUpdate,
    MovingAverage,
    PairedLBFGS,
    PaperLBFGS,
    Recoverer,
)
from fedrec.testing.problems import quadratic_federation

NAMES = [
    ("paired", PairedLBFGS()),
    ("paper", PaperLBFGS()),
    ("average", MovingAverage()),
    ("anchored", AnchoredLBFGS()),
    ("history", HistoricalUpdate()),
    ("none", None),
]


@pytest.mark.parametrize(("name", "meant"), NAMES)
def test_a_name_means_an_estimator_at_its_defaults(name: str, meant: Estimator | None) -> None:
    by_name, itself = FedRecover(estimator=name), FedRecover(estimator=meant)
    assert repr(by_name) == repr(itself)
    assert f"estimator={meant!r}" in repr(by_name)
    assert repr(build(by_name.spec(), Recoverer, "recoverer")) == repr(by_name)
    assert by_name.estimator is None or by_name.estimator is not FedRecover(estimator=name)


@pytest.mark.parametrize("kind", [PairedLBFGS, PaperLBFGS])
def test_lbfgs_keeps_pairs_estimates_and_model_differences(
    kind: type[PairedLBFGS | PaperLBFGS],
) -> None:
    # 10 clients with 3 update differences and an estimate each; 3 model differences and the vector
    # that all are multiplied with; of 100 float32.
    assert kind(buffer_size=3).kept_bytes(10, 100) == (10 * 4 + 4) * 100 * 4


def test_the_default_is_the_anchored_estimate() -> None:
    assert repr(FedRecover().estimator) == repr(AnchoredLBFGS())


@pytest.mark.parametrize("wrong", ["lbfgs", 3, PairedLBFGS])
def test_anything_else_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="Expected `estimator` to be an Estimator or a na"):
        FedRecover(estimator=wrong)


@pytest.mark.parametrize("kind", [PairedLBFGS, PaperLBFGS])
def test_warm_up_is_longer_than_pairs_are_many(kind: Any) -> None:
    assert FedRecover(warmup_rounds=4, estimator=kind(buffer_size=3)).warmup_rounds == 4
    with pytest.raises(
        ConfigurationError, match=r"`warmup_rounds` to be at least 4 with estimator=Pa"
    ):
        FedRecover(warmup_rounds=3, estimator=kind(buffer_size=3))
    assert FedRecover(warmup_rounds=1, estimator="history").warmup_rounds == 1


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("paper", "PaperLBFGS(buffer_size=2)"),
        ("none", "None"),
        ("{class_path: HistoricalUpdate}", "HistoricalUpdate()"),
        (
            "{class_path: AnchoredLBFGS, init_args: {gain: spacing, history_weight: 1}}",
            repr(AnchoredLBFGS(gain="spacing", history_weight=1.0)),
        ),
        (
            "{class_path: AnchoredLBFGS, init_args: {gain: 0.3, curvature_weight: pooled}}",
            repr(AnchoredLBFGS(gain=0.3, curvature_weight="pooled")),
        ),
        (
            "{class_path: PairedLBFGS, init_args: {buffer_size: 3, negative_curvature: true}}",
            "PairedLBFGS(buffer_size=3, negative_curvature=True)",
        ),
    ],
)
def test_a_recipe_says_it(tmp_path: Path, written: str, meant: str) -> None:
    path = tmp_path / "estimated.yaml"
    path.write_text(
        f"""
data: {{class_path: Digits, init_args: {{num_clients: 5}}}}
model: {{class_path: MLP, init_args: {{in_features: 64, hidden: [4]}}}}
federation: {{malicious: 1}}
aggregator: FedAvg
record: {{max_rounds: 40, server_lr: 0.1}}
recover: {{exclude: [client-0]}}
recoverers:
  - class_path: FedRecover
    init_args: {{estimator: {written}}}
"""
    )
    (recoverer,) = build_parts(load_recipe(path)).recoverers.values()
    assert isinstance(recoverer, FedRecover)
    assert repr(recoverer.estimator) == meant


class Watching(Estimator):
    """Remembers what it is shown; its estimates of q1 are infinite, of q2 there are none."""

    def start(self, *arguments):
        self.seen = []

    def observe(self, record, exact, global_weights, reason):
        self.seen.append((record, exact.clone(), global_weights.clone(), reason))

    def estimate(self, record, global_weights):
        updates = record.updates.clone()
        for row, client_id in zip(updates, record.client_ids, strict=True):
            if client_id == "q1":
                row[0] = 100.0
        usable = torch.tensor([c != "q2" for c in record.client_ids])
        return Estimates(updates, updates.abs().amax(dim=1), usable)

    def diagnostics(self):
        return {"observed": float(len(self.seen))}


@pytest.mark.parametrize("keep", [{}, {"every": 2}], ids=str)
def test_it_sees_every_exact_update_with_the_recorded_one(keep: dict[str, int]) -> None:
    federation = quadratic_federation()  # q0 to q4, of which q4 is malicious
    history = MemoryHistory(keep=keep)
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    loop.record(federation, FedAvg(), history, max_rounds=12, server_lr=0.3)
    method = FedRecover(
        warmup_rounds=3,
        correction_period=5,
        final_rounds=2,
        abnormality_threshold=50.0,
        estimator=Watching(),
    )
    result = loop.recover(federation, history, method, ["q4"])
    clients = {c.client_id: c for c in federation.clients}
    shown: list[tuple[str, int, str]] = []
    assert isinstance(method.estimator, Watching)
    for record, exact, weights, reason in method.estimator.seen:
        recorded = history.read_round(record.round, record.client_ids)
        assert torch.equal(record.updates, recorded.updates)
        assert torch.equal(record.global_weights, recorded.global_weights)
        for client_id, update in zip(record.client_ids, exact, strict=True):
            client = clients[client_id]
            torch.testing.assert_close(update, client.hessian @ (weights - client.centre))
            shown.append((client_id, record.round, reason))
    # What was asked is what was shown, but for final rounds and rounds that were not kept.
    kept = {t for t in range(12) if not keep or t % 2 == 0}
    entries = [(e.client_id, e.round, e.reason) for e in result.ledger.entries]
    assert sorted(shown) == sorted(e for e in entries if e[1] in kept and e[2] != "final")
    rounds = kept - {0, 1, 2, 7, 10, 11}
    reasons = Counter(e[2] for e in entries)
    assert reasons["abnormality"] == len(rounds)
    assert reasons["fallback"] == len(rounds) + 4 * (6 - len(rounds))
    assert result.diagnostics == {
        "abnormality_threshold": 50.0,
        "estimated_updates": 2.0 * len(rounds),
        "filtered_updates": 0.0,
        "observed": float(len(method.estimator.seen)),
    }
