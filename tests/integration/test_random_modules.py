"""Random modules: an executor that is fast gives what one client after another does, or says so."""

import dataclasses
import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrec.executors import SequentialExecutor

sys.path.insert(0, str(Path(__file__).parent))
import random_modules
from random_modules import LIMIT, ROUNDS, all_features, compare, random_case, record

# The first 20 are tried while one works, and show the most common mistakes.
CHUNKS = [range(20), *(range(first, first + 56) for first in range(20, 132, 56))]
# Share of each chunk: cases along a path, and those that leave it in a later round.
LEAST = {"grouped": 0.25, "vmap": 0.25, "left grouped": 0.08, "left vmap": 0.03}


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect():
    """Leave what there is out of collections: they are frequent here, and a tenth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    "seeds",
    [CHUNKS[0], *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in CHUNKS[1:])],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_nothing_differs(seeds: range) -> None:
    wrong, counts = {}, Counter[str]()
    for seed in seeds:
        case = random_case(seed)
        outcome = compare(case)
        if not outcome.is_right:
            wrong[seed] = outcome, case.plan
        path = outcome.path.partition(" ")[0]
        counts[path] += 1
        counts[f"left {path}"] += outcome.departure is not None
    assert not wrong, "\n".join(f"seed {seed}: {what}" for seed, what in wrong.items())
    # What is refused at once shows little.
    least = {name: share * len(seeds) for name, share in LEAST.items()}
    assert {name: counts[name] for name in least if counts[name] < least[name]} == {}


def test_there_are_cases_of_everything() -> None:
    """Of 12 cases 4 have one thing for sure, so that some hundreds have all."""
    counts = Counter(name for seed in range(1000) for name in random_case(seed).features)
    assert set(counts) <= all_features()
    assert {name for name in all_features() if counts[name] == 0} == set()


def test_a_case_is_a_function_of_its_seed() -> None:
    one, other = (record(random_case(4), "sequential", rounds=3) for _ in range(2))
    assert torch.equal(one.updates, other.updates)
    assert random_case(4) == random_case(4) != random_case(5)


class Off(SequentialExecutor):
    """Sends slightly too much of the last client, from a late round on."""

    def compute(self, clients: Any, global_weights: Any, ctx: Any) -> Any:
        sent = super().compute(clients, global_weights, ctx)
        if ctx.round >= ROUNDS - 2:
            sent.updates[-1] *= 1 + 3 * LIMIT
        return sent


class CountsIgnored(SequentialExecutor):
    """Divides by all samples of a batch, whatever their labels, as one mean over clients would."""

    def compute(self, clients: Any, global_weights: Any, ctx: Any) -> Any:
        sent = super().compute(clients, global_weights, ctx)
        for row, client in zip(sent.updates, clients, strict=True):
            (batch,) = client.batches(ctx)
            kept = (client.dataset.tensors[0][batch].flatten(1)[:, 0] <= 5).double().mean()
            row *= float(kept)
        return sent


def plain_case(loss: str) -> random_modules.Case:
    """Return a case with nothing unusual but its loss, and a rare sample in two clients."""
    case = random_case(0)
    plan = dataclasses.replace(
        case.plan,
        body="vector",
        layers=("linear",),
        activations=("nn.Tanh",),
        pool="as_is",
        loss=loss,
        twists=(),
        hook=None,
        logs=(),
        optimizer="sgd",
        returns_dict=False,
    )
    return dataclasses.replace(
        case,
        plan=plan,
        sizes=(30, 30, 10),
        rare=(1, 1, 0),
        local={"batch_size": 3},
        data="tensors",
        server_lr=0.2,
        chunk_size=None,
        way="auto",
    )


def test_a_difference_of_one_client_in_a_late_round_is_found() -> None:
    outcome = compare(plain_case("cross_entropy"), Off())
    assert outcome.verdict == "update"
    assert (outcome.round, outcome.rounds, outcome.clients) == (ROUNDS - 2, 2, 1)
    assert outcome.largest == pytest.approx(3 * LIMIT, rel=1e-2)


def test_a_mean_that_counts_ignored_labels_is_found() -> None:
    case = plain_case("ignore_index")
    outcome = compare(case, CountsIgnored())
    assert outcome.verdict == "update"
    # One of three samples is ignored: two thirds of the update are sent.
    assert outcome.largest == pytest.approx(1 / 3, rel=1e-5)
    assert compare(plain_case("cross_entropy"), SequentialExecutor()).largest == 0


class WrongAfterwards(random_modules.Planned):
    """Sends twice of everything in the round in which it leaves its path."""

    def compute(self, clients: Any, global_weights: Any, ctx: Any) -> Any:
        sent = super().compute(clients, global_weights, ctx)
        if self.departure is not None and self.departure["round"] == ctx.round:
            sent.updates.mul_(2)
        return sent


def test_a_departure_excuses_nothing() -> None:
    # Samples that are read one by one are not searched for such labels before the first round.
    case = dataclasses.replace(plain_case("ignore_class"), data="plain")
    outcome = compare(case, WrongAfterwards(warn=False))
    assert outcome.verdict == "update"
    assert outcome.departure is not None
    assert (outcome.round, outcome.rounds) == (outcome.departure["round"], 1)
    assert outcome.largest == pytest.approx(1, rel=1e-5)
    assert compare(case).verdict == "agree"


def test_a_difference_of_what_is_logged_is_found() -> None:
    class LogsMore(SequentialExecutor):
        def compute(self, clients: Any, global_weights: Any, ctx: Any) -> Any:
            sent = super().compute(clients, global_weights, ctx)
            more = 1.01 if ctx.round == ROUNDS - 1 else 1
            metrics = {name: more * value for name, value in sent.metrics.items()}
            return dataclasses.replace(sent, metrics=metrics)

    case = plain_case("cross_entropy")
    case = dataclasses.replace(case, plan=dataclasses.replace(case.plan, logs=("mean",)))
    outcome = compare(case, LogsMore())
    assert (outcome.verdict, outcome.round, outcome.rounds) == ("log", ROUNDS - 1, 1)
    assert outcome.largest == pytest.approx(0.01, rel=1e-3)
    assert compare(case, SequentialExecutor()).verdict == "agree"


def test_rounding_is_told_from_an_error() -> None:
    class Rounds(SequentialExecutor):
        def compute(self, clients: Any, global_weights: Any, ctx: Any) -> Any:
            nudged = global_weights * (1 + 6e-8 * (-1) ** torch.arange(len(global_weights)))
            return super().compute(clients, nudged, ctx)

    assert compare(plain_case("cross_entropy"), Rounds()).verdict == "agree"
