from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedrec.detectors import FLDetector
from fedrec.exceptions import ConfigurationError
from fedrec.functional import trim_attack, trimmed_mean
from fedrec.types import CohortUpdates, RoundRecord

D = 3


def record(
    t: int, updates: dict[str, list[float]], weights: Tensor | None = None, aggregate: float = 1.0
) -> RoundRecord:
    return RoundRecord(
        round=t,
        global_weights=torch.full((D,), -float(t)) if weights is None else weights,
        sent=CohortUpdates(
            client_ids=tuple(updates),
            updates=torch.tensor(list(updates.values())),
            num_samples=torch.ones(len(updates)),
        ),
        aggregate=torch.full((D,), aggregate),
        cohort=tuple(updates),
    )


def spread(t: int, outlier: float = 0.0) -> dict[str, list[float]]:
    """Twelve clients whose updates change by about 1 a round, those of `k` and `l` by `outlier`."""
    sign = (-1.0) ** t
    jumps = {c: 1.0 + 0.02 * i for i, c in enumerate("abcdefghij")}
    if outlier:
        jumps |= {"k": outlier, "l": outlier * 1.01}
    return {c: [sign * jump / 2, 0.0, 0.0] for c, jump in jumps.items()}


def watch(detector: FLDetector, rounds: int, **kwargs: float) -> FLDetector:
    for t in range(rounds):
        detector.observe(record(t, spread(t, **kwargs)))
    return detector


def test_first_verdict_after_a_full_window() -> None:
    for window, start_round in ((1, 1), (4, 1), (4, 6), (10, 20)):
        detector = FLDetector(window=window, start_round=start_round)
        result = watch(detector, 40, outlier=3.0).result()
        assert result.round == start_round + window - 1
        assert result.malicious == ("k", "l")


def test_scores_are_relative_to_the_mean_of_the_round() -> None:
    # All differences of aggregates are zero, so there is no curvature and no correction: client c
    # is off by its jump, and the scores are the jumps over their mean.
    result = watch(FLDetector(window=3, start_round=1), 3).result()
    assert result.round is None
    jumps = torch.tensor([1.0 + 0.02 * i for i in range(10)])
    expected = dict(zip("abcdefghij", (jumps / jumps.mean()).tolist(), strict=True))
    assert dict(result.scores) == pytest.approx(expected, rel=1e-5)


def test_gap_statistic_is_left_alone_until_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def count(values: Tensor, *args: object) -> int:
        asked.append(len(values))
        return 2 if len(asked) == 3 else 1

    monkeypatch.setattr("fedrec.detectors.fldetector.gap_statistic", count)
    detector = watch(FLDetector(window=4, start_round=5), 30)
    assert len(asked) == 3  # rounds 8, 9 and 10
    assert detector.result().round == 10


def test_verdict_stays_and_newcomers_are_seen() -> None:
    detector = watch(FLDetector(window=3, start_round=1), 4, outlier=3.0)
    verdict = detector.result()
    for t in range(4, 20):
        detector.observe(record(t, {**spread(t), "z": [100.0 * (-1) ** t, 0.0, 0.0]}))
    later = detector.result()
    assert (later.malicious, later.round, later.scores) == (
        verdict.malicious,
        verdict.round,
        verdict.scores,
    )
    assert later.seen == (*"abcdefghijkl", "z")


def test_a_client_that_was_away_has_no_prediction() -> None:
    detector = FLDetector(window=2, start_round=1)
    detector.observe(record(0, {"a": [0.0] * D, "b": [0.0] * D}))
    detector.observe(record(1, {"b": [1.0] * D, "c": [9.0] * D}))
    # c is new in round 1, a is gone; b alone is as far from its prediction as the mean.
    assert dict(detector.result().scores) == {"b": 1.0}
    detector.observe(record(2, {"c": [9.0, 9.0, 8.0], "b": [1.0, 1.0, 4.0], "a": [5.0] * D}))
    # In round 2, b is off by 3 and c by 1; b's score is the mean of 1 and 1.5.
    assert dict(detector.result().scores) == pytest.approx({"b": 1.25, "c": 0.5})
    assert detector.result().seen == ("a", "b", "c")


def test_rounds_without_a_client_in_common() -> None:
    detector = FLDetector(window=2, start_round=1)
    for t in range(8):
        detector.observe(record(t, {"ab"[t % 2]: [float(t)] * D}))
    result = detector.result()
    assert result.round is None
    assert result.malicious == ()
    assert dict(result.scores) == {}


@pytest.mark.parametrize(
    "weights",
    [
        lambda t: torch.zeros(D),  # the server never moved
        lambda t: torch.full((D,), float(t)),  # moved against its aggregates: negative curvature
        lambda t: torch.full((D,), 1e-30 * t),  # differences whose squares vanish
        lambda t: torch.full((D,), 1e18 * (-1) ** t),
    ],
)
def test_pairs_without_use_do_no_harm(weights: object) -> None:
    detector = FLDetector(window=4, start_round=1)
    for t in range(12):
        at = weights(t)  # type: ignore[operator]
        detector.observe(record(t, spread(t, outlier=3.0), at, aggregate=1.0 - 0.1 * t))
    result = detector.result()
    assert all(np.isfinite(list(result.scores.values())))
    assert result.malicious == ("k", "l")


def test_all_clients_alike() -> None:
    detector = FLDetector(window=2, start_round=1)
    for t in range(9):
        detector.observe(record(t, {c: [float(t)] * D for c in "abcde"}))
    assert detector.result().round is None
    assert set(detector.result().scores.values()) == {1.0}


def test_prediction_uses_the_shared_hessian() -> None:
    # Gradients are 2 w in every coordinate. Once a pair is in the buffer, predictions are exact for
    # everyone but b, whose gradients are 3 w.
    detector = FLDetector(window=1, start_round=3, standard_errors=1e6)
    w = torch.tensor([1.0, 1.0, 1.0])
    for t in range(4):
        detector.observe(
            RoundRecord(
                round=t,
                global_weights=w,
                sent=CohortUpdates(
                    client_ids=("a", "b", "c"),
                    updates=torch.stack([2 * w, 3 * w, 2 * w]),
                    num_samples=torch.ones(3),
                ),
                aggregate=2 * w,
            )
        )
        w = w - 0.25 * 2 * w
    assert dict(detector.result().scores) == pytest.approx({"a": 0.0, "b": 3.0, "c": 0.0}, abs=1e-5)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("window", 0),
        ("buffer_size", 0),
        ("start_round", 0),
        ("max_clusters", 1),
        ("num_references", 1),
        ("standard_errors", -1.0),
        ("seed", -1),
        ("window", 2.5),
    ],
)
def test_bad_arguments_are_named(argument: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{argument}` to be"):
        FLDetector(**{argument: value})  # type: ignore[arg-type]


def digits_federation(seed: int, malicious: Tensor, rounds: int) -> Iterator[RoundRecord]:
    """Twenty iid clients train a small network on digits in batches of 16."""
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randperm(1340, generator=generator).reshape(20, 67)
    w1 = (0.25 * torch.rand(32, 64, generator=generator) - 0.125).requires_grad_()
    w2 = (0.35 * torch.rand(10, 32, generator=generator) - 0.175).requires_grad_()
    ids = tuple(f"client-{i:02d}" for i in range(20))
    for t in range(rounds):
        rows = []
        for part in parts:
            batch = part[torch.randperm(67, generator=generator)[:16]]
            loss = cross_entropy((x[batch].float() / 16 @ w1.T).relu() @ w2.T, y[batch])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [w1, w2])]))
        updates = torch.stack(rows)
        draws = torch.rand(int(malicious.sum()), updates.shape[1], generator=generator)
        if malicious.any():
            updates = trim_attack(updates, malicious, draws)
        aggregate = trimmed_mean(updates, 4)
        with torch.no_grad():
            weights = torch.cat([w1.flatten(), w2.flatten()])
            w1 -= 0.1 * aggregate[: w1.numel()].reshape(w1.shape)
            w2 -= 0.1 * aggregate[w1.numel() :].reshape(w2.shape)
        yield RoundRecord(
            round=t,
            global_weights=weights,
            sent=CohortUpdates(
                client_ids=ids,
                updates=updates,
                num_samples=torch.full((20,), 67),
            ),
            aggregate=aggregate,
        )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_finds_exactly_the_trim_attackers_on_digits(seed: int) -> None:
    malicious = torch.zeros(20, dtype=torch.bool)
    malicious[torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:4]] = True
    detector = FLDetector()
    for record in digits_federation(seed, malicious, rounds=30):
        detector.observe(record)
    result = detector.result()
    assert result.round == 29
    assert result.malicious == tuple(
        f"client-{i:02d}" for i in malicious.nonzero().flatten().tolist()
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_accuses_nobody_on_benign_digits(seed: int) -> None:
    detector = FLDetector()
    for record in digits_federation(seed, torch.zeros(20, dtype=torch.bool), rounds=50):
        detector.observe(record)
    assert detector.result().malicious == ()
