"""Numbers of NumPy are numbers: every public constructor takes them and keeps plain ones."""

from __future__ import annotations

import inspect
import json
import typing
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedrec.aggregators
import fedrec.attacks
import fedrec.clients
import fedrec.data
import fedrec.detectors
import fedrec.executors
import fedrec.history
import fedrec.metrics
import fedrec.models
import fedrec.recoverers
from fedrec import ClientSampler, FederatedLoop, Federation
from fedrec._checks import as_float, check_float, check_int
from fedrec.aggregators import FedAvg, TrimmedMean
from fedrec.component import Component
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError
from fedrec.federation import draw_malicious
from fedrec.history import MemoryHistory, forecast
from fedrec.history.retention import Retention
from fedrec.models import MLP
from fedrec.recipe.annotations import parameter_types

PACKAGES = (
    fedrec.aggregators,
    fedrec.attacks,
    fedrec.clients,
    fedrec.data,
    fedrec.detectors,
    fedrec.executors,
    fedrec.metrics,
    fedrec.models,
    fedrec.recoverers,
)
DATA = TensorDataset(torch.zeros(6, 4), torch.zeros(6, dtype=torch.long))
# Arguments that a constructor needs, or that have no number by default.
GIVEN: dict[str, Any] = {
    "attack": fedrec.attacks.SignFlip(),
    "client_id": "a",
    "clients": 2,
    "dataset": DATA,
    "detectors": [fedrec.detectors.NormOutlier()],
    "module": MLP(in_features=4),
    "rule": FedAvg(),
    "seed": 3,
    "pattern": "pixels",
    "abnormality_threshold": 0.5,
    "batch_size": 4,
    "beta": 0.5,
    "chunk_size": 2,
    "common_gain": 0.5,
    "eval_every": 2,
    "image_shape": (8, 8),
    "in_features": 4,
    "input_shape": (1, 8, 8),
    "joins": {"a": 2},
    "last": 3,
    "leaves": {"a": 2},
    "local_epochs": 2,
    "local_lr": 0.5,
    "local_steps": 2,
    "lr": 0.5,
    "max_norm": 2.0,
    "max_samples": 9,
    "min_accuracy": 0.5,
    "num_byzantine": 1,
    "num_classes": 3,
    "num_clients": 3,
    "num_coordinates": 5,
    "num_rounds": 3,
    "num_samples": 5,
    "num_threads": 1,
    "pairs": ((0, 1),),
    "radius": 2.0,
    "server_beta": 0.5,
    "server_samples": 3,
    "stop": 4,
    "tau": 0.5,
    "target_label": 1,
    "threshold": 1,
    "trim": 1,
    "votes": 1,
    "z": 1.5,
    **dict.fromkeys(("gain", "history_weight", "curvature_weight"), 0.5),
}
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("LightningClient", "local_epochs"): {"local_steps": None},
    ("LabelFlip", "pairs"): {"num_classes": None},
    ("FineTune", "beta"): {"num_samples": 5},
    ("CostLedger", "num_rounds"): {"num_rounds": {"a": 3}},
}
# Names of clients.
SKIPPED = {("ByUser", "users")}


def scalars(annotation: Any) -> set[type]:
    """Return which of int and float an annotation speaks of, at any depth."""
    if annotation in (int, float):
        return {annotation}
    return set().union(*(scalars(a) for a in typing.get_args(annotation)), set())


def constructors() -> dict[str, type]:
    found = {
        name: getattr(package, name)
        for package in PACKAGES
        for name in package.__all__
        if inspect.isclass(getattr(package, name))
        and not inspect.isabstract(getattr(package, name))
    }
    for cls in (ClientSampler, FederatedLoop, Retention):
        found[cls.__name__] = cls
    dataclasses_of_results = {
        "AggregationContext",
        "AttackContext",
        "LocalWork",
        "Partition",
        "RecoveryContext",
    }
    return {name: cls for name, cls in found.items() if name not in dataclasses_of_results}


def numeric() -> list[tuple[str, str]]:
    found = []
    for name, cls in sorted(constructors().items()):
        for argument, annotation in parameter_types(cls).items():
            if argument in inspect.signature(cls).parameters and scalars(annotation):
                found.append((name, argument))
    return [pair for pair in found if pair not in SKIPPED]


def as_numpy(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(as_numpy(one) for one in value)
    if isinstance(value, dict):
        return {key: as_numpy(one) for key, one in value.items()}
    return np.float32(value) if isinstance(value, float) else np.int64(value)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves(one)]
    if isinstance(value, dict):
        return leaves(list(value.values()))
    return [value]


def arguments(name: str, argument: str) -> tuple[type, dict[str, Any], Any]:
    """Return the class, its arguments, and the number that is meant."""
    cls = constructors()[name]
    parameters = inspect.signature(cls).parameters
    needed = {
        key: GIVEN[key] for key, p in parameters.items() if p.default is inspect.Parameter.empty
    } | BESIDE.get((name, argument), {})
    value = needed.get(argument, parameters[argument].default)
    if argument == "max_suspicious":
        value = 0.5  # float32 does not hold a third
    if isinstance(value, (bool, str)) or value is None or value is inspect.Parameter.empty:
        value = GIVEN.get(argument, 2)
    return cls, needed, value


@pytest.mark.parametrize(("name", "argument"), numeric())
def test_numbers_of_numpy_are_kept_as_plain_numbers(name: str, argument: str) -> None:
    cls, needed, value = arguments(name, argument)
    made = cls(**{**needed, argument: as_numpy(value)})
    stored = getattr(made, argument) if hasattr(made, argument) else made.hparams[argument]
    assert {type(leaf) for leaf in leaves(stored)} <= {int, float}
    assert leaves(stored) == pytest.approx(leaves(value), rel=1e-15)
    if isinstance(made, Component):
        json.dumps(made.spec())


@pytest.mark.parametrize(("name", "argument"), numeric())
def test_true_and_what_is_not_finite_are_no_numbers(name: str, argument: str) -> None:
    cls, needed, value = arguments(name, argument)
    kinds = scalars(parameter_types(cls)[argument])
    wrong: list[Any] = [] if "bool" in str(parameter_types(cls)[argument]) else [True, np.True_]
    wrong += [np.float32("nan"), np.float64("inf")] if float in kinds else [np.float32(1.5)]
    wrong.append(np.array(1))
    for one in wrong:
        bad: Any = one
        if isinstance(value, dict):
            bad = dict.fromkeys(value, one)
        elif isinstance(value, (list, tuple)):
            nested = isinstance(value[0], (list, tuple))
            bad = [(one, *value[0][1:])] if nested else [one, *value[1:]]
        with pytest.raises(ConfigurationError):
            cls(**{**needed, argument: bad})


def test_a_narrow_float_is_meant_as_written() -> None:
    assert check_float("x", np.float32(0.29)) == 0.29
    assert check_float("x", np.float16(0.1)) == 0.1
    assert check_float("x", np.float64(1 / 3)) == 1 / 3
    assert as_float(Fraction(1, 4)) == 0.25
    assert TrimmedMean(trim=np.float32(0.29)).num_trim(100) == 29
    assert check_int("x", np.uint64(2**63)) == 2**63
    for huge in (10**400, np.longdouble("1e400")):
        with pytest.raises(ConfigurationError, match="finite"):
            check_float("x", huge)


def test_malicious_clients_are_counted_or_a_fraction() -> None:
    ids = [f"client-{i}" for i in range(5)]
    for count in (np.int64(2), np.uint8(2), np.float32(0.4), np.float64(0.4)):
        assert draw_malicious(count, ids, 0) == draw_malicious(2, ids, 0)
    for wrong in (True, np.int64(5), np.int64(-1), np.float32(1.0), np.float32("nan")):
        with pytest.raises(ConfigurationError, match="malicious"):
            draw_malicious(wrong, ids, 0)


def test_a_whole_recording_in_numbers_of_numpy() -> None:
    manifests = []
    for integer, real in ((int, float), (np.int64, np.float32)):
        torch.manual_seed(0)
        federation = Federation.from_data(
            Digits(num_clients=integer(5)),
            MLP(in_features=integer(64)),
            malicious=integer(2),
            batch_size=integer(2),
            local_lr=real(0.5),
            fake_clients=integer(1),
            seed=integer(1),
        )
        loop = FederatedLoop(logger=False, enable_progress_bar=False, seed=integer(3))
        history = MemoryHistory(keep={"last": integer(2)})
        loop.record(
            federation,
            TrimmedMean(trim=real(0.2)),
            history,
            max_rounds=integer(2),
            server_lr=real(0.5),
        )
        manifests.append(json.loads(history.manifest.to_json()) | {"store_id": None})
    assert manifests[0] == manifests[1]


def test_a_forecast_in_numbers_of_numpy() -> None:
    small = forecast(num_clients=np.int32(3), num_parameters=np.int8(9), max_rounds=np.int64(2))
    assert small == forecast(num_clients=3, num_parameters=9, max_rounds=2)
