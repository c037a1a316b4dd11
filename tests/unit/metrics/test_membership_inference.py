from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedrec.exceptions import ShapeError
from fedrec.metrics import MembershipInferenceAUC


def test_it_is_the_area_under_the_roc_curve_of_minus_the_loss() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(60, 4)).round(1), rng.integers(4, size=60)
    logits[30:40] = logits[:10]  # ties
    labels[30:40] = labels[:10]
    member = np.arange(60) < 25
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(60), labels]
    metric = MembershipInferenceAUC()
    for rows in (slice(0, 7), slice(7, 33), slice(33, 60)):
        metric.update(*(torch.tensor(a[rows]) for a in (logits, labels, member)))
    # Rounded, so that ties stay ties whatever the order of summation.
    assert float(metric.compute()) == pytest.approx(roc_auc_score(member, -losses.round(9)))
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert metric.compute().isnan()


def test_extremes() -> None:
    def auc(losses_in: list[float], losses_out: list[float]) -> float:
        metric = MembershipInferenceAUC()
        z = torch.tensor(losses_in + losses_out)
        logits = torch.stack([-z, torch.zeros_like(z)], dim=1)  # a higher z, a higher loss
        member = torch.arange(len(z)) < len(losses_in)
        metric.update(logits, torch.zeros(len(z), dtype=torch.long), member)
        return float(metric.compute())

    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auc([3.0, 4.0], [1.0]) == 0.0
    assert auc([2.0], [2.0, 2.0]) == 0.5
    assert auc([float("nan")], [100.0]) == 0.0
    assert np.isnan(auc([], [1.0]))
    assert np.isnan(auc([1.0], []))


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="logits"):
        MembershipInferenceAUC().update(torch.ones(2), torch.ones(2), torch.ones(2))
