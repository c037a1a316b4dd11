"""FedRecover that starts late, and FedRecover that distrusts what it is sent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec import Attack, FederatedLoop
from fedrec.aggregators import FedAvg, Median
from fedrec.exceptions import ConfigurationError
from fedrec.history import MemoryHistory
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts
from fedrec.recoverers import FedRecover, HistoricalOnly, TrainFromScratch, UpdateFilter
from fedrec.testing.problems import quadratic_federation

ROUNDS, LR = 40, 0.3
SCHEDULE = {"warmup_rounds": 5, "correction_period": 10, "final_rounds": 3}


def make_loop() -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)


class Dormant(Attack):
    """q4 attacks while recording; q3 only when a recovery asks it."""

    def craft(self, updates, malicious, ctx):
        crafted = updates.clone()
        for i in malicious.nonzero().flatten().tolist():
            if ctx.client_ids[i] == "q4" and ctx.phase == "record":
                crafted[i] *= -0.5
            if ctx.client_ids[i] == "q3" and ctx.phase == "recover":
                crafted[i] *= -1
        return crafted


def recorded(rounds: int = ROUNDS, initial: torch.Tensor | None = None, rule=None):
    federation = quadratic_federation(num_clients=5, size=6, num_malicious=2)
    if initial is not None:
        with torch.no_grad():
            federation.module.weight.copy_(initial)
    history = MemoryHistory()
    make_loop().record(
        federation,
        rule or FedAvg(),
        history,
        max_rounds=rounds,
        server_lr=LR,
        attack=Dormant(),
    )
    return federation, history


# -- start_round --------------------------------------------------------------------------------


def test_starting_late_is_recovering_from_a_recording_that_starts_there() -> None:
    federation, history = recorded()
    weights = history.read_round(20, ()).global_weights
    _, rest = recorded(ROUNDS - 20, initial=weights)
    for options in ({}, {"tolerance_rate": None}, {"estimator": "history"}):
        late, whole = (
            make_loop().recover(
                federation, store, FedRecover(**SCHEDULE, **start, **options), ["q4"]
            )
            for store, start in ((history, {"start_round": 20}), (rest, {}))
        )
        assert torch.equal(late.global_weights, whole.global_weights)
        assert late.diagnostics == whole.diagnostics
        shifted = [e._replace(round=e.round + 20) for e in whole.ledger.entries]
        assert list(late.ledger.entries) == shifted
        assert late.rounds == 20


def test_rounds_before_the_start_cost_nothing_and_count() -> None:
    federation, history = recorded()
    recoverer = FedRecover(start_round=20, tolerance_rate=None, **SCHEDULE)
    result = make_loop().recover(federation, history, recoverer, ["q4"])
    asked = [e.round for e in result.ledger.entries if e.client_id == "q0"]
    # Warm-up; every tenth round, the first of them 20 + 5 + 9; final tuning.
    assert asked == [20, 21, 22, 23, 24, 34, 37, 38, 39]
    assert result.ledger.acp() == pytest.approx((40 - 9) / 40)


def test_start_has_to_be_within_the_recording() -> None:
    federation, history = recorded()
    with pytest.raises(ConfigurationError, match="`start_round` to be less than the 40 rounds"):
        make_loop().recover(federation, history, FedRecover(start_round=40), ["q4"])


# -- update_filter ------------------------------------------------------------------------------


def test_filter_is_relative_distance_and_cosine() -> None:
    rng = np.random.default_rng(0)
    estimates = rng.normal(size=(200, 8))
    received = estimates + rng.normal(size=(200, 8)) * rng.uniform(0, 4, size=(200, 1))
    length = np.sqrt((estimates**2).sum(axis=1))
    distance = np.sqrt(((received - estimates) ** 2).sum(axis=1)) / length
    cosine = np.einsum("ij,ij->i", received, estimates) / length
    cosine /= np.sqrt((received**2).sum(axis=1))
    pairs = [torch.from_numpy(received), torch.from_numpy(estimates)]
    near = UpdateFilter(max_distance=1.5, min_cosine=None).accepts(*pairs).numpy()
    aligned = UpdateFilter(max_distance=None, min_cosine=0.6).accepts(*pairs).numpy()
    both = UpdateFilter(max_distance=1.5, min_cosine=0.6).accepts(*pairs).numpy()
    np.testing.assert_array_equal(near, distance <= 1.5)
    np.testing.assert_array_equal(aligned, cosine >= 0.6)
    np.testing.assert_array_equal(both, (distance <= 1.5) & (cosine >= 0.6))
    assert len({near.sum(), aligned.sum(), both.sum()}) == 3


@pytest.mark.parametrize(("rule", "estimator"), [(FedAvg(), "paired"), (Median(), "paper")])
def test_an_undetected_attacker_is_stopped(rule, estimator: str) -> None:
    federation, history = recorded(rule=rule)

    def recover(recoverer, attack):
        return make_loop().recover(federation, history, recoverer, ["q4"], attack=attack)

    def fedrecover(update_filter=None):
        return FedRecover(
            **SCHEDULE, tolerance_rate=None, estimator=estimator, update_filter=update_filter
        )

    honest = recover(fedrecover(), None).global_weights
    attacked = recover(fedrecover(), Dormant()).global_weights
    found = recover(fedrecover(UpdateFilter()), Dormant())
    harm = float((attacked - honest).norm())
    assert harm > 1
    assert float((found.global_weights - honest).norm()) < 0.2 * harm
    # q3 never gives a pair, so it is asked in all rounds, and filtered in all.
    assert found.diagnostics["filtered_updates"] == ROUNDS
    assert found.ledger.cp()["q3"] == 0
    assert found.ledger.cp()["q0"] == pytest.approx((40 - 11) / 40)


def test_a_filter_that_all_pass_changes_no_bit() -> None:
    federation, history = recorded()
    weights = [
        make_loop()
        .recover(federation, history, FedRecover(**SCHEDULE, update_filter=one), ["q4"])
        .global_weights
        for one in (None, UpdateFilter(max_distance=1e9, min_cosine=-1.0))
    ]
    assert torch.equal(*weights)


def test_filtered_updates_are_replaced_by_estimates() -> None:
    """Where nothing passes and history is the estimate, history is all that is used."""
    federation, history = recorded()
    strict = UpdateFilter(max_distance=1e-12, min_cosine=None)
    recoverer = FedRecover(
        **SCHEDULE, estimator="history", tolerance_rate=None, update_filter=strict
    )
    found = make_loop().recover(federation, history, recoverer, ["q4"], attack=Dormant())
    replayed = make_loop().recover(federation, history, HistoricalOnly(), ["q4"])
    torch.testing.assert_close(found.global_weights, replayed.global_weights)
    # q0, q1, q2 send in the first round what they sent in the recording.
    assert found.diagnostics["filtered_updates"] == 11 * 4 - 3
    scratch = make_loop().recover(federation, history, TrainFromScratch(), ["q4"])
    assert float((scratch.global_weights - replayed.global_weights).norm()) > 0.1


def test_without_estimates_there_is_nothing_to_filter_by() -> None:
    with pytest.raises(ConfigurationError, match="`update_filter` to be none"):
        FedRecover(estimator="none", update_filter=UpdateFilter())
    with pytest.raises(ConfigurationError, match="neither bound"):
        UpdateFilter(max_distance=None, min_cosine=None)


def test_a_recipe_says_it(tmp_path: Path) -> None:
    path = tmp_path / "filtered.yaml"
    path.write_text(
        """
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1}
aggregator: Median
record: {max_rounds: 40, server_lr: 0.1}
recover: {exclude: [client-0]}
recoverers:
  - class_path: FedRecover
    init_args:
      start_round: 3
      update_filter: {class_path: UpdateFilter, init_args: {min_cosine: 0.5}}
  - class_path: FedEraser
    init_args: {interval: 4}
  - class_path: RollbackRetrain
    init_args: {noise_std: 0.01}
"""
    )
    parts = build_parts(load_recipe(path))
    recoverer = next(iter(parts.recoverers.values()))
    assert isinstance(recoverer, FedRecover)
    assert recoverer.update_filter is not None
    assert recoverer.update_filter.min_cosine == 0.5
