"""A small recording, as arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedrec
from fedrec.history import LMDBHistory, Manifest
from fedrec.history.rounds import RoundArrays

IDS = tuple(f"client-{i}" for i in range(5))
D = 2000  # 8,000 bytes: too long for a page of 4,096, so that a value has pages of its own


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        model_fingerprint="1234",
        num_parameters=D,
        clients=dict.fromkeys(IDS, 10),
        seed=0,
        aggregator={"class_path": "FedAvg", "init_args": {}},
        server_lr=0.5,
        max_rounds=100,
        execution={"executor": "SequentialExecutor", "threads": 1},
    )


@pytest.fixture
def arrays() -> Callable[..., RoundArrays]:
    """Return a function that makes the same random round for the same `t`."""

    def make(t: int, client_ids: tuple[str, ...] = IDS, **changes: Any) -> RoundArrays:
        generator = np.random.default_rng(t)
        fields: dict[str, Any] = {
            "round": t,
            "global_weights": generator.standard_normal(D, dtype=np.float32),
            "client_ids": client_ids,
            "updates": generator.standard_normal((len(IDS), D), dtype=np.float32)[
                [IDS.index(c) for c in client_ids]
            ],
            "num_samples": np.full(len(client_ids), 10),
            "aggregate": generator.standard_normal(D, dtype=np.float32),
        }
        return RoundArrays(**{**fields, **changes})

    return make


@pytest.fixture
def recorded(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> Callable[..., Path]:
    """Return a function that records rounds and returns the closed history's directory."""

    def make(num_rounds: int = 3, name: str = "history") -> Path:
        store = LMDBHistory(tmp_path / name)
        store.begin(manifest)
        for t in range(num_rounds):
            store.append(arrays(t))
        store.close()
        return tmp_path / name

    return make


@pytest.fixture
def run_script() -> Callable[..., str]:
    """Return a function that runs code in a process without torch and returns its output."""

    def run(code: str, *arguments: object, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, **environment, "PYTHONPATH": str(Path(fedrec.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
