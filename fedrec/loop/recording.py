"""Recording, a part of `FederatedLoop`: training, and storing every round."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrec._derived import register_derived
from fedrec._guard import left_alone
from fedrec.aggregators.base import Aggregator
from fedrec.attacks.base import Attack
from fedrec.callbacks.callback import Callback
from fedrec.detectors.base import Detector, verdict
from fedrec.exceptions import ConfigurationError, HistoryCorruptedError, UpdateError
from fedrec.federation import ClientSampler, Federation
from fedrec.history.background import BackgroundWriter
from fedrec.history.base import HistoryStore
from fedrec.history.manifest import Manifest
from fedrec.history.view import HistoryView
from fedrec.loop.checkpoint import check_state, load_state, on_device, save_state
from fedrec.loop.footprint import recording_bytes
from fedrec.loop.interrupts import stop_between_rounds
from fedrec.loop.logs import MetricsLog
from fedrec.loop.plan import carried_out, require_same_plan
from fedrec.loop.rehearsal import buffers_that_change, check_repeatable
from fedrec.loop.round import Engine
from fedrec.loop.runtime import Runtime
from fedrec.types import Detection, RoundRecord, RunResult

__all__ = ["Recording", "training_of"]

_log = logging.getLogger(__name__)


def training_of(federation: Federation) -> dict[str, dict[str, Any]]:
    """Return the settings of local training by client id; under "*" if all have the same."""
    by_client = {c.client_id: c.training_args() for c in federation.clients}
    first = next(iter(by_client.values()))
    return {"*": first} if all(args == first for args in by_client.values()) else by_client


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import fedrec

    packages = ("torch", "pytorch-lightning", "numpy", "lmdb")
    return {"fedrec": fedrec.__version__, **{name: version(name) for name in packages}}


@dataclass(kw_only=True, eq=False)
class Recording:
    """One call of `FederatedLoop.record`; see there for the arguments."""

    runtime: Runtime
    federation: Federation
    aggregator: Aggregator
    history: HistoryStore
    max_rounds: int
    server_lr: float
    attack: Attack | None
    detector: Detector | None
    stop_on_detection: bool
    sampler: ClientSampler | None
    on_bad_update: str
    resume: bool
    recipe: Mapping[str, Any] | None

    def run(self) -> RunResult:
        """Record from round 0, or from the round after the last stored one."""
        runtime, federation = self.runtime, self.federation
        self.folder = None if runtime.folder is None else runtime.folder / "record"
        federation.module.to(runtime.device)
        recorded = None
        if not self.history.is_empty:
            recorded = self.history.manifest.execution.get("num_shards", 1)
        sharding = runtime.shard(federation.client_ids, recorded)
        self.engine = Engine(
            federation=federation,
            phase="record",
            executor=runtime.choose_executor(sharding),
            sharding=sharding,
            aggregator=self.aggregator,
            server_lr=self.server_lr,
            attack=self.attack,
            malicious=frozenset(federation.malicious if self.attack is not None else ()),
            seed=runtime.settings.seed,
            device=runtime.device,
            autocast=runtime.autocast,
            on_bad_update=self.on_bad_update,
        )
        initial = federation.layout.flatten(federation.module)
        if self.detector is not None:
            self.detector.reset(federation.malicious)
        weights, first = self._begin(initial)
        log = runtime.metrics_log(self.folder, "record/", first)
        seconds, saved = 0.0, time.monotonic()
        self.client_seconds = 0.0
        t = first
        self.writer = BackgroundWriter(self.history)
        layout, num_clients = federation.layout, len(federation.clients)
        runtime.announce(self.execution, recording_bytes(num_clients, layout.num_parameters))
        runtime.call("on_record_start", self.max_rounds, first)
        try:
            with stop_between_rounds(at_once=self.engine.executor.live) as stop:
                for t in range(first, self.max_rounds):
                    if self._decided():
                        break
                    weights, spent = self._round(t, weights, log)
                    seconds += spent
                    due = time.monotonic() - saved >= runtime.settings.checkpoint_every
                    signal, due = runtime.ranks.agree(t, weights, stop=stop.signal, save=due)
                    if t == first and self._rule_state_path is not None:
                        check_state({"aggregator": self.engine.aggregator.state_dict()})
                    if signal or due:
                        self._save_rule_state(t + 1)
                        saved = time.monotonic()
                    if signal:
                        stop.signal = signal
                        self.writer.wait()
                        stop.obey(f"after round {t} of the recording", "Every round is stored.")
                began = time.perf_counter()
                self.writer.wait()
                seconds += time.perf_counter() - began
        finally:
            log.close()
            self.writer.close()
        result = RunResult(
            name="record",
            global_weights=weights,
            rounds=len(self.history.rounds()),
            seconds=seconds,
            curve=log.curve(),
            execution=carried_out(self.execution, self.engine.executor),
            buffers=self.engine.buffers.values,
            detection=self._verdict(),
            client_seconds={"record": self.client_seconds},
            trained=self.federation.module,
            layout=copy.copy(self.federation.layout),
        )
        runtime.call("on_record_end", result)
        return result

    def _decided(self) -> bool:
        """Whether the detector has decided and its decision ends the recording."""
        found = self._verdict() if self.stop_on_detection else None
        return found is not None and found.round is not None

    def _verdict(self) -> Detection | None:
        return None if self.detector is None else verdict(self.detector, self.federation.client_ids)

    def _begin(self, initial: Tensor) -> tuple[Tensor, int]:
        """Begin the history, or replay it; return the weights and the round to go on from."""
        history = self.history
        if not history.is_empty:
            if not self.resume:
                raise ConfigurationError(
                    f"The history already holds a recording of {len(history.rounds())} rounds. "
                    "HINT: `resume=True` goes on with it; a new recording needs an empty history."
                )
            recorded = history.manifest
            threads = recorded.execution.get("threads")
            if isinstance(threads, int):
                torch.set_num_threads(threads)
            self.engine.buffers.select(recorded.buffers)
        else:
            # The first client is rank 0's.
            ranks = self.runtime.ranks
            changing = ranks.once(lambda: buffers_that_change(self.engine, initial))
            self.engine.buffers.select(changing)
            ranks.once(lambda: check_repeatable(self.engine, initial))
        self.execution = self.runtime.plan(self.engine, initial, self.federation.client_ids)
        manifest = self._manifest()
        if history.is_empty:
            history.begin(manifest)
            watched = self.detector is not None and self.detector.needs_updates
            if history.manifest.keep and (watched or self.engine.aggregator.has_memory):
                _log.warning(
                    "The detector or the aggregation rule has a memory, and the history will not "
                    "keep all updates: this recording may not be resumable if it is interrupted."
                )
            return initial, 0
        self._require_same(recorded, manifest)
        require_same_plan(recorded.execution, self.execution, "the recording")
        return self._replay(initial)

    def _replay(self, initial: Tensor) -> tuple[Tensor, int]:
        """Bring detector, attack and aggregation rule into their states after the last round."""
        rounds = self.history.rounds()
        if not rounds:
            return initial, 0
        # The first round that the aggregation rule has to see again.
        begin = len(rounds)
        if self.engine.aggregator.has_memory:
            begin = self._load_rule_state(len(rounds))
        watched = self.detector is not None and self.detector.needs_updates
        watched = watched or self.engine.attack_has_memory
        self._require_updates(rounds if watched else rounds[begin:])
        seen_by_all = self.detector is not None or self.engine.attack_has_memory
        # In shards, as they were seen.
        ranks = self.runtime.ranks
        view = HistoryView(self.history, sharding=self.engine.sharding, ranks=ranks)
        for t in rounds if seen_by_all else rounds[max(begin - 1, 0) :]:
            needed = None if watched or t >= begin else ()
            record = view.read(t, needed).to(self.runtime.device)
            ctx = self.engine.context(t, record.cohort, record.global_weights)
            self.engine.remember(ctx, record.sent)
            if self.detector is not None:
                self.detector.observe(record)
            if t >= begin:
                self.engine.server_step(ctx, record.sent, record.global_weights)
            if record.buffers is not None:
                self.engine.buffers.values = record.buffers
        self.engine.last_aggregate = record.aggregate
        self.engine.executor.departure = record.departure
        return self.engine.apply(record.global_weights, record.aggregate), rounds[-1] + 1

    def _require_updates(self, rounds: range) -> None:
        """Refuse to resume if updates of these rounds are needed that the history did not keep."""
        history = self.history
        keep = history.manifest.keep
        for t in rounds if keep else ():
            if history.index(t).lost:
                raise ConfigurationError(
                    "Cannot resume, because the detector or the aggregation rule has a memory and "
                    f"would have to see the updates of round {t} again, which the history did not "
                    f"keep (keep={dict(keep)}). HINT: record again, and keep all updates."
                )

    @property
    def _rule_state_path(self) -> Path | None:
        """File with the memory of the aggregation rule; it saves replaying the rounds before."""
        return None if self.folder is None else self.folder / "aggregator.npz"

    def _save_rule_state(self, next_round: int) -> None:
        """Save the memory of the aggregation rule, after the rounds that it has seen are stored."""
        path, aggregator = self._rule_state_path, self.engine.aggregator
        if path is not None and aggregator.has_memory:
            self.writer.wait()
            store_id = self.history.manifest.store_id
            state = aggregator.state_dict()
            register_derived(path)  # the memory may hold data of single clients
            saved = {"store_id": store_id, "next": next_round, "aggregator": state}
            save_state(path, saved, self.history)

    def _load_rule_state(self, num_rounds: int) -> int:
        """Load the saved memory of the aggregation rule; return the first round to replay."""
        state = self.runtime.ranks.once(self._read_rule_state)
        if state is None:
            return 0
        if state["store_id"] != self.history.manifest.store_id or state["next"] > num_rounds:
            return 0  # the file belongs to another history
        self.engine.aggregator.load_state_dict(on_device(state["aggregator"], self.runtime.device))
        return int(state["next"])

    def _read_rule_state(self) -> dict[str, Any] | None:
        path = self._rule_state_path
        if path is None or not path.exists():
            return None
        try:
            return load_state(path, self.history)
        except HistoryCorruptedError as error:
            _log.warning("%s The whole history is replayed instead.", error)
            return None

    def _manifest(self) -> Manifest:
        layout = self.federation.layout
        return Manifest(
            model_fingerprint=layout.fingerprint,
            num_parameters=layout.num_parameters,
            buffers=layout.buffer_spec,
            clients={c.client_id: c.num_samples for c in self.federation.clients},
            malicious=self.federation.malicious,
            seed=self.runtime.settings.seed,
            aggregator=self.aggregator.spec(),
            server_lr=self.server_lr,
            max_rounds=self.max_rounds,
            sampler=None if self.sampler is None else self.sampler.spec(),
            attack=None if self.attack is None else self.attack.spec(),
            training=training_of(self.federation),
            on_bad_update=self.on_bad_update,
            execution=self.execution,
            recipe=self.recipe,
            versions=versions(),
        )

    def _require_same(self, recorded: Manifest, current: Manifest) -> None:
        """Refuse to resume a recording that had other settings."""
        layout = self.federation.layout
        self.history.check_model(layout.fingerprint, layout.num_parameters)
        names = ("clients", "malicious", "seed", "aggregator", "server_lr", "max_rounds")
        differences = [
            name
            for name in (*names, "sampler", "attack", "training", "on_bad_update")
            if getattr(recorded, name) != getattr(current, name)
        ]
        if differences:
            listed = "; ".join(
                f"{name}: {_short(getattr(recorded, name))} recorded, "
                f"{_short(getattr(current, name))} now"
                for name in differences
            )
            raise ConfigurationError(
                f"Cannot resume, because this is another recording ({listed}). "
                "HINT: use the recorded settings, or an empty history."
            )

    def _round(self, t: int, weights: Tensor, log: MetricsLog) -> tuple[Tensor, float]:
        """Do one round; return the next weights and the seconds spent, evaluation left out."""
        runtime, engine, ids = self.runtime, self.engine, self.federation.client_ids
        began = time.perf_counter()
        cohort = ids if self.sampler is None else self.sampler.sample(ids, t, runtime.settings.seed)
        logged: dict[str, float] = {}
        ctx = engine.context(t, cohort, weights, logged.__setitem__)
        runtime.call("on_round_start", ctx)
        attack_state = engine.attack.state_dict() if engine.attack is not None else {}
        asking = time.perf_counter()
        rule_has_memory = engine.aggregator.has_memory
        # A component with a memory sees updates as stored: a resumed recording replays these.
        remembered = rule_has_memory or self.detector is not None or bool(attack_state)
        # Callbacks are shown updates that are finite.
        usual = Callback.on_updates
        shown = any(type(c).on_updates is not usual for c in runtime.settings.callbacks)
        sent = engine.ask(ctx, cohort, read_later=not (remembered or shown))
        self.client_seconds += time.perf_counter() - asking
        if not sent.client_ids:
            hint = "the reasons say what is wrong with the clients."
            if any("NaN" in reason for reason in sent.refused.values()):
                hint = "the model diverges; lower `server_lr` or use a robust aggregation rule."
            raise UpdateError(
                f"Round {t} has no usable update left: {dict(sent.refused)}. HINT: {hint}"
            )
        runtime.call("on_updates", ctx, sent)
        seen = sent
        if remembered:
            own = sent.in_process().updates
            stored = self.history.as_stored(own)
            seen = sent if stored is own else sent.with_rows([stored])
        if attack_state and engine.attack is not None:
            engine.attack.load_state_dict(attack_state)
            engine.remember(ctx, seen)
        new, aggregate = engine.server_step(
            ctx,
            seen if rule_has_memory else sent,
            weights,
            is_checked=not rule_has_memory or seen is sent,
        )
        engine.end_round()
        record = RoundRecord(
            round=t,
            global_weights=weights,
            sent=sent,
            aggregate=aggregate,
            cohort=tuple(cohort),
            buffers=engine.buffers.values,
            departure=engine.executor.departure,
        )
        if self.detector is not None:
            # What is stored is written afterwards.
            method = f"{type(self.detector).__name__}.observe"
            own = sent.in_process().updates
            given = {"updates": own, "global_weights": weights, "aggregate": aggregate}
            with left_alone(method, ConfigurationError, **given):
                self.detector.observe(dataclasses.replace(record, sent=seen))
        spent = time.perf_counter() - began
        values, tested = {**sent.metrics, **logged}, dict[str, float]()
        if runtime.evaluates(t, self.max_rounds):
            buffers = engine.buffers.values
            tested = runtime.evaluate_curve(self.federation, new, self.attack, buffers)
        log.write(t, values, tested)
        values = {**values, **tested}
        began = time.perf_counter()
        self.writer.write(record)
        spent += time.perf_counter() - began
        runtime.call("on_round_end", ctx, values)
        return new, spent


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
