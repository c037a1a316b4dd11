"""The objects that a recipe describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
from torchmetrics import Metric

from fedrec.aggregators.base import Aggregator
from fedrec.attacks.base import Attack
from fedrec.data import FederatedDataModule
from fedrec.detectors.base import Detector
from fedrec.history.base import HistoryStore
from fedrec.recoverers.base import Recoverer

__all__ = ["Parts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The objects and arguments that a recipe describes.

    Args:
        data: Data module.
        model: LightningModule.
        aggregator: Aggregation rule.
        attack: Attack, or `None`.
        detector: Detector, or `None`.
        history: Class of the history store and its arguments.
        federation: Keyword arguments of `Federation.from_data`.
        loop: Keyword arguments of `FederatedLoop`.
        record: Keyword arguments of `FederatedLoop.record`.
        recover: Keyword arguments of `FederatedLoop.recover`.
        exclude: `"detected"`, or the ids of the clients to leave out.
        recoverers: Recoverers by label.
        metrics: Metrics by label, besides test error rate and attack success rate.
        remarks: Remarks of recoverers about the recipe, see `Recoverer.check_plan`.
    """

    data: FederatedDataModule
    model: pl.LightningModule
    aggregator: Aggregator
    attack: Attack | None
    detector: Detector | None
    history: tuple[type[HistoryStore], Mapping[str, Any]]
    federation: Mapping[str, Any]
    loop: Mapping[str, Any]
    record: Mapping[str, Any]
    recover: Mapping[str, Any]
    exclude: str | list[str]
    recoverers: Mapping[str, Recoverer] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    @property
    def stop_on_detection(self) -> bool:
        """Whether the detector watches the recording, and its decision ends it."""
        return bool(self.record.get("stop_on_detection"))
