"""Detectors by scores: cases by hand, clients that come and go, verdicts, votes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch

from fedrec import FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.detectors import (
    Auror,
    CosineOutlier,
    CrossRoundConsistency,
    Detector,
    Ensemble,
    KnownMalicious,
    Mahalanobis,
    NormOutlier,
    ScoreDetector,
    Spectral,
    SybilSimilarity,
    UpdateAutoencoder,
)
from fedrec.exceptions import ConfigurationError
from fedrec.federation import ClientSampler
from fedrec.history import MemoryHistory
from fedrec.testing.problems import quadratic_federation
from fedrec.types import CohortUpdates, Detection, RoundRecord


class FirstEntry(ScoreDetector):
    """The score of a client is the first entry of its update."""

    def score(self, record: RoundRecord) -> torch.Tensor:
        return record.updates[:, 0]


def show(detector: Detector, t: int, updates: Mapping[str, Sequence[float]]) -> Detector:
    rows = torch.tensor(list(updates.values()), dtype=torch.float32)
    detector.observe(
        RoundRecord(
            round=t,
            global_weights=torch.zeros(rows.shape[1]),
            sent=CohortUpdates(
                client_ids=tuple(updates),
                updates=rows,
                num_samples=torch.ones(len(rows), dtype=torch.int64),
            ),
            aggregate=rows.mean(dim=0),
        )
    )
    return detector


# -- what no client may do to the others -----------------------------------------------------------


@pytest.mark.parametrize(
    "detector",
    [
        NormOutlier(window=2),
        CosineOutlier(window=2),
        CrossRoundConsistency(window=2),
        Spectral(window=2),
        Mahalanobis(window=2),
        Mahalanobis(projection="random", window=2),
        SybilSimilarity(window=2),
        UpdateAutoencoder(num_features=8, code=2, train_rounds=2, epochs=3, window=2),
    ],
    ids=lambda detector: f"{type(detector).__name__}-{getattr(detector, 'projection', '')}",
)
def test_values_near_overflow_do_not_hide_anybody(detector: ScoreDetector) -> None:
    generator = torch.Generator().manual_seed(0)
    detector.reset()
    for t in range(6):
        x = torch.randn(9, 20, generator=generator) + 1.0
        x[4] = 3e38
        show(detector, t, dict(zip("abcdefghi", x.tolist(), strict=True)))
    scores = detector.result().scores
    assert sorted(scores) == list("abcdefghi")
    assert all(map(math.isfinite, scores.values()))
    assert len(set(scores.values())) > 1


# -- what they share -------------------------------------------------------------------------------


def test_the_mean_over_the_window_decides() -> None:
    detector = FirstEntry(window=2, threshold=1.0)
    show(detector, 0, {"a": [9.0], "b": [0.0]})
    assert detector.result().malicious == ()  # one round is not two
    show(detector, 1, {"a": [-8.0], "b": [2.0]})  # means 0.5 and 1
    assert detector.result().malicious == ()
    show(detector, 2, {"a": [0.0], "b": [0.5]})  # means -4 and 1.25
    result = detector.result()
    assert (result.malicious, result.round) == (("b",), 2)
    assert dict(result.scores) == {"a": -4.0, "b": 1.25}
    show(detector, 3, {"a": [0.0], "b": [0.0]})  # b stays flagged, with the score that did it
    result = detector.result()
    assert (result.malicious, result.round) == (("b",), 2)
    assert dict(result.scores) == {"a": 0.0, "b": 1.25}
    assert result.round_scores[1] == {"a": -8.0, "b": 2.0}


def test_clients_are_judged_by_the_rounds_they_took_part_in() -> None:
    detector = FirstEntry(window=2, threshold=1.0)
    for t in range(6):
        cohort = {"a": [0.0]} if t % 2 else {"a": [0.0], "late": [3.0]}
        show(detector, t, cohort if t > 2 else {"a": [0.0]})
    result = detector.result()
    # "late" is there in round 4 alone.
    assert (result.malicious, result.seen) == ((), ("a", "late"))
    show(detector, 6, {"late": [3.0]})
    assert (detector.result().malicious, detector.result().round) == (("late",), 6)


def test_rounds_before_the_start_are_not_scored() -> None:
    detector = FirstEntry(window=1, threshold=1.0, start_round=3)
    for t in range(4):
        assert show(detector, t, {"a": [5.0]}).result().round == (3 if t == 3 else None)
    assert sorted(detector.result().round_scores) == [3]


def test_a_stop_ends_the_recording_at_the_decision() -> None:
    loop = FederatedLoop(logger=False, enable_progress_bar=False)
    detector = NormOutlier(window=4, threshold=0.0)
    result = loop.record(
        quadratic_federation(), FedAvg(), MemoryHistory(), max_rounds=50, server_lr=0.1,
        detector=detector, stop_on_detection=True,
    )  # fmt: skip
    assert result.rounds == 4
    assert result.detection is not None
    assert result.detection.round == 3


def test_late_joiners_are_found_on_a_recording() -> None:
    """The malicious client joins in round 20 and is named ten rounds later."""
    federation = quadratic_federation(num_clients=9, num_malicious=1)
    from fedrec.attacks import SignFlip

    history = MemoryHistory()
    FederatedLoop(logger=False, enable_progress_bar=False).record(
        federation, FedAvg(), history, max_rounds=40, server_lr=0.1, attack=SignFlip(scale=30.0),
        sampler=ClientSampler(joins={"q8": 20}),
    )  # fmt: skip
    found = NormOutlier(threshold=8.0).detect(history)
    assert (found.malicious, found.round) == (("q8",), 29)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: NormOutlier(window=0), "window"),
        (lambda: NormOutlier(two_sided=1), "two_sided"),
        (lambda: CosineOutlier(threshold=-1.0), "threshold"),
        (lambda: Spectral(num_coordinates=0), "num_coordinates"),
        (lambda: Mahalanobis(projection="svd"), "projection"),
        (lambda: Auror(alpha=0), "alpha"),
        (lambda: Auror(find_rounds=0), "find_rounds"),
        (lambda: CrossRoundConsistency(measure="angle"), "measure"),
        (lambda: SybilSimilarity(start_round=-1), "start_round"),
        (lambda: UpdateAutoencoder(epochs=0), "epochs"),
        (lambda: Ensemble([]), "detectors"),
        (lambda: Ensemble([KnownMalicious()], votes=2), "votes"),
        (lambda: Ensemble([(one := NormOutlier()), one]), "detectors"),
    ],
)
def test_bad_arguments_are_named(make, argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{argument}`"):
        make()


# -- cases by hand ---------------------------------------------------------------------------------


def test_norms_by_hand() -> None:
    """Norms 1, 2, 3, 4, 13: median 3, deviations 2, 1, 0, 1, 10, their median 1."""
    updates = {"a": [1, 0], "b": [0, 2], "c": [3, 0], "d": [0, -4], "e": [5, 12]}
    scores = show(NormOutlier(window=1), 0, updates).result().scores
    expected = [0.6744897501960817 * k for k in (-2, -1, 0, 1, 10)]
    assert list(scores.values()) == pytest.approx(expected)


def test_short_updates_are_suspicious_if_asked_for() -> None:
    updates = {"a": [10.0], "b": [10.1], "c": [9.9], "d": [10.2], "e": [0.1]}
    assert show(NormOutlier(window=1), 0, updates).result().malicious == ()
    assert show(NormOutlier(window=1, two_sided=True), 0, updates).result().malicious == ("e",)


def test_a_flipped_sign_is_a_cosine_of_minus_one() -> None:
    updates = {"a": [1, 1.0], "b": [2, 2.1], "c": [1, 0.9], "d": [1, 1.2], "e": [-1, -1.0]}
    assert show(CosineOutlier(window=1), 0, updates).result().malicious == ("e",)


def test_colluders_own_the_top_singular_direction() -> None:
    updates = {f"b{i}": [0.1 * (-1) ** i, 0.02 * i, 0.0] for i in range(7)}
    updates |= {"x": [0.0, 0.0, 5.0], "y": [0.0, 0.0, 5.2]}
    assert show(Spectral(window=1), 0, updates).result().malicious == ("x", "y")


def test_auror_by_hand() -> None:
    """Two coordinates show the groups {x, y} and the rest; one does not (2.7 spreads apart)."""
    detector = Auror(alpha=10.0, find_rounds=1, window=1)
    rest = {c: [0.0 + 0.01 * i, 1.0 + 0.01 * i, float(i)] for i, c in enumerate("abcde")}
    updates = rest | {"x": [1.0, -1.0, 2.5], "y": [1.01, -1.01, 2.6]}
    assert show(detector, 0, updates).result().scores == {}
    assert show(detector, 1, updates).result().scores == dict.fromkeys("abcde", 0) | {
        "x": 1.0,
        "y": 1.0,
    }
    # In the minority in one of the two coordinates: a half, which is not more than a half.
    updates = rest | {"x": [1.0, 1.0, 0.0], "y": [1.0, 1.0, 0.0]}
    result = show(detector, 2, updates).result()
    assert result.malicious == ("x", "y")
    assert (result.round, result.round_scores[2]["x"]) == (1, 0.5)


def test_without_indicative_coordinates_nobody_is_suspicious() -> None:
    detector = Auror(alpha=1e5, find_rounds=1, window=1)
    for t in range(2):
        show(detector, t, {"a": [0.0], "b": [0.3], "c": [9.0]})
    assert detector.result().scores == {"a": 0.0, "b": 0.0, "c": 0.0}


def test_twins_are_found_by_their_sums() -> None:
    detector = SybilSimilarity(window=1, threshold=6.0)
    angles = [0.0, 0.3, 0.7, 1.2, 1.8, 2.5]
    updates = {f"b{i}": [math.cos(a), math.sin(a)] for i, a in enumerate(angles)}
    updates |= {"x": [math.cos(4.0), math.sin(4.0)], "y": [2 * math.cos(4.0), 2 * math.sin(4.0)]}
    assert show(detector, 0, updates).result().malicious == ("x", "y")
    alone = {k: v for k, v in updates.items() if k != "y"}
    assert show(SybilSimilarity(window=1), 0, alone).result().malicious == ()


def test_a_change_of_sign_from_round_to_round() -> None:
    """a, b, c, d keep 3 of 4 signs, or all; x none."""
    detector = CrossRoundConsistency(measure="sign", window=1)
    before = {c: [1.0, 1.0, 1.0, 1.0] for c in "abcdex"}
    assert show(detector, 0, before).result().scores == {}
    after = {
        "a": [1.0, 1.0, 1.0, -1.0],
        "b": [2.0, 1.0, -1.0, 1.0],
        "c": [1.0, 1.0, 1.0, 1.0],
        "d": [1.0, 1.0, 1.0, 1.0],
        "x": [-1.0, -1.0, -1.0, -1.0],
        "new": [-1.0, 1.0, 1.0, 1.0],
    }
    result = show(detector, 1, after).result()
    assert set(result.scores) == set("abcdx")  # nothing to compare "new" with
    # 1 - agreement: 1/4, 1/4, 0, 0, 1; the median is 1/4, its absolute deviations' median 1/4.
    assert result.scores["x"] == pytest.approx(0.6744897501960817 * 3)


def test_mahalanobis_sees_what_is_unusual_not_what_is_far() -> None:
    """x is nearer to the middle than a, but off the line the others lie along."""
    updates = {c: [float(10 * i), 0.1 * (-1) ** i] for i, c in enumerate("abcdefghi", start=-4)}
    updates["x"] = [0.0, 6.0]
    result = show(Mahalanobis(window=1), 0, updates).result()
    assert result.malicious == ("x",)


@pytest.mark.parametrize("projection", ["pca", "random"])
def test_mahalanobis_does_not_score_a_round_of_few_clients(projection: str) -> None:
    detector = Mahalanobis(projection=projection)
    show(detector, 0, {c: [float(i), i * i, 1.0] for i, c in enumerate("abcd")})
    assert detector.result().seen == tuple("abcd")
    assert dict(detector.result().round_scores) == {}
    show(detector, 1, {c: [float(i), i * i, 1.0] for i, c in enumerate("abcde")})
    assert set(detector.result().round_scores[1]) == set("abcde")


def test_an_autoencoder_learns_a_line_and_finds_what_is_not_on_it() -> None:
    detector = UpdateAutoencoder(
        num_features=4, hidden=16, code=1, train_rounds=5, epochs=500, window=3
    )
    generator = torch.Generator().manual_seed(0)
    for t in range(8):
        scale = torch.rand(10, generator=generator) + 0.5
        updates = {f"b{i}": [float(s)] * 4 for i, s in enumerate(scale)}
        # As long as the others.
        updates["x"] = [1.0, -1.0, 1.0, -1.0]
        show(detector, t, updates)
    result = detector.result()
    assert sorted(result.round_scores) == [5, 6, 7]
    assert "x" in result.malicious
    benign = [score for client, score in result.scores.items() if client != "x"]
    assert result.scores["x"] > 2 * max(benign)


# -- votes -----------------------------------------------------------------------------------------


def test_votes_by_hand() -> None:
    detectors = [
        KnownMalicious(ids=["a", "b"]),
        KnownMalicious(ids=["b", "c"]),
        FirstEntry(window=2, threshold=1.0),
    ]
    ensemble = Ensemble(detectors)  # two of three
    show(ensemble, 0, {"a": [2.0], "b": [0.0], "c": [0.0], "d": [2.0]})
    result = ensemble.result()
    assert (result.malicious, result.round) == (("b",), 0)
    show(ensemble, 1, {"a": [2.0], "b": [0.0], "c": [0.0], "d": [2.0]})
    result = ensemble.result()
    assert (result.malicious, result.round) == (("a", "b"), 0)
    assert dict(result.scores) == pytest.approx({"a": 2 / 3, "b": 2 / 3, "c": 1 / 3, "d": 1 / 3})
    unanimous = show(Ensemble(detectors[:2], votes=2), 0, {"a": [0.0], "b": [0.0], "c": [0.0]})
    assert unanimous.result().malicious == ("b",)


def test_oracles_vote_with_the_truth() -> None:
    ensemble = Ensemble([KnownMalicious(), KnownMalicious()])
    assert not ensemble.needs_updates
    ensemble.reset(["b"])
    assert show(ensemble, 0, {"a": [0.0], "b": [0.0]}).result().malicious == ("b",)
    assert Ensemble([KnownMalicious(), NormOutlier()]).needs_updates


# -- rates -----------------------------------------------------------------------------------------


def test_rates_by_hand() -> None:
    found = Detection(malicious=("a", "b", "c"), seen=("a", "b", "c", "d", "e", "f"))
    truth = ("b", "d", "unseen")
    assert found.precision(truth) == pytest.approx(1 / 3)
    assert found.recall(truth) == 0.5
    assert found.false_negative_rate(truth) == 0.5
    assert found.false_positive_rate(truth) == 0.5
    nobody = Detection(malicious=(), seen=("a",))
    assert nobody.precision(truth) is None
    assert nobody.recall(()) is None
