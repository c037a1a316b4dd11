from __future__ import annotations

import itertools

import pytest
import torch

from fedrec.detectors import Detector, Ensemble, ImperfectOracle, KnownMalicious
from fedrec.exceptions import ConfigurationError
from fedrec.types import CohortUpdates, RoundRecord

CLIENTS = tuple(f"client-{i:02d}" for i in range(20))
TRUTH = CLIENTS[3:7]


def record(t: int, client_ids: tuple[str, ...], cohort: tuple[str, ...] = ()) -> RoundRecord:
    m = len(client_ids)
    return RoundRecord(
        round=t,
        global_weights=torch.zeros(1),
        sent=CohortUpdates(
            client_ids=client_ids,
            updates=torch.zeros(m, 1),
            num_samples=torch.ones(m),
        ),
        aggregate=torch.zeros(1),
        cohort=cohort,
    )


def verdict_on(detector: Detector, *cohorts: tuple[str, ...]) -> tuple[str, ...]:
    detector.reset(TRUTH)
    for t, cohort in enumerate(cohorts):
        detector.observe(record(t, cohort))
    return detector.result().malicious


def test_known_malicious_is_the_truth_or_the_list() -> None:
    assert verdict_on(KnownMalicious(), CLIENTS) == TRUTH
    assert verdict_on(KnownMalicious(ids=["client-19", "client-00"]), CLIENTS) == (
        "client-00",
        "client-19",
    )
    assert verdict_on(KnownMalicious(ids=[]), CLIENTS) == ()


def test_only_clients_that_took_part_are_flagged() -> None:
    assert verdict_on(KnownMalicious(), CLIENTS[:5]) == CLIENTS[3:5]
    assert verdict_on(KnownMalicious(), CLIENTS[:5], CLIENTS[6:9]) == (*CLIENTS[3:5], CLIENTS[6])


def test_a_client_whose_updates_were_refused_took_part() -> None:
    detector = KnownMalicious()
    detector.reset(TRUTH)
    detector.observe(record(0, CLIENTS[:3], cohort=CLIENTS[:4]))
    assert detector.result().malicious == (CLIENTS[3],)


def test_decided_in_the_first_round_observed() -> None:
    for detector in (KnownMalicious(), ImperfectOracle()):
        detector.reset(TRUTH)
        for t in (4, 5, 6):
            detector.observe(record(t, CLIENTS))
        assert detector.result().round == 4
        detector.reset()
        assert detector.result().round is None
        assert detector.result().seen == ()


@pytest.mark.parametrize(
    ("fnr", "fpr", "missed", "flagged"),
    [
        (0.0, 0.0, 0, 0),
        (0.25, 0.0, 1, 0),
        (0.3, 0.1, 1, 2),  # 1.2 and 1.6
        (0.375, 0.0, 2, 0),  # 1.5: halves go up
        (0.5, 0.5, 2, 8),
        (1.0, 1.0, 4, 16),
    ],
)
def test_number_of_errors(fnr: float, fpr: float, missed: int, flagged: int) -> None:
    detector = ImperfectOracle(fnr=fnr, fpr=fpr, seed=1)
    malicious = set(verdict_on(detector, CLIENTS))
    assert len(set(TRUTH) - malicious) == missed
    assert len(malicious - set(TRUTH)) == flagged
    assert detector.result().false_negative_rate(TRUTH) == missed / 4
    assert detector.result().false_positive_rate(TRUTH) == flagged / 16


def test_who_is_misjudged_depends_on_the_seed_alone() -> None:
    verdicts = {
        seed: verdict_on(ImperfectOracle(fnr=0.5, fpr=0.25, seed=seed), CLIENTS)
        for seed in range(9)
    }
    assert len(set(verdicts.values())) > 5
    for seed, verdict in verdicts.items():
        oracle = ImperfectOracle(fnr=0.5, fpr=0.25, seed=seed)
        assert verdict_on(oracle, CLIENTS[::-1], CLIENTS[:4]) == verdict


def test_a_higher_rate_misjudges_the_same_clients_and_more() -> None:
    verdicts = [set(verdict_on(ImperfectOracle(fpr=p / 16), CLIENTS)) for p in range(17)]
    assert [len(v) for v in verdicts] == list(range(4, 21))
    assert all(a < b for a, b in itertools.pairwise(verdicts))


@pytest.mark.parametrize("name", ["fnr", "fpr"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.5"])
def test_rates_are_fractions(name: str, value: object) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"Expected `{name}` to be a finite number in \[0, 1\]"
    ):
        ImperfectOracle(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", ["client-01", [1, 2]])
def test_ids_are_a_list_of_names(ids: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected `ids` to be a list"):
        KnownMalicious(ids=ids)  # type: ignore[arg-type]


def test_no_detector_is_twice_in_an_ensemble_be_it_inside_another() -> None:
    one, two = KnownMalicious(ids=["a"]), KnownMalicious(ids=["a"])
    inner = Ensemble([one, two])
    assert Ensemble([inner, KnownMalicious(ids=["a"])]).detectors[0] is inner
    for repeated in ([one, one], [inner, one], [inner, Ensemble([two])], [inner, inner]):
        with pytest.raises(ConfigurationError, match="`detectors` to be different objects"):
            Ensemble(repeated)
