"""Clean data at the server, taken out of the training data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedrec.data import (
    ByUser,
    DegreeOfNonIID,
    Digits,
    FederatedDataModule,
    IIDPartitioner,
    QuantitySkew,
)
from fedrec.data.draw import draw_samples
from fedrec.exceptions import ConfigurationError
from fedrec.federation import Federation
from fedrec.models import MLP


class Numbers(FederatedDataModule):
    """Training sample i is i, of label i mod 3; test samples go on from there."""

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        x = torch.arange(60.0)[:, None]
        return TensorDataset(x, torch.arange(60) % 3), TensorDataset(x + 60, torch.arange(60) % 3)


def ids(dataset: TensorDataset | None) -> list[int]:
    assert dataset is not None
    assert torch.equal(dataset.tensors[0][:, 0].long() % 3, dataset.tensors[1])
    return dataset.tensors[0][:, 0].long().tolist()


@pytest.mark.parametrize("partitioner", [IIDPartitioner(), DegreeOfNonIID(q=0.6)])
@pytest.mark.parametrize("beta", [None, 0.3])
def test_no_sample_is_in_two_places(partitioner: object, beta: float | None) -> None:
    whole = Numbers(num_clients=4, partitioner=partitioner, seed=3)
    data = Numbers(
        num_clients=4, partitioner=partitioner, seed=3, server_samples=10, server_beta=beta
    )
    server = ids(data.server_dataset)
    assert len(server) == len(set(server)) == 10
    for client_id, dataset in data.client_datasets().items():
        before = ids(whole.client_datasets()[client_id])
        assert ids(dataset) == [i for i in before if i not in server]
    assert ids(data.train_dataset) == [i for i in range(60) if i not in server]
    assert ids(data.test_dataset) == list(range(60, 120))
    assert data.partition.counts.sum() == 50


def test_without_it_nothing_changes() -> None:
    data = Numbers(num_clients=4)
    assert data.server_dataset is None
    assert data.train_dataset is data._datasets[0]
    assert "server" not in repr(data)
    assert repr(Numbers(num_clients=2, server_samples=3, server_beta=0.5)).endswith(
        "seed=0, server_samples=3, server_beta=0.5)"
    )


def test_the_choice_is_a_function_of_the_seed_alone() -> None:
    def chosen(seed: int, num_clients: int) -> list[int]:
        return ids(Numbers(num_clients=num_clients, seed=seed, server_samples=10).server_dataset)

    assert chosen(1, 4) == chosen(1, 7)
    assert chosen(1, 4) != chosen(2, 4)


def test_partitioners_that_name_samples_by_position_stay_right() -> None:
    users = [f"u{i % 5}" for i in range(60)]
    data = Numbers(num_clients=5, partitioner=ByUser(users=users), server_samples=20)
    assert [{i % 5 for i in ids(d)} for d in data.client_datasets().values()] == [
        {0},
        {1},
        {2},
        {3},
        {4},
    ]


def test_a_federation_gets_it_unless_it_is_given_other_data() -> None:
    data, module = Digits(num_clients=3, server_samples=30), MLP(in_features=64)
    assert Federation.from_data(data, module).server_data is data.server_dataset
    other = data.test_dataset
    assert Federation.from_data(data, module, server_data=other).server_data is other
    assert Federation.from_data(Digits(num_clients=3), module).server_data is None


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`server_samples` to be fewer than the 60"):
        Numbers(num_clients=2, server_samples=60).client_datasets()
    with pytest.raises(ConfigurationError, match=r"59 samples leave clients \['client-"):
        Numbers(num_clients=2, server_samples=59).client_datasets()
    # Unless a client may be empty.
    empty = QuantitySkew(alpha=1.0, min_samples=0)
    assert Numbers(num_clients=2, partitioner=empty, server_samples=59).partition.counts.sum() == 1
    with pytest.raises(ConfigurationError, match="Expected `server_samples`"):
        Numbers(num_clients=2, server_samples=-1)
    with pytest.raises(ConfigurationError, match="Expected `server_beta`"):
        Numbers(num_clients=2, server_samples=5, server_beta=0.0)


# -- draw_samples ---------------------------------------------------------------------------------


def test_shares_of_labels_are_dirichlet() -> None:
    # Of Dir(b, ..., b) over L labels every share has mean 1/L and variance (L-1) / (L^2 (L b + 1)).
    labels, beta, count = np.repeat(np.arange(4), 1000), 0.5, 800
    shares = np.stack(
        [
            np.bincount(
                labels[draw_samples(labels, count, beta, np.random.default_rng(i))], minlength=4
            )
            / count
            for i in range(400)
        ]
    )
    assert np.allclose(shares.mean(axis=0), 1 / 4, atol=0.04)
    assert np.allclose(shares.var(axis=0), 3 / (16 * (4 * beta + 1)), atol=0.012)


def test_labels_that_are_used_up_are_made_up_for() -> None:
    labels = np.repeat([0, 1, 2], [5, 5, 90])
    for i in range(20):
        chosen = draw_samples(labels, 95, 0.1, np.random.default_rng(i))
        assert len(set(chosen.tolist())) == 95
    assert sorted(draw_samples(labels, 100, 0.1, np.random.default_rng(0))) == list(range(100))
    assert sorted(draw_samples(labels, 100, None, np.random.default_rng(0))) == list(range(100))
    with pytest.raises(ConfigurationError, match="at most the 100 samples there are"):
        draw_samples(labels, 101, None, np.random.default_rng(0))


def test_a_large_beta_means_equal_numbers_and_none_means_those_of_the_data() -> None:
    labels = np.repeat([0, 1], [9000, 1000])
    for beta, share in ((1e6, 0.5), (None, 0.1)):
        chosen = draw_samples(labels, 1000, beta, np.random.default_rng(0))
        assert labels[chosen].mean() == pytest.approx(share, abs=0.05)
