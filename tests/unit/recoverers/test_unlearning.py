"""What FineTune, KnowledgeDistillation and GradientAscent refuse, and what they achieve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.attacks import BackdoorAttack
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError
from fedrec.history import MemoryHistory, RoundIndex
from fedrec.models import MLP
from fedrec.recoverers import FineTune, GradientAscent, KnowledgeDistillation
from fedrec.testing.problems import classifying_federation, quadratic_federation


def loop(**kwargs) -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False, **kwargs)


class Forgetful(MemoryHistory):
    """Has nothing of c4 once it was recorded."""

    @property
    def forgotten(self) -> tuple[str, ...]:
        return ("c4",)

    def index(self, t: int) -> RoundIndex:
        index = super().index(t)
        return replace(index, bounds={c: b for c, b in index.bounds.items() if c != "c4"})


def recorded(federation: Federation, cls=MemoryHistory, **kwargs) -> MemoryHistory:
    history = cls(**kwargs)
    loop().record(federation, FedAvg(), history, max_rounds=3, server_lr=0.1)
    return history


@pytest.mark.parametrize("recoverer", [FineTune(), KnowledgeDistillation()])
def test_data_at_the_server_and_a_lightning_client_are_needed(recoverer) -> None:
    bare = quadratic_federation()
    with pytest.raises(ConfigurationError, match="needs clean data at the server"):
        loop().recover(bare, recorded(bare), recoverer, ["q4"])
    odd = quadratic_federation(server_data=classifying_federation().server_data)
    with pytest.raises(ConfigurationError, match="none of them is a LightningClient"):
        loop().recover(odd, recorded(odd), recoverer, ["q4"])


def test_samples_that_are_not_there_are_refused() -> None:
    federation = classifying_federation()  # 30 samples at the server
    with pytest.raises(ConfigurationError, match="takes 31 samples, but the server has 30"):
        loop().recover(federation, recorded(federation), FineTune(num_samples=31), ["c4"])
    with pytest.raises(ConfigurationError, match="`num_samples` beside `beta`"):
        FineTune(beta=0.5)


@pytest.mark.parametrize("recoverer", [KnowledgeDistillation(), GradientAscent()])
def test_updates_that_are_gone_are_missed(recoverer) -> None:
    federation = classifying_federation()
    history = recorded(federation, keep={"every": 2})
    assert ["c4" in history.index(t).kept for t in range(3)] == [True, False, True]
    if isinstance(recoverer, GradientAscent):
        loop().recover(federation, history, recoverer, ["c4"])  # the last one is enough
    else:
        with pytest.raises(ConfigurationError, match=r"kept nothing of \['c4'\] in round 1"):
            loop().recover(federation, history, recoverer, ["c4"])
    history = recorded(federation, cls=Forgetful)
    with pytest.raises(ConfigurationError, match=r"has forgotten \['c4'\]"):
        loop().recover(federation, history, recoverer, ["c4"])


def test_fine_tuning_needs_no_update() -> None:
    federation = classifying_federation()
    history = recorded(federation, cls=Forgetful)
    result = loop().recover(federation, history, FineTune(num_epochs=2), ["c4"])
    assert result.ledger.acp() == 1.0


def test_ascent_needs_a_client_that_is_there_and_means_well() -> None:
    federation = classifying_federation()
    history, recover = recorded(federation), loop().recover
    attack = BackdoorAttack()
    with pytest.raises(ConfigurationError, match=r"\['c4'\] are malicious"):
        recover(federation, history, GradientAscent(), ["c4"], attack=attack)
    left = Federation(federation.clients[:4], federation.module)
    with pytest.raises(ConfigurationError, match=r"\['c4'\] are not in the federation"):
        recover(left, history, GradientAscent(), ["c4"])
    others = quadratic_federation()
    with pytest.raises(ConfigurationError, match="'q4' is a QuadraticClient"):
        recover(others, recorded(others), GradientAscent(), ["q4"])


def test_a_trial_run_does_a_few_epochs_only() -> None:
    federation = classifying_federation()
    history = recorded(federation)
    assert loop(fast_dev_run=2).recover(federation, history, FineTune(), ["c4"]).rounds == 2


def on_digits(**kwargs) -> tuple[Digits, Federation]:
    torch.manual_seed(0)
    data = Digits(num_clients=10, server_samples=200)
    module = MLP(in_features=64, hidden=(32,), lr=0.1)
    return data, Federation.from_data(data, module, batch_size=32, **kwargs)


def test_distillation_mends_the_subtraction_without_the_backdoor() -> None:
    _, federation = on_digits(malicious=2)
    attack, history = BackdoorAttack(scale=5.0), MemoryHistory()
    loop(seed=1).record(federation, FedAvg(), history, max_rounds=150, server_lr=0.3, attack=attack)

    def tested(recoverer) -> dict:
        excluded = federation.malicious
        result = loop().recover(federation, history, recoverer, excluded, attack=attack)
        return loop().test(federation, result.global_weights, attack=attack)

    poisoned = tested(FineTune(num_epochs=0))
    subtracted = tested(KnowledgeDistillation(num_epochs=0))
    distilled = tested(KnowledgeDistillation(num_epochs=20))
    assert poisoned["asr"] > 0.9
    assert subtracted["ter"] > poisoned["ter"] + 0.2
    assert distilled["asr"] < 0.2
    assert distilled["ter"] < poisoned["ter"] + 0.1


def test_ascent_hurts_the_target_more_than_the_others() -> None:
    data, federation = on_digits()
    history = MemoryHistory()
    loop(seed=1).record(federation, FedAvg(), history, max_rounds=100, server_lr=0.3)

    def losses(weights: torch.Tensor) -> tuple[float, float]:
        """Of the target, and the mean over the others."""
        federation.layout.load(federation.module, weights)
        with torch.no_grad():
            found = [
                float(torch.nn.functional.cross_entropy(federation.module(x), y))
                for x, y in (d.tensors for d in data.client_datasets().values())
            ]
        return found[0], sum(found[1:]) / 9

    def recovered(recoverer) -> tuple[float, float]:
        result = loop().recover(federation, history, recoverer, ["client-0"])
        return losses(result.global_weights)

    target, others = recovered(FineTune(num_epochs=0))
    ascent = GradientAscent(lr=0.1, batch_size=32, stop_distance=None, radius=0.5, final_rounds=0)
    climbed, carried = recovered(ascent)
    assert climbed > 1.1 * target
    assert climbed - target > carried - others
