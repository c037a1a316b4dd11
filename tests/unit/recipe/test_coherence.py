"""What a run would refuse after it recorded is found in the recipe, all of it at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedrec.exceptions import ConfigurationError, RecipeError
from fedrec.recipe import load_recipe, run
from fedrec.recipe.points import sweep_points
from fedrec.recipe.schema import build_parts
from fedrec.recoverers import FedRecover

_RECIPE = """
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: [client-1, client-3], batch_size: 8}
aggregator: FedAvg
attack: BackdoorAttack
detector: KnownMalicious
record: {max_rounds: 4, server_lr: 0.5}
recoverers: [HistoricalOnly]
"""
_OWN = """
from torch.utils.data import Subset
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError
from fedrec.recoverers import HistoricalOnly

class Choosy(HistoricalOnly):
    "Takes more than three rounds, and would rather have more than four."
    def check_plan(self, max_rounds, server_samples):
        if max_rounds <= 3:
            raise ConfigurationError(f"Choosy has {max_rounds} rounds and {server_samples}.")
        return "Choosy does little in 4 rounds." if max_rounds == 4 else None

class Public(Digits):
    "The server has what is public."
    @property
    def server_dataset(self):
        return Subset(self.test_dataset, range(7))
"""
_LEAVES = "record.sampler={class_path: ClientSampler, init_args: {leaves: {client-9: 1}}}"
_ROUNDS = "Expected `max_rounds` to be at most the 4 rounds of the recording, but got 5."
_DATA = "needs clean data at the server, but there are none."


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_coherence.py").write_text(_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(_RECIPE)
    yield path
    sys.modules.pop("own_coherence", None)


def mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, ["own_coherence"])
    return [error.partition(" HINT: ")[0] for error in caught.value.errors]


def is_right(path: Path, *overrides: str) -> bool:
    return load_recipe(path, overrides, ["own_coherence"]).name == "small"


def test_server_data_that_are_not_there(path: Path) -> None:
    methods = "recoverers=[HistoricalOnly, FineTune, Crab, KnowledgeDistillation]"
    assert mistakes(path, methods, "aggregator=FLTrust", "recover.max_rounds=5") == [
        f"recover.max_rounds: {_ROUNDS}",
        f"aggregator: FLTrust {_DATA}",
        f"recoverers.1: FineTune {_DATA}",
        f"recoverers.2: Crab {_DATA}",
        f"recoverers.3: KnowledgeDistillation {_DATA}",
    ]
    rule = "aggregator={class_path: Bucketing, init_args: {rule: FLTrust}}"
    assert mistakes(path, rule) == [f"aggregator: Bucketing {_DATA}"]
    assert is_right(path, methods, "aggregator=FLTrust", "data.init_args.server_samples=10")


def test_more_samples_than_the_server_has(path: Path) -> None:
    def fine_tune(num_samples: int) -> str:
        return f"recoverers=[{{class_path: FineTune, init_args: {{num_samples: {num_samples}}}}}]"

    text = "recoverers.0: FineTune takes {} samples, but the server has {}."
    ten = "data.init_args.server_samples=10"
    assert mistakes(path, ten, fine_tune(11)) == [text.format(11, 10)]
    assert is_right(path, ten, fine_tune(10))
    own = "data={class_path: Public, init_args: {num_clients: 5}}"
    assert mistakes(path, own, fine_tune(8)) == [text.format(8, 7)]
    assert is_right(path, own, fine_tune(7))


@pytest.mark.parametrize(
    ("overrides", "hostile"),
    [
        ([], "'client-1', 'client-3'"),
        (["federation.fake_clients=1"], "'client-1', 'client-3', 'fake-0'"),
        (["recover.exclude=[client-3, client-0]"], "'client-3'"),
        (["detector={class_path: KnownMalicious, init_args: {ids: [client-1]}}"], "'client-1'"),
        (["recover.exclude=[client-0]"], None),
        (["attack=null"], None),
        (["federation.malicious=0"], None),
        (["detector=FLDetector"], None),
        (["record.sampler={class_path: ClientSampler, init_args: {fraction: 0.5}}"], None),
    ],
)
def test_help_that_attackers_would_not_give(
    path: Path, overrides: list[str], hostile: str | None
) -> None:
    overrides = [*overrides, "recoverers=[GradientAscent]"]
    if hostile is None:
        assert is_right(path, *overrides)
    else:
        (error,) = mistakes(path, *overrides)
        assert error == (
            f"recoverers.0: GradientAscent asks the excluded clients for help, but [{hostile}] are "
            "malicious and would send what they want."
        )


def test_clients_are_checked_beside_other_mistakes(path: Path) -> None:
    wrong = ["aggregator=Medain", "federation.batch_size=0", "recover.exclude=[nobody, 3]"]
    errors = mistakes(path, *wrong, "federation.malicious=5", _LEAVES)
    assert [error.partition(": ")[0] for error in errors] == [
        "federation.batch_size",
        "aggregator",
        "recover.exclude.1",
        "federation.malicious",
        "record.sampler.init_args",
    ]
    # A mistake of a value itself is not followed by what comes of it.
    assert len(mistakes(path, "federation.malicious=-1", "record.max_rounds=0")) == 2


def test_methods_of_ones_own_speak_for_themselves(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choosy, short = "recoverers=[HistoricalOnly, Choosy]", "recover.max_rounds=3"
    assert mistakes(path, choosy, short) == ["recoverers.1: Choosy has 3 rounds and 0."]
    assert is_right(path, choosy, short, "loop.fast_dev_run=true")
    with pytest.raises(RecipeError, match="Choosy has 3 rounds and 0"):
        sweep_points(
            path,
            {"record.max_rounds": [3, 5]},
            overrides=[choosy],
            allow=["own_coherence"],
        )
    recipe = load_recipe(path, [choosy], ["own_coherence"])
    remark = "recoverers.1: Choosy does little in 4 rounds."
    assert build_parts(recipe).remarks == [remark]
    with caplog.at_level(logging.WARNING, logger="fedrec.recipe"):
        run(recipe, output_dir=tmp_path, steps=["record"], progress=False)
    assert caplog.messages == [remark]


def test_rounds_of_fedrecover() -> None:
    new = FedRecover(warmup_rounds=3, final_rounds=2, start_round=4)
    assert new.check_plan(10, None) is None  # one round in between
    assert new.check_plan(9, None) == (
        "FedRecover asks all clients in each of the 5 rounds from round 4 on, so it estimates "
        "nothing and spares them nothing (warmup_rounds=3, final_rounds=2, correction_period=10). "
        "HINT: lower these, or record more rounds."
    )
    with pytest.raises(ConfigurationError, match="less than the 4 rounds of the recovery"):
        new.check_plan(4, None)
    with pytest.raises(ConfigurationError, match="true, false, or an integer of at least 1"):
        FedRecover(diagnose=0)


_START = "Expected `start_round` to be less than the 4 rounds of the recovery, but got 4."


def test_fedrecover_has_rounds_to_estimate_in(path: Path) -> None:
    node = "recoverers=[{{class_path: FedRecover, init_args: {{warmup_rounds: 3, {}}}}}]"
    assert mistakes(path, node.format("start_round: 4")) == [f"recoverers.0: {_START}"]
    for final_rounds, said in ((0, False), (1, True)):
        recipe = load_recipe(path, [node.format(f"final_rounds: {final_rounds}")])
        assert bool(build_parts(recipe).remarks) == said
