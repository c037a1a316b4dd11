"""The batches that a client trains on are those of a DataLoader; errors say whose they are."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FedAvg
from fedrec.clients.batches import batch_indices, collate_name, take
from fedrec.exceptions import ConfigurationError
from fedrec.executors import SequentialExecutor, VectorizedExecutor
from fedrec.history import MemoryHistory
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext

CPU, ONE = torch.device("cpu"), torch.ones(1)
Pair = namedtuple("Pair", "features target")


@dataclass
class Sample:
    features: Tensor
    target: Tensor


def pairs(size: int = 6, seed: int = 0) -> list[tuple[Tensor, int]]:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))
    return [(row, i % 2) for i, row in enumerate(x)]


def stacked(samples: list[tuple[Tensor, int]]) -> Sample:
    x, y = zip(*samples, strict=True)
    return Sample(torch.stack(x), torch.tensor(y))


SEEN: list[type] = []


class Net(pl.LightningModule):
    """Notes the type of each batch."""

    def __init__(self, read: Callable[[Any], tuple[Tensor, Tensor]] = tuple, body: Any = None):
        super().__init__()
        self.layer = nn.Linear(3, 2) if body is None else body
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN.append(type(batch))
        x, y = self.read(batch)
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_name(batch: Any) -> tuple[Tensor, Tensor]:
    return batch.features, batch.target


def by_key(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


def context(module: nn.Module, clients: Sequence[LightningClient]) -> RoundContext:
    layout = ParameterVector(module)
    torch.manual_seed(1)
    return RoundContext(
        round=0,
        phase="record",
        client_ids=tuple(c.client_id for c in clients),
        global_weights=0.3 * torch.randn(layout.num_parameters),
        layout=layout,
    )


def updates(module: Net, datasets: Sequence[Any], executor: Any = None, **local: Any) -> Tensor:
    made = [LightningClient(f"c{i}", module, d, **local) for i, d in enumerate(datasets)]
    ctx = context(module, made)
    return (executor or SequentialExecutor()).compute(made, ctx.global_weights, ctx).updates


# --- types -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "read"),
    [
        (TensorDataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1])), None, tuple),
        (pairs(4), None, tuple),
        ([Pair(x, y) for x, y in pairs(4)], None, by_name),
        ([{"x": x, "y": y} for x, y in pairs(4)], None, by_key),
        ([[x, y] for x, y in pairs(4)], None, tuple),
        (pairs(4), stacked, by_name),
    ],
    ids=["tensors", "pairs", "namedtuple", "dict", "lists", "dataclass"],
)
def test_batches_are_those_of_a_dataloader_on_every_path(dataset, collate_fn, read) -> None:
    loader = DataLoader(dataset, batch_size=4, collate_fn=collate_fn)
    theirs, ours = next(iter(loader)), take(dataset, np.arange(4), CPU, collate_fn)
    assert type(ours) is type(theirs)
    for x, y in zip(read(ours), read(theirs), strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
    module = Net(read)
    SEEN.clear()
    reference = updates(module, [dataset] * 3, collate_fn=collate_fn)
    fast = updates(module, [dataset] * 3, VectorizedExecutor(warn=False), collate_fn=collate_fn)
    torch.testing.assert_close(fast, reference, rtol=1e-5, atol=1e-7)
    assert set(SEEN) == {type(theirs)}


def packed(samples: list[tuple[Tensor, int]]) -> tuple[PackedSequence, Tensor]:
    """Sequences of one number a step, of different lengths."""
    order = sorted(samples, key=lambda s: -len(s[0]))
    return pack_sequence([x for x, _ in order]), torch.tensor([y for _, y in order])


class Last(nn.Module):
    """The mean of each packed sequence, times weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: PackedSequence) -> Tensor:
        padded, lengths = nn.utils.rnn.pad_packed_sequence(x, batch_first=True)
        return self.layer((padded.sum(dim=1) / lengths)[:, None])


def test_packed_sequences_are_never_joined() -> None:
    datasets = [
        [(torch.full((n,), float(n + i)), n % 2) for n in lengths]
        for i, lengths in enumerate([(1, 2, 3), (3, 2, 1), (2, 2, 2)])
    ]
    module = Net(body=Last())
    reference = updates(module, datasets, collate_fn=packed)
    fast = updates(module, datasets, VectorizedExecutor(warn=False), collate_fn=packed)
    assert torch.equal(fast, reference)


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*samples, strict=True)
    return pad_sequence(x, batch_first=True), torch.tensor(y)


class Sums(nn.Module):
    """The sum of each sequence, times weights: zeros at its end change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.sum(dim=1, keepdim=True))


def test_collated_lengths_that_differ_in_one_round_only_are_asked_one_by_one() -> None:
    """Round 0 has sequences of one length, which join; those of another client's do not."""
    alike = [[(torch.full((4,), float(i + n)), n % 2) for n in range(2)] for i in range(3)]
    module, executor = Net(body=Sums()), VectorizedExecutor(warn=False)
    made = [LightningClient(f"c{i}", module, d, collate_fn=padded) for i, d in enumerate(alike)]
    ctx = context(module, made)
    assert executor.plan(made, ctx.global_weights, ctx)["path"] == "grouped"
    made[1] = made[1].with_dataset([(torch.ones(2), 0), (torch.ones(3), 1)])
    found = executor.compute(made, ctx.global_weights, ctx).updates
    reference = SequentialExecutor().compute(made, ctx.global_weights, ctx).updates
    assert torch.equal(found, reference)
    # The gradient of the weights by hand: p - onehot(y), times the sum, over two samples.
    w, b = ctx.global_weights[:2].double(), ctx.global_weights[2:].double()
    p = torch.softmax(torch.tensor([[2.0], [3.0]]).double() * w + b, dim=1)
    by_hand = ((p - torch.eye(2)) * torch.tensor([[2.0], [3.0]])).mean(dim=0)
    torch.testing.assert_close(found[1, :2].double(), by_hand, rtol=1e-5, atol=1e-7)


def test_samples_are_fetched_together_where_the_data_set_can() -> None:
    class Fetches(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> Any:
            raise AssertionError

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(torch.full((3,), float(i)), i) for i in indices]

    x, y = take(Fetches(), np.array([2, 0]), CPU)
    assert x[:, 0].tolist() == [2.0, 0.0]
    assert y.tolist() == [2, 0]


def test_the_manifest_remembers_how_batches_were_made() -> None:
    module = Net(by_name)
    clients = [LightningClient("a", module, pairs(), drop_last=True, collate_fn=stacked)]
    history = MemoryHistory()
    loop = FederatedLoop(logger=False, enable_progress_bar=False)
    loop.record(Federation(clients, module), FedAvg(), history, max_rounds=1, server_lr=0.1)
    training = history.manifest.training["*"]
    assert training["drop_last"] is True
    assert training["collate_fn"] == f"{__name__}.stacked"


def test_names_of_functions() -> None:
    class Padding:
        def __call__(self, samples: list[Any]) -> Any:
            return samples

    assert collate_name(None) is None
    assert collate_name(stacked) == f"{__name__}.stacked"
    assert collate_name(Padding()).endswith("test_names_of_functions.<locals>.Padding")


# --- drop_last ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "lengths"),
    [
        (10, 4, [4, 4, 4, 4]),
        (8, 4, [4, 4, 4, 4]),
        (3, 4, [3, 3]),  # the full batch, not nothing
        (3, None, [3, 3]),
    ],
)
def test_drop_last(num_samples: int, batch_size: int | None, lengths: list[int]) -> None:
    module = Net()
    dataset = pairs(num_samples)
    client = LightningClient(
        "a", module, dataset, batch_size=batch_size, local_epochs=2, drop_last=True
    )
    ctx = context(module, [client])
    found = client.batches(ctx)
    assert [len(batch) for batch in found] == lengths
    assert client.num_local_steps(ctx) == len(lengths)
    whole = LightningClient("a", module, dataset, batch_size=batch_size, local_epochs=2)
    full = [b for b in whole.batches(ctx) if len(b) == lengths[0]]
    assert all(np.array_equal(a, b) for a, b in zip(found, full, strict=True))
    assert client.local_trainer(module, ctx).num_training_batches == len(lengths) // 2


def test_steps_are_not_changed_by_drop_last() -> None:
    given = {"seed": 0, "round": 0, "client_id": "a", "num_samples": 10, "batch_size": 4}
    one, other = (
        batch_indices(**given, local_steps=5, local_epochs=None, drop_last=d) for d in (0, 1)
    )
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# --- errors ------------------------------------------------------------------------------------


def refusal(dataset: Any, body: Any = None, **local: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        updates(Net(body=body), [pairs(), dataset], **local)
    return str(caught.value)


def test_a_last_batch_of_one_under_batchnorm() -> None:
    body = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    local = {"batch_size": 2, "local_epochs": 1}
    text = refusal(pairs(5), body, **local)
    assert "Cannot train on a batch of one sample (" in text
    assert "`drop_last=True`" in text
    assert updates(Net(body=body), [pairs(5)], **local, drop_last=True).isfinite().all()


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (
            TensorDataset(torch.zeros(4, 3).double(), torch.zeros(4).long()),
            "gives [float64 of shape (3,), int64 of shape ()]: mat1 and mat2",
        ),
        ([(np.zeros(3), 1)] * 4, "gives [float64 of shape (3,), int64 of shape ()]"),
        ([(torch.zeros(3, dtype=torch.uint8), 1)] * 4, "gives [uint8 of shape (3,)"),
        ([(torch.zeros(3), torch.tensor(1, dtype=torch.int32))] * 4, "int32 of shape ()]"),
        ([(torch.zeros(3), 0.5)] * 4, "float64 of shape ()]"),
    ],
    ids=["float64", "numpy", "uint8", "int32 labels", "float labels"],
)
def test_types_that_a_model_cannot_take(dataset: Any, found: str) -> None:
    text = refusal(dataset)
    assert text.startswith("Net computes in float32 and fails on a batch of client 'c1', whose")
    assert found in text
    assert "HINT: let the data set, or a transform, give the types" in text


def test_types_that_a_model_can_take_are_not_refused() -> None:
    dataset = TensorDataset(torch.zeros(4, 3).double(), torch.zeros(4, dtype=torch.uint8))
    float64 = updates(Net(lambda batch: (batch[0].float(), batch[1])), [dataset])
    labels = TensorDataset(torch.zeros(4, 3), torch.zeros(4).long())
    assert torch.equal(float64, updates(Net(), [labels]))


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (
            [(torch.zeros(3), 0), (torch.zeros(3), 0), (ONE, 0)],
            "sample 2 is (float32 of shape (1,), int), and sample 0 is (float32",
        ),
        ([(object(), 0)] * 3, "sample 0 is (object, int)"),
        ([{"x": 1}, {"y": 1}], "sample 1 is {'y': int}, and sample 0 is {'x': int}"),
        ([[1, 2], [1]], "sample 1 is [int], and sample 0 is [int, int]"),
    ],
)
def test_samples_that_make_no_batch(dataset: Any, found: str) -> None:
    text = refusal(dataset)
    assert text.startswith(f"Cannot put samples of client 'c1' into one batch: {found}")
    assert "`collate_fn=`" in text


@pytest.mark.parametrize(
    ("dataset", "found", "hint"),
    [
        ([(torch.zeros(4), 0)] * 2, "gives [float32 of shape (4,), int64", "the shapes that"),
        ([(torch.zeros(3), 9)] * 2, "Target 9 is out of bounds", "labels have to be below"),
        ([(torch.zeros(3), torch.tensor([1]))] * 2, "int64 of shape (1,)", "the shapes that"),
        ([(torch.zeros(3), "cat")] * 2, "argument 'target'", "the types that"),
    ],
    ids=["features", "label", "label of a dimension", "label in words"],
)
def test_shapes_and_values_that_a_model_cannot_take(dataset: Any, found: str, hint: str) -> None:
    text = refusal(dataset)
    assert "fails on a batch of client 'c1', whose first sample (0)" in text
    assert found in text
    assert hint in text.partition("HINT: ")[2]


def test_other_failures_stay_what_they_are() -> None:
    def fail(batch: Any) -> Any:
        raise IndexError("no such word")

    with pytest.raises(IndexError, match="no such word"):
        updates(Net(fail), [pairs()])


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="Expected `drop_last`"):
        LightningClient("a", Net(), pairs(), drop_last=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Expected `collate_fn` to be a function or None"):
        LightningClient("a", Net(), pairs(), collate_fn="pad")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dataset", [{"x": torch.zeros(2), "y": torch.zeros(2)}, DataLoader(pairs()), iter([])]
)
def test_data_that_are_not_read_by_index(dataset: Any) -> None:
    with pytest.raises(ConfigurationError, match="Expected `dataset` to be a map-style data set"):
        LightningClient("a", Net(), dataset)
    client = LightningClient("a", Net(), pairs())
    with pytest.raises(ConfigurationError, match="Expected `test_dataset` to be a map-style"):
        Federation([client], client.module, test_dataset=dataset)
