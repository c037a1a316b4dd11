from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fedrec.exceptions import ConfigurationError
from fedrec.models import CNN, HARMLP, MLP, Classifier, PurchaseMLP

MODELS = {
    "mlp": (lambda: MLP(in_features=6, hidden=(5, 4), num_classes=3, activation="tanh"), (6,), 3),
    "linear": (lambda: MLP(in_features=6, hidden=(), num_classes=3), (2, 3), 3),
    "cnn": (lambda: CNN(hidden=12, image_size=12, in_channels=2), (2, 12, 12), 10),
    "purchase": (PurchaseMLP, (600,), 100),
    "har": (HARMLP, (561,), 6),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Classifier, Tensor, Tensor]:
    """A model, a batch of 4 inputs, and labels."""
    make, shape, classes = MODELS[request.param]
    torch.manual_seed(0)
    return make(), torch.rand(4, *shape), torch.arange(4) % classes


def trainer(folder: Path, **arguments: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def test_logits(case: tuple[Classifier, Tensor, Tensor]) -> None:
    module, x, _ = case
    logits = module(x)
    assert logits.shape == (4, num_classes(module))
    # Samples do not mix.
    torch.testing.assert_close(module(x[2:3]), logits[2:3])


def num_classes(module: Classifier) -> int:
    """The length of the last bias."""
    return list(module.parameters())[-1].numel()


def test_initial_weights_are_xavier_uniform_of_magnitude_2_24() -> None:
    torch.manual_seed(1)
    module = CNN(in_channels=3, hidden=100)
    for name, p in module.named_parameters():
        if p.ndim == 1:
            assert torch.count_nonzero(p) == 0, name
            continue
        area = math.prod(p.shape[2:])
        bound = math.sqrt(2.24 / ((p.shape[0] * area + p.shape[1] * area) / 2))
        assert p.abs().max() <= bound
        # n uniform draws: all below (1 - 0.02) of the bound has probability 0.98^n < 1e-7, and the
        # variance is bound^2 / 3, estimated with relative standard error sqrt(0.8 / n).
        assert p.abs().max() > 0.98 * bound
        relative = float(p.detach().double().square().mean()) / (bound**2 / 3) - 1
        assert abs(relative) < 5 * math.sqrt(0.8 / p.numel())


def test_initial_weights_follow_the_global_seed() -> None:
    def weights() -> Tensor:
        pl.seed_everything(3, verbose=False)
        return nn.utils.parameters_to_vector(MLP(in_features=4).parameters())

    assert torch.equal(weights(), weights())


def test_training_step_is_the_mean_cross_entropy_and_is_logged(
    case: tuple[Classifier, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x, y = case
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(module, "log", lambda name, value: logged.update({name: value}))
    loss = module.training_step((x, y), 0)
    probabilities = module(x).double().softmax(dim=1)
    expected = -probabilities[torch.arange(4), y].log().mean()
    torch.testing.assert_close(loss.double(), expected)
    assert loss.requires_grad
    assert logged == {"loss": loss}


def test_optimizer_is_plain_sgd(case: tuple[Classifier, Tensor, Tensor]) -> None:
    module, x, y = case
    optimizer = module.configure_optimizers()
    before = [p.detach().clone() for p in module.parameters()]
    cross_entropy(module(x), y).backward()
    optimizer.step()
    for old, p in zip(before, module.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), old - module.lr * p.grad)


def test_gradients_of_many_clients_at_once(case: tuple[Classifier, Tensor, Tensor]) -> None:
    module, x, y = case
    modules = [copy.deepcopy(module) for _ in range(3)]
    for i, m in enumerate(modules):
        with torch.no_grad():
            for p in m.parameters():
                p.add_(0.01 * i)
    inputs = torch.stack([x, x.flip(0), x * 0.5])
    labels = torch.stack([y, y.flip(0), y])

    def loss(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(functional_call(module, parameters, (inputs,)), labels)

    stacked, _ = stack_module_state(modules)
    together = vmap(grad(loss))(stacked, inputs, labels)
    for i, m in enumerate(modules):
        cross_entropy(m(inputs[i]), labels[i]).backward()
        for name, p in m.named_parameters():
            torch.testing.assert_close(together[name][i], p.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*number of training batches")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own use of torch
def test_lightning_trains_saves_loads_and_tests(
    case: tuple[Classifier, Tensor, Tensor], tmp_path: Path
) -> None:
    module, x, y = case
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    first = trainer(tmp_path, max_epochs=1)
    first.fit(module, loader, loader)
    wrong = (module(x).argmax(dim=1) != y).double().mean()
    # Batches of 3 and 1: a mean over samples, not over batches.
    assert float(first.callback_metrics["val_ter"]) == pytest.approx(float(wrong))
    assert float(first.callback_metrics["val_loss"]) == pytest.approx(
        float(cross_entropy(module(x), y).detach()), rel=1e-5
    )

    path = tmp_path / "model.ckpt"
    first.save_checkpoint(path)
    loaded = type(module).load_from_checkpoint(path)
    assert dict(loaded.hparams) == dict(module.hparams)
    assert loaded.lr == module.lr
    assert torch.equal(loaded(x), module(x))
    results = trainer(tmp_path).test(loaded, loader, verbose=False)
    assert results[0]["test_ter"] == pytest.approx(float(wrong))


@pytest.mark.parametrize("lr", [0.0, -1.0, float("inf"), "0.1"])
def test_learning_rate_is_checked(lr: object) -> None:
    for make in (lambda: MLP(in_features=2, lr=lr), lambda: CNN(lr=lr), lambda: HARMLP(lr=lr)):
        with pytest.raises(ConfigurationError, match="Expected `lr`"):
            make()
