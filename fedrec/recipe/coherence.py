"""Checking that the parts of a recipe fit each other, as far as that shows without its data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from fedrec.aggregators.base import Aggregator
from fedrec.data import FederatedDataModule
from fedrec.detectors import KnownMalicious
from fedrec.exceptions import ConfigurationError, expected
from fedrec.federation import ClientSampler, draw_malicious, fake_ids
from fedrec.loop.recovery import help_from_attackers
from fedrec.loop.server import no_server_data
from fedrec.recipe.instantiate import Instantiator
from fedrec.recoverers.base import Recoverer

if TYPE_CHECKING:
    from fedrec.recipe.parts import Parts

__all__ = ["check_parts"]


def check_parts(config: Mapping[str, Any], parts: Parts, make: Instantiator) -> list[str]:
    """Check now what a run would refuse only later, perhaps after hours.

    A part that has a mistake of its own is not compared with the others.

    Args:
        config: The resolved recipe.
        parts: The recipe's objects.
        make: Collects the mistakes.

    Returns:
        Remarks of recoverers about parts that they can work with, see `Recoverer.check_plan`.
    """
    malicious = _check_clients(parts, make)
    max_rounds = _check_rounds(parts, make)
    samples = _server_samples(parts.data)
    for key, rule in (
        ("aggregator", parts.aggregator),
        ("recover.aggregator", parts.recover.get("aggregator")),
    ):
        if isinstance(rule, Aggregator) and rule.needs_server_update and samples == 0:
            make.mistake(key, no_server_data(type(rule).__name__))
    remarks = []
    # If a label was refused, its recoverer is missing, and the positions would be wrong.
    complete = len(parts.recoverers) == len(config.get("recoverers") or [])
    for i, recoverer in enumerate(parts.recoverers.values() if complete else ()):
        key = f"recoverers.{i}"
        if not isinstance(recoverer, Recoverer):
            continue
        if recoverer.needs_server_data and samples == 0:
            make.mistake(key, no_server_data(type(recoverer).__name__))
            continue
        attackers = _excluded_attackers(parts, malicious) if recoverer.needs_excluded_client else []
        if attackers:
            make.mistake(key, help_from_attackers(type(recoverer).__name__, attackers))
        try:
            remark = None if max_rounds is None else recoverer.check_plan(max_rounds, samples)
        except ConfigurationError as error:
            make.mistake(key, str(error))
        else:
            remarks += [] if remark is None else [f"{key}: {remark}"]
    return remarks


def _check_clients(parts: Parts, make: Instantiator) -> Collection[str]:
    """Check that the clients that a recipe names exist; return the malicious ones."""
    try:
        ids = list(parts.data.client_ids)
    except Exception:  # noqa: BLE001 - a user's data module may need its data for this
        return ()
    fakes = fake_ids(parts.federation.get("fake_clients", 0))
    known = [*ids, *fakes]
    given, malicious = parts.federation.get("malicious", 0), None
    if _is_right(make, "federation.malicious", "federation.seed"):
        seed = parts.federation["seed"]
        arguments = {"malicious": given, "ids": ids, "seed": seed}
        malicious = make.construct(draw_malicious, arguments, "federation")
    flagged = parts.detector.ids if isinstance(parts.detector, KnownMalicious) else None
    for key, named in (
        ("federation.malicious", given),
        ("detector.init_args.ids", flagged and list(flagged)),
        ("recover.exclude", parts.exclude),
    ):
        if not isinstance(named, list) or not _is_right(make, key):
            continue
        unknown = [c for c in named if c not in known]
        if unknown:
            argument = key.rpartition(".")[2]
            make.mistake(key, expected(argument, "ids of clients", unknown, known=known[:20]))
        elif key == "recover.exclude" and set(known) <= set(named):
            make.mistake(key, expected("exclude", "fewer than all clients", named))
    sampler = parts.record.get("sampler")
    if sampler is not None and type(sampler).sample is ClientSampler.sample:
        make.construct(sampler.check_known, {"client_ids": known}, "record.sampler.init_args")
    return [*malicious, *fakes] if isinstance(malicious, (list, tuple)) else fakes


def _check_rounds(parts: Parts, make: Instantiator) -> int | None:
    """Check that no more rounds are recovered than recorded; return how many are, if known."""
    recorded, recovered = parts.record.get("max_rounds"), parts.recover.get("max_rounds")
    # With `fast_dev_run`, a run has fewer rounds than the recipe says.
    if recorded is None or parts.loop.get("fast_dev_run"):
        return None
    if not _is_right(make, "record.max_rounds", "recover.max_rounds"):
        return None
    if recovered is not None and recovered > recorded:
        requirement = f"at most the {recorded} rounds of the recording"
        make.mistake("recover.max_rounds", expected("max_rounds", requirement, recovered))
        return None
    return int(recovered or recorded)


def _server_samples(data: Any) -> int | None:
    """Return how many samples the server has; `None` if only the data can tell."""
    if not isinstance(data, FederatedDataModule):
        return None
    if data.server_samples:
        return data.server_samples
    try:  # fedrec's data modules load nothing for this
        dataset = data.server_dataset
    except Exception:  # noqa: BLE001 - a user's data module may need its data for this
        return None
    return 0 if dataset is None else len(dataset)


def _excluded_attackers(parts: Parts, malicious: Collection[str]) -> list[str]:
    """Return the malicious clients that are certain to be excluded; none if there is no attack."""
    if parts.attack is None:
        return []
    if isinstance(parts.exclude, list):
        return sorted(c for c in malicious if c in parts.exclude)
    # With a sampler, a malicious client may never take part, and then it is not flagged.
    all_take_part = bool(parts.record) and parts.record.get("sampler") is None
    if not isinstance(parts.detector, KnownMalicious) or not all_take_part:
        return []
    known = parts.detector.ids
    return sorted(c for c in malicious if known is None or c in known)


def _is_right(make: Instantiator, *keys: str) -> bool:
    """Return whether none of the mistakes so far is about one of the keys."""
    return not any(error.startswith(keys) for error in make.errors)
