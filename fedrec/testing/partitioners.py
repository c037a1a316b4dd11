"""The contract of partitioners, as tests."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod

import numpy as np
import pytest
from numpy.typing import NDArray

from fedrec.component import build
from fedrec.data import Partitioner
from fedrec.exceptions import ConfigurationError

__all__ = ["PartitionerContract"]


class PartitionerContract(ABC):
    """Tests for a partitioner: subclass it as `Test...` in a test file and write `make`.

    Override the class attributes if the partitioner needs other data.

    Examples:
        >>> from fedrec.data import IIDPartitioner
        >>> class TestIID(PartitionerContract):
        ...     def make(self):
        ...         return IIDPartitioner()
    """

    #: Size and shape of the data set that is split.
    num_samples: int = 600
    num_classes: int = 5
    num_clients: int = 12

    @abstractmethod
    def make(self) -> Partitioner:
        """Return a new partitioner, the same each time."""

    def labels(self) -> NDArray[np.int64]:
        """Return the labels of the data set that is split: every class, in random order."""
        return np.random.default_rng(7).permutation(np.arange(self.num_samples) % self.num_classes)

    def split(self, labels: NDArray[np.int64], seed: int = 0) -> list[list[int]]:
        """Split with a fresh partitioner and generator."""
        parts = self.make()(labels, self.num_clients, np.random.default_rng(seed))
        return [part.tolist() for part in parts]

    def test_every_sample_goes_to_exactly_one_client(self) -> None:
        """`split` returns one part per client; together the parts are all samples, each once."""
        parts = self.make().split(self.labels(), self.num_clients, np.random.default_rng(0))
        assert len(parts) == self.num_clients
        assert sorted(np.concatenate(parts).tolist()) == list(range(self.num_samples))

    def test_no_client_is_empty(self) -> None:
        """Every client gets a sample, if there are enough."""
        assert min(len(part) for part in self.split(self.labels())) > 0

    def test_same_seed_same_partition(self) -> None:
        """The generator alone decides."""
        assert self.split(self.labels(), seed=3) == self.split(self.labels(), seed=3)

    def test_one_partitioner_used_twice_gives_the_same(self) -> None:
        """A split does not depend on earlier ones."""
        partitioner = self.make()
        a, b = (
            partitioner(self.labels(), self.num_clients, np.random.default_rng(0)) for _ in range(2)
        )
        assert [part.tolist() for part in a] == [part.tolist() for part in b]

    def test_global_random_numbers_are_neither_used_nor_changed(self) -> None:
        """NumPy's global generator has no influence, and is not moved on."""
        state = np.random.get_state()  # noqa: NPY002 - the global stream is what is tested
        try:
            np.random.seed(1)  # noqa: NPY002
            first = self.split(self.labels())
            after_first = np.random.random()  # noqa: NPY002
            np.random.seed(1)  # noqa: NPY002
            untouched = np.random.random()  # noqa: NPY002
            np.random.seed(2)  # noqa: NPY002
            assert self.split(self.labels()) == first
            assert after_first == untouched
        finally:
            np.random.set_state(state)  # noqa: NPY002

    def test_labels_are_not_changed(self) -> None:
        """The caller's labels are not written to."""
        labels = self.labels()
        labels.setflags(write=False)  # writing to them raises
        self.split(labels)
        assert np.array_equal(labels, self.labels())

    def test_names_of_labels_do_not_matter(self) -> None:
        """Labels need not be 0, 1, ..., nor int64."""
        labels = self.labels()
        assert self.split(7 * labels + 3) == self.split(labels)
        assert self.split(labels.astype(np.uint8)) == self.split(labels)

    def test_sorted_samples_are_split_completely(self) -> None:
        """Samples sorted by label are split completely, too."""
        parts = self.split(np.sort(self.labels()))
        assert sorted(np.concatenate(parts).tolist()) == list(range(self.num_samples))

    def test_more_clients_than_samples_is_refused(self) -> None:
        """There is an error instead of empty clients."""
        with pytest.raises(ConfigurationError, match="samples over"):
            self.make()(self.labels()[:3], 4, np.random.default_rng(0))

    def test_survives_pickle_and_its_own_description(self) -> None:
        """Pickled, or rebuilt from `spec`, it splits the same way."""
        partitioner = self.make()
        rebuilt = build(partitioner.spec(), Partitioner, "partitioner")
        unpickled = pickle.loads(pickle.dumps(partitioner))  # noqa: S301 - made a line above
        assert repr(rebuilt) == repr(unpickled) == repr(partitioner)
        labels = self.labels()
        parts = rebuilt(labels, self.num_clients, np.random.default_rng(0))
        assert [part.tolist() for part in parts] == self.split(labels)
