"""Components that change what they are shown, or return what they must not: refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedrec import Callback, Client, FederatedLoop, Federation
from fedrec.aggregators import Aggregator, FedAvg
from fedrec.attacks import Attack
from fedrec.detectors import Detector
from fedrec.exceptions import ConfigurationError, FedrecError, UpdateError
from fedrec.history import MemoryHistory
from fedrec.loop.checkpoint import load_state, save_state
from fedrec.recoverers import Estimator, FedRecover, Recoverer, TrainFromScratch
from fedrec.recoverers.estimators.base import Estimates
from fedrec.testing.problems import classifying_federation, quadratic_federation
from fedrec.types import ClientUpdate, Detection


def make_loop(*callbacks: Callback, **kwargs: Any) -> FederatedLoop:
    return FederatedLoop(
        accelerator="cpu", enable_progress_bar=False, logger=False, callbacks=list(callbacks),
        **kwargs,
    )  # fmt: skip


def record(rule: Aggregator | None = None, callbacks: Any = (), **kwargs: Any) -> Any:
    history = MemoryHistory()
    result = make_loop(*callbacks).record(
        quadratic_federation(), rule or FedAvg(), history, max_rounds=3, server_lr=0.3, **kwargs
    )
    return result, history


def recover(method: Recoverer, **kwargs: Any) -> Any:
    federation, history = quadratic_federation(), record()[1]
    return make_loop(**kwargs).recover(federation, history, method, federation.malicious)


class Shares(Client):
    """Trains in the memory of the vector that it is given."""

    def __init__(self, client_id: str, module: nn.Module) -> None:
        super().__init__(client_id, num_samples=4)
        self.module = module

    def local_update(self, global_weights, ctx):
        vector_to_parameters(global_weights, self.module.parameters())
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.data.sub_(0.1)
        trained = parameters_to_vector(self.module.parameters()).detach()
        return ClientUpdate(update=global_weights - trained, num_samples=4)


def test_a_client_that_trains_in_the_servers_memory_is_refused() -> None:
    module = nn.Linear(2, 1)
    federation = Federation([Shares(c, nn.Linear(2, 1)) for c in "ab"], module)
    with pytest.raises(UpdateError, match=r"Shares\.local_update to leave `global_weights`.*clone"):
        make_loop().record(federation, FedAvg(), MemoryHistory(), max_rounds=2, server_lr=0.3)


class Does(Aggregator):
    """A mean, after something is done to the weights."""

    def __init__(self, *, returns: Any = None, wrong: bool = False) -> None:
        self.returns, self.wrong = returns, wrong

    def aggregate(self, updates, client_weights=None, ctx=None):
        if self.wrong:
            return {"none": None, "float64": updates[0].double()}[self.returns]
        ctx.global_weights.mul_(0.5)
        return updates.mean(dim=0)


class Sends(Attack):
    """Does, or returns, what an attack must not."""

    def __init__(self, *, what: str = "weights") -> None:
        self.what = what

    def craft(self, updates, malicious, ctx):
        if self.what == "weights":
            ctx.global_weights.mul_(2)
        elif self.what == "updates":
            updates.neg_()
        elif self.what == "graph":
            return torch.where(malicious[:, None], torch.ones((), requires_grad=True), updates)
        return {"none": None, "float64": updates.double()}.get(self.what, updates)


class Looks(Detector):
    """Centres the updates that it is shown in place, or gives this verdict."""

    def __init__(self, *, says: Any = None) -> None:
        self.says = says

    def observe(self, record):
        if self.says is None:
            record.updates.sub_(record.updates.mean(dim=0))

    def result(self):
        return Detection(malicious=(), seen=()) if self.says is None else self.says


class Scales(Callback):
    """Scales what clients sent in place."""

    def on_updates(self, loop, ctx, updates):
        updates.updates.mul_(2)


class Halves(Callback):
    """Halves the weights that a round starts from in place."""

    def on_round_start(self, loop, ctx):
        ctx.global_weights.mul_(0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": Does()}, r"Does\.aggregate to leave `global_weights`"),
        ({"rule": Does(returns="none", wrong=True)}, r"Does\.aggregate to return a tensor.*NoneTy"),
        ({"rule": Does(returns="float64", wrong=True)}, r"Does\.aggregate.*float32.*float64"),
        ({"attack": Sends()}, r"Sends\.craft to leave `global_weights`"),
        ({"attack": Sends(what="updates")}, r"Sends\.craft to leave `updates`.*clone"),
        ({"attack": Sends(what="none")}, r"Sends\.craft to return a tensor.*NoneType"),
        ({"attack": Sends(what="float64")}, r"Sends\.craft to return torch.float32.*float64"),
        ({"detector": Looks()}, r"Looks\.observe to leave `updates`.*clone"),
        ({"detector": Looks(says=["c1"])}, r"Looks\.result to return a Detection, but got list"),
        (
            {"detector": Looks(says=Detection(malicious=("d",), seen=("d",)))},
            r"Looks\.result to flag clients of the recording, but it flags \['d'\]",
        ),
        ({"callbacks": [Scales()]}, r"`on_updates` of callbacks to leave `updates`"),
        ({"callbacks": [Halves()]}, r"`on_round_start` of callbacks to leave `global_weights`"),
    ],
)
def test_a_recording_refuses_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FedrecError, match=message):
        record(**arguments)


def test_clients_of_a_verdict_are_no_text() -> None:
    with pytest.raises(ConfigurationError, match="Expected `malicious` to be clients in a tuple"):
        Detection(malicious="c1", seen=("c1",))  # type: ignore[arg-type]


class Everybody(Attack):
    """Turns all updates around, whoever sends them."""

    full_knowledge = True

    def craft(self, updates, malicious, ctx):
        return -updates


class Malicious(Attack):
    """Turns those of malicious clients around."""

    full_knowledge = True

    def craft(self, updates, malicious, ctx):
        return torch.where(malicious[:, None], -updates, updates)


@pytest.mark.parametrize("num_shards", [None, 2])
def test_only_malicious_clients_send_what_an_attack_makes(num_shards: int | None) -> None:
    weights = []
    for attack in (Everybody(), Malicious()):
        loop = make_loop(num_shards=num_shards)
        result = loop.record(
            quadratic_federation(), FedAvg(), MemoryHistory(),
            max_rounds=3, server_lr=0.3, attack=attack,
        )  # fmt: skip
        weights.append(result.global_weights)
    assert torch.equal(*weights)


def test_what_is_computed_with_a_graph_is_kept_without() -> None:
    result, history = record(attack=Sends(what="graph"))
    assert not result.global_weights.requires_grad
    assert not history.read_round(1).updates.requires_grad
    assert history.read_round(1).updates[-1].tolist() == [1.0] * 4


class Steps(Recoverer):
    """Goes on as recorded, and does what a recoverer must not, or may."""

    def __init__(self, *, what: str = "") -> None:
        self.what, self.memory = what, {}

    def initial_weights(self, history):
        weights = super().initial_weights(history)
        return None if self.what == "start" else weights

    def step(self, t, global_weights, ctx):
        if self.what == "in place":
            return global_weights.mul_(0.5)
        if self.what == "nobody":
            ctx.exact([], "correction")
        if self.what == "rows":
            return ctx.server_step(ctx.exact(ctx.client_ids, "correction").updates.double())
        if self.what == "keys":
            self.memory = {0: torch.ones(1)}
        new = ctx.server_step(ctx.exact(ctx.client_ids, "correction"))
        return {"none": None, "float64": new.double()}.get(self.what, new)

    def state_dict(self):
        return {"memory": self.memory}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("in place", r"Steps\.step to leave `global_weights`"),
        ("none", r"Steps\.step to return a tensor of shape \(4,\), but got NoneType"),
        ("float64", r"Steps\.step to return torch\.float32, but got torch\.float64"),
        ("start", r"Steps\.initial_weights to return a tensor.*NoneType"),
        ("rows", r"Steps to give updates as a tensor of torch\.float32, but got torch\.float64"),
    ],
)
def test_a_recovery_refuses_by_name(what: str, message: str) -> None:
    with pytest.raises(FedrecError, match=message):
        recover(Steps(what=what))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Scales(), r"`on_updates` of callbacks to leave `updates`"),
        (Halves(), r"`on_round_start` of callbacks to leave `global_weights`"),
    ],
)
def test_callbacks_leave_alone_what_a_recovery_shows_them(callback: Any, message: str) -> None:
    federation, history = quadratic_federation(), record()[1]
    with pytest.raises(ConfigurationError, match=message):
        make_loop(callback).recover(federation, history, TrainFromScratch(), federation.malicious)


def test_numbers_of_a_verdict_are_pythons() -> None:
    verdict = Detection(
        malicious=("a",), seen=("a", "b"), round=np.int64(3),
        scores={"a": torch.tensor(0.5), "b": np.float32(0.25)},
    )  # fmt: skip
    assert type(verdict.round) is int
    assert verdict.round == 3
    assert json.dumps(verdict.scores) == '{"a": 0.5, "b": 0.25}'


def test_a_state_that_no_checkpoint_holds_is_refused_after_a_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"`recoverer\.memory` of a checkpoint.*keys \[0"):
        recover(Steps(what="keys"), default_root_dir=tmp_path)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({0: 1}, r"a dict with the keys \[0\]"),
        (np.float32(1), "a float32"),
        ({1, 2}, "a set"),
        (torch.ones(1, dtype=torch.bfloat16), "a tensor of torch.bfloat16"),
    ],
)
def test_checkpoints_refuse_what_would_come_back_as_something_else(
    tmp_path: Path, value: Any, found: str
) -> None:
    path = tmp_path / "state.npz"
    with pytest.raises(ConfigurationError, match=rf"`rule\.m\[1\]` of a checkpoint.*{found}"):
        save_state(path, {"rule": {"m": [0, value]}})
    save_state(path, {"rule": {"m": [0, None, True, "a", 0.5, torch.ones(1)]}})
    assert load_state(path)["rule"]["m"][:5] == [0, None, True, "a", 0.5]


def test_asking_nobody_costs_nothing_and_leaves_the_fast_path_alone() -> None:
    federation, history = classifying_federation(), MemoryHistory()
    make_loop().record(federation, FedAvg(), history, max_rounds=3, server_lr=0.3)
    results = [
        make_loop().recover(federation, history, method, federation.malicious)
        for method in (Steps(what="nobody"), Steps())
    ]
    assert results[0].execution == results[1].execution
    assert results[0].execution.get("departure") is None
    assert len(results[0].ledger.entries) == len(results[1].ledger.entries) == 12
    assert torch.equal(results[0].global_weights, results[1].global_weights)


class Guesses(Estimator):
    """Estimates of another form than asked for."""

    def __init__(self, *, what: str) -> None:
        self.what = what

    def observe(self, record, exact, global_weights, reason):
        return None

    def estimate(self, record, global_weights):
        updates, m = record.updates, len(record.client_ids)
        largest, usable = updates.abs().amax(dim=1), torch.ones(m, dtype=torch.bool)
        if self.what == "tensor":
            return updates
        if self.what == "rows":
            return Estimates(updates[:1], largest[:1], usable[:1])
        if self.what == "float64":
            return Estimates(updates.double(), largest, usable)
        return Estimates(updates, largest[0], usable)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tensor", r"Guesses\.estimate to return Estimates, but got Tensor"),
        ("rows", r"Guesses\.estimate to return shape \(4, 4\), but got \(1, 4\)"),
        ("float64", r"Guesses\.estimate to return torch\.float32"),
        ("largest", r"`largest` of what Guesses\.estimate returns to have shape \(4,\)"),
    ],
)
def test_estimates_of_another_form_are_refused(what: str, message: str) -> None:
    method = FedRecover(
        estimator=Guesses(what=what), warmup_rounds=1, correction_period=None, final_rounds=0
    )
    with pytest.raises(FedrecError, match=message):
        recover(method)


class Halves(FedAvg):
    """Stores another value than it was given."""

    def __init__(self, *, share: float = 1.0) -> None:
        super().__init__()
        self.share = share / 2


def test_arguments_are_stored_as_they_are_given() -> None:
    with pytest.raises(ConfigurationError, match=r"Halves\(share=0.5\) becomes Halves\(share=0.25"):
        record(Halves())


@pytest.mark.parametrize("num_samples", [0, -1, 1.5, True])
def test_a_client_has_samples(num_samples: Any) -> None:
    class Own(Client):
        def local_update(self, global_weights, ctx):
            return None

    with pytest.raises(ConfigurationError, match="Expected `num_samples` to be an integer of at"):
        Own("a", num_samples=num_samples)


class Empties(Attack):
    """Takes its clients' data away, or gives something else."""

    def __init__(self, *, gives: Any = ()) -> None:
        self.gives = gives

    def poison_dataset(self, dataset, client_id):
        return self.gives


@pytest.mark.parametrize(("gives", "found"), [((), "one without samples"), (None, "NoneType")])
def test_poisoned_data_have_samples(gives: Any, found: str) -> None:
    federation = classifying_federation()
    with pytest.raises(
        ConfigurationError, match=rf"Empties\.poison_dataset.*'c4', but got {found}"
    ):
        make_loop().record(
            federation, FedAvg(), MemoryHistory(),
            max_rounds=1, server_lr=0.3, attack=Empties(gives=gives),
        )  # fmt: skip


class FlipsInPlace(Attack):
    def poison_dataset(self, dataset, client_id):
        dataset.tensors[1].zero_()
        return dataset


def test_an_attack_leaves_the_clients_own_data_alone() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"FlipsInPlace\.poison_dataset to leave `dataset.tensors\[1\]` .* `dataset.*clone",
    ):
        make_loop().record(
            classifying_federation(), FedAvg(), MemoryHistory(),
            max_rounds=1, server_lr=0.3, attack=FlipsInPlace(),
        )  # fmt: skip


def test_components_that_behave_are_not_refused() -> None:
    result = recover(TrainFromScratch())
    assert result.rounds == 3
