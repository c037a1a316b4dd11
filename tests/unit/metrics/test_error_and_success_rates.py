from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from fedrec.exceptions import ConfigurationError, ShapeError
from fedrec.metrics import AttackSuccessRate, TestErrorRate

NAN = float("nan")


def logits(*labels: int, num_classes: int = 4) -> Tensor:
    """Logits whose largest entry is at these labels."""
    return torch.eye(num_classes)[list(labels)] - 5


@pytest.mark.parametrize("as_logits", [True, False])
def test_error_rate_over_batches(as_logits: bool) -> None:
    metric = TestErrorRate()
    batches = [([0, 1, 2], [0, 1, 3]), ([3], [0]), ([2, 2], [2, 2])]
    for predicted, true in batches:
        preds = logits(*predicted) if as_logits else torch.tensor(predicted)
        metric.update(preds, torch.tensor(true))
    assert float(metric.compute()) == pytest.approx(2 / 6)
    metric.reset()
    metric.update(torch.tensor([1]), torch.tensor([1]))
    assert float(metric.compute()) == 0.0


@pytest.mark.parametrize("as_logits", [True, False])
def test_success_rate_drops_inputs_of_the_target_label(as_logits: bool) -> None:
    metric = AttackSuccessRate(target_label=2)
    # Three of the five inputs are not of label 2; two of those are taken for it.
    predicted, true = [2, 2, 2, 0, 1], [2, 0, 1, 2, 3]
    preds = logits(*predicted) if as_logits else torch.tensor(predicted)
    metric.update(preds, torch.tensor(true))
    assert float(metric.compute()) == pytest.approx(2 / 3)
    metric.update(torch.tensor([2]), torch.tensor([0]))
    assert float(metric.compute()) == pytest.approx(3 / 4)


def test_another_wrong_label_is_no_success() -> None:
    metric = AttackSuccessRate(target_label=0)
    metric.update(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1]))
    assert float(metric.compute()) == 0.0


def test_nothing_left_is_nan() -> None:
    metric = AttackSuccessRate(target_label=1)
    metric.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
    assert metric.compute().isnan()
    empty = TestErrorRate()
    empty.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    assert empty.compute().isnan()


def test_a_diverged_model_is_wrong_everywhere_and_no_success_of_the_attack() -> None:
    broken = torch.tensor([[NAN, NAN], [0.0, NAN], [NAN, 0.0], [1.0, 0.0]])
    target = torch.tensor([0, 1, 1, 1])
    ter, asr = TestErrorRate(), AttackSuccessRate(target_label=0)
    ter.update(broken, target)
    asr.update(broken, target)
    assert float(ter.compute()) == 1.0
    assert float(asr.compute()) == pytest.approx(1 / 3)  # the one row that is finite


def test_an_infinite_logit_is_a_prediction() -> None:
    ter = TestErrorRate()
    ter.update(torch.tensor([[0.0, float("inf")], [float("-inf"), 0.0]]), torch.tensor([1, 1]))
    assert float(ter.compute()) == 0.0


@pytest.mark.parametrize("metric", [TestErrorRate(), AttackSuccessRate(target_label=0)])
@pytest.mark.parametrize(
    ("preds", "target"),
    [
        (torch.zeros(3, 2), torch.zeros(2).long()),
        (torch.zeros(3, 2), torch.zeros(3, 1).long()),
        (torch.zeros(3), torch.zeros(2).long()),
        (torch.zeros(3, 2).long(), torch.zeros(3).long()),
        (torch.zeros(3, 2, 2), torch.zeros(3).long()),
    ],
)
def test_shapes_are_checked(metric: Metric, preds: Tensor, target: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"logits \(B, C, \.\.\.\) for `target` \(B, \.\.\.\)"):
        metric.update(preds, target)


@pytest.mark.parametrize("label", [-1, 1.0, None])
def test_target_label_is_checked(label: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected `target_label`"):
        AttackSuccessRate(target_label=label)  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", [TestErrorRate(), AttackSuccessRate(target_label=0)])
def test_flags(metric: Metric) -> None:
    assert metric.higher_is_better is False
    assert metric.is_differentiable is False
    assert (metric.plot_lower_bound, metric.plot_upper_bound) == (0.0, 1.0)


def test_they_work_in_a_collection_and_survive_pickle() -> None:
    metrics = MetricCollection({"ter": TestErrorRate(), "asr": AttackSuccessRate(target_label=0)})
    metrics.update(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    found = pickle.loads(pickle.dumps(metrics)).compute()
    assert float(found["ter"]) == pytest.approx(1 / 3)
    assert float(found["asr"]) == pytest.approx(1 / 2)


def test_sum_over_processes() -> None:
    """What `dist_reduce_fx="sum"` does with the states of two processes."""
    parts = [TestErrorRate(), TestErrorRate()]
    parts[0].update(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0]))
    parts[1].update(torch.tensor([0]), torch.tensor([0]))
    whole = TestErrorRate()
    for name, reduce in whole._reductions.items():
        setattr(whole, name, reduce(torch.stack([getattr(part, name) for part in parts])))
    whole._update_count = 2
    assert float(whole.compute()) == 0.5


# --- what a label is, by the shapes ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32])
@pytest.mark.parametrize("preds_shape", [(4,), (4, 1)])
@pytest.mark.parametrize("target_shape", [(4,), (4, 1)])
def test_one_logit_for_two_classes(dtype, preds_shape, target_shape) -> None:
    logits = torch.tensor([0.3, -2.0, 0.9, NAN]).reshape(preds_shape)
    target = torch.tensor([1, 0, 0, 0]).to(dtype).reshape(target_shape)
    ter, asr = TestErrorRate(), AttackSuccessRate(target_label=1)
    ter.update(logits, target)
    asr.update(logits, target)
    assert float(ter.compute()) == 0.5  # the third, and the one that is no number
    assert float(asr.compute()) == pytest.approx(1 / 3)  # of those labelled 0, the third


def test_several_labels_a_sample_are_counted_one_by_one() -> None:
    ter = TestErrorRate()
    ter.update(
        torch.tensor([[1.0, -1.0, 2.0], [-1.0, 0.0, 1.0]]), torch.tensor([[1, 0, 0], [0, 0, 1]])
    )
    assert float(ter.compute()) == pytest.approx(1 / 6)


def test_every_position_is_counted_but_those_that_are_ignored() -> None:
    target = torch.tensor([[0, 1, -100], [2, 2, 0]])
    preds = torch.nn.functional.one_hot(torch.tensor([[0, 1, 0], [2, 0, 1]]), 3).float()
    ter = TestErrorRate()
    ter.update(preds.movedim(-1, 1), target)
    assert float(ter.compute()) == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("preds", "target"),
    [
        (torch.zeros(2), torch.tensor([0.5, 1.0])),
        (torch.zeros(2, 1), torch.tensor([3.0, 1.0])),
        (torch.zeros(2, 3), torch.full((2, 3), 0.25)),
        (torch.zeros(2, 3), torch.zeros(2)),
    ],
)
def test_numbers_to_regress_on_have_no_error_rate(preds: Tensor, target: Tensor) -> None:
    with pytest.raises(
        ConfigurationError, match="undefined for targets that are numbers"
    ) as caught:
        TestErrorRate().update(preds, target)
    assert "metrics=" in str(caught.value)


@pytest.mark.parametrize(
    ("preds", "target", "found"),
    [
        (torch.zeros(2, 1), torch.tensor([1, 2]), "labels 0 and 1 .* got 2"),
        (torch.zeros(2, 3), torch.tensor([1, 3]), r"labels in 0\.\.2.* got 3"),
        (torch.zeros(2, 3), torch.tensor([-1, 1]), r"labels in 0\.\.2.* got -1"),
    ],
)
def test_labels_beyond_the_outputs(preds: Tensor, target: Tensor, found: str) -> None:
    with pytest.raises(ShapeError, match=found):
        TestErrorRate().update(preds, target)


@pytest.mark.parametrize(
    ("preds", "label"), [(torch.zeros(2, 3), 3), (torch.zeros(2), 2), (torch.zeros(2, 1), 2)]
)
def test_a_target_label_that_the_model_cannot_predict(preds: Tensor, label: int) -> None:
    classes = 3 if preds.shape == (2, 3) else 2
    with pytest.raises(ConfigurationError, match=f"`target_label` to be below {classes}"):
        AttackSuccessRate(target_label=label).update(preds, torch.tensor([0, 1]))


def test_several_labels_have_no_attack_success_rate() -> None:
    with pytest.raises(ShapeError, match="undefined where an input has several labels"):
        AttackSuccessRate(target_label=0).update(torch.zeros(2, 3), torch.zeros(2, 3))
