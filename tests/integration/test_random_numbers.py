"""What clients draw from torch, NumPy or Python is a function of seed, round and client."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FedAvg
from fedrec.callbacks import Callback
from fedrec.clients.generators import (
    generators_restored,
    held_generators,
    random_numbers,
    seed_generators,
)
from fedrec.exceptions import ConfigurationError
from fedrec.history import MemoryHistory
from fedrec.parameters import ParameterVector
from fedrec.random import key
from fedrec.recoverers import TrainFromScratch
from fedrec.types import RoundContext

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.randn(())),
    "numpy": lambda: float(np.random.normal()),  # noqa: NPY002 - what users draw from
    "random": lambda: random.gauss(0, 1),
}
NUM_CLIENTS, ROUNDS = 3, 3


def samples(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 2, generator=generator), torch.arange(8) % 2


class Noisy(Dataset):
    """Augments each sample as it is read."""

    def __init__(self, seed: int, draw: Callable[[], float]) -> None:
        (self.x, self.y), self.draw = samples(seed), draw

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + self.draw(), self.y[i]


class Net(pl.LightningModule):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(2, 2), draw

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.layer(batch[0] * (1 + self.draw())), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make(where: str, draw: Callable[[], float], reverse: bool = False, **local: Any) -> Federation:
    torch.manual_seed(0)
    module = Net(draw if where == "training_step" else float)
    data: Any = lambda i: TensorDataset(*samples(i))  # noqa: E731
    if where == "dataset":
        data = lambda i: Noisy(i, draw)  # noqa: E731
    clients = [
        LightningClient(f"c{i}", module, data(i), batch_size=4, **local) for i in range(NUM_CLIENTS)
    ]
    return Federation(clients[::-1] if reverse else clients, module)


def record(federation: Federation, executor: str = "sequential", rounds: int = ROUNDS) -> Any:
    loop = FederatedLoop(logger=False, enable_progress_bar=False, executor=executor)
    history = MemoryHistory()
    result = loop.record(federation, FedAvg(), history, max_rounds=rounds, server_lr=0.5)
    return loop, history, result.global_weights


def updates(history: Any) -> dict[tuple[int, str], Tensor]:
    records = [history.read_round(t) for t in history.rounds()]
    return {
        (record.round, client): row
        for record in records
        for client, row in zip(record.client_ids, record.updates, strict=True)
    }


@pytest.mark.parametrize(("where", "local_steps"), [("dataset", 1), ("training_step", 2)])
@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.filterwarnings("ignore:.*one client after another:fedrec.exceptions.FedrecWarning")
def test_a_recording_is_the_same_however_it_is_made(
    source: str, where: str, local_steps: int
) -> None:
    draw = DRAWS[source]
    loop, history, weights = record(make(where, draw, local_steps=local_steps))
    draw()  # somebody else draws in between
    _, again, _ = record(make(where, draw, local_steps=local_steps))
    _, reversed_, _ = record(make(where, draw, reverse=True, local_steps=local_steps))
    first = updates(history)
    assert all(torch.equal(first[k], row) for k, row in updates(again).items())
    # The server sums in another order, which makes later rounds differ in the last bit.
    close = updates(reversed_)
    assert all(torch.equal(first[k], close[k]) for k in first if k[0] == 0)
    assert all(torch.allclose(first[k], close[k], rtol=1e-4, atol=1e-6) for k in first)
    # Another executor may draw otherwise only if what comes out is the same.
    _, fast, _ = record(make(where, draw, local_steps=local_steps), executor="auto")
    together = updates(fast)
    assert all(torch.allclose(first[k], together[k], rtol=1e-4, atol=1e-6) for k in first)
    # A recovery without anybody excluded replays all of it.
    federation = make(where, draw, local_steps=local_steps)
    run = loop.recover(federation, history, TrainFromScratch(), exclude=[])
    assert torch.equal(run.global_weights, weights)
    # Clients and rounds draw other numbers.
    assert not torch.equal(first[0, "c0"], first[1, "c0"])


def test_an_interrupted_recording_goes_on_with_the_same_numbers() -> None:
    class Stop(Callback):
        def on_round_start(self, loop: Any, ctx: Any) -> None:
            if ctx.round == 2:
                raise KeyboardInterrupt

    draw = lambda: sum(one() for one in DRAWS.values())  # noqa: E731
    _, whole, _ = record(make("dataset", draw))
    history = MemoryHistory()
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    arguments: Any = (FedAvg(), history)
    loop = FederatedLoop(executor="sequential", callbacks=[Stop()], **settings)
    with pytest.raises(KeyboardInterrupt):
        loop.record(make("dataset", draw), *arguments, max_rounds=ROUNDS, server_lr=0.5)
    loop = FederatedLoop(executor="sequential", **settings)
    federation = make("dataset", draw)
    loop.record(federation, *arguments, max_rounds=ROUNDS, server_lr=0.5, resume=True)
    first, second = updates(whole), updates(history)
    assert all(torch.equal(row, second[k]) for k, row in first.items())


class Crop:
    """A transform with a generator of its own, as libraries of transforms have them."""

    def __init__(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        self.generator, self.draw = generator, draw

    def __call__(self) -> float:
        return float(self.draw(self.generator))


HELD: dict[str, Callable[[], Crop]] = {
    "torch.Generator": lambda: Crop(torch.Generator(), lambda g: torch.randn((), generator=g)),
    "numpy Generator": lambda: Crop(np.random.default_rng(), lambda g: g.normal()),
    "Philox": lambda: Crop(np.random.Generator(np.random.Philox()), lambda g: g.normal()),
    "RandomState": lambda: Crop(np.random.RandomState(), lambda g: g.normal()),
    "random.Random": lambda: Crop(random.Random(), lambda g: g.gauss(0, 1)),
}


@pytest.mark.parametrize("kind", HELD)
def test_generators_that_a_data_set_holds_are_seeded_for_each_round(kind: str) -> None:
    crop = HELD[kind]()
    federation = make("dataset", crop)
    loop, history, weights = record(federation)
    first = updates(history)
    # Another object in another state gives the same.
    another = HELD[kind]()
    another()
    _, again, _ = record(make("dataset", another), executor="auto")
    assert all(
        torch.allclose(row, updates(again)[k], rtol=1e-4, atol=1e-6) for k, row in first.items()
    )
    assert not torch.equal(first[0, "c0"], first[0, "c1"])
    run = loop.recover(federation, history, TrainFromScratch(), exclude=[])
    assert torch.equal(run.global_weights, weights)


def test_generators_that_a_data_set_holds_are_left_as_they_were_found() -> None:
    crop, twin = (Crop(np.random.default_rng(3), lambda g: g.normal()) for _ in range(2))
    record(make("dataset", crop), rounds=1)
    assert crop() == twin()


def test_a_collate_function_may_hold_a_generator() -> None:
    def recorded(seed: int) -> Any:
        generator = np.random.default_rng(seed)

        def noisy(samples: Any) -> Any:
            x, y = zip(*samples, strict=True)
            return torch.stack(x) + float(generator.normal()), torch.stack(y)

        return updates(record(make("nowhere", float, collate_fn=noisy))[1])

    first, second = recorded(0), recorded(1)
    assert all(torch.equal(row, second[k]) for k, row in first.items())


class Counting(Noisy):
    """Gives other samples the more of them have been read."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__(0, self.next)

    def next(self) -> float:
        self.count += 1
        return float(self.count)


@pytest.mark.parametrize(
    "draw", [Counting().next, lambda: np.random.default_rng().normal()], ids=["count", "unseeded"]
)
def test_data_that_cannot_be_read_again_are_refused_before_round_0(draw: Any) -> None:
    history = MemoryHistory()
    loop = FederatedLoop(logger=False, enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match="'c0' gives another batch each time"):
        loop.record(make("dataset", draw), FedAvg(), history, max_rounds=1, server_lr=0.1)
    assert history.is_empty


def test_a_generator_that_is_made_at_the_first_sample_is_no_reason_to_refuse() -> None:
    made: list[Any] = []

    def draw() -> float:
        if not made:
            made.append(np.random.default_rng())
        return float(made[0].normal())

    loop, history, weights = record(make("dataset", draw))
    federation = make("dataset", draw)
    run = loop.recover(federation, history, TrainFromScratch(), exclude=[])
    assert torch.equal(run.global_weights, weights)


def test_seeding_in_a_training_step_does_not_reach_the_user() -> None:
    class Seeds(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            torch.manual_seed(7)
            return cross_entropy(self.layer(batch[0]), batch[1])

    module = Seeds(float)
    clients = [LightningClient(f"c{i}", module, TensorDataset(*samples(i))) for i in range(2)]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    record(Federation(clients, module), executor="auto")
    assert torch.equal(torch.random.get_rng_state(), before)


def context(**given: Any) -> RoundContext:
    layout = ParameterVector(nn.Linear(1, 1))
    return RoundContext(
        phase="record", client_ids=("a",), global_weights=torch.zeros(2), layout=layout, **given
    )


def test_generators_are_left_as_they_were_found_and_seeded_by_key() -> None:
    before = {name: draw() for name, draw in DRAWS.items()}
    with generators_restored(torch.device("cpu")):
        now = {name: draw() for name, draw in DRAWS.items()}
    assert before != now
    assert now == {name: draw() for name, draw in DRAWS.items()}
    ctx = context(round=2, seed=5)
    with random_numbers(ctx, "a"):
        drawn = {name: draw() for name, draw in DRAWS.items()}
    whole = key(5, "training", 2, "a")
    generator = torch.Generator().manual_seed(whole & (2**63 - 1))
    words = [(whole >> 32 * i) & 0xFFFFFFFF for i in range(4)]
    assert drawn == {
        "torch": float(torch.randn((), generator=generator)),
        "numpy": float(np.random.RandomState(words).normal()),
        "random": random.Random(whole).gauss(0, 1),
    }


@pytest.mark.parametrize(
    "other", [{"round": 3}, {"seed": 6}, {"batch_policy": "fresh"}, {"client": "b"}]
)
def test_another_round_seed_policy_or_client_draws_other_numbers(other: dict[str, Any]) -> None:
    def drawn(client: str = "a", **given: Any) -> list[float]:
        with generators_restored(torch.device("cpu")):
            seed_generators(context(**{"round": 2, "seed": 5, **given}), client)
            return [draw() for draw in DRAWS.values()]

    assert drawn() == drawn()
    assert all(a != b for a, b in zip(drawn(), drawn(**other), strict=True))


def test_generators_of_packages_and_loggers_are_not_the_data_sets() -> None:
    """Both lead to those of all of torch, NumPy and Python, in a quarter of a second."""
    own = random.Random(0)
    held = {"numpy": np, "torch": torch, "log": logging.getLogger("own"), "draw": [own]}
    assert held_generators(held) == [own]
