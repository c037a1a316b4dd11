"""R1, R3, R4, R12 to R14: whole recordings and recoveries. These need torch."""

from __future__ import annotations

import csv
import math
import random
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fault_kills import after_kill, sleep_while_it_records
from fault_stores import Facts, arrays, fork, manifest

from fedrec import ClientSampler, FederatedLoop, Federation
from fedrec.aggregators import FedAvg, Median
from fedrec.exceptions import UpdateError
from fedrec.history import LMDBHistory, MemoryHistory
from fedrec.history.background import BackgroundWriter
from fedrec.history.conversion import to_record
from fedrec.recoverers import FedRecover, PairedLBFGS, TrainFromScratch
from fedrec.testing.problems import QuadraticClient, quadratic_federation

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import runs

# Children are forked: what they need is imported once, and their parent has started no threads.
torch.set_num_threads(1)
runs.federation()


def killed_background_writer(codec: str, rng: random.Random, folder: Path) -> Facts:
    """R1: kill -9 while a thread of its own writes, as a recording does."""
    path = folder / "history"

    def run(send: Callable[[object], None]) -> None:
        history = LMDBHistory(path)
        history.begin(manifest(codec))
        writer = BackgroundWriter(history)
        stored = 0
        for t in range(10**6):
            writer.write(to_record(arrays(t)))
            if rng.random() < 0.2:  # meanwhile rounds gather, and are written together
                writer.wait()
                for acknowledged in range(stored, t + 1):
                    send(acknowledged)
                stored = t + 1

    child = fork(run)
    sleep_while_it_records(child, rng)
    child.kill()
    # Those since the last wait may be stored, too.
    return after_kill(path, child.wait(), codec, ahead=10**6)


# -- R3, R4 ---------------------------------------------------------------------------------------

ROUNDS = 20


def _play(mode: str, folder: Path, send: Callable[[object], None]) -> dict[str, Any]:
    """Record or recover in a folder, or go on there; say what came out."""
    runs.ROUNDS = ROUNDS
    uuid.uuid4 = lambda: uuid.UUID(int=5)  # two recordings that differ in nothing
    runs.CountingClient.log = folder / f"{mode}.calls"
    runs.CountingClient.say = send
    with LMDBHistory(folder / "history") as history:
        result = (runs.record if mode == "record" else runs.recover)(history, folder)
        with history.snapshot() as snapshot:
            chain = [snapshot.entry(t)[1] for t in snapshot.rounds()]
    return {
        "weights": result.global_weights.numpy().tobytes().hex(),
        "chain": chain,
        "asked": len(result.ledger.entries) if mode == "recover" else ROUNDS * runs.CLIENTS,
    }


@cache
def _uninterrupted(folder: Path) -> dict[str, Any]:
    """Record and recover once without interruption; return what came out."""
    place = folder / "uninterrupted"
    place.mkdir()
    found: dict[str, Any] = {"folder": place}
    for mode in ("record", "recover"):
        found[mode] = fork(partial(_play, mode, place)).result()
        assert _calls(mode, place) == found[mode]["asked"]
    return found


def _calls(mode: str, folder: Path) -> int:
    path = folder / f"{mode}.calls"
    return path.stat().st_size if path.exists() else 0


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def killed_run(mode: str, rng: random.Random, folder: Path) -> Facts:
    """R3, R4: kill -9 at a random instant of a recording or a recovery, and resume.

    What comes out is that of a run that was not interrupted, bit by bit; clients were asked as
    often, and once more at most in what the kill hit.
    """
    reference = _uninterrupted(folder.parent)
    if mode == "recover":
        shutil.copytree(reference["folder"] / "history", folder / "history")
    wanted = reference[mode]
    child = fork(partial(_play, mode, folder))
    child.read(rng.randrange(wanted["asked"]))  # the first rounds take longer than all the others
    time.sleep(rng.uniform(0, 0.01))
    child.kill()
    child.wait()
    interrupted = _calls(mode, folder)
    stored = len(LMDBHistory(folder / "history").rounds())
    found = fork(partial(_play, mode, folder)).result()
    assert found == wanted, "what comes out differs"
    place = folder / ("record" if mode == "record" else "recover/FedRecover")
    assert [int(row["round"]) for row in _table(place / "metrics.csv")] == list(range(ROUNDS))
    if mode == "recover":
        assert len(_table(place / "ledger.csv")) == wanted["asked"]
    again = _calls(mode, folder) - wanted["asked"]
    # A recording asks again for what was not stored: rounds that waited for the disk, and the one
    # that was computed. A recovery goes on from its last checkpoint.
    if mode == "record":
        assert again == interrupted - stored * runs.CLIENTS, (again, interrupted, stored)
    assert 0 <= again <= runs.CLIENTS * (9 if mode == "record" else 1), (again, interrupted)
    return {
        "client calls": wanted["asked"],
        "asked again": again,
        "killed midway": 0 < interrupted < wanted["asked"],
    }


# -- R12 ------------------------------------------------------------------------------------------


class _Sub(torch.Tensor):
    """A subclass of Tensor."""


def bad_updates(d: int) -> dict[str, Any]:
    """Return what a client may send that is no update, by name."""
    one = torch.ones(d)
    return {
        "NaN": one * math.nan,
        "one NaN": torch.cat([one[1:], torch.tensor([math.nan])]),
        "inf": one * math.inf,
        "-inf": -one * math.inf,
        "inf and -inf": torch.tensor([math.inf, -math.inf] * (d // 2)),
        "M + 1": torch.ones(d + 1),
        "M - 1": torch.ones(d - 1),
        "a matrix": torch.ones(d, 1),
        "a scalar": torch.tensor(1.0),
        "empty": torch.empty(0),
        "10 GB": torch.ones(1).expand(2_500_000_000),
        "integers": torch.ones(d, dtype=torch.int64),
        "booleans": torch.ones(d, dtype=torch.bool),
        "complex": torch.ones(d, dtype=torch.complex64),
        "float64 beyond float32": torch.full((d,), 1e300, dtype=torch.float64),
        "NumPy": np.ones(d, np.float32),
        "a list": [1.0] * d,
        "text": "update",
        "None": None,
    }


def good_updates(update: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the same update in odd clothes, by name."""
    wide = torch.empty(2 * update.numel())
    wide[::2] = update
    return {
        "non-contiguous": wide[::2],
        "requires_grad": update.clone().requires_grad_(),
        "a subclass": update.clone().as_subclass(_Sub),
        "a parameter": torch.nn.Parameter(update.clone()),
        "float64": update.double(),
    }


# -- R13 ------------------------------------------------------------------------------------------


class _Odd(QuadraticClient):
    """Behaves in each round as a schedule says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.schedule: dict[int, str] = {}
        self.last: torch.Tensor | None = None

    def local_update(self, global_weights: torch.Tensor, ctx: Any) -> Any:
        sent = super().local_update(global_weights, ctx)
        kind = self.schedule.get(ctx.round, "well") if ctx.phase == "record" else "well"
        if kind == "silent":
            return None
        if kind == "replayed" and self.last is not None:
            return type(sent)(update=self.last, num_samples=self.num_samples)
        if kind == "claims more":
            return type(sent)(update=sent.update, num_samples=10**9)
        if kind == "broken":
            return type(sent)(update=sent.update * math.nan, num_samples=self.num_samples)
        self.last = sent.update.clone()
        return sent


class _Random(ClientSampler):
    """Draws cohorts as a schedule says."""

    def __init__(self, *, cohorts: tuple[tuple[str, ...], ...] = ()) -> None:
        self.cohorts = cohorts

    def sample(self, client_ids: Any, t: int, seed: int) -> list[str]:
        return list(self.cohorts[t])


KINDS = ("well", "well", "well", "silent", "replayed", "claims more", "broken")
REFUSED = {"silent", "claims more", "broken"}


def schedule(rng: random.Random, folder: Path) -> Facts:
    """R13: clients that are silent, late, or send nonsense, in cohorts at random; then recover."""
    plain = quadratic_federation(num_clients=6, num_malicious=1, seed=rng.randrange(100))
    rounds = rng.randrange(3, 9)
    clients = [
        _Odd(c.client_id, c.hessian, c.centre, num_samples=rng.randrange(1, 9))
        for c in plain.clients
    ]
    ids = [c.client_id for c in clients]
    cohorts = []
    counts: Facts = {}
    for t in range(rounds):
        cohort = rng.sample(ids, rng.randrange(1, 7))
        kinds = [rng.choice(KINDS) for _ in cohort]
        kinds[rng.randrange(len(cohort))] = "well"  # otherwise there is no round: see R14
        for client_id, kind in zip(cohort, kinds, strict=True):
            clients[ids.index(client_id)].schedule[t] = kind
            counts[kind] = counts.get(kind, 0) + 1
        cohorts.append(tuple(cohort))
    federation = Federation(clients, plain.module, malicious=plain.malicious)
    history = LMDBHistory(folder / "history") if rng.random() < 0.5 else MemoryHistory()
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, seed=1)
    loop.record(
        federation,
        rng.choice((FedAvg(), Median())),
        history,
        max_rounds=rounds,
        server_lr=0.1,
        sampler=_Random(cohorts=tuple(cohorts)),
        on_bad_update="drop",
    )
    for t in range(rounds):
        found = history.read_round(t)
        refused = {c for c in cohorts[t] if clients[ids.index(c)].schedule[t] in REFUSED}
        assert set(found.refused) == refused
        assert found.client_ids == tuple(c for c in cohorts[t] if c not in refused)
        assert bool(torch.isfinite(found.global_weights).all())
    excluded = rng.sample(ids, rng.randrange(1, 5))
    for method in (
        FedRecover(
            warmup_rounds=2,
            correction_period=2,
            final_rounds=1,
            estimator=PairedLBFGS(buffer_size=1),
        ),
        TrainFromScratch(),
    ):
        result = loop.recover(federation, history, method, excluded)
        assert bool(torch.isfinite(result.global_weights).all())
        # Nobody who is excluded, silent or refused in a round is asked or counted in it.
        for entry in result.ledger.entries:
            assert entry.client_id not in excluded
            assert entry.client_id in history.read_round(entry.round).client_ids
    history.close()
    return counts


# -- R14 ------------------------------------------------------------------------------------------


def all_dropped(rng: random.Random, folder: Path) -> Facts:
    """R14: a round in which nobody sends anything usable ends the recording with an error."""
    plain = quadratic_federation(num_clients=3, num_malicious=0)
    clients = [_Odd(c.client_id, c.hessian, c.centre) for c in plain.clients]
    last = rng.randrange(1, 4)
    for client in clients:
        client.schedule[last] = rng.choice(("silent", "broken"))
    history = LMDBHistory(folder / "history")
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    arguments = {"max_rounds": 6, "server_lr": 0.1, "on_bad_update": "drop", "resume": True}
    federation = Federation(clients, plain.module)
    try:
        loop.record(federation, FedAvg(), history, **arguments)
    except UpdateError as error:
        text = str(error)
    assert f"Round {last} has no usable update left" in text
    assert all(c.client_id in text for c in clients)
    assert history.rounds() == range(last)
    for client in clients:
        client.schedule.clear()
    loop.record(federation, FedAvg(), history, **arguments)
    assert history.verify() == range(6)
    history.close()
    return {"recordings": 1}
