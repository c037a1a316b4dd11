"""A loop that asks clients of Flower, on a grid without a network."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.clients import LightningClient, LocalObjective, LocalWork
from fedrec.exceptions import ConfigurationError, UpdateError
from fedrec.flower import FlowerExecutor, make_client_app
from fedrec.flower.nodes import key_fingerprint
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedEraser, FedRecover, TrainFromScratch
from fedrec.types import RoundContext
from tests.flower.conftest import TRAINING, FakeGrid, make_module

from fedrec.data import Digits  # isort: skip

METHOD = FedRecover(warmup_rounds=3, correction_period=4, final_rounds=1)


def record(loop: FederatedLoop, federation: Federation, rounds: int = 8, **more: Any) -> Any:
    history = more.pop("history", None) or MemoryHistory()
    result = loop.record(
        federation,
        FedAvg(),
        history,
        max_rounds=rounds,
        server_lr=0.5,
        on_bad_update="drop",
        **more,
    )
    return result, history


def test_a_recording_and_a_recovery_equal_those_in_one_process(
    joined: Any, in_process: Any, make_loop: Any
) -> None:
    executor, federation = joined
    live, here = make_loop(executor), FederatedLoop(executor="sequential", logger=False)
    recorded, history = record(live, federation)
    expected, reference = record(here, in_process)
    assert torch.equal(recorded.global_weights, expected.global_weights)
    for t in range(8):
        assert torch.equal(history.read_round(t).updates, reference.read_round(t).updates)
    recovered = live.recover(federation, history, METHOD, ["client-3"])
    again = here.recover(in_process, reference, METHOD, ["client-3"])
    assert torch.equal(recovered.global_weights, again.global_weights)
    assert [e[:4] for e in recovered.ledger.entries] == [e[:4] for e in again.ledger.entries]


def test_only_clients_that_the_algorithm_asks_get_messages(
    grid: Any, joined: Any, make_loop: Any
) -> None:
    executor, federation = joined
    _, history = record(make_loop(executor), federation)
    before = {c: len(grid.find(c).asked) for c in federation.client_ids}
    result = make_loop(executor).recover(federation, history, METHOD, ["client-3"])
    asked = {c: len(grid.find(c).asked) - before[c] for c in federation.client_ids}
    counts = result.ledger.by_client()
    assert asked == {**{c: counts[c][0] for c in counts}, "client-3": 0}
    # 3 warm-up rounds, one correction (round 6), one final round, of 8.
    assert result.ledger.acp() == pytest.approx(3 / 8)


def test_the_ledger_has_the_bytes_that_were_sent(joined: Any, make_loop: Any) -> None:
    executor, federation = joined
    _, history = record(make_loop(executor), federation)
    result = make_loop(executor).recover(federation, history, TrainFromScratch(), ["client-3"])
    weights = 4 * federation.layout.num_parameters
    for _, num_bytes, seconds in result.ledger.by_client().values():
        assert 8 * 2 * weights < num_bytes < 8 * (2 * weights + 2000)
        assert seconds > 0


def test_nobody_has_worked_for_longer_than_the_server_has_waited(
    grid: Any, joined: Any, make_loop: Any
) -> None:
    executor, federation = joined
    _, history = record(make_loop(executor), federation, rounds=2)
    grid.find("client-1").tamper = changed("card", "seconds", lambda seconds: 1e300)
    began = time.monotonic()
    result = make_loop(executor).recover(federation, history, TrainFromScratch(), ["client-3"])
    waited = time.monotonic() - began
    assert 0 < result.ledger.by_client()["client-1"][2] <= waited


# -- answers that cannot be used ------------------------------------------------------------------


def changed(name: str, key: str, value: Any) -> Any:
    """Return what a node does that changes one value of its answers to tasks."""

    def tamper(message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train.fedrec":
            reply.content[name][key] = value(reply.content[name][key])
        return [reply]

    return tamper


def vector(edit: Any) -> Any:
    return lambda array: Array(edit(array.numpy().copy()))


def poisoned(row: np.ndarray) -> np.ndarray:
    row[3] = np.nan
    return row


def lying_header(array: Array) -> Array:
    """Claim another number of entries inside the array's bytes."""
    honest = b"(%d,)" % array.shape[0]
    data = array.data.replace(honest, b"(10,)".ljust(len(honest)))
    return Array(array.dtype, array.shape, array.stype, data)


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (changed("arrays", "update", vector(lambda row: row[:-1])), "expected an array of shape"),
        (changed("arrays", "update", vector(lambda row: row.astype("f8"))), "dtype float32"),
        (changed("arrays", "update", vector(poisoned)), "NaN or infinity"),
        (changed("arrays", "update", lying_header), "inside the array, too"),
        (
            changed("arrays", "update", lambda a: Array("float32", a.shape, a.stype, b"x" * 10)),
            "bytes of numbers, but got 10",
        ),
        (
            changed("arrays", "update", lambda a: Array(a.dtype, a.shape, "pickle", a.data)),
            "expected an array of shape",
        ),
        (changed("card", "round", lambda t: t - 1), "for another round"),
        (changed("card", "phase", lambda phase: "recover"), "for another round"),
        (changed("card", "client-id", lambda c: "client-0"), "of another client"),
        (changed("card", "nonce", lambda n: "0" * 32), "another question"),
        (changed("card", "num-samples", lambda n: 10 * n), "num_samples was"),
        (changed("card", "num-samples", lambda n: "many"), "expected num-samples to be int"),
        (changed("card", "num-samples", lambda n: 2**62), "num-samples to be positive, and below"),
        (changed("card", "fingerprint", lambda f: "0" * 32), "fingerprint was"),
        (changed("card", "training", lambda t: '{"batch_size": 1}'), "training was"),
        (changed("card", "training", lambda t: "[" * 9000), "expected training to be JSON"),
        (changed("card", "seconds", lambda s: float("inf")), "one finite number"),
        (changed("card", "logged", lambda s: '{"loss": NaN}'), "one finite number"),
        (changed("card", "logged", lambda s: '{"loss": 1' + 400 * "0" + "}"), "one finite number"),
        (changed("card", "logged", lambda s: "[1.0]"), "expected logged to be a mapping"),
        (lambda m, r: [Message(RecordDict(), reply_to=m)], "expected a record"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_by_name(
    grid: Any, joined: Any, make_loop: Any, tamper: Any, reason: str
) -> None:
    executor, federation = joined
    grid.find("client-1").tamper = tamper
    _, history = record(make_loop(executor), federation, rounds=1)
    stored = history.read_round(0)
    assert stored.client_ids == ("client-0", "client-2", "client-3")
    assert reason in stored.refused["client-1"]


def test_the_error_of_a_client_is_the_reason(grid: Any, joined: Any, make_loop: Any) -> None:
    executor, federation = joined

    def fails(message: Any, context: Any) -> Any:
        raise OSError("this client's disk is full")

    grid.find("client-2").app = fails
    _, history = record(make_loop(executor), federation, rounds=1)
    assert "this client's disk is full" in history.read_round(0).refused["client-2"]


def test_by_default_a_refused_client_ends_the_recording(
    grid: Any, joined: Any, make_loop: Any
) -> None:
    executor, federation = joined
    grid.find("client-2").silent = True
    with pytest.raises(UpdateError, match=r"'client-2': no answer within 0\.5 seconds"):
        make_loop(executor).record(
            federation, FedAvg(), MemoryHistory(), max_rounds=1, server_lr=0.5
        )


# -- late, twice, away ----------------------------------------------------------------------------


def test_a_late_answer_is_never_used(grid: Any, joined: Any, make_loop: Any) -> None:
    executor, federation = joined
    kept: list[Message] = []
    node = grid.find("client-1")

    def late(message: Message, reply: Message) -> list[Message]:
        kept.append(reply)
        return kept[-2:-1]  # the answer to the task before

    node.tamper = late
    _, history = record(make_loop(executor), federation, rounds=2)
    assert [history.read_round(t).refused["client-1"] for t in (0, 1)] == [
        "no answer within 0.5 seconds"
    ] * 2


def test_an_answer_that_comes_twice_counts_once(
    grid: Any, joined: Any, in_process: Any, make_loop: Any
) -> None:
    executor, federation = joined
    grid.find("client-1").tamper = lambda message, reply: [reply, reply]
    recorded, _ = record(make_loop(executor), federation, rounds=3)
    expected, _ = record(FederatedLoop(executor="sequential", logger=False), in_process, rounds=3)
    assert torch.equal(recorded.global_weights, expected.global_weights)


def test_an_old_answer_to_a_new_task_is_refused(grid: Any, joined: Any, make_loop: Any) -> None:
    executor, federation = joined
    contents: list[RecordDict] = []

    def replay(message: Message, reply: Message) -> list[Message]:
        contents.append(reply.content)
        return [Message(contents[0], reply_to=message)]

    grid.find("client-1").tamper = replay
    _, history = record(make_loop(executor), federation, rounds=2)
    assert "client-1" not in history.read_round(0).refused
    assert "another question" in history.read_round(1).refused["client-1"]


def test_a_client_that_is_away_misses_the_rounds(grid: Any, joined: Any, make_loop: Any) -> None:
    executor, federation = joined
    loop = make_loop(executor)
    _, history = record(loop, federation, rounds=4, history=MemoryHistory())
    node = grid.drop("client-2")
    result = loop.recover(
        federation, history, TrainFromScratch(), ["client-3"], on_bad_update="drop", max_rounds=2
    )
    assert result.rounds == 2
    grid.nodes[555] = node  # it is back, under another node id
    asked = len(node.asked)
    loop.recover(federation, history, TrainFromScratch(), ["client-3"], max_rounds=2)
    assert len(node.asked) == asked + 3  # who it is, and two rounds


def test_a_client_that_restarts_during_a_round_is_asked_again(
    grid: Any, joined: Any, in_process: Any, make_loop: Any
) -> None:
    executor, federation = joined
    executor.timeout = 60.0
    node, lost = grid.find("client-1"), []

    def restarts(message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train.fedrec" and not lost:
            lost.append(reply)
            node.started = "2"
            return []
        return [reply]

    node.tamper = restarts
    recorded, history = record(make_loop(executor), federation, rounds=2)
    expected, _ = record(FederatedLoop(executor="sequential", logger=False), in_process, rounds=2)
    assert torch.equal(recorded.global_weights, expected.global_weights)
    assert not history.read_round(0).refused


def test_a_task_that_flower_lost_with_a_node_is_sent_again_when_it_is_back(
    grid: Any, joined: Any, in_process: Any, make_loop: Any
) -> None:
    executor, federation = joined
    executor.timeout = executor.reconnect = 60.0
    node, lost = grid.find("client-1"), []

    def gone(message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train.fedrec" and not lost:
            lost.append(reply)
            node.started = "2"
            return [Message(Error(ErrorCode.NODE_UNAVAILABLE, "no heartbeat"), reply_to=message)]
        return [reply]

    node.tamper = gone
    recorded, history = record(make_loop(executor), federation, rounds=2)
    expected, _ = record(FederatedLoop(executor="sequential", logger=False), in_process, rounds=2)
    assert torch.equal(recorded.global_weights, expected.global_weights)
    assert not history.read_round(0).refused


def test_a_client_that_comes_back_with_other_data_is_refused(
    grid: Any, joined: Any, make_loop: Any
) -> None:
    executor, federation = joined
    node = grid.find("client-1")
    node.app = make_client_app(lambda c: MLP(in_features=64), lambda c: Digits(num_clients=5))
    node.started = "2"
    _, history = record(make_loop(executor), federation, rounds=1)
    assert "it came back with num_samples" in history.read_round(0).refused["client-1"]


# -- joining --------------------------------------------------------------------------------------


def test_a_second_node_that_claims_an_id_is_refused(grid: Any, joined: Any) -> None:
    executor, _ = joined
    first = executor.nodes.by_client["client-1"]
    grid.nodes[777] = grid.add("client-1", key=b"another key")
    executor.nodes.refresh()
    executor.nodes.refresh()
    assert executor.nodes.by_client["client-1"] == first
    assert executor.nodes.refused[777] == "client 'client-1' is there already, as another node"


def test_a_client_is_who_its_key_says(grid: Any) -> None:
    keys = {f"client-{i}": key_fingerprint(f"key of client-{i}".encode()) for i in range(4)}
    grid.find("client-1").config = {"client-id": "client-2"}
    grid.add("client-9")
    executor = FlowerExecutor(grid, timeout=0.5, keys=keys)
    with pytest.raises(ConfigurationError, match=r"clients \['client-1'\] to join .* has another"):
        executor.join(MLP(in_features=64), client_ids=list(keys))
    stranger = grid.drop("client-9")
    assert executor.nodes.refused[104] == (
        f"its key {key_fingerprint(b'key of client-9')} is no client's"
    )
    assert not stranger.asked
    (node,) = [n for n in grid.nodes.values() if n.key == b"key of client-1"]
    node.config, node.started = {"client-id": "client-1"}, "2"
    clients = executor.join(MLP(in_features=64), client_ids=list(keys))
    assert clients[1].training_args()["key"] == keys["client-1"]


def test_a_new_key_is_added_to_the_old_one(grid: Any) -> None:
    keys = {f"client-{i}": key_fingerprint(f"key of client-{i}".encode()) for i in range(4)}
    grid.find("client-1").key = b"new"
    executor = FlowerExecutor(
        grid, timeout=0.5, keys={**keys, "client-1": [keys["client-1"], key_fingerprint(b"new")]}
    )
    clients = executor.join(MLP(in_features=64), num_clients=4)
    assert clients[1].training_args()["key"] == keys["client-1"]


@pytest.mark.parametrize("known", [True, False])
def test_a_node_without_an_id_is_named_by_its_key(known: bool) -> None:
    data, module = TensorDataset(torch.rand(50, 64), torch.arange(50) % 10), make_module()
    app = make_client_app(make_module, lambda context: data, **TRAINING)
    grid, fingerprint = FakeGrid(), key_fingerprint(b"key of a")
    grid.add("a", app=app, config={})
    keys, name = ({"a": fingerprint}, "a") if known else (None, f"key-{fingerprint}")
    executor = FlowerExecutor(grid, timeout=0.5, keys=keys)
    clients = executor.join(module, num_clients=1)
    assert [client.client_id for client in clients] == [name]
    loop = FederatedLoop(executor=executor, logger=False, enable_progress_bar=False)
    recorded, _ = record(loop, Federation(clients, module), rounds=2)
    # It draws the mini-batches of that name.
    in_process = Federation([LightningClient(name, module, data, **TRAINING)], module)
    expected, _ = record(FederatedLoop(executor="sequential", logger=False), in_process, rounds=2)
    assert torch.equal(recorded.global_weights, expected.global_weights)


def test_a_client_with_another_model_is_not_let_in(grid: Any) -> None:
    executor = FlowerExecutor(grid, timeout=0.5)
    with pytest.raises(ConfigurationError, match="have another model than the server"):
        executor.join(MLP(in_features=64, hidden=(8,)), num_clients=4)


def test_a_node_that_does_not_answer_is_asked_again(grid: Any) -> None:
    node = grid.find("client-2")
    node.silent = True
    executor = FlowerExecutor(grid, timeout=0.01)
    with pytest.raises(ConfigurationError, match=r"3 are there.*it has not said yet who it is"):
        executor.join(MLP(in_features=64), num_clients=4, timeout=0.5)
    node.silent = False
    assert len(executor.join(MLP(in_features=64), num_clients=4, timeout=60)) == 4
    assert not executor.nodes.refused


def test_too_few_clients_are_an_error_that_names_those_there(grid: Any) -> None:
    executor = FlowerExecutor(grid, timeout=0.5)
    with pytest.raises(ConfigurationError, match=r"Expected 5 clients .* 4 are there"):
        executor.join(MLP(in_features=64), num_clients=5)


def test_a_card_that_answers_another_question_is_refused(grid: Any) -> None:
    def tamper(message: Message, reply: Message) -> list[Message]:
        reply.content["card"]["nonce"] = "0"
        return [reply]

    grid.find("client-0").tamper = tamper
    executor = FlowerExecutor(grid, timeout=0.2)
    with pytest.raises(ConfigurationError, match=r"3 are there.*its nonce differs"):
        executor.join(MLP(in_features=64), num_clients=4)


# -- what cannot be asked -------------------------------------------------------------------------


def test_an_objective_of_its_own_cannot_be_sent(joined: Any) -> None:
    executor, federation = joined
    weights = federation.layout.flatten(federation.module)
    ctx = RoundContext(
        round=0,
        phase="recover",
        client_ids=("client-0",),
        global_weights=weights,
        layout=federation.layout,
        work=LocalWork(objective=LocalObjective()),
    )
    with pytest.raises(ConfigurationError, match="an objective is code, and messages carry none"):
        executor.compute(federation.clients[:1], weights, ctx)


def test_other_work_is_sent_as_numbers(joined: Any, in_process: Any, make_loop: Any) -> None:
    executor, federation = joined
    live, here = make_loop(executor), FederatedLoop(executor="sequential", logger=False)
    _, history = record(live, federation)
    _, reference = record(here, in_process)
    method = FedEraser()
    recovered = live.recover(federation, history, method, ["client-3"])
    expected = here.recover(in_process, reference, method, ["client-3"])
    assert torch.equal(recovered.global_weights, expected.global_weights)


def test_a_loop_without_the_executor_says_what_is_missing(joined: Any) -> None:
    _, federation = joined
    loop = FederatedLoop(executor="sequential", logger=False, enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match="FederatedLoop\\(executor=executor\\)"):
        record(loop, federation, rounds=1)


def test_a_task_for_another_client_is_refused_by_the_client(grid: Any) -> None:
    node = grid.find("client-0")
    executor = FlowerExecutor(grid, timeout=0.5)
    federation = Federation(executor.join(MLP(in_features=64), num_clients=4), MLP(in_features=64))
    node.config = {"client-id": "client-1"}
    loop = FederatedLoop(executor=executor, logger=False, enable_progress_bar=False)
    _, history = record(loop, federation, rounds=1)
    assert "the task is for 'client-0'" in history.read_round(0).refused["client-0"]
