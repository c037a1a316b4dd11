"""A server that is stopped in the middle of a round, and goes on."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedrec.aggregators import FedAvg
from fedrec.history import MemoryHistory
from fedrec.recoverers import FedRecover

METHOD = FedRecover(warmup_rounds=3, correction_period=2, final_rounds=1)


@pytest.fixture
def federation(grid: Any, joined: Any) -> Any:
    """A federation whose client 1 answers so late that no test would wait for it."""
    executor, federation = joined
    executor.timeout = 3600.0
    return federation


def interrupt(grid: Any, phase: str, t: int, signum: int) -> None:
    """Let client 1 send the server a signal, once, in place of its answer in a round."""
    sent: list[int] = []

    def tamper(message: Message, reply: Message) -> list[Message]:
        task = message.content.config_records.get("task", {})
        if (task.get("phase"), task.get("round")) == (phase, t) and not sent:
            sent.append(signum)
            signal.raise_signal(signum)
        return [reply]

    grid.find("client-1").tamper = tamper


def asked(grid: Any, phase: str) -> Counter[int]:
    """How often client 0 was asked in each round."""
    tasks = [m.content.config_records.get("task", {}) for m in grid.find("client-0").asked]
    return Counter(task["round"] for task in tasks if task.get("phase") == phase)


@pytest.mark.parametrize(
    ("signum", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_a_recording_in_the_round_and_the_next_run_goes_on(
    grid: Any, joined: Any, federation: Any, make_loop: Any, signum: int, raised: Any
) -> None:
    loop, history = make_loop(joined[0]), MemoryHistory()
    interrupt(grid, "record", 2, signum)
    before = signal.getsignal(signum)
    with pytest.raises(raised):
        loop.record(federation, FedAvg(), history, max_rounds=4, server_lr=0.5)
    assert len(history.rounds()) == 2
    assert signal.getsignal(signum) is before  # a second one acts as usual
    stopped = loop.record(federation, FedAvg(), history, max_rounds=4, server_lr=0.5, resume=True)
    assert asked(grid, "record") == {0: 1, 1: 1, 2: 2, 3: 1}
    whole = loop.record(federation, FedAvg(), MemoryHistory(), max_rounds=4, server_lr=0.5)
    assert torch.equal(stopped.global_weights, whole.global_weights)


def test_nobody_is_asked_twice_for_a_round_that_a_recovery_has_done(
    grid: Any, joined: Any, federation: Any, make_loop: Any
) -> None:
    loop, history = make_loop(joined[0]), MemoryHistory()
    loop.record(federation, FedAvg(), history, max_rounds=8, server_lr=0.5)
    whole = loop.recover(federation, history, METHOD, ["client-3"])
    needed = asked(grid, "recover")
    assert needed == dict.fromkeys((0, 1, 2, 4, 6, 7), 1)
    interrupt(grid, "recover", 6, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        loop.recover(federation, history, METHOD, ["client-3"])
    result = loop.recover(federation, history, METHOD, ["client-3"], resume=True)
    counts = asked(grid, "recover") - needed
    assert counts == {0: 1, 1: 1, 2: 1, 4: 1, 6: 2, 7: 1}
    assert torch.equal(result.global_weights, whole.global_weights)
