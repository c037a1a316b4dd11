"""Reading a whole history to find every damage."""

from __future__ import annotations

from collections.abc import Iterator

from fedrec.exceptions import HistoryCorruptedError
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.reading import Snapshot
from fedrec.history.lmdb.records import NAMES, ROUND, StoredManifest, digest

__all__ = ["check"]

BROKEN_CHAIN = "the chain is broken, it does not follow the one before it"


def check(
    recording: StoredManifest, environment: Environment
) -> Iterator[tuple[int, list[Damage]]]:
    """Read everything, and follow the chain of hashes from the manifest to the last round.

    Of an encrypted history without keys, each record is compared with its checksum, and no more.

    Args:
        recording: The recording.
        environment: Where it is.

    Yields:
        How many rounds are left to do, and what is damaged in the one that is done.

    Raises:
        HistoryCorruptedError: If the file as a whole cannot be read.
    """
    with environment.read() as txn:
        snapshot = Snapshot(recording, environment, txn)
        stored = snapshot.round_numbers()
        damage = [] if recording.is_locked else snapshot.lists_damage()
    previous: str | None = digest(recording.record)
    expected = 0
    for done, t in enumerate(stored, start=1):
        if t != expected:
            damage.append(Damage(part=NAMES[ROUND], reason="it is missing", round=expected))
            previous = None
        following = None
        try:
            with environment.read() as txn:
                snapshot = Snapshot(recording, environment, txn)
                if recording.is_locked:
                    damage += snapshot.locked_damage(t)
                else:
                    entry, following = snapshot.entry(t)
                    if previous not in (None, entry["previous"]):
                        damage.append(Damage(part=NAMES[ROUND], reason=BROKEN_CHAIN, round=t))
                    damage += snapshot.damage(entry)
        except DamagedRecordError as error:
            damage.append(error.damage)
        except HistoryCorruptedError as error:  # LMDB cannot read the file there
            damage.append(Damage(part="the file", reason=str(error), round=t))
        previous, expected = following, t + 1
        yield len(stored) - done, damage
        damage = []
    if damage:  # of the lists, where there is no round
        yield 0, damage
