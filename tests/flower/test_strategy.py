"""A strategy of Flower's that is recorded: unchanged, and recoverable afterwards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower

from fedrec import Federation
from fedrec.aggregators import FedAvg, Median, TrimmedMean
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError, FedrecWarning
from fedrec.flower import FlowerExecutor, RecordingStrategy, make_client_app
from fedrec.flower.nodes import key_fingerprint
from fedrec.history import LMDBHistory, MemoryHistory, forget
from fedrec.models import MLP
from fedrec.recoverers import FedRecover, HistoricalOnly, TrainFromScratch
from tests.flower.conftest import FakeGrid, make_module

LOCAL_LR = 0.2
SIZES = {c: len(d) for c, d in Digits(num_clients=4).client_datasets().items()}
KEYS = {c: key_fingerprint(f"key of {c}".encode()) for c in SIZES}


def users_app(*, as_list: bool = False) -> ClientApp:
    """A ClientApp as a user of Flower has it: its own loop, and fedrec's handlers beside it."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client_id = str(context.node_config["client-id"])
        module = make_module()
        sent = message.content["arrays"]
        names = list(module.state_dict())
        arrays = dict(zip(names, sent.to_numpy_ndarrays(), strict=True))
        module.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()})
        x, y = Digits(num_clients=4).client_datasets()[client_id][:]
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= LOCAL_LR * parameter.grad
        values = [v.numpy() for v in module.state_dict().values()]
        record = ArrayRecord(values) if as_list else ArrayRecord(module.state_dict())
        content = RecordDict(
            {
                "arrays": record,
                "metrics": MetricRecord({"num-examples": SIZES[client_id], "loss": loss.item()}),
            }
        )
        return Message(content, reply_to=message)

    return make_client_app(make_module, lambda context: Digits(num_clients=4), app=app)


@pytest.fixture
def users_grid() -> FakeGrid:
    grid = FakeGrid()
    for c in SIZES:
        grid.add(c, app=users_app())
    return grid


def plain(**more: Any) -> flower.FedAvg:
    return flower.FedAvg(fraction_evaluate=0.0, min_train_nodes=4, **more)


def recording(strategy: Any, history: Any, **more: Any) -> RecordingStrategy:
    settings = {"module": make_module(), "clients": SIZES, "keys": KEYS, "local_lr": LOCAL_LR}
    return RecordingStrategy(strategy, history, **{**settings, **more})


def arrays_of(module: Any) -> ArrayRecord:
    return ArrayRecord(module.state_dict())


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (plain, FedAvg()),
        (lambda: flower.FedMedian(fraction_evaluate=0.0, min_train_nodes=4), Median()),
        (
            lambda: flower.FedTrimmedAvg(fraction_evaluate=0.0, min_train_nodes=4, beta=0.25),
            TrimmedMean(trim=0.25),
        ),
    ],
)
def test_the_strategy_does_what_it_does_without_the_recording(
    users_grid: FakeGrid, make: Any, rule: Any
) -> None:
    history = MemoryHistory()
    random.seed(0)  # Flower draws the order of the clients
    alone = make().start(users_grid, arrays_of(make_module()), num_rounds=4)
    random.seed(0)
    wrapped = recording(make(), history).start(users_grid, arrays_of(make_module()), num_rounds=4)
    for name, array in alone.arrays.items():
        assert wrapped.arrays[name].data == array.data
    assert [dict(m) for m in wrapped.train_metrics_clientapp.values()] == [
        dict(m) for m in alone.train_metrics_clientapp.values()
    ]
    assert len(history.rounds()) == 4
    assert history.manifest.aggregator == rule.spec()


def test_what_is_recorded_repeats_the_training(users_grid: FakeGrid, make_loop: Any) -> None:
    """Each update is a gradient, and the rule on the updates gives the strategy's weights."""
    history = MemoryHistory()
    result = recording(plain(), history).start(users_grid, arrays_of(make_module()), num_rounds=3)
    module = make_module()
    federation = Federation.from_data(Digits(num_clients=4), module)
    weights = federation.layout.flatten(module)
    torch.testing.assert_close(history.read_round(0).global_weights, weights)
    x, y = Digits(num_clients=4).client_datasets()["client-2"][:]
    torch.nn.functional.cross_entropy(module(x), y).backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
    update = history.read_round(0, ["client-2"]).updates[0]
    torch.testing.assert_close(update, gradient, atol=1e-5, rtol=1e-4)
    loop = make_loop("sequential")
    again = loop.recover(federation, history, HistoricalOnly(), [], batch_policy="fresh")
    final = torch.cat(
        [torch.from_numpy(a.copy()).flatten() for a in result.arrays.to_numpy_ndarrays()]
    )
    torch.testing.assert_close(again.global_weights, final, atol=1e-5, rtol=1e-4)


def test_live_clients_recover_from_what_was_recorded(users_grid: FakeGrid, make_loop: Any) -> None:
    history = MemoryHistory()
    recording(plain(), history).start(users_grid, arrays_of(make_module()), num_rounds=8)
    executor = FlowerExecutor(users_grid, timeout=5.0, keys=KEYS)
    module = make_module()
    remaining = ["client-0", "client-1", "client-2"]
    federation = Federation(executor.join(module, client_ids=remaining), module)
    loop = make_loop(executor)
    method = FedRecover(warmup_rounds=3, correction_period=4, final_rounds=1, tolerance_rate=None)
    result = loop.recover(federation, history, method, ["client-3"], batch_policy="fresh")
    scratch = loop.recover(
        federation, history, TrainFromScratch(), ["client-3"], batch_policy="fresh"
    )
    assert result.ledger.acp() == pytest.approx(3 / 8)
    start = history.read_round(0, ()).global_weights
    moved = (scratch.global_weights - start).norm()
    assert (result.global_weights - scratch.global_weights).norm() < 0.2 * moved


def test_arrays_without_names_are_in_the_order_of_the_state(users_grid: FakeGrid) -> None:
    for node in users_grid.nodes.values():
        node.app = users_app(as_list=True)
    history, module = MemoryHistory(), make_module()
    initial = ArrayRecord([v.numpy() for v in module.state_dict().values()])
    recording(plain(), history).start(users_grid, initial, num_rounds=1)
    layout = Federation.from_data(Digits(num_clients=4), module).layout
    torch.testing.assert_close(history.read_round(0).global_weights, layout.flatten(module))


def test_a_server_that_restarts_goes_on(users_grid: FakeGrid) -> None:
    whole, parts = MemoryHistory(), MemoryHistory()
    recording(plain(), whole).start(users_grid, arrays_of(make_module()), num_rounds=5)
    first = recording(plain(), parts)
    first.start(users_grid, first.weights_to_go_on_from(arrays_of(make_module())), num_rounds=2)
    second = recording(plain(), parts)
    second.start(users_grid, second.weights_to_go_on_from(arrays_of(make_module())), num_rounds=3)
    assert len(parts.rounds()) == 5
    torch.testing.assert_close(
        parts.read_round(4).global_weights, whole.read_round(4).global_weights
    )


@pytest.mark.parametrize("keys", [KEYS, None])
def test_a_client_that_was_forgotten_is_not_asked_any_more(
    users_grid: FakeGrid,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
    keys: Any,
) -> None:
    """It is still connected and listed; the training goes on without it."""
    remaining = tuple(c for c in SIZES if c != "client-2")
    for num_rounds in (2, 3):
        with LMDBHistory(tmp_path) as history:
            server = recording(plain(), history, keys=keys)
            begin = server.weights_to_go_on_from(arrays_of(make_module()))
            server.start(users_grid, begin, num_rounds=num_rounds)
        if num_rounds == 2:
            assert forget(tmp_path, ["client-2"]).updates == 2
    asked = [m.metadata.message_type for m in users_grid.find("client-2").asked]
    assert asked.count("train") == 2
    with LMDBHistory(tmp_path) as history:
        assert history.verify() == range(5)
        rounds = [history.read_round(t) for t in range(5)]
    assert all(r.client_ids == remaining for r in rounds)
    assert rounds[1].refused == {"client-2": "forgotten"}
    assert all(r.cohort == remaining and not r.refused for r in rounds[2:])
    said = [r.getMessage() for r in caplog.records if "forgotten" in r.getMessage()]
    assert said == [
        "Clients ['client-2'] were forgotten: they stay in `clients`, and are not asked to train."
    ]


def test_a_client_that_fails_is_refused_by_name(users_grid: FakeGrid) -> None:
    def fails(message: Any, context: Any) -> Any:
        raise OSError("no disk")

    users_grid.find("client-1").app = fails
    history = MemoryHistory()
    recording(plain(), history).start(users_grid, arrays_of(make_module()), num_rounds=1)
    stored = history.read_round(0)
    assert stored.client_ids == ("client-0", "client-2", "client-3")
    assert "no disk" in stored.refused["client-1"]


def test_a_client_that_was_not_listed_is_used_and_not_recorded(users_grid: FakeGrid) -> None:
    listed = {c: n for c, n in SIZES.items() if c != "client-3"}
    history = MemoryHistory()
    with pytest.warns(FedrecWarning, match="did not do what FedAvg"):  # it lacks an update
        recording(plain(), history, clients=listed).start(
            users_grid, arrays_of(make_module()), num_rounds=1
        )
    assert history.read_round(0).client_ids == ("client-0", "client-1", "client-2")


def test_a_size_that_is_not_the_listed_one_is_said(users_grid: FakeGrid) -> None:
    history = MemoryHistory()
    with pytest.warns(FedrecWarning, match="Round 1 is not recorded.*num-examples is"):
        recording(plain(), history, clients=dict.fromkeys(SIZES, 7)).start(
            users_grid, arrays_of(make_module()), num_rounds=1
        )
    assert not history.rounds()


class Mine(flower.FedAvg):
    """A strategy as users derive it: it keeps things in `start`, and changes what comes out."""

    factor = 1.0

    def start(self, *arguments: Any, **settings: Any) -> Any:
        self.rounds: list[int] = []
        return super().start(*arguments, **settings)

    def aggregate_train(self, server_round: Any, replies: Any) -> Any:
        self.rounds.append(server_round)
        arrays, metrics = super().aggregate_train(server_round, replies)
        changed = {k: Array(a.numpy() * np.float32(self.factor)) for k, a in arrays.items()}
        return ArrayRecord(changed), metrics


def test_a_strategy_with_a_start_of_its_own_runs_it(users_grid: FakeGrid) -> None:
    mine, history = Mine(fraction_evaluate=0.0, min_train_nodes=4), MemoryHistory()
    recording(mine, history).start(users_grid, arrays_of(make_module()), num_rounds=2)
    assert mine.rounds == [1, 2]
    assert len(history.rounds()) == 2
    mine.start(users_grid, arrays_of(make_module()), num_rounds=1)  # unwrapped again
    assert len(history.rounds()) == 2


def test_a_derived_strategy_that_does_something_else_is_said(users_grid: FakeGrid) -> None:
    mine, history = Mine(fraction_evaluate=0.0, min_train_nodes=4), MemoryHistory()
    mine.factor = 0.5
    with pytest.warns(FedrecWarning, match="Mine did not do what FedAvg"):
        recording(mine, history).start(users_grid, arrays_of(make_module()), num_rounds=1)
    assert len(history.rounds()) == 1


def test_a_strategy_without_a_known_rule_needs_one(users_grid: FakeGrid) -> None:
    adam = flower.FedAdam(fraction_evaluate=0.0, min_train_nodes=4)
    with pytest.raises(ConfigurationError, match="`aggregator=` names the rule"):
        recording(adam, MemoryHistory())
    history = MemoryHistory()
    with pytest.warns(FedrecWarning, match="FedAdam did not do what FedAvg"):
        result = recording(adam, history, aggregator=FedAvg()).start(
            users_grid, arrays_of(make_module()), num_rounds=2
        )
    assert {array.dtype for array in result.arrays.values()} == {"float64"}  # Flower's doing
    assert len(history.rounds()) == 2


def test_a_rule_that_cannot_be_tried_does_not_end_the_training(users_grid: FakeGrid) -> None:
    krum = flower.Krum(num_malicious_nodes=1, fraction_evaluate=0.0, min_train_nodes=4)
    history = MemoryHistory()
    with pytest.warns(FedrecWarning, match="Krum needs m >= 2f"):  # five clients, but there are 4
        recording(krum, history).start(users_grid, arrays_of(make_module()), num_rounds=1)
    assert len(history.rounds()) == 1


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_numbers_that_are_no_update_do_not_end_the_training(
    users_grid: FakeGrid, value: float
) -> None:
    """The strategy uses them, as it did before; 3e38 is finite, but no update of float32."""
    node = users_grid.find("client-1")

    def tamper(message: Message, reply: Message) -> list[Message]:
        arrays = reply.content["arrays"]
        for key, array in arrays.items():
            arrays[key] = Array(np.full(array.shape, value, np.float32))
        return [reply]

    node.tamper = tamper
    history = MemoryHistory()
    with pytest.warns(FedrecWarning, match=r"Round \d is not recorded.*NaN or infinity"):
        result = recording(plain(), history).start(
            users_grid, arrays_of(make_module()), num_rounds=2
        )
    assert not history.rounds()
    assert sorted(result.train_metrics_clientapp) == [1, 2]


def test_arrays_of_another_module_are_refused_by_name(users_grid: FakeGrid) -> None:
    other = MLP(in_features=64, hidden=(8,))
    with pytest.raises(ConfigurationError, match=r"arrays are not those of MLP.*HINT"):
        recording(plain(), MemoryHistory()).start(users_grid, arrays_of(other), num_rounds=1)


def visits(grid: FakeGrid) -> list[int]:
    """How often each node was asked who it is."""
    return [
        sum(m.metadata.message_type == "query.fedrec" for m in node.asked)
        for node in grid.nodes.values()
    ]


def test_nodes_whose_keys_nobody_knows_are_asked_once_who_they_are(users_grid: FakeGrid) -> None:
    """As in Flower's simulation, in which keys are random."""
    history = MemoryHistory()
    recording(plain(), history, keys=None).start(users_grid, arrays_of(make_module()), num_rounds=2)
    assert history.read_round(1).client_ids == tuple(SIZES)
    assert visits(users_grid) == [1, 1, 1, 1]


def test_nodes_that_are_known_by_their_keys_are_not_asked(users_grid: FakeGrid) -> None:
    """Nor is a stranger, whatever it says."""
    named = {f"key-{KEYS[c]}": n for c, n in SIZES.items()}
    users_grid.add("client-0", app=users_app(), key=b"another key")
    history = MemoryHistory()
    with pytest.warns(FedrecWarning, match="did not do what FedAvg"):  # it lacks an update
        recording(plain(), history, keys=None, clients=named).start(
            users_grid, arrays_of(make_module()), num_rounds=1
        )
    assert history.read_round(0).client_ids == tuple(named)
    assert visits(users_grid) == [0, 0, 0, 0, 0]


def test_a_recovery_knows_the_recorded_keys(users_grid: FakeGrid, make_loop: Any) -> None:
    """Whoever claims an id without its key is not asked, whatever else may have changed."""
    history = MemoryHistory()
    recording(plain(), history).start(users_grid, arrays_of(make_module()), num_rounds=3)

    def recover(keys: Any) -> Any:
        executor, module = FlowerExecutor(users_grid, timeout=5.0, keys=keys), make_module()
        federation = Federation(executor.join(module, client_ids=list(SIZES)[:3]), module)
        loop = make_loop(executor)
        return loop.recover(
            federation, history, TrainFromScratch(), ["client-3"], batch_policy="fresh"
        )

    key = KEYS["client-1"]
    with pytest.raises(ConfigurationError, match=r"'client-0' had the key .* no key was asked for"):
        recover(None)
    users_grid.find("client-1").key = b"new"
    new = key_fingerprint(b"new")
    with pytest.raises(ConfigurationError, match=f"had the key {key} .* its key is {new} now"):
        recover({**KEYS, "client-1": new})
    assert recover({**KEYS, "client-1": [key, new]}).rounds == 3


def test_another_recording_is_not_continued(users_grid: FakeGrid) -> None:
    history = MemoryHistory()
    recording(plain(), history).start(users_grid, arrays_of(make_module()), num_rounds=1)
    with pytest.raises(ConfigurationError, match="The history holds another recording"):
        recording(plain(), history, local_lr=0.1).start(
            users_grid, arrays_of(make_module()), num_rounds=1
        )


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("clients", {0: 12}, "`client_id` to be a string of 1 to 200 characters .* but got 0"),
        ("clients", {"a": 0}, r"`clients\['a'\]` to be an integer of at least 1, but got 0"),
        ("clients", ["a"], "`clients` to be a mapping of client ids .* but got \\['a'\\]"),
        ("clients", {}, "`clients` to be a mapping of client ids .* but got {}"),
        ("keys", {"a": 5}, r"`keys\['a'\]` to be a fingerprint, or a list of some, but got 5"),
        ("keys", {"a": []}, r"`keys\['a'\]` to be a fingerprint"),
        ("keys", {"a": "5f", "b": ["c8", "5f"]}, "'5f' is that of `a` and of `b`"),
    ],
)
def test_clients_and_keys_that_cannot_be_meant_are_refused(
    argument: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        recording(plain(), MemoryHistory(), **{argument: value})


def test_sizes_of_numpy_are_taken(users_grid: FakeGrid) -> None:
    history = MemoryHistory()
    strategy = recording(plain(), history, clients={c: np.int64(n) for c, n in SIZES.items()})
    strategy.start(users_grid, arrays_of(make_module()), num_rounds=1)
    assert history.manifest.clients == SIZES


def test_what_callers_want_of_the_strategy_it_has() -> None:
    strategy = recording(plain(fraction_train=0.5), MemoryHistory())
    assert strategy.fraction_train == 0.5
    with pytest.raises(AttributeError):
        _ = strategy.nonsense
