"""The recovered model back in the user's hands: `module()`, checkpoints, exported models."""

from __future__ import annotations

import argparse
import io
import math
import pathlib
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FoolsGold, Median
from fedrec.callbacks import Callback
from fedrec.exceptions import (
    ConfigurationError,
    FedrecWarning,
    HistoryCorruptedError,
    HistoryKeyError,
)
from fedrec.history import LMDBHistory, MemoryHistory, ShardedHistory
from fedrec.history.base import SEALED
from fedrec.loop.checkpoint import finished_state, lightning_checkpoint, load_state, save_state
from fedrec.recoverers import FedRecover, TrainFromScratch
from fedrec.testing.problems import quadratic_federation
from fedrec.types import RunResult


class Base(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class Net(Base):
    """BatchNorm, tied weights, a frozen layer, a hyper-parameter, and a buffer of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.down.weight = self.up.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 3)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("shift", torch.tensor(0.25), persistent=False)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.head(self.frozen(torch.tanh(self.down(self.up(x)))) * self.scale + self.shift)


def federation(module: pl.LightningModule, buffers: str = "average") -> Federation:
    generator = torch.Generator().manual_seed(0)

    def data(size: int) -> TensorDataset:
        x = torch.randn(size, 6, generator=generator)
        return TensorDataset(x, x[:, :3].argmax(dim=1))

    clients = [LightningClient(c, module, data(20), batch_size=10) for c in "abc"]
    return Federation(clients, module, test_dataset=data(30), buffers=buffers)


def recovered(
    module: pl.LightningModule, folder: Path | None = None, **arguments: Any
) -> tuple[Federation, RunResult, RunResult]:
    clients = federation(module, **arguments)
    loop = FederatedLoop(enable_progress_bar=False, default_root_dir=folder)
    history = MemoryHistory()
    recorded = loop.record(clients, Median(), history, max_rounds=4, server_lr=0.1)
    return clients, recorded, loop.recover(clients, history, TrainFromScratch(), exclude=["b"])


class _Interrupted(Callback):
    def on_round_end(self, loop, ctx, metrics):
        if ctx.phase == "recover" and ctx.round == 5:
            raise KeyboardInterrupt


def test_files_with_what_clients_sent_are_their_owners_alone(tmp_path: Path) -> None:
    """The updates in a checkpoint are gone when the recovery has ended; FoolsGold keeps sums."""
    clients, history = quadratic_federation(), MemoryHistory()
    checkpoint = tmp_path / "recover" / "FedRecover" / "checkpoint.npz"
    files = [checkpoint, tmp_path / "record" / "aggregator.npz"]
    for file in files:  # as they were left by an earlier release
        file.parent.mkdir(parents=True)
        file.touch(mode=0o644)
    checkpoint.unlink()

    def loop(*callbacks: Callback) -> FederatedLoop:
        return FederatedLoop(
            accelerator="cpu",
            enable_progress_bar=False,
            default_root_dir=tmp_path,
            checkpoint_every=0,
            callbacks=callbacks,
        )

    loop().record(clients, FoolsGold(), history, max_rounds=8, server_lr=0.1)
    method = FedRecover(warmup_rounds=3, correction_period=4, final_rounds=1)
    with pytest.raises(KeyboardInterrupt):
        loop(_Interrupted()).recover(clients, history, method, exclude=[clients.client_ids[0]])
    assert load_state(checkpoint)["recoverer"]["estimator"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    ended = loop().recover(clients, history, method, exclude=[clients.client_ids[0]], resume=True)
    state = load_state(checkpoint)
    assert state["finished"]
    assert not {"recoverer", "aggregator", "attack", "last_aggregate"} & set(state)
    assert stat.S_IMODE(checkpoint.stat().st_mode) == 0o600
    # A recovery that has ended says again what it said, whoever reads it.
    new = FedRecover(warmup_rounds=3, correction_period=4, final_rounds=1)
    again = loop().recover(clients, history, new, exclude=[clients.client_ids[0]], resume=True)
    assert again.diagnostics == ended.diagnostics
    assert again.diagnostics["estimated_updates"] > 0


@pytest.mark.parametrize("num_shards", [None, 3])
def test_files_beside_an_encrypted_history_are_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int | None
) -> None:
    """Until the recovery has ended: then nothing that a client sent is in them."""
    monkeypatch.setenv("KEY", "0f" * 32)
    clients = quadratic_federation(num_clients=6, size=40)
    method = {"warmup_rounds": 3, "correction_period": 4, "final_rounds": 1}
    settings: dict[str, Any] = {
        "accelerator": "cpu", "enable_progress_bar": False, "checkpoint_every": 0,
        "num_shards": num_shards,
    }  # fmt: skip
    store: Any = LMDBHistory if num_shards is None else ShardedHistory
    rule = FoolsGold() if num_shards is None else Median()
    history = store(tmp_path / "history", master_key="env:KEY")
    loop = FederatedLoop(**settings, default_root_dir=tmp_path)
    loop.record(clients, rule, history, max_rounds=8, server_lr=0.1)
    left_out = list(clients.client_ids[:2])
    whole = FederatedLoop(**settings).recover(clients, history, FedRecover(**method), left_out)
    stopped = FederatedLoop(**settings, default_root_dir=tmp_path, callbacks=[_Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        stopped.recover(clients, history, FedRecover(**method), left_out)
    files = sorted(tmp_path.glob("rec*/**/*.npz"))
    folder = tmp_path / "recover" / "FedRecover"
    if num_shards is None:
        assert files == [tmp_path / "record" / "aggregator.npz", folder / "checkpoint.npz"]
    else:  # nobody is left in the first of three shards
        turn = load_state(folder / "checkpoint.npz", history)["shard_files"]
        names = [f"checkpoint-shard-00{v}-{turn}.npz" for v in (1, 2)]
        assert [file.name for file in files] == [*names, "checkpoint.npz"]
    for file in files:
        assert file.read_bytes()[: len(SEALED)] == SEALED
        assert finished_state(file) is None
        with pytest.raises(HistoryCorruptedError, match=rf"{file.name} cannot be read"):
            load_state(file)
    again = loop.recover(clients, history, FedRecover(**method), left_out, resume=True)
    assert torch.equal(again.global_weights, whole.global_weights)
    state = finished_state(folder / "checkpoint.npz")
    assert state is not None
    assert torch.equal(state["weights"], whole.global_weights)
    assert [file.name for file in folder.glob("*.npz")] == ["checkpoint.npz"]


def test_a_checkpoint_beside_another_history_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "0f" * 32)
    clients = quadratic_federation()
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    one, other = (LMDBHistory(tmp_path / name, master_key="env:KEY") for name in ("a", "b"))
    for history in (one, other):
        loop.record(clients, Median(), history, max_rounds=1, server_lr=0.1)
    path = tmp_path / "checkpoint.npz"
    save_state(path, {"sums": torch.ones(3)}, one)
    assert load_state(path, one)["sums"].tolist() == [1, 1, 1]
    for history in (other, MemoryHistory()):
        with pytest.raises(HistoryCorruptedError, match="cannot be read"):
            load_state(path, history)
    monkeypatch.delenv("KEY")
    with pytest.raises(HistoryKeyError, match="`KEY`"):
        load_state(path, LMDBHistory(tmp_path / "a", master_key="env:KEY"))


def test_module_is_a_copy_with_the_weights_and_buffers_of_the_result() -> None:
    torch.manual_seed(0)
    module = Net(width=5)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    clients, recorded, result = recovered(module)
    loop = FederatedLoop(enable_progress_bar=False)
    for run in (recorded, result):
        copy = run.module()
        assert type(copy) is Net
        assert copy is not module
        assert copy.hparams["width"] == 5
        assert torch.equal(clients.layout.flatten(copy), run.global_weights)
        assert run.buffers is not None
        assert torch.equal(clients.layout.buffers(copy), run.buffers)
        assert not torch.equal(copy.norm.running_mean, torch.zeros(5))
        assert copy.up.weight is copy.down.weight
        assert not copy.frozen.weight.requires_grad
        assert torch.equal(copy.frozen.weight, before["frozen.weight"])
        assert copy.scale.item() == 0.5
        assert copy.shift.item() == 0.25
        assert copy.training
        # What the loop measured last is what the copy gives.
        logits = copy.eval()(clients.test_dataset.tensors[0])
        assert loop.test(clients, run)["ter"] == pytest.approx(run.curve[-1]["ter"])
        with pytest.raises(ConfigurationError, match="averages buffers, but got None"):
            loop.test(clients, run.global_weights)
        wrong = (logits.argmax(dim=1) != clients.test_dataset.tensors[1]).float().mean().item()
        assert math.isclose(wrong, run.curve[-1]["ter"], rel_tol=1e-6)
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Copies are the user's own: changing one changes neither the result nor the next copy.
    with torch.no_grad():
        result.module().first.weight.zero_()
    assert torch.equal(clients.layout.flatten(result.module()), result.global_weights)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["old", "new"]
)
def test_layers_that_compute_their_weights_are_copied(norm: Any) -> None:
    module = Net(width=5)
    module.head = norm(module.head)
    clients, _, result = recovered(module)
    copy = result.module().eval()
    assert torch.equal(clients.layout.flatten(copy), result.global_weights)
    logits = copy(clients.test_dataset.tensors[0])
    wrong = (logits.argmax(dim=1) != clients.test_dataset.tensors[1]).float().mean().item()
    assert math.isclose(wrong, result.curve[-1]["ter"], rel_tol=1e-6)


def test_module_goes_on_with_lightnings_trainer() -> None:
    clients, _, result = recovered(Net())
    copy = result.module()
    trainer = pl.Trainer(
        max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tips of Lightning
        loader = torch.utils.data.DataLoader(clients.clients[0].dataset, batch_size=10)
        trainer.fit(copy, loader)
    assert not torch.equal(clients.layout.flatten(copy), result.global_weights)
    assert torch.equal(clients.layout.flatten(result.module()), result.global_weights)


def test_module_of_a_result_made_by_hand_is_refused() -> None:
    result = RunResult(name="a", global_weights=torch.zeros(1), rounds=1, seconds=0.0)
    with pytest.raises(ConfigurationError, match="no module to copy"):
        result.module()


def test_modules_that_cannot_be_copied_say_so() -> None:
    class Locked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.file = None

    module = Locked()
    _, result, _ = recovered(module)
    module.file = io.TextIOWrapper(io.BytesIO())
    with pytest.raises(ConfigurationError, match="Locked cannot be copied"):
        result.module()


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_a_recovered_checkpoint_loads(tmp_path: Path, weights_only: bool | None) -> None:
    clients, recorded, result = recovered(Net(width=5), tmp_path)
    assert recorded.checkpoint is None
    assert result.checkpoint == tmp_path / "recover" / "TrainFromScratch" / "model.ckpt"
    loaded = Net.load_from_checkpoint(result.checkpoint, weights_only=weights_only)
    assert loaded.hparams["width"] == 5
    assert loaded.up.weight is loaded.down.weight
    copy = result.module().state_dict()
    assert loaded.state_dict().keys() == copy.keys()
    assert all(torch.equal(loaded.state_dict()[name], copy[name]) for name in copy)


class Plain(Base):
    """Saves no hyper-parameters."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


class OfConfig(Plain):
    """Has one argument that holds all settings."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.width)
        self.save_hyperparameters(config)


class Picky(Plain):
    """Has settings that torch does not load from a file that is not trusted."""

    def __init__(self, width: int = 4, where: Any = None, activation: Any = None) -> None:
        super().__init__(width)
        self.save_hyperparameters()


def saved(module: pl.LightningModule) -> io.BytesIO:
    return io.BytesIO(lightning_checkpoint(module, rounds=7))


def test_without_hyperparameters_the_arguments_are_given_again() -> None:
    assert Plain.load_from_checkpoint(saved(Plain())).layers[0].out_features == 4
    file = saved(Plain(width=9))
    assert Plain.load_from_checkpoint(file, width=9).layers[0].out_features == 9


@pytest.mark.parametrize(
    "config",
    [argparse.Namespace(width=9, lr=0.1), OmegaConf.create({"width": 9, "rest": {"lr": 0.1}})],
    ids=["Namespace", "OmegaConf"],
)
def test_settings_in_one_argument(config: Any) -> None:
    loaded = OfConfig.load_from_checkpoint(saved(OfConfig(config)), weights_only=True)
    assert loaded.layers[0].out_features == 9


def test_hyperparameters_that_are_not_plain_data_are_left_out_by_name() -> None:
    module = Picky(width=9, where=pathlib.PurePosixPath("a"), activation=torch.tanh)
    with pytest.warns(FedrecWarning) as caught:
        file = saved(module)
    named = [str(w.message).split(" ")[1] for w in caught]
    assert named == ["'where'", "'activation'"]
    loaded = Picky.load_from_checkpoint(file, where="b", weights_only=True)
    assert loaded.layers[0].out_features == 9
    assert loaded.hparams["where"] == "b"


def test_what_a_module_adds_to_its_checkpoint_is_warned_of_if_torch_does_not_load_it() -> None:
    class Adds(Plain):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["numbers"], checkpoint["path"] = [1, 2], pathlib.PurePosixPath("a")

    with pytest.warns(FedrecWarning, match=r"Adds puts 'path' .* `weights_only=False`") as caught:
        file = saved(Adds())
    assert len(caught) == 1
    checkpoint = torch.load(file, weights_only=False)
    assert (checkpoint["numbers"], checkpoint["global_step"]) == ([1, 2], 7)
    file.seek(0)
    assert type(Adds.load_from_checkpoint(file, weights_only=False)) is Adds


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_exported_models_give_what_the_module_gives(tmp_path: Path) -> None:
    import onnxruntime

    _, _, result = recovered(Net(width=5))
    module = result.module().eval()
    x, shapes = torch.randn(4, 6), ({0: torch.export.Dim("batch")},)
    more = torch.randn(7, 6)
    program = torch.export.export(module, (x,), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(more), module(more), rtol=0, atol=1e-5)
    file = tmp_path / "model.onnx"
    torch.onnx.export(module, (x,), file, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (name,) = (entry.name for entry in session.get_inputs())
    (logits,) = session.run(None, {name: more.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), module(more), rtol=0, atol=1e-5)
