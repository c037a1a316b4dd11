"""Whole recipes: every mistake at once, and the objects they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedrec.exceptions import RecipeError
from fedrec.history import LMDBHistory
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts, folder_name, label_of

_RECIPE = """
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1}
aggregator: Median
detector: KnownMalicious
record: {max_rounds: 4, server_lr: 0.1}
recoverers: [HistoricalOnly]
"""
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(more: str = "", recipe: str = _RECIPE) -> Path:
        path = tmp_path / "small.yaml"
        path.write_text(recipe + more)
        return path

    return write


def mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value.errors


def test_all_mistakes_are_raised_at_once(write: Write) -> None:
    errors = mistakes(
        write("sede: 1\n"),
        "data.init_args.num_clients=0",
        "model=MPL",
        "federation={malicios: 1}",
        "aggregator=TrimedMean",
        "record={max_rounds: four}",
        "record.server_lr=???",
        "recoverers=[HistoricalOnly, HistoricalOnly, Nothing]",
        "loop.executor=fast",
        "recover.exclude=all",
        "name=../elsewhere",
    )
    assert [e.partition(":")[0] for e in errors] == [
        "record.server_lr",
        "sede",
        "name",
        "data.init_args.num_clients",
        "model.class_path",
        "federation.malicios",
        "aggregator",
        "loop.executor",
        "record.max_rounds",
        "recover.exclude",
        "recoverers.1.label",
        "recoverers.2",
    ]


def test_required_sections(write: Write) -> None:
    errors = mistakes(write(recipe="seed: 0\n"))
    assert errors[:4] == [
        f"{key}: Expected a section `{key}`, but there is none."
        for key in ("data", "model", "aggregator", "record")
    ]


def test_detected_needs_a_detector(write: Write) -> None:
    (error,) = mistakes(write(), "detector=null")
    assert error == (
        'recover.exclude: Expected a `detector` for exclude="detected", but there is none. HINT: '
        "add one, or list the clients to exclude."
    )
    load_recipe(write(), ["detector=null", "recover.exclude=[client-0]"])
    load_recipe(write(), ["detector=null", "recoverers=null"])


def test_stopping_on_detection_needs_a_detector(write: Write) -> None:
    without = ["detector=null", "recoverers=null", "record.stop_on_detection=true"]
    (error,) = mistakes(write(), *without)
    assert error.startswith(
        "record.stop_on_detection: Expected `stop_on_detection` to be false without a detector"
    )
    load_recipe(write(), ["record.stop_on_detection=true"])


def test_excluded_clients_are_texts(write: Write) -> None:
    assert mistakes(write(), "recover.exclude=[client-0, 3]") == [
        "recover.exclude.1: Expected `exclude` to be client ids, but got 3."
    ]


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("history={class_path: LMDBHistory, init_args: {path: /tmp/x}}", "history.init_args.path",
         "the run folder decides"),
        ("loop.default_root_dir=/tmp/x", "loop.default_root_dir", "the run folder decides"),
        ("record.aggregator=Median", "record.aggregator", "a section of its own"),
        ("recover.resume=true", "recover.resume", "always goes on"),
        ("recover.name=x", "recover.name", "`label`"),
        ("federation.server_data=x", "federation.server_data", "`server_samples`"),
    ],
)  # fmt: skip
def test_what_the_run_decides(write: Write, override: str, key: str, hint: str) -> None:
    (error,) = mistakes(write(), override)
    assert error.startswith(f"{key}: ")
    assert hint in error


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "", "a\\b"])
def test_names_cannot_lead_elsewhere(write: Write, name: str) -> None:
    (error,) = mistakes(write(), f"name={name!r}")
    assert error.startswith("name: Expected `name` to be a plain folder name")


def test_labels(write: Write) -> None:
    assert folder_name("FedRecover w/o estimates") == "FedRecover-w-o-estimates"
    assert folder_name("../../etc") == "etc"
    assert label_of("fedrec.recoverers.FedRecover") == "FedRecover"
    assert label_of({"class_path": "FedRecover", "label": "mine"}) == "mine"
    both = "[{class_path: FedRecover, label: a/b}, {class_path: FedRecover, label: a b}]"
    (error,) = mistakes(write(), f"recoverers={both}")
    assert error.startswith("recoverers.1.label: Expected labels that differ")
    (error,) = mistakes(write(), "recoverers=[{class_path: FedRecover, label: ../..}]")
    assert error.startswith("recoverers.0.label: Expected `label` to be")


def test_parts(write: Write) -> None:
    recipe = load_recipe(write(), ["seed=5", "record.sampler=ClientSampler"])
    parts = build_parts(recipe)
    assert recipe.name == "small"
    assert parts.data.seed == 5
    assert parts.federation == {"seed": 5, "malicious": 1}
    assert parts.loop == {"seed": 5}
    assert parts.record["max_rounds"] == 4
    assert type(parts.record["sampler"]).__name__ == "ClientSampler"
    assert parts.attack is None
    assert parts.exclude == "detected"
    assert list(parts.recoverers) == ["HistoricalOnly"]
    assert parts.history == (LMDBHistory, {})


def test_initial_weights_are_a_function_of_the_seed(write: Write) -> None:
    def weights(seed: int) -> torch.Tensor:
        parts = build_parts(load_recipe(write(), [f"seed={seed}"]))
        return torch.nn.utils.parameters_to_vector(parts.model.parameters())

    state = torch.random.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))


def test_loggers_of_lightning(write: Write, tmp_path: Path) -> None:
    node = f"{{class_path: CSVLogger, init_args: {{save_dir: {tmp_path}}}}}"
    recipe = load_recipe(write(), [f"loop.logger=[{node}]"])
    (logger,) = build_parts(recipe).loop["logger"]
    assert type(logger).__name__ == "CSVLogger"


@pytest.mark.parametrize(
    "override",
    [
        "record.max_rounds=0",
        "record.server_lr=-0.1",
        "record.on_bad_update=ignore",
        "recover.batch_policy=newest",
        "recover.max_rounds=0",
        "recover.server_lr=0.0",
        "federation.malicious=1.5",
        "federation.malicious=-1",
        "federation.batch_size=0",
        "federation.local_steps=0",
        "federation.local_lr=0.0",
        "federation.fake_clients=-1",
        "federation.buffers=keep",
        "seed=-1",
    ],
)
def test_ranges_are_those_of_the_run(write: Write, override: str) -> None:
    (error,) = mistakes(write(), override)
    key, _, value = override.partition("=")
    assert error.startswith(f"{key}: Expected `{key.rpartition('.')[2]}` to be ")
    assert value in error


def test_excluding_the_malicious_says_how(write: Write) -> None:
    (error,) = mistakes(write(), "recover.exclude=malicious")
    assert "`detector: KnownMalicious` with `exclude: detected`" in error


def test_metrics(write: Write) -> None:
    node = "{class_path: torchmetrics.classification.MulticlassF1Score, init_args: {num_classes: 3}"
    recipe = load_recipe(write(f"metrics: [MembershipInferenceAUC, {node}, label: F1}}]\n"))
    assert list(build_parts(recipe).metrics) == ["MembershipInferenceAUC", "F1"]
    errors = mistakes(
        write(), "metrics=[MembershipInferenceAUK, Median, TestErrorRate, TestErrorRate]"
    )
    assert [e.partition(":")[0] for e in errors] == ["metrics.0", "metrics.1", "metrics.3.label"]
    assert "Did you mean `MembershipInferenceAUC`?" in errors[0]
    assert mistakes(write(), "metrics=TestErrorRate")[0].startswith("metrics: Expected `metrics`")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "federation.malicious=5",
            "federation.malicious: Expected `malicious` to be a count below",
        ),
        ("federation.malicious=[client-5]", "federation.malicious: Expected `malicious` to be ids"),
        ("recover.exclude=[client-5]", "recover.exclude: Expected `exclude` to be ids of clients"),
        (
            "recover.exclude=[client-0, client-1, client-2, client-3, client-4]",
            "recover.exclude: Expected `exclude` to be fewer than all clients",
        ),
        (
            "record.sampler={class_path: ClientSampler, init_args: {joins: {client-7: 2}}}",
            "record.sampler.init_args: Expected `joins` to be about clients",
        ),
    ],
)
def test_clients_that_are_not_there(write: Write, override: str, message: str) -> None:
    (error,) = mistakes(write(), override)
    assert error.startswith(message)


def test_fake_clients_are_there(write: Write) -> None:
    fakes = ["federation.fake_clients=2", "recover.exclude=[client-0, fake-1]"]
    assert build_parts(load_recipe(write(), fakes)).exclude == ["client-0", "fake-1"]
    assert "fake-2" in mistakes(write(), *fakes, "recover.exclude=[fake-2]")[0]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["record.max_rounds=-5", "record.server_lr=abc"], ["server_lr", "max_rounds"]),
        (
            ["record.server_lr=-1", "record.max_rounds=0", "record.on_bad_update=no"],
            ["on_bad_update", "max_rounds", "server_lr"],
        ),
    ],
)
def test_a_wrong_type_hides_no_value_out_of_range(
    write: Write, overrides: list[str], keys: list[str]
) -> None:
    found = mistakes(write(), *overrides)
    assert [error.partition(":")[0] for error in found] == [f"record.{key}" for key in keys]


def test_a_constructor_tells_all_it_has_against_its_arguments(write: Write) -> None:
    found = mistakes(
        write(),
        "data.init_args={num_clients: -1, server_samples: -2}",
        "recoverers=[{class_path: FedRecover, init_args: {warmup_rounds: -2, final_rounds: -3}}]",
        "loop={eval_every: 0, checkpoint_every: -1}",
        "federation={batch_size: 0, malicious: -2}",
    )
    assert [error.partition(":")[0] for error in found] == [
        "data.init_args.num_clients",
        "data.init_args.server_samples",
        "federation.malicious",
        "federation.batch_size",
        "loop.eval_every",
        "loop.checkpoint_every",
        "recoverers.0.init_args.warmup_rounds",
        "recoverers.0.init_args.final_rounds",
    ]
    found = mistakes(write(), "model.init_args={in_features: x, lr: -1}")
    assert [error.partition(":")[0] for error in found] == [
        "model.init_args.in_features",
        "model.init_args.lr",
    ]
