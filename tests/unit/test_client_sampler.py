"""Who is asked in which round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedrec.component import Component, build
from fedrec.exceptions import ConfigurationError
from fedrec.federation import ClientSampler
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts

IDS = [f"c{i}" for i in range(10)]


def cohorts(sampler: ClientSampler, rounds: int = 200, seed: int = 0) -> list[tuple[str, ...]]:
    return [sampler.sample(IDS, t, seed) for t in range(rounds)]


def test_everybody_by_default() -> None:
    assert set(cohorts(ClientSampler())) == {tuple(IDS)}


def test_a_fixed_number_drawn_evenly() -> None:
    found = cohorts(ClientSampler(num_clients=3), rounds=1000)
    assert {len(set(c)) for c in found} == {3}
    assert all(list(c) == sorted(c) for c in found)
    # Each client in 300 of 1000 rounds, with a standard deviation of 14.5.
    counts = np.array([sum(i in c for c in found) for i in IDS])
    assert abs(counts - 300).max() < 5 * 14.5


def test_a_fixed_number_is_all_where_fewer_are_there() -> None:
    sampler = ClientSampler(num_clients=8, leaves=dict.fromkeys(IDS[5:], 1))
    assert len(sampler.sample(IDS, 0, 0)) == 8
    assert sampler.sample(IDS, 1, 0) == tuple(IDS[:5])


def test_a_schedule_is_taken_in_turn() -> None:
    sampler = ClientSampler(schedule=[["c3", "c1"], ["c2"]])
    assert cohorts(sampler, 3) == [("c1", "c3"), ("c2",), ("c1", "c3")]


def test_clients_drop_out_independently_at_the_rate_asked_for() -> None:
    found = cohorts(ClientSampler(dropout=0.3), rounds=1000)
    there = np.array([[i in c for i in IDS] for c in found])
    # Each in 700 of 1000 rounds, with a standard deviation of 14.5.
    assert abs(there.sum(axis=0) - 700).max() < 5 * 14.5
    correlations = np.corrcoef(there.T) - np.eye(10)
    assert abs(correlations).max() < 5 / np.sqrt(1000)
    # Whether a client drops out has nothing to do with who else is there.
    fewer = ClientSampler(dropout=0.3, leaves={"c0": 0})
    for t in range(50):
        expected = tuple(c for c in found[t] if c != "c0")
        assert fewer.sample(IDS, t, 0) == expected or expected == ()


def test_somebody_always_stays() -> None:
    assert min(len(c) for c in cohorts(ClientSampler(dropout=0.99))) == 1
    assert set(cohorts(ClientSampler(schedule=[["c4"]], dropout=0.9))) == {("c4",)}


def test_late_joiners_and_leavers() -> None:
    sampler = ClientSampler(joins={"c9": 5}, leaves={"c0": 3})
    for t in range(8):
        assert ("c9" in sampler.sample(IDS, t, 0)) == (t >= 5)
        assert ("c0" in sampler.sample(IDS, t, 0)) == (t < 3)


def test_the_fraction_is_of_those_who_are_there() -> None:
    sampler = ClientSampler(fraction=0.5, joins=dict.fromkeys(IDS[4:], 7))
    assert {len(c) for c in cohorts(sampler, 7)} == {2}
    assert len(sampler.sample(IDS, 7, 0)) == 5


def test_draws_depend_on_seed_and_round_alone() -> None:
    sampler = ClientSampler(fraction=0.5, dropout=0.3)
    assert cohorts(sampler) == cohorts(build(sampler.spec(), Component, "sampler"))
    assert sampler.sample(IDS, 17, 0) == cohorts(sampler)[17]
    assert cohorts(sampler, seed=1) != cohorts(sampler)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"fraction": 0.0}, "`fraction`"),
        ({"num_clients": 0}, "`num_clients`"),
        ({"dropout": 1.0}, "`dropout`"),
        ({"schedule": []}, "`schedule`"),
        ({"schedule": ["c1", "c2"]}, "`schedule`"),
        ({"joins": {"c1": -1}}, "`joins`"),
        ({"fraction": 0.5, "num_clients": 3}, "one of `fraction`, `num_clients` and `schedule`"),
    ],
)
def test_bad_arguments(kwargs: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ClientSampler(**kwargs)


def test_unknown_clients_and_empty_rounds() -> None:
    with pytest.raises(ConfigurationError, match=r"Expected `joins` .* Known: c0"):
        ClientSampler(joins={"c77": 3}).sample(IDS, 0, 0)
    with pytest.raises(ConfigurationError, match=r"Round 2 has no client: of 10, 0 are there"):
        ClientSampler(leaves=dict.fromkeys(IDS, 2)).sample(IDS, 2, 0)


def test_recipes_say_it_all() -> None:
    said = "{num_clients: 5, dropout: 0.1, joins: {client-03: 10}, leaves: {client-04: 30}}"
    override = f"record.sampler={{class_path: ClientSampler, init_args: {said}}}"
    recipe = load_recipe(Path("recipes/quickstart.yaml"), [override])
    sampler = build_parts(recipe).record["sampler"]
    assert sampler.spec()["init_args"] == {
        "fraction": 1.0,
        "num_clients": 5,
        "schedule": None,
        "dropout": 0.1,
        "joins": {"client-03": 10},
        "leaves": {"client-04": 30},
    }
