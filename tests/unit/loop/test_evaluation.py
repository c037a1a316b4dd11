"""Testing uses the data set as its user wrote it, and leaves the model as it was."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryConfusionMatrix, BinaryF1Score

from fedrec import FederatedLoop, LightningClient
from fedrec.aggregators import FedAvg
from fedrec.attacks import BackdoorAttack, FeatureTrigger
from fedrec.exceptions import ConfigurationError, FedrecWarning, ShapeError
from fedrec.federation import Federation
from fedrec.history import MemoryHistory
from fedrec.loop.evaluation import evaluate, fixed_subset
from fedrec.testing.problems import QuadraticClient

X = torch.eye(2).repeat(5, 1)
Y = torch.tensor([0, 1]).repeat(5)


class Relabelled(TensorDataset):
    """Swaps the two labels when a sample is fetched."""

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x, 1 - y


class _Modes:
    """Where what a forward pass saw is kept outside of the module."""

    seen: ClassVar[list[bool]] = []

    def note(self, modes: list[bool]) -> None:
        _Modes.seen = modes


class Parts(nn.Module):
    """Logits are the input times the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Sequential(nn.Dropout(0.5), nn.Identity())
        self.modes = _Modes()

    def forward(self, x: Tensor) -> Tensor:
        self.modes.note([part.training for part in self.modules()])
        self.calls = getattr(self, "calls", 0) + 1
        return self.linear(self.frozen(x))


def run(module: nn.Module, dataset: Dataset[Any]) -> dict[str, float | None]:
    client = QuadraticClient("a", hessian=torch.eye(4), centre=torch.zeros(4))
    return evaluate(
        Federation([client], module),
        dataset,
        torch.eye(2).flatten(),  # the predicted label is the place of the one
        attack=None,
        buffers=None,
        device=torch.device("cpu"),
        metrics={},
        can_do_without=False,
    )


def test_error_rate_of_weights_that_are_right_for_plain_tensors() -> None:
    assert run(Parts(), TensorDataset(X, Y)) == {"ter": 0.0, "asr": None}
    assert run(Parts(), TensorDataset(X, Y.roll(1))) == {"ter": 1.0, "asr": None}


@pytest.mark.parametrize("size", [None, 4])
def test_a_subclass_that_changes_samples_is_asked_for_them(size: int | None) -> None:
    assert run(Parts(), fixed_subset(Relabelled(X, Y), size, seed=0))["ter"] == 1.0


def test_a_subset_of_plain_tensors_is_plain_tensors() -> None:
    subset = fixed_subset(TensorDataset(X, Y), 4, seed=0)
    assert type(subset) is TensorDataset
    assert len(subset) == 4


@pytest.mark.parametrize("error", [False, True])
def test_every_part_of_the_model_keeps_its_mode(error: bool) -> None:
    module = Parts().train()
    module.frozen.eval()
    before = [part.training for part in module.modules()]
    assert before == [True, True, False, False, False]
    if error:
        with pytest.raises(ConfigurationError, match="the shapes that the model"):
            run(module, TensorDataset(X.repeat(1, 2), Y))
    else:
        run(module, TensorDataset(X, Y))
    assert _Modes.seen == [False] * 5  # all of it was in evaluation mode in between
    assert [part.training for part in module.modules()] == before
    assert not hasattr(module, "calls")


# --- what can be tested, and what is refused ------------------------------------------------------


class Fixed(pl.LightningModule):
    """Gives what a function makes of the input, whose only parameter does nothing."""

    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight**2).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def same(x: Tensor) -> Tensor:
    return x


def federation(dataset: Any, function: Any = same, **local: Any) -> Federation:
    module = Fixed(function)
    client = LightningClient("a", module, TensorDataset(torch.zeros(2, 1)), **local)
    return Federation([client], module, test_dataset=dataset)


def loop(**kwargs: Any) -> FederatedLoop:
    return FederatedLoop(logger=False, enable_progress_bar=False, **kwargs)


def result_of(dataset: Any, function: Any = same, attack: Any = None, **kwargs: Any) -> Any:
    return loop(**kwargs).test(federation(dataset, function), torch.zeros(1), attack=attack)


def recorded(made: Federation, **kwargs: Any) -> MemoryHistory:
    history = MemoryHistory()
    attack = kwargs.pop("attack", None)
    result = loop(**kwargs).record(
        made, FedAvg(), history, max_rounds=2, server_lr=0.1, attack=attack
    )
    history.curve = result.curve
    return history


# Of five samples the second and the last are on the wrong side of 0.
LOGITS, BINARY = torch.tensor([2.0, 1.0, -1.0, -3.0, 0.5]), torch.tensor([1, 0, 0, 0, 0])


def test_a_model_with_one_logit() -> None:
    assert result_of(TensorDataset(LOGITS[:, None], BINARY))["ter"] == pytest.approx(0.4)


def test_outputs_that_look_like_probabilities_are_warned_of() -> None:
    dataset = TensorDataset(LOGITS[:, None], BINARY)
    with pytest.warns(FedrecWarning, match=r"All outputs of Fixed .* in \[0, 1\]"):
        assert result_of(dataset, torch.sigmoid)["ter"] == pytest.approx(0.8)


def test_one_hot_labels_are_warned_of() -> None:
    dataset = TensorDataset(4 * torch.eye(3) - 2, torch.eye(3)[[0, 1, 0]])
    with pytest.warns(FedrecWarning, match="exactly one of 3 labels"):
        assert result_of(dataset)["ter"] == pytest.approx(2 / 9)
    several = TensorDataset(4 * torch.eye(3) - 2, torch.ones(3, 3))
    assert result_of(several)["ter"] == pytest.approx(6 / 9)


REGRESSION = TensorDataset(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 4.0]))


def test_regression_is_refused_before_anything_is_recorded() -> None:
    history = MemoryHistory()
    with pytest.raises(ConfigurationError, match="undefined for targets that are numbers"):
        loop().record(federation(REGRESSION), FedAvg(), history, max_rounds=1, server_lr=0.1)
    assert history.is_empty
    with pytest.raises(ConfigurationError, match="undefined for targets that are numbers"):
        result_of(REGRESSION)


def test_metrics_of_the_users_own_in_curves_and_tests() -> None:
    given = {"mse": MeanSquaredError()}
    squared = (0.25 + 4) / 2
    assert result_of(REGRESSION, metrics=given) == {"ter": None, "asr": None, "mse": squared}
    history = recorded(federation(REGRESSION), metrics=given, eval_every=1)
    assert history.curve == [{"round": t, "mse": squared} for t in range(2)]
    assert given["mse"].update_called is False


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (BinaryAccuracy(), ["BinaryAccuracy"]),
        ([BinaryAccuracy(), BinaryF1Score()], ["BinaryAccuracy", "BinaryF1Score"]),
        (MetricCollection([BinaryAccuracy(), BinaryF1Score()], prefix="test_"), None),
        (MetricCollection({"acc": BinaryAccuracy(), "f1": BinaryF1Score()}), ["acc", "f1"]),
    ],
)
def test_metrics_in_any_form(given: Any, names: Any) -> None:
    names = names or ["test_BinaryAccuracy", "test_BinaryF1Score"]
    found = result_of(TensorDataset(LOGITS, BINARY), metrics=given)
    # One true positive, two false ones.
    assert [found[name] for name in names] == pytest.approx([0.6, 0.5][: len(names)])
    assert list(found) == ["ter", "asr", *names]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"ter": BinaryAccuracy()}, "but got 'ter'"),
        ([BinaryAccuracy(), BinaryAccuracy()], "names that differ"),
        ({"f1": "f1"}, "`metrics` to be torchmetrics by name, but got 'f1'"),
        (5, "`metrics` to be torchmetrics by name"),
    ],
)
def test_metrics_are_checked(given: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        loop(metrics=given)


def test_a_metric_that_does_not_fit_is_refused_before_anything_is_recorded() -> None:
    made = federation(TensorDataset(LOGITS[:, None], BINARY))
    with pytest.raises(ConfigurationError, match="The metric `mse` does not fit"):
        recorded(made, metrics={"mse": MeanSquaredError()})


@pytest.mark.parametrize(
    ("dataset", "label", "reason"),
    [
        (TensorDataset(torch.zeros(2, 8), torch.tensor([0, 1])), 8, "`target_label` to be below 8"),
        (TensorDataset(torch.zeros(2, 8), torch.zeros(2, 8)), 0, "several labels"),
        (TensorDataset(torch.zeros(2, 8), torch.full((2, 8), 0.5)), 0, "targets that are numbers"),
    ],
)
@pytest.mark.parametrize("metrics", [None, {"mse": MeanSquaredError()}])
def test_attack_success_that_is_undefined(dataset, label, reason, metrics) -> None:
    attack = BackdoorAttack(pattern=FeatureTrigger(k=8), target_label=label)
    with pytest.raises((ConfigurationError, ShapeError), match=reason):
        recorded(federation(dataset), attack=attack, metrics=metrics)


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ([(torch.zeros(1), 0, 1)] * 2, "is a list of 3"),
        ([{"x": torch.zeros(1), "y": 0}] * 2, "is a dict of 2"),
        ([torch.zeros(1)] * 2, "is a Tensor"),
        ([(torch.zeros(1), "cat")] * 2, "with a tensor of labels"),
        ([(torch.zeros(1 + i), 0) for i in range(2)], "samples of the test data into one batch"),
        ([], "`test_dataset`"),
    ],
)
def test_test_samples_of_other_kinds_are_refused(dataset: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        recorded(federation(dataset))


def test_the_clients_collate_fn_is_used_for_test_data() -> None:
    def padded(samples: list[Any]) -> Any:
        return pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([0, 1])

    made = federation([(torch.ones(1), 0), (torch.ones(2), 1)], collate_fn=padded)
    found = loop().test(made, torch.zeros(1))
    assert found["ter"] == 0.5  # of two equal logits the first is taken


def test_inputs_of_any_structure() -> None:
    dataset = [({"a": LOGITS[i : i + 1], "b": 1.0}, BINARY[i]) for i in range(5)]
    assert result_of(dataset, lambda x: x["a"])["ter"] == pytest.approx(0.4)


def test_an_output_that_is_no_tensor() -> None:
    dataset = TensorDataset(LOGITS, BINARY)
    with pytest.raises(ConfigurationError, match=r"Fixed\.forward` to give a tensor .* dict"):
        result_of(dataset, lambda x: {"logits": x})


def test_testing_leaves_no_trace_and_does_not_depend_on_what_was_drawn() -> None:
    def noisy(x: Tensor) -> Tensor:
        noise = np.random.rand() + random.random()  # noqa: NPY002 - a user's own
        return x + torch.randn_like(x) + noise

    dataset = TensorDataset(torch.zeros(50), torch.arange(50) % 2)
    made = federation(dataset, noisy)
    with torch.no_grad():
        made.module.weight.fill_(7.0)
    torch.manual_seed(3)
    first, expected = loop().test(made, torch.zeros(1)), torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), expected)
    assert loop().test(made, torch.zeros(1)) == first
    assert made.module.weight.tolist() == [7.0]


def test_types_that_the_model_cannot_take() -> None:
    module = Parts()
    client = QuadraticClient("a", hessian=torch.eye(4), centre=torch.zeros(4))
    made = Federation([client], module, test_dataset=TensorDataset(X.double(), Y))
    with pytest.raises(ConfigurationError, match=r"the test data, .* \[float64 of shape \(2,\)\]"):
        loop().test(made, torch.zeros(4))


def test_hooks_that_change_batches_do_so_in_testing_too() -> None:
    """Training adds noise, testing does not; both shift the inputs, and the labels with them."""

    class Shifting(Fixed):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert self.trainer.testing
            x, y = batch
            return [x + 1 if not self.trainer.training else x - 100, 1 - y]

    x, y = torch.tensor([[-0.5], [-2.0], [-0.4], [-3.0]]), torch.tensor([0, 1, 1, 1])
    # The logits of class 1 are x + 1, and class 1 is what was 0: right, right, wrong, right.
    module = Shifting(lambda x: torch.cat([torch.zeros_like(x), x], dim=1))
    clients = [LightningClient("a", module, TensorDataset(x, y))]
    made = Federation(clients, module, test_dataset=TensorDataset(x, y))
    found = evaluate(
        made,
        TensorDataset(x, y),
        made.layout.flatten(module),
        attack=None,
        buffers=None,
        device=torch.device("cpu"),
        metrics={},
        can_do_without=False,
    )
    assert found["ter"] == 0.25
    assert module._trainer is None


class Silent(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))


def test_a_module_without_forward_is_named() -> None:
    with pytest.raises(ConfigurationError, match="Silent has no `forward`"):
        run(Silent(), TensorDataset(X, Y))


def test_a_forward_of_two_inputs_is_named() -> None:
    class Two(Fixed):
        def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            return x

    with pytest.raises(ConfigurationError, match=r"Two.forward` to take one input.*`x`, `y`"):
        run(Two(), TensorDataset(X, Y))


def test_a_metric_of_several_numbers_is_named_before_anything_is_recorded() -> None:
    history = MemoryHistory()
    metrics = {"matrix": BinaryConfusionMatrix()}
    with pytest.raises(ConfigurationError, match=r"metric `matrix`, but got .*\(2, 2\)"):
        loop(metrics=metrics).record(
            federation(TensorDataset(LOGITS, BINARY)),
            FedAvg(),
            history,
            max_rounds=1,
            server_lr=0.1,
        )
    assert history.is_empty


def test_generators_that_test_data_hold_give_the_same_each_time() -> None:
    class Blurred(Dataset):
        def __init__(self) -> None:
            self.generator = np.random.default_rng(3)

        def __len__(self) -> int:
            return len(Y)

        def __getitem__(self, i: int) -> Any:
            drawn.append(self.generator.normal())
            return X[i], Y[i]

    drawn: list[float] = []
    data = Blurred()
    run(Parts(), data)
    run(Parts(), data)
    assert drawn[: len(Y)] == drawn[len(Y) :]
    assert data.generator.normal() == np.random.default_rng(3).normal()
