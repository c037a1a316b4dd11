"""The sections of a recipe: checking all of them, and building their objects."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torchmetrics import Metric

from fedrec._checks import check_choice, check_float, check_int, check_recording, check_recovery
from fedrec.aggregators.base import Aggregator
from fedrec.attacks.base import Attack
from fedrec.clients import LightningClient
from fedrec.data import FederatedDataModule
from fedrec.detectors.base import Detector
from fedrec.exceptions import RecipeError, expected
from fedrec.federation import Federation
from fedrec.history import HistoryStore
from fedrec.loop import FederatedLoop
from fedrec.random import key as random_key
from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.coherence import check_parts
from fedrec.recipe.instantiate import Instantiator
from fedrec.recipe.loading import UNUSABLE, read_recipe
from fedrec.recipe.parts import Parts
from fedrec.recipe.shipped import find_recipe
from fedrec.recoverers.base import Recoverer

__all__ = [
    "ARGUMENTS",
    "LOGGER",
    "SECTIONS",
    "Recipe",
    "build_parts",
    "folder_name",
    "label_of",
    "load_recipe",
]

#: The keys of a recipe.
SECTIONS = (
    "name",
    "seed",
    "extends",
    "data",
    "model",
    "federation",
    "aggregator",
    "attack",
    "detector",
    "history",
    "loop",
    "record",
    "recover",
    "recoverers",
    "metrics",
)
_FOLDER = "the run folder decides; choose it with `name=` and `--output-dir`."
_SECTION = "it has a section of its own in the recipe."
_FILE_NAME = re.compile(r"\w[\w .,+=-]{0,99}")


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and has no mistakes.

    Args:
        config: The resolved recipe as plain dicts, lists and scalars.
        path: The file it came from.
        allow: Modules its classes may come from, besides fedrec, torch, torchmetrics and Lightning.
    """

    config: Mapping[str, Any]
    path: Path
    allow: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return str(self.config["name"])


def load_recipe(
    path: str | Path, overrides: Iterable[str] = (), allow: Iterable[str] = ()
) -> Recipe:
    """Read a recipe, and check everything that can be checked without its data.

    Args:
        path: The YAML file, or the name of a recipe that comes with fedrec (`quickstart`).
        overrides: `key=value` texts; the key is dotted (`recoverers.0.label`), the value is YAML.
        allow: Modules its classes may come from, besides fedrec, torch, torchmetrics and Lightning.
            They are imported.

    Raises:
        RecipeError: With all mistakes of the recipe.
        ConfigurationError: If there is no such recipe, or a module in `allow` cannot be imported.

    Examples:
        >>> load_recipe("quickstart", ["record.max_rounds=50", "name=short"]).name
        'short'
    """
    errors: list[str] = []
    path = find_recipe(path)
    allow = tuple([allow] if isinstance(allow, str) else allow)
    finder = ClassFinder(allow)
    config = read_recipe(path, overrides, errors)
    _build(config, finder, errors)
    if errors:
        raise RecipeError(errors)
    return Recipe(config, path, allow)


def build_parts(recipe: Recipe) -> Parts:
    """Build the objects of a recipe, new ones in every call.

    Raises:
        RecipeError: If a constructor refuses its arguments.
    """
    errors: list[str] = []
    parts = _build(recipe.config, ClassFinder(recipe.allow), errors)
    if errors or parts is None:
        raise RecipeError(errors)
    return parts


def folder_name(label: str) -> str:
    """Return a label as a folder name: other characters are replaced by dashes.

    Examples:
        >>> folder_name("FedRecover w/o estimates")
        'FedRecover-w-o-estimates'
    """
    return re.sub(r"[^\w.+=-]+", "-", label).strip("-.")


def label_of(node: Any) -> Any:
    """Return the label of a recoverer or metric: its own, or the class's name."""
    if not isinstance(node, Mapping):
        return str(node).rpartition(".")[2]
    if node.get("label") is not None:
        return node["label"]
    return str(node.get("class_path")).rpartition(".")[2]


def _build(config: Mapping[str, Any], finder: ClassFinder, errors: list[str]) -> Parts | None:
    make = Instantiator(finder)
    make.errors = errors
    for key in sorted(config.keys() - set(SECTIONS)):
        text = expected("key", "a section of a recipe", key, known=SECTIONS, hint=_sections_of(key))
        make.mistake(key, text)
    for key in ("data", "model", "aggregator", "record"):
        if config.get(key) is None:
            make.mistake(key, f"Expected a section `{key}`, but there is none.")
    seed = config.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        if seed is not UNUSABLE:
            make.mistake("seed", expected("seed", "an integer of at least 0", seed))
        seed = 0
    name = config.get("name")
    if name is not UNUSABLE and not (isinstance(name, str) and _FILE_NAME.fullmatch(name)):
        requirement = "a plain folder name (letters, digits, spaces and . , + = - _)"
        make.mistake("name", expected("name", requirement, name))

    def component(key: str, base: type, defaults: Mapping[str, Any] | None = None) -> Any:
        if config.get(key) is None:
            return None
        return make.component(config[key], key, [base], defaults=defaults)

    def arguments(key: str, check: Any, **types: Any) -> Any:
        section = {} if config.get(key) is None else config[key]
        function, given = ARGUMENTS[key]
        checked = make.arguments(section, key, function, given=given, types=types, check=check)
        if checked is not UNUSABLE:
            make.construct(check, checked, key)
        return checked

    data = component("data", FederatedDataModule, {"seed": seed})
    # The initial weights are a function of the seed, and the caller's generator stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_key(seed, "model") % 2**63)
        model = component("model", pl.LightningModule)
    check = partial(_check_federation, model)
    federation = arguments("federation", check)
    aggregator = component("aggregator", Aggregator)
    attack = component("attack", Attack)
    detector = component("detector", Detector)
    history = config.get("history")
    store = make.arguments_of(
        "LMDBHistory" if history is None else history,
        "history",
        [HistoryStore],
        given={"path": _FOLDER},
    )
    if store is not UNUSABLE:  # made to find its mistakes now; making a store touches no file
        cls, init = store
        path = {"path": "."} if "path" in inspect.signature(cls).parameters else {}
        make.construct(cls, {**init, **path}, "history.init_args")
    loop = arguments("loop", FederatedLoop, logger=LOGGER)
    required = partial(check_recording, max_rounds=1, server_lr=1.0, detector=detector)
    record = arguments("record", required)
    recover, exclude = _recover(config, make)
    parts = Parts(
        data=data,
        model=model,
        aggregator=aggregator,
        attack=attack,
        detector=detector,
        history=store,
        federation={"seed": seed, **_mapping(federation)},
        loop={"seed": seed, **_mapping(loop)},
        record=_mapping(record),
        recover=_mapping(recover),
        exclude=exclude,
        recoverers=_labelled("recoverers", Recoverer, config, make),
        metrics=_labelled("metrics", Metric, config, make),
    )
    remarks = check_parts(config, parts, make)
    return None if errors else replace(parts, remarks=remarks)


#: What the argument `logger` of a loop may be in a recipe.
LOGGER = bool | Logger | list[Logger]
_LOOP = {
    "default_root_dir": _FOLDER,
    "metrics": "the section `metrics` of a recipe measures every model.",
}
_FEDERATION = {
    "data": "",
    "module": "",
    "collate_fn": "a function is given in Python; let the data set of a recipe make samples alike.",
    "server_data": "`data` puts samples aside for the server with `server_samples`.",
}
_RECORD = {
    "federation": _SECTION,
    "aggregator": _SECTION,
    "history": _SECTION,
    "attack": _SECTION,
    "detector": _SECTION,
    "resume": "a run that was interrupted always goes on.",
    "recipe": "",
}
_RECOVER = {
    "federation": _SECTION,
    "history": _SECTION,
    "recoverer": _SECTION,
    "exclude": "",
    "attack": _SECTION,
    "name": "`recoverers` give themselves a `label`.",
    "resume": "a run that was interrupted always goes on.",
}


#: The sections that give arguments to a function: the function, and those a recipe must not have.
ARGUMENTS: dict[str, tuple[Callable[..., Any], Mapping[str, str]]] = {
    "federation": (Federation.from_data, _FEDERATION),
    "loop": (FederatedLoop, _LOOP),
    "record": (FederatedLoop.record, _RECORD),
    "recover": (FederatedLoop.recover, _RECOVER),
}


def _sections_of(argument: str) -> str | None:
    """Say which sections have such an argument, if any does."""
    found = [
        f"`{section}.{argument}`"
        for section, (function, refused) in ARGUMENTS.items()
        if argument in inspect.signature(function).parameters and argument not in refused
    ]
    return f"{' or '.join(found)} may be meant." if found else None


def _check_federation(
    model: Any,
    malicious: Any = 0,
    fake_clients: Any = 0,
    buffers: Any = "refuse",
    seed: Any = 0,
    drop_last: Any = None,
    **training: Any,
) -> None:
    """Check the arguments of `Federation.from_data` without any data."""
    if isinstance(malicious, float):
        check_float("malicious", malicious, minimum=0, maximum=1, open_maximum=True)
    elif not isinstance(malicious, list):
        check_int("malicious", malicious, minimum=0)
    check_int("fake_clients", fake_clients, minimum=0)
    check_int("seed", seed, minimum=0)
    check_choice("buffers", buffers, ("refuse", "average"))
    if isinstance(model, pl.LightningModule):
        training["drop_last"] = False if drop_last is None else drop_last
        LightningClient("client", model, [None], **training)  # type: ignore[arg-type]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _recover(config: Mapping[str, Any], make: Instantiator) -> tuple[Any, Any]:
    """Return the checked arguments of the section `recover`, and its `exclude`."""
    section = config.get("recover")
    section = {} if section is None else section
    exclude: Any = "detected"
    if isinstance(section, Mapping):
        exclude = section.get("exclude", "detected")
        section = {k: v for k, v in section.items() if k != "exclude"}
    if isinstance(exclude, list):
        for i, client_id in enumerate(exclude):
            if client_id is not UNUSABLE and not isinstance(client_id, str):
                make.mistake(f"recover.exclude.{i}", expected("exclude", "client ids", client_id))
    elif exclude is not UNUSABLE and exclude != "detected":
        requirement = '"detected" or a list of client ids'
        hint = "`detector: KnownMalicious` with `exclude: detected` leaves out who is malicious."
        text = expected("exclude", requirement, exclude, hint=hint)
        make.mistake("recover.exclude", text)
    elif config.get("detector") is None and config.get("recoverers"):
        make.mistake(
            "recover.exclude",
            'Expected a `detector` for exclude="detected", but there is none. HINT: add one, or '
            "list the clients to exclude.",
        )
    function, given = ARGUMENTS["recover"]
    arguments = make.arguments(section, "recover", function, given=given, check=check_recovery)
    if arguments is not UNUSABLE:
        make.construct(check_recovery, arguments, "recover")
    return arguments, exclude


def _labelled(
    section: str, base: type, config: Mapping[str, Any], make: Instantiator
) -> dict[str, Any]:
    """Build the components of a list section, by label; labels have to differ."""
    nodes = config.get(section)
    if nodes is None or nodes is UNUSABLE:
        return {}
    if not isinstance(nodes, list):
        make.mistake(section, expected(section, "a list", nodes))
        return {}
    components: dict[str, Any] = {}
    folders: dict[str, str] = {}
    for i, node in enumerate(nodes):
        key = f"{section}.{i}"
        component = make.component(node, key, [base], extra=["label"])
        label = label_of(node)
        if label is UNUSABLE:
            continue
        if not isinstance(label, str) or not folder_name(label) or len(label) > 100:
            make.mistake(f"{key}.label", expected("label", "text of 1 to 100 characters", label))
        elif folder_name(label).lower() in folders:
            other = folders[folder_name(label).lower()]
            make.mistake(
                f"{key}.label",
                f"Expected labels that differ, but `{label}` is also that of `{other}`. HINT: give "
                "it a `label` of its own.",
            )
        else:
            folders[folder_name(label).lower()] = key
            components[label] = component
    return components
