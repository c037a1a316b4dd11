"""Run by several processes: what every component comes to, as a hash, in a file of rank 0.

python ranks_outcomes.py DEVICES FILE
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg, Median, TrimmedMean
from fedrec.attacks import MPAF, TrimAttack
from fedrec.data import Digits
from fedrec.federation import ClientSampler
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedRecover
from fedrec.types import RunResult

_CONTRACTS = Path(__file__).parents[1] / "contracts"
DATA = Digits(num_clients=10, server_samples=40)


def cases(family: str) -> Iterator[tuple[str, Any]]:
    """Yield the components that the contracts of a family are about, by the name of their case."""
    path = _CONTRACTS / f"test_{family}_contracts.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, case in vars(module).items():
        if name.startswith("Test") and callable(getattr(case, "make", None)):
            yield f"{family} {name}", case().make()


def federation(**arguments: Any) -> Federation:
    torch.manual_seed(0)
    given = {"malicious": 2, "batch_size": 6, **arguments}
    return Federation.from_data(DATA, MLP(in_features=64), **given)


def main(devices: int, file: Path) -> None:
    warnings.simplefilter("ignore")
    loop = FederatedLoop(
        accelerator="cpu", devices=devices, num_shards=4, logger=False, enable_progress_bar=False,
        eval_every=100, timeout=120,
    )  # fmt: skip
    outcomes: dict[str, str] = {}

    def note(name: str, run: Callable[[], RunResult]) -> None:
        try:
            result = run()
        except Exception as error:  # noqa: BLE001 - of a case that does not fit these data
            outcomes[name] = f"{type(error).__name__}: {error}"
            return
        parts = [result.global_weights.numpy().tobytes()]
        if result.ledger is not None:
            parts.append(json.dumps(result.ledger.state_dict(), default=str).encode())
        if result.detection is not None:
            parts.append(repr(result.detection).encode())
        outcomes[name] = hashlib.sha256(b"".join(parts)).hexdigest()

    def record(**arguments: Any) -> tuple[MemoryHistory, RunResult]:
        history = MemoryHistory()
        given = {
            "federation": federation(), "aggregator": Median(), "max_rounds": 3, "server_lr": 0.1,
            **arguments,
        }  # fmt: skip
        return history, loop.record(history=history, **given)

    for name, rule in cases("aggregator"):
        note(name, lambda rule=rule: record(aggregator=rule)[1])
        note(f"{name}, attacked", lambda rule=rule: record(aggregator=rule, attack=TrimAttack())[1])
    half = ClientSampler(fraction=0.5, dropout=0.2)
    for name, attack in cases("attack"):
        note(
            name, lambda attack=attack: record(attack=attack, aggregator=FedAvg(), sampler=half)[1]
        )
    watched = {"attack": TrimAttack(), "max_rounds": 12, "sampler": ClientSampler(fraction=0.8)}
    for name, detector in cases("detector"):
        note(name, lambda detector=detector: record(detector=detector, **watched)[1])
    note("partial participation", lambda: record(sampler=half, max_rounds=8)[1])
    note("fake clients", lambda: record(federation=federation(fake_clients=3), attack=MPAF())[1])
    for rule in (FedAvg(), TrimmedMean(trim=0.2)):
        history, _ = record(aggregator=rule, max_rounds=10, sampler=half)
        for name, recoverer in [*cases("recoverer"), ("FedRecover", _short_fedrecover())]:
            note(
                f"{name} after {type(rule).__name__}",
                lambda recoverer=recoverer, history=history: loop.recover(
                    federation(), history, recoverer, exclude=history.manifest.malicious
                ),
            )
    if loop.is_global_zero:
        file.write_text(json.dumps(outcomes), encoding="utf-8")


def _short_fedrecover() -> FedRecover:
    return FedRecover(warmup_rounds=3, correction_period=3, final_rounds=1)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
