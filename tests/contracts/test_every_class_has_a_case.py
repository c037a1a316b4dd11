"""No component is forgotten: whatever concrete class a family has, a contract is run over it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import LightningModule
from torchmetrics import Metric

import fedrec
from fedrec.aggregators import Aggregator
from fedrec.attacks import Attack
from fedrec.callbacks import Callback
from fedrec.clients import Client
from fedrec.component import Component, subclasses
from fedrec.data import FederatedDataModule, Partitioner
from fedrec.detectors import Detector
from fedrec.executors import Executor
from fedrec.history import HistoryStore
from fedrec.history.codecs import Codec
from fedrec.recoverers import Recoverer
from fedrec.testing import (
    AggregatorContract,
    AttackContract,
    ClientContract,
    DetectorContract,
    HistoryStoreContract,
    PartitionerContract,
    RecovererContract,
)


def _made(case: Any, path: Path) -> set[type]:
    return {type(case.make())}


def _made_in_folder(case: Any, path: Path) -> set[type]:
    return {type(case.make(path))}


def _made_in_federation(case: Any, path: Path) -> set[type]:
    return {type(client) for client in case.make_federation().clients}


# Kernels alone, which import a package that may not be there.
_OPTIONAL = "fedrec.functional.kernels._numba"

FAMILIES: list[tuple[type, type, Callable[[Any, Path], set[type]]]] = [
    (Aggregator, AggregatorContract, _made),
    (Attack, AttackContract, _made),
    (Client, ClientContract, _made_in_federation),
    (Detector, DetectorContract, _made),
    (HistoryStore, HistoryStoreContract, _made_in_folder),
    (Partitioner, PartitionerContract, _made),
    (Recoverer, RecovererContract, _made),
]

# A client that answers over a network: `tests/flower` plays its part with a federation that runs.
_REMOTE = "fedrec.flower."

# Of all classes that users make.
BASES = [
    *(Callback, Client, Codec, Component, Executor, FederatedDataModule, HistoryStore),
    *(LightningModule, Metric),
]

# Required objects that a component wraps or holds; whatever else it takes is a setting.
_HELD = ("rule", "attack", "detectors", "function", "datamodule", "path")
_HELD += ("client_id", "module", "dataset", "hessian", "centre", "grid", "card")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def concrete_classes(base: type) -> set[type]:
    """Return the family's concrete classes, those that are not exported among them."""
    for module in pkgutil.walk_packages(fedrec.__path__, "fedrec."):
        if not module.name.startswith(_OPTIONAL):
            importlib.import_module(module.name)
    return {
        cls
        for path, cls in subclasses(base).items()  # type: ignore[type-var]
        if path.startswith("fedrec.")
        # A class out of a doctest bears its module's name, but is not in it.
        and getattr(importlib.import_module(cls.__module__), cls.__name__, None) is cls
    }


def cases(contract: type) -> list[type]:
    """Return the test classes of this folder that run the contract."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*_contracts.py")):
        names = runpy.run_path(str(path))
        found += [
            value
            for name, value in names.items()
            if name.startswith("Test") and isinstance(value, type) and issubclass(value, contract)
        ]
    return found


@pytest.mark.parametrize(
    ("base", "contract", "made"), FAMILIES, ids=[family[0].__name__ for family in FAMILIES]
)
def test_every_concrete_class_has_a_case(
    base: type, contract: type, made: Callable[[Any, Path], set[type]], tmp_path: Path
) -> None:
    tested: set[type] = set()
    for number, case in enumerate(cases(contract)):
        tested |= made(case(), tmp_path / str(number))
    here = {cls for cls in concrete_classes(base) if not cls.__module__.startswith(_REMOTE)}
    assert here - tested == set()


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_settings_are_given_by_keyword(base: type) -> None:
    positional = {
        f"{cls.__name__}({name})"
        for cls in concrete_classes(base)
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in _POSITIONAL
        and (name not in _HELD or parameter.default is not inspect.Parameter.empty)
    }
    assert positional == set()


def test_every_contract_belongs_to_a_family() -> None:
    contracts = {getattr(fedrec.testing, name) for name in fedrec.testing.__all__}
    assert {contract for _, contract, _ in FAMILIES} == contracts
