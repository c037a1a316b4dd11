"""Dirichlet, shards, quantity skew, users: what follows from their definitions by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedrec.data import ByUser, Digits, Dirichlet, Partitioner, QuantitySkew, Shards
from fedrec.exceptions import ConfigurationError, ShapeError
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts

TEN = np.repeat(np.arange(10), 60)


def counts(partitioner: Partitioner, labels: np.ndarray, num_clients: int, seed: int = 0):
    parts = partitioner(labels, num_clients, np.random.default_rng(seed))
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


# -- Dirichlet: no endless loop, no empty client, no NaN -------------------------------------------


def test_an_impossible_minimum_is_given_up_and_said() -> None:
    """500 clients at alpha 0.3: drawing until it fits would never end."""
    labels = np.arange(5000) % 100
    with pytest.raises(
        ConfigurationError,
        match=r"In 7 draws of Dirichlet\(alpha=0.3, .* fewer than 10 samples; .* has \d. HINT: use",
    ):
        counts(Dirichlet(alpha=0.3, min_samples=10, max_tries=7), labels, 500)


def test_no_client_is_empty_even_where_most_draws_leave_one() -> None:
    partitioner = Dirichlet(alpha=0.1)
    for seed in range(20):
        assert counts(partitioner, TEN, 15, seed).sum(axis=1).min() >= 1


def test_empty_clients_if_asked_for() -> None:
    found = counts(Dirichlet(alpha=0.01, min_samples=0), TEN, 100)
    assert (found.sum(axis=1) == 0).any()
    assert (found.sum(axis=0) == 60).all()


@pytest.mark.parametrize("balanced", [True, False])
def test_a_large_concentration_is_even_though_labels_run_out(balanced: bool) -> None:
    """The last client finds no sample of some labels: probabilities must not become NaN."""
    for seed in range(5):
        found = counts(Dirichlet(alpha=1e4, balanced=balanced), TEN, 7, seed)
        assert (found.sum(axis=0) == 60).all()
        # By label: shares of a seventh, each off by a hundredth at most. Balanced: 86 draws of one
        # in ten, with a standard deviation of 2.8; the last client gets what is left.
        off = abs(found[:-1] - 60 / 7).max()
        assert off < 6 * 2.8 if balanced else off < 2.5


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.1, 1.0, 1e3])
def test_balanced_clients_are_of_equal_size(alpha: float) -> None:
    found = counts(Dirichlet(alpha=alpha, balanced=True), TEN, 7)
    assert sorted(found.sum(axis=1)) == [85, 85, 86, 86, 86, 86, 86]
    assert (found.sum(axis=0) == 60).all()


def test_a_tiny_concentration_gives_single_labels() -> None:
    labels = np.repeat([0, 1], 1000)
    # Balanced: one label a client, but for those whose label was used up.
    found = counts(Dirichlet(alpha=1e-4, balanced=True), labels, 20)
    assert (found.min(axis=1) > 0).sum() <= 1
    # By label: one client gets (nearly) all of it.
    found = counts(Dirichlet(alpha=1e-4, min_samples=0), labels, 20)
    assert (found.max(axis=0) > 990).all()


def test_a_minimum_that_can_be_met_is_met() -> None:
    found = counts(Dirichlet(alpha=0.5, min_samples=20), TEN, 10)
    assert found.sum(axis=1).min() >= 20


def test_more_than_there_is_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"600 samples over 10 clients of 61 or more each"):
        counts(Dirichlet(min_samples=61), TEN, 10)


# -- shards ----------------------------------------------------------------------------------------


def test_the_papers_shards() -> None:
    """60,000 sorted images, 200 shards of 300, 2 for each of 100 clients: at most 2 labels each."""
    labels = np.random.default_rng(0).permutation(np.arange(60_000) % 10)
    found = counts(Shards(shards_per_client=2), labels, 100)
    assert set(np.unique(found)) == {0, 300, 600}
    assert (found.sum(axis=1) == 600).all()
    assert (found.sum(axis=0) == 6000).all()


def test_shards_are_dealt_out_at_random() -> None:
    labels = np.repeat(np.arange(4), 10)
    first = [
        tuple(counts(Shards(shards_per_client=1), labels, 4, seed).argmax(axis=1))
        for seed in range(300)
    ]
    assert len(set(first)) == 24


def test_shards_that_do_not_divide_differ_by_one_sample() -> None:
    sizes = [
        len(p)
        for p in Shards(shards_per_client=3)(np.zeros(50, dtype=int), 4, np.random.default_rng(0))
    ]
    assert sum(sizes) == 50
    assert max(sizes) - min(sizes) <= 3


def test_too_few_samples_for_the_shards() -> None:
    with pytest.raises(ConfigurationError, match=r"30 samples into 4 \* 8 = 32 shards"):
        Shards(shards_per_client=8)(np.zeros(30, dtype=int), 4, np.random.default_rng(0))


# -- quantity skew ---------------------------------------------------------------------------------


def test_the_power_law_by_hand() -> None:
    """Shares 1, 1/4, 1/9 over 1 + 1/4 + 1/9 = 49/36: 36/49, 9/49, 4/49 of 490."""
    found = counts(QuantitySkew(law="power", alpha=2.0), np.zeros(490, dtype=int), 3)
    assert sorted(found[:, 0]) == [40, 90, 360]


def test_who_is_large_is_random() -> None:
    largest = {
        int(counts(QuantitySkew(law="power", alpha=1.0), TEN, 4, s).sum(axis=1).argmax())
        for s in range(40)
    }
    assert largest == {0, 1, 2, 3}


def test_a_power_law_that_leaves_a_client_empty_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"left \d+ of 60 clients without a sample"):
        counts(QuantitySkew(law="power", alpha=3.0), TEN, 60)


def test_sizes_that_cannot_be_drawn_are_given_up() -> None:
    with pytest.raises(ConfigurationError, match=r"In 5 draws of QuantitySkew\(law='dirichlet'"):
        counts(QuantitySkew(alpha=0.01, min_samples=20, max_tries=5), TEN, 20)


def test_labels_stay_iid() -> None:
    """A client of m samples draws its labels as a random sample without replacement."""
    found = counts(QuantitySkew(law="power", alpha=1.0), np.repeat(np.arange(2), 5000), 5)
    sizes = found.sum(axis=1)
    deviation = np.sqrt(sizes * 0.25 * (10_000 - sizes) / 9_999)
    assert (abs(found[:, 0] - sizes / 2) < 5 * deviation).all()


# -- by user ---------------------------------------------------------------------------------------


def test_users_are_clients_in_the_order_of_their_ids() -> None:
    parts = ByUser(users=[30, 4, 30, 11])(np.zeros(4, dtype=int), 3, np.random.default_rng(0))
    assert [part.tolist() for part in parts] == [[1], [3], [0, 2]]


@pytest.mark.parametrize(
    "names",
    [
        ["user9", "user10", "user011"],
        ["2", "10", "100"],
        ["1a2", "1a10", "1b1", "a"],
        ["", "07", "7", "7a"],
        [-20, -3, 4, 10],
    ],
)
def test_numbers_in_ids_count_as_numbers(names: list[int | str]) -> None:
    given = [*names[::-1], names[0]]
    parts = ByUser(users=given)(
        np.zeros(len(given), dtype=int), len(names), np.random.default_rng(0)
    )
    assert [{given[i] for i in part} for part in parts] == [{name} for name in names]


def test_users_are_never_torn_apart() -> None:
    users = np.random.default_rng(1).integers(9, size=500)
    parts = ByUser(users=users)(np.zeros(500, dtype=int), 4, np.random.default_rng(0))
    held = [set(users[part]) for part in parts]
    assert sorted(len(h) for h in held) == [2, 2, 2, 3]
    assert sum(len(h) for h in held) == 9


def test_users_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text("b\na\nb\n")
    parts = ByUser(users=str(tmp_path / "users.txt"))(
        np.zeros(3, dtype=int), 2, np.random.default_rng(0)
    )
    assert [part.tolist() for part in parts] == [[1], [0, 2]]
    (tmp_path / "names.txt").write_text("bo li\nann\nbo li\n")  # a name may have spaces
    parts = ByUser(users=str(tmp_path / "names.txt"))(
        np.zeros(3, dtype=int), 2, np.random.default_rng(0)
    )
    assert [part.tolist() for part in parts] == [[1], [0, 2]]
    with pytest.raises(ConfigurationError, match="a text file with one user a line"):
        ByUser(users=str(tmp_path / "none.txt"))(
            np.zeros(3, dtype=int), 2, np.random.default_rng(0)
        )


def test_wrong_users() -> None:
    with pytest.raises(ShapeError, match="one user a sample, but got 2 for 3 samples"):
        ByUser(users=["a", "b"])(np.zeros(3, dtype=int), 2, np.random.default_rng(0))
    with pytest.raises(ConfigurationError, match=r"2 users over 3 clients\. HINT: `num_clients=2`"):
        ByUser(users=["a", "b", "a"])(np.zeros(3, dtype=int), 3, np.random.default_rng(0))
    with pytest.raises(ConfigurationError, match="Expected `users`"):
        ByUser(users=["a", 3])
    assert repr(ByUser(users=["a", "b", "a"])) == "ByUser(users=<2 users of 3 samples>)"


# -- arguments, recipes, the picture ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Dirichlet(alpha=0), "alpha"),
        (lambda: Dirichlet(balanced=1), "balanced"),
        (lambda: Dirichlet(min_samples=-1), "min_samples"),
        (lambda: Dirichlet(max_tries=0), "max_tries"),
        (lambda: Shards(shards_per_client=0), "shards_per_client"),
        (lambda: QuantitySkew(law="zipf"), "law"),
        (lambda: QuantitySkew(alpha=-1.0), "alpha"),
    ],
)
def test_bad_arguments_are_named(make, argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{argument}`"):
        make()


@pytest.mark.parametrize(
    "partitioner",
    [
        "{class_path: Dirichlet, init_args: {alpha: 0.3, balanced: true}}",
        "Shards",
        "{class_path: QuantitySkew, init_args: {law: power, alpha: 1.2}}",
        "{class_path: ByUser, init_args: {users: [a, b, a]}}",
    ],
)
def test_recipes_name_them(partitioner: str) -> None:
    recipe = load_recipe(
        Path("recipes/quickstart.yaml"),
        [f"data={{class_path: Digits, init_args: {{num_clients: 8, partitioner: {partitioner}}}}}"],
    )
    name = partitioner.partition(",")[0].removeprefix("{class_path: ")
    assert type(build_parts(recipe).data.partitioner).__name__ == name


def test_the_picture_says_every_number(tmp_path: Path) -> None:
    data = Digits(num_clients=12, partitioner=Shards(shards_per_client=2))
    picture = data.partition.plot(tmp_path / "partition.svg")
    assert (tmp_path / "partition.svg").read_text() == picture
    table = data.partition.counts
    assert table.sum() == len(data.train_dataset)
    for i, client_id in enumerate(data.client_ids):
        size = len(data.client_datasets()[client_id])
        assert f"<title>{client_id}: {size}</title>" in picture
        for label in range(10):
            said = f"<title>{client_id}, label {label}: {table[i, label]} of {size}</title>"
            assert (said in picture) == (table[i, label] > 0)
    assert picture.count("<title>") == 12 + (table > 0).sum()
