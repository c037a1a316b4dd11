"""Real processes on the loopback interface, over TLS: what happens when they die or lie."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.cli.main import main
from fedrec.flower import LocalFederation
from fedrec.flower.credentials import make_certificates, make_node_key
from fedrec.history import LMDBHistory, MemoryHistory

APP = Path(__file__).parent / "app"
sys.path.insert(0, str(APP))
from tried_client import make_data, make_module  # noqa: E402
from tried_server import METHOD  # noqa: E402

# They start a dozen processes each, which is slow on a busy machine: this ends one that hangs.
pytestmark = pytest.mark.timeout(1800)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


class Tried:
    """A federation whose app notes what its clients are asked."""

    def __init__(
        self,
        folder: Path,
        ids: Sequence[str],
        how: dict[str, str] | None = None,
        database: bool = False,
    ) -> None:
        self.folder, self.ids = folder, list(ids)
        self.how = how or {}
        self.federation = LocalFederation(folder / "federation", database=database)

    def __enter__(self) -> Tried:
        self.federation.__enter__()
        for c in self.ids:
            self.federation.start_node(c, {"how": self.how[c]} if c in self.how else None)
        (self.folder / "keys.json").write_text(json.dumps(self.federation.keys))
        return self

    def __exit__(self, *error: Any) -> None:
        self.federation.__exit__(*error)

    def submit(self, mode: str, ids: Sequence[str] | None = None, **config: Any) -> str:
        clients = "+".join(self.ids if ids is None else ids)
        settings = {"mode": mode, "folder": str(self.folder), "clients": clients, **config}
        return self.federation.submit(APP, settings)

    def asked(self, phase: str) -> Counter[tuple[int, str]]:
        """How often each client was asked in each round."""
        path = self.folder / "asked.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        parts = (line.split() for line in lines)
        return Counter((int(t), c) for p, t, c in parts if p == phase)

    def wait_for_round(self, phase: str, t: int) -> None:
        """Wait until some client has been asked in a round."""
        wait_until(lambda: any(r == t for r, _ in self.asked(phase)))

    def kill_server(self) -> None:
        """Kill the process of the ServerApp."""
        pid = int((self.folder / "server.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())

    def weights(self, mode: str) -> torch.Tensor:
        weights: torch.Tensor = torch.load(self.folder / f"{mode}.pt", weights_only=True)
        return weights


def in_process(ids: Sequence[str], rounds: int, excluded: Sequence[str]) -> list[torch.Tensor]:
    """Return the weights of a recording and of a recovery in one process."""
    whole = Federation.from_data(make_data(), make_module(), batch_size=32)
    clients = [c for c in whole.clients if c.client_id in ids]
    federation = Federation(clients, whole.module)
    loop = FederatedLoop(executor="sequential", logger=False, enable_progress_bar=False)
    history = MemoryHistory()
    recorded = loop.record(federation, FedAvg(), history, max_rounds=rounds, server_lr=0.5)
    recovered = loop.recover(federation, history, METHOD, excluded)
    return [recorded.global_weights, recovered.global_weights]


def test_over_tls_known_nodes_do_what_one_process_does_and_others_stay_out(tmp_path: Path) -> None:
    """A node that does not trust the server's certificate stays out; so does an unknown key."""
    ids = ["client-0", "client-1"]
    with Tried(tmp_path, ids) as tried:
        federation = tried.federation
        make_certificates(tmp_path / "other")
        federation.start_node("client-2", root_certificates=tmp_path / "other" / "ca.pem")
        federation.keys["client-3"] = make_node_key(federation.folder / "keys" / "client-3")
        federation.start_node("client-3")  # not registered, as it has a key already
        federation.wait(tried.submit("record", rounds=2))
        said = {"client-2": "CERTIFICATE_VERIFY_FAILED", "client-3": "Failed to activate SuperNode"}
        for client_id, text in said.items():
            assert federation.process(client_id).wait() == 1
            assert text in (federation.folder / f"{client_id}.log").read_text()
    assert tried.asked("record") == {(t, c): 1 for t in (0, 1) for c in ids}
    assert torch.equal(tried.weights("record"), in_process(ids, 2, [])[0])


@pytest.mark.live
def test_a_new_project_passes_its_tests(tmp_path: Path) -> None:
    """Among them: start.py ends with 0 only if live and rehearsed bits are equal."""
    assert main(["new", str(tmp_path / "of_mine"), "--flower", "-q"]) == 0
    pytest_of_its_own = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    paths = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        pytest_of_its_own,
        cwd=tmp_path / "of_mine",
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("..")


@pytest.mark.live
def test_nodes_and_servers_that_die_change_nothing(tmp_path: Path) -> None:
    """A node and the server are killed in recording and in recovery: the bits are the same."""
    ids, remaining = ["client-0", "client-1", "client-2"], ["client-0", "client-1"]
    with Tried(tmp_path, ids) as tried:
        federation = tried.federation
        tried.submit("record", rounds=8)
        tried.wait_for_round("record", 1)
        federation.kill("client-1")
        federation.restart_node("client-1")
        tried.wait_for_round("record", 4)
        tried.kill_server()
        with LMDBHistory(tmp_path / "history") as history:
            committed = len(history.rounds())
            before = tried.asked("record")
        federation.wait(tried.submit("record", rounds=8))
        after = tried.asked("record")
        assert all(after[key] == before[key] for key in before if key[0] < committed)
        tried.submit("recover", remaining)
        tried.wait_for_round("recover", 1)
        federation.process("client-0").kill(signal.SIGTERM)
        federation.restart_node("client-0")
        tried.wait_for_round("recover", 2)
        tried.kill_server()
        before = tried.asked("recover")
        federation.wait(tried.submit("recover", remaining))
        after = tried.asked("recover")
        assert all(after[key] == before[key] for key in before if key[0] < 2)
    recorded, recovered = in_process(ids, 8, ["client-2"])
    assert torch.equal(tried.weights("record"), recorded)
    assert torch.equal(tried.weights("recover"), recovered)


@pytest.mark.live
def test_a_server_that_loses_power_goes_on(tmp_path: Path) -> None:
    """SuperLink and ServerApp are killed together, and started again."""
    ids = ["client-0", "client-1"]
    with Tried(tmp_path, ids, database=True) as tried:
        tried.submit("record", rounds=6)
        tried.wait_for_round("record", 2)
        tried.federation.kill("superlink")
        tried.kill_server()
        tried.federation.start()
        tried.federation.wait(tried.submit("record", rounds=6))
    assert torch.equal(tried.weights("record"), in_process(ids, 6, [])[0])


@pytest.mark.live
def test_clients_that_lie_fail_or_are_late_are_refused_by_name(tmp_path: Path) -> None:
    how = {"client-1": "shape", "client-2": "nan", "client-3": "round", "client-4": "other"}
    ids = [f"client-{i}" for i in range(6)]
    with Tried(tmp_path, ids, {**how, "client-5": "late"}) as tried:
        tried.federation.wait(tried.submit("record", rounds=1, timeout=180.0))
        with LMDBHistory(tmp_path / "history") as history:
            refused = dict(history.read_round(0).refused)
            assert history.read_round(0).client_ids == ("client-0",)
    said = ("expected an array of shape", "NaN or infinity", "another round", "another client")
    for client_id, reason in zip(how, said, strict=True):
        assert reason in refused[client_id]
    assert refused["client-5"] == "no answer within 180 seconds"


@pytest.mark.live
def test_a_client_that_left_for_good_is_dropped_from_the_recovery(tmp_path: Path) -> None:
    ids, remaining = [f"client-{i}" for i in range(3)], ["client-0", "client-1"]
    with Tried(tmp_path, ids, {"client-1": "hang"}) as tried:
        tried.federation.wait(tried.submit("record", rounds=6))
        run = tried.submit("recover", remaining, reconnect=10.0)
        wait_until(lambda: (1, "client-1") in tried.asked("recover"))
        tried.federation.process("client-1").kill(signal.SIGTERM)
        tried.federation.wait(run)
    assert tried.weights("recover").isfinite().all()
    asked = tried.asked("recover")
    assert {t for t, c in asked if c == "client-1"} == {0, 1}
    # Three rounds of warm-up, one correction (5 would be the next), the final one.
    assert {t for t, c in asked if c == "client-0"} >= {0, 1, 2, 5}
