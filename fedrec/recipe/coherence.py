"""Whether the parts of a recipe fit each other, as far as that shows without its data."""

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
    """Note what a run would refuse, which may be hours after it began.

    What has a mistake of its own already is not compared with anything.

    Args:
        config: The resolved recipe.
        parts: What it stands for.
        make: Notes the mistakes.

    Returns:
        What recoverers have to say about parts that they can work with.
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
    # A label that is refused has no recoverer, and their positions would be those of others.
    complete = len(parts.recoverers) == len(config.get("recoverers") or [])
    for i, recoverer in enumerate(parts.recoverers.values() if complete else ()):
        key = f"recoverers.{i}"
        if not isinstance(recoverer, Recoverer):
            continue
        if recoverer.needs_server_data and samples == 0:
            make.mistake(key, no_server_data(type(recoverer).__name__))
            continue
        hostile = _hostile(parts, malicious) if recoverer.needs_excluded_client else []
        if hostile:
            make.mistake(key, help_from_attackers(type(recoverer).__name__, hostile))
        try:
            remark = None if max_rounds is None else recoverer.check_plan(max_rounds, samples)
        except ConfigurationError as error:
            make.mistake(key, str(error))
        else:
            remarks += [] if remark is None else [f"{key}: {remark}"]
    return remarks


def _check_clients(parts: Parts, make: Instantiator) -> Collection[str]:
    """Check that the clients that a recipe names are there; return who is malicious."""
    try:
        ids = list(parts.data.client_ids)
    except Exception:  # noqa: BLE001 - one of a user's may need its data for this
        return ()
    fakes = fake_ids(parts.federation.get("fake_clients", 0))
    known = [*ids, *fakes]
    given, malicious = parts.federation.get("malicious", 0), None
    if _is_right(make, "federation.malicious", "federation.seed"):
        seed = parts.federation["seed"]
        arguments = {"malicious": given, "ids": ids, "seed": seed}
        malicious = make.construct(draw_malicious, arguments, "federation")
    for key, named in (("federation.malicious", given), ("recover.exclude", parts.exclude)):
        if not isinstance(named, list) or not _is_right(make, key):
            continue
        unknown = [c for c in named if c not in known]
        if unknown:
            wanted = expected(key.rpartition(".")[2], "ids of clients", unknown, known=known[:20])
            make.mistake(key, wanted)
        elif key == "recover.exclude" and set(known) <= set(named):
            make.mistake(key, expected("exclude", "fewer than all clients", named))
    sampler = parts.record.get("sampler")
    if sampler is not None and type(sampler).sample is ClientSampler.sample:
        make.construct(sampler.check_known, {"client_ids": known}, "record.sampler.init_args")
    return [*malicious, *fakes] if isinstance(malicious, (list, tuple)) else fakes


def _check_rounds(parts: Parts, make: Instantiator) -> int | None:
    """Check that no more is recovered than recorded; return how many rounds at most, if known."""
    recorded, wanted = parts.record.get("max_rounds"), parts.recover.get("max_rounds")
    # A trial run has fewer rounds than the recipe says.
    if recorded is None or parts.loop.get("fast_dev_run"):
        return None
    if not _is_right(make, "record.max_rounds", "recover.max_rounds"):
        return None
    if wanted is not None and wanted > recorded:
        requirement = f"at most the {recorded} rounds of the recording"
        make.mistake("recover.max_rounds", expected("max_rounds", requirement, wanted))
        return None
    return int(wanted or recorded)


def _server_samples(data: Any) -> int | None:
    """Return how many samples the server has; `None` if only the data can tell."""
    if not isinstance(data, FederatedDataModule):
        return None
    if data.server_samples:
        return data.server_samples
    try:  # nothing is loaded for this, unless a user's own does
        dataset = data.server_dataset
    except Exception:  # noqa: BLE001 - it may need its data
        return None
    return 0 if dataset is None else len(dataset)


def _hostile(parts: Parts, malicious: Collection[str]) -> list[str]:
    """Return which malicious clients are certain to be excluded, of a recipe with an attack."""
    if parts.attack is None:
        return []
    if isinstance(parts.exclude, list):
        return sorted(c for c in malicious if c in parts.exclude)
    # With a sampler, one that is named may never take part, and then is not flagged.
    everyone = bool(parts.record) and parts.record.get("sampler") is None
    if not isinstance(parts.detector, KnownMalicious) or not everyone:
        return []
    named = parts.detector.ids
    return sorted(c for c in malicious if named is None or c in named)


def _is_right(make: Instantiator, *keys: str) -> bool:
    """Return whether no mistake is about one of these keys."""
    return not any(error.startswith(keys) for error in make.errors)
