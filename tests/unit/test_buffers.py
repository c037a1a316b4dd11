"""Buffers: exactly as they were, or averaged where training changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

from fedrec import ClientSampler, FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.callbacks import Callback
from fedrec.clients import LightningClient
from fedrec.exceptions import ConfigurationError, ShapeError, UpdateError
from fedrec.history import LMDBHistory, MemoryHistory
from fedrec.parameters import ParameterVector
from fedrec.recoverers import HistoricalOnly, TrainFromScratch


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


CONSTANTS = {
    "multiplier": torch.tensor(2654435761),
    "rate": torch.tensor(0.1, dtype=torch.float64),
    "phase": torch.tensor([1 + 2j]),
    "mask": torch.tensor([[0.0, float("-inf")], [float("nan"), 0.0]]),
    "odd": torch.tensor([True, False]),
    "narrow": torch.tensor([0.1], dtype=torch.bfloat16),
}


class Constant(Net):
    def __init__(self) -> None:
        super().__init__()
        for name, value in CONSTANTS.items():
            self.register_buffer(name, value.clone(), persistent=name != "mask")


class Moving(Net):
    """Keeps, of every batch, half of its mean input beside half of what was there."""

    def __init__(self, dtype: torch.dtype = torch.float32, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=dtype), persistent=persistent)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.ones(2))

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.mean.mul_(0.5).add_(0.5 * batch[0].mean(dim=0).to(self.mean.dtype))
        self.calls += 1
        return super().training_step(batch, index)


class Replacing(Moving):
    """The same, with a new tensor every time."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * batch[0].mean(dim=0).to(self.mean.dtype)
        return Net.training_step(self, batch, index)


class Late(Moving):
    """Keeps nothing of the first client's data."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return (Net if len(batch[0]) == 6 else Moving).training_step(self, batch, index)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = spectral_norm(nn.Linear(4, 3))


def inputs(i: int) -> Tensor:
    return torch.randn(6 + 2 * i, 4, generator=torch.Generator().manual_seed(i))


def federation_of(module: nn.Module, buffers: str = "average") -> Federation:
    torch.manual_seed(0)
    clients = [
        LightningClient(f"c{i}", module, TensorDataset(x := inputs(i), torch.arange(len(x)) % 3))
        for i in range(3)
    ]
    test = TensorDataset(inputs(9), torch.arange(len(inputs(9))) % 3)
    return Federation(clients, module, test_dataset=test, buffers=buffers)


def record(
    federation: Federation, history: Any = None, rounds: int = 2, **arguments: Any
) -> tuple[FederatedLoop, Any, Any]:
    loop = FederatedLoop(
        logger=False, enable_progress_bar=False, executor="sequential", **arguments
    )
    history = MemoryHistory() if history is None else history
    return (
        loop,
        history,
        loop.record(federation, FedAvg(), history, max_rounds=rounds, server_lr=0.1),
    )


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )


@pytest.mark.parametrize("buffers", ["refuse", "average"])
def test_a_buffer_that_training_leaves_alone_keeps_every_bit(buffers: str, tmp_path: Path) -> None:
    module = Constant()
    federation = federation_of(module, buffers)
    loop, history, result = record(federation, default_root_dir=tmp_path)
    assert history.manifest.buffers == {}
    assert result.buffers is None
    loop.test(federation, result.global_weights)
    loop.recover(federation, history, TrainFromScratch(), exclude=["c0"])
    for name, value in CONSTANTS.items():
        assert same(getattr(module, name), value)
    saved = torch.load(tmp_path / "recover/TrainFromScratch/model.ckpt", weights_only=True)
    for name in CONSTANTS.keys() - {"mask"}:
        assert same(saved["state_dict"][name], CONSTANTS[name])


def test_what_travels_comes_back_in_its_dtype() -> None:
    module = Constant()
    layout = ParameterVector(module)
    assert layout.num_buffers == 0
    layout.select_buffers(module, ["narrow", "rate", "phase"])
    vector = layout.buffers(module)
    # bfloat16 has 8 bits: 0.1 is 205/2048 there. A complex number is two.
    assert vector.dtype == torch.float64
    assert vector.tolist() == [205 / 2048, 0.1, 1.0, 2.0]
    layout.load_buffers(module, 2 * vector)
    assert module.narrow.tolist() == [205 / 1024]
    assert module.phase.tolist() == [2 + 4j]
    assert module.rate.item() == 0.2
    assert same(module.mask, CONSTANTS["mask"])
    third = layout.round_buffers(torch.full((4,), 1 / 3, dtype=torch.float64)).tolist()
    # To 8, 53 and 24 bits.
    assert third == [171 / 512, 1 / 3, 11184811 / 2**25, 11184811 / 2**25]
    with pytest.raises(ShapeError, match="the buffers"):
        layout.load_buffers(module, vector[:2])
    for wrong in (["multiplier"], ["gone"], {"rate": {"dtype": "float32", "shape": []}}):
        with pytest.raises(ConfigurationError, match=r"multiplier|gone|`rate`"):
            layout.select_buffers(module, wrong)


@pytest.mark.parametrize("cls", [Moving, Replacing])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_a_rehearsal_finds_is_averaged(
    cls: type[Moving], persistent: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    module = cls(dtype, persistent)
    federation = federation_of(module)
    loop, history, result = record(federation, LMDBHistory(tmp_path / "history"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    name = str(dtype).removeprefix("torch.")
    assert history.manifest.buffers == {"mean": {"dtype": name, "shape": [4]}}
    # Half of the mean of the clients' means, weighted by samples; then half of that more.
    means = [inputs(i).mean(dim=0).double() for i in range(3)]
    mean = sum((6 + 2 * i) * m for i, m in enumerate(means)) / 24
    tolerance = {"rtol": 0, "atol": 2e-3 if dtype == torch.float16 else 1e-7}
    for t, part in enumerate((0.5, 0.75)):
        found = history.read_round(t).buffers
        assert found.dtype == wide
        assert same(found, found.to(dtype).to(wide))
        torch.testing.assert_close(found.double(), part * mean, **tolerance)
    assert same(result.buffers, history.read_round(1).buffers)
    # The module is as it was handed over.
    assert module.mean.tolist() == [0.0] * 4
    assert module.calls.item() == 0
    recovered = loop.recover(federation, history, TrainFromScratch(), exclude=[])
    assert same(recovered.buffers, result.buffers)
    unasked = loop.recover(federation, history, HistoricalOnly(), exclude=["c0"])
    assert unasked.buffers.tolist() == [0.0] * 4
    history.close()


def test_another_federation_takes_the_names_from_the_history() -> None:
    _, history, result = record(federation_of(Moving()), rounds=3)
    new = federation_of(Moving())
    assert new.layout.buffer_names == ()
    loop = FederatedLoop(logger=False, enable_progress_bar=False, executor="sequential")
    recovered = loop.recover(new, history, TrainFromScratch(), exclude=[])
    assert same(recovered.buffers, result.buffers)
    assert same(recovered.global_weights, result.global_weights)
    with pytest.raises(ConfigurationError, match=r'`mean`.*buffers="average"'):
        loop.recover(federation_of(Moving(), "refuse"), history, TrainFromScratch(), exclude=[])
    with pytest.raises(ConfigurationError, match=r"`mean`.*float32.*float64"):
        loop.recover(federation_of(Moving(torch.float64)), history, TrainFromScratch(), exclude=[])


class InterruptError(Exception):
    pass


def test_resumed_recording_goes_on_from_the_stored_buffers() -> None:
    class Stop(Callback):
        def on_round_start(self, loop: FederatedLoop, ctx: Any) -> None:
            if ctx.round == 2:
                raise InterruptError

    _, whole, result = record(federation_of(Moving(torch.float64)), rounds=4)
    history = MemoryHistory()
    arguments: dict[str, Any] = {"max_rounds": 4, "server_lr": 0.1}
    loop = FederatedLoop(
        logger=False, enable_progress_bar=False, executor="sequential", callbacks=Stop()
    )
    with pytest.raises(InterruptError):
        loop.record(federation_of(Moving(torch.float64)), FedAvg(), history, **arguments)
    loop.callbacks.clear()
    resumed = loop.record(
        federation_of(Moving(torch.float64)), FedAvg(), history, resume=True, **arguments
    )
    assert len(history.rounds()) == 4
    assert same(resumed.buffers, result.buffers)
    for t in range(4):
        assert same(history.read_round(t).buffers, whole.read_round(t).buffers)


@pytest.mark.parametrize("persistent", [True, False])
def test_what_training_changes_is_refused_by_name(persistent: bool) -> None:
    history = MemoryHistory()
    with pytest.raises(ConfigurationError, match=r"Moving.*`mean`\. HINT.*average") as error:
        record(federation_of(Moving(persistent=persistent), "refuse"), history)
    assert "scale" not in str(error.value)
    assert "calls" not in str(error.value)
    assert history.is_empty
    with pytest.raises(ConfigurationError, match=r"`net\.parametrizations\.weight\.0\._u`"):
        record(federation_of(Spectral(), "refuse"), history)
    assert history.is_empty


def test_batch_norm_averages_its_statistics_alone() -> None:
    module = Normed()
    _, history, result = record(federation_of(module), rounds=3)
    assert list(history.manifest.buffers) == ["net.1.running_mean", "net.1.running_var"]
    assert result.buffers.shape == (10,)
    assert module.net[1].num_batches_tracked.item() == 0
    assert module.net[1].running_var.tolist() == [1.0] * 5


def test_spectral_norm_is_averaged() -> None:
    _, history, result = record(federation_of(Spectral()))
    assert [name[-2:] for name in history.manifest.buffers] == ["_u", "_v"]
    assert result.buffers.shape == (7,)


@pytest.mark.parametrize("buffers", ["refuse", "average"])
def test_a_buffer_that_changes_later_is_an_error_then(buffers: str) -> None:
    history, loop = (
        MemoryHistory(),
        FederatedLoop(logger=False, enable_progress_bar=False, executor="sequential"),
    )
    one_by_one = ClientSampler(schedule=[["c0"], ["c0"], ["c0"], ["c1"]])
    with pytest.raises(ConfigurationError, match=r"in round 3 .*`mean`"):
        loop.record(
            federation_of(Late(), buffers),
            FedAvg(),
            history,
            max_rounds=5,
            server_lr=0.1,
            sampler=one_by_one,
        )
    assert len(history.rounds()) == 3


def test_values_that_all_clients_leave_keep_their_bits() -> None:
    class Half(Moving):
        def training_step(self, batch: Any, index: int) -> Tensor:
            self.mean[0] += batch[0].mean()
            return Net.training_step(self, batch, index)

    module = Half(torch.float64)
    # A weighted mean of three equal values like these may differ in the last bit.
    odd = torch.tensor([0.0, 0.1, 1 / 3, 1e300], dtype=torch.float64)
    module.mean.copy_(odd)
    _, _, result = record(federation_of(module), rounds=3)
    assert result.buffers[0] != 0
    assert same(result.buffers[1:], odd[1:])


def test_a_changed_value_that_is_not_finite_is_refused() -> None:
    class Overflowing(Moving):
        def training_step(self, batch: Any, index: int) -> Tensor:
            self.mean += float("inf")
            return Net.training_step(self, batch, index)

    with pytest.raises(UpdateError, match="its buffers have NaN or infinity"):
        record(federation_of(Overflowing()))
