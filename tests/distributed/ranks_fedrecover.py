"""Run by several processes: what recoveries by FedRecover come to, as hashes, in a file of rank 0.

python ranks_fedrecover.py DEVICES FOLDER

The recording in one piece is in FOLDER/whole, that in shards in FOLDER/shards; the first process
that runs makes them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import (
    ARC,
    CAF,
    FLAME,
    RLR,
    Bulyan,
    CenteredClipping,
    DnC,
    FedAvg,
    FedAvgM,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NearestNeighborMixing,
    NormClipping,
    TrimmedMean,
)
from fedrec.attacks import ALIE, GaussianNoise, SignFlip, TrimAttack
from fedrec.data import Digits
from fedrec.detectors import CrossRoundConsistency, FLDetector, NormOutlier
from fedrec.distributed.updates import ShardedUpdates
from fedrec.federation import ClientSampler
from fedrec.history import LMDBHistory, ShardedHistory
from fedrec.models import MLP
from fedrec.recoverers import Estimates, Estimator, FedRecover, HistoricalOnly, UpdateFilter

DATA = Digits(num_clients=10, server_samples=40)
ROUNDS = 14
SCHEDULE = {"warmup_rounds": 4, "correction_period": 5, "final_rounds": 1}


class Sampled(Estimator):
    """A user's own, which knows nothing of shards, and has no estimate of half of the clients."""

    def estimate(self, record, global_weights):
        updates = record.updates * 0.5
        usable = torch.tensor([int(c[-1]) % 2 == 0 for c in record.client_ids])
        return Estimates(updates, updates.abs().amax(dim=1), usable)

    def diagnostics(self):
        return {"mean_of_equals": 0.1}


class Faulty(LightningClient):
    """Sends NaN in some rounds of a recovery."""

    def local_update(self, global_weights, ctx):
        found = super().local_update(global_weights, ctx)
        if ctx.phase == "recover" and ctx.round % 3 == 0:
            found.update[0] = float("nan")
        return found


RECOVERIES: dict[str, dict[str, Any]] = {
    "anchored": {"estimator": "anchored"},
    "anchored in one piece": {"estimator": "anchored"},
    "average": {"estimator": "average"},
    "average in one piece": {"estimator": "average", "tolerance_rate": 1e-3},
    "paired": {"estimator": "paired"},
    "paper": {"estimator": "paper"},
    "history": {"estimator": "history"},
    "none": {"estimator": "none"},
    "own": {"estimator": Sampled()},
    "abnormal": {"tolerance_rate": 1e-3},
    # Estimates of everybody exceed the median magnitude, as do exact updates.
    "outgrown": {"estimator": "average", "tolerance_rate": 0.5},
    "no threshold": {"tolerance_rate": None},
    "filter": {"update_filter": UpdateFilter(max_distance=0.5, min_cosine=0.9)},
    "diagnose": {"diagnose": 3},
    "estimate": {"on_missing": "estimate", "tolerance_rate": 1e-3},
    "historical": {"on_missing": "historical"},
}
# Of the recording in one piece, in which everybody takes part in every round.
IN_ONE_PIECE = (
    *("anchored in one piece", "average in one piece"),
    *("abnormal", "outgrown", "estimate", "own"),
)


def federation() -> Federation:
    torch.manual_seed(0)
    module = MLP(in_features=64)
    clients = [
        (Faulty if client_id == "client-5" else LightningClient)(
            client_id, module, samples, batch_size=6
        )
        for client_id, samples in DATA.client_datasets().items()
    ]
    malicious = ["client-0", "client-9"]
    return Federation(clients, module, malicious=malicious, server_data=DATA.server_dataset)


def outcome(result: Any) -> dict[str, Any]:
    parts = [
        result.global_weights.numpy().tobytes(),
        json.dumps(dict(result.diagnostics)).encode(),
        repr(result.estimate_errors).encode(),
    ]
    found: dict[str, Any] = {**result.diagnostics}
    if result.ledger is not None:
        parts.append(json.dumps(result.ledger.state_dict(), default=str).encode())
        found["asked"] = dict(Counter(entry.reason for entry in result.ledger.entries))
    if result.detection is not None:
        parts.append(repr(result.detection.round_scores).encode())
        found["scored"] = len(result.detection.round_scores)
        found["flagged"] = result.detection.malicious
    return {**found, "bits": hashlib.sha256(b"".join(parts)).hexdigest()}


def main(devices: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    loop = FederatedLoop(
        accelerator="cpu", devices=devices, num_shards=5, logger=False, enable_progress_bar=False,
        eval_every=100, timeout=120,
    )  # fmt: skip
    whole, shards = LMDBHistory(folder / "whole"), ShardedHistory(folder / "shards")
    if devices == 1:
        half = ClientSampler(fraction=0.8, dropout=0.1)
        given = {"max_rounds": ROUNDS, "server_lr": 0.1, "attack": SignFlip()}
        loop.record(federation(), TrimmedMean(trim=0.2), shards, sampler=half, **given)
        alone = FederatedLoop(accelerator="cpu", logger=False, enable_progress_bar=False)
        alone.record(federation(), FedAvg(), whole, **given)
    outcomes: dict[str, Any] = {}

    def gathers(self: ShardedUpdates) -> None:
        raise AssertionError("rows of all clients were gathered")

    ShardedUpdates.updates = property(gathers)  # type: ignore[assignment]
    for name, arguments in RECOVERIES.items():
        history = whole if name in IN_ONE_PIECE else shards
        outcomes[name] = outcome(
            loop.recover(
                federation(), history, FedRecover(**SCHEDULE, **arguments),
                exclude=["client-0", "client-9"], on_bad_update="drop",
            )
        )  # fmt: skip
    for rule in (
        Median(),
        TrimmedMean(trim=0.2),
        FedAvg(),
        Krum(num_byzantine=1),
        MultiKrum(num_byzantine=1),
        CAF(num_byzantine=1),
        FedAvgM(GeometricMedian()),
        RLR(FedAvg(), threshold=0.5),
        NormClipping(),
        FedAvgM(CenteredClipping(tau=0.5, iterations=2)),
        Bulyan(num_byzantine=1),
        DnC(num_byzantine=1, num_coordinates=1500, iterations=2),
        ARC(GeometricMedian(), num_byzantine=1),
        NearestNeighborMixing(TrimmedMean(trim=1), num_byzantine=1),
        FLAME(),
        FLTrust(),
    ):
        result = loop.recover(
            federation(), whole, HistoricalOnly(), ["client-0", "client-9"], aggregator=rule
        )
        outcomes[f"HistoricalOnly, {rule}"] = outcome(result)
    for attack in (SignFlip(), TrimAttack()):
        result = loop.recover(
            federation(), shards, FedRecover(**SCHEDULE, diagnose=True), ["client-0"],
            attack=attack, on_bad_update="drop",
        )  # fmt: skip
        outcomes[f"an attacker stays, {attack}"] = outcome(result)
    for name, attack, detector in (
        ("FLDetector", TrimAttack(), FLDetector(start_round=2, window=3)),
        ("NormOutlier", GaussianNoise(std=0.1), NormOutlier(window=3)),
        ("CrossRoundConsistency", ALIE(full_knowledge=True), CrossRoundConsistency(window=3)),
    ):
        for rule in (
            FedAvg(),
            TrimmedMean(trim=0.2),
            GeometricMedian(),
            RLR(FedAvg(), threshold=3),
        ):
            with ShardedHistory(folder / f"{devices} {name} {type(rule).__name__}") as history:
                result = loop.record(
                    federation(), rule, history, max_rounds=7, server_lr=0.1, attack=attack,
                    detector=detector, sampler=ClientSampler(fraction=0.9),
                )  # fmt: skip
            outcomes[f"recording, {name}, {rule}"] = outcome(result)
    if loop.is_global_zero:
        (folder / f"{devices}.json").write_text(json.dumps(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
