"""Recovery, a part of `FederatedLoop`: stepping through the recorded rounds with a recoverer."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrec._derived import register_derived
from fedrec._files import write_atomically
from fedrec._guard import left_alone, returned
from fedrec.aggregators.base import Aggregator
from fedrec.attacks.base import Attack
from fedrec.component import build
from fedrec.exceptions import ConfigurationError, RecoveryError, expected
from fedrec.federation import Federation
from fedrec.functional.kernels._finite import nonfinite_rows
from fedrec.history.background import RoundReader
from fedrec.history.base import HistoryStore
from fedrec.history.view import HistoryView
from fedrec.loop.checkpoint import (
    ShardFiles,
    check_state,
    lightning_checkpoint,
    load_state,
    on_device,
    save_state,
)
from fedrec.loop.context import Meter, MeteredContext
from fedrec.loop.footprint import recovery_bytes
from fedrec.loop.interrupts import stop_between_rounds
from fedrec.loop.loggers import log_file
from fedrec.loop.logs import MetricsLog
from fedrec.loop.plan import carried_out, require_same_plan
from fedrec.loop.recording import training_of
from fedrec.loop.round import Engine
from fedrec.loop.runtime import Runtime
from fedrec.loop.server import no_server_data
from fedrec.metrics import CostLedger
from fedrec.metrics.estimate_errors import EstimateErrors
from fedrec.recoverers._gradients import warn_unless_gradients
from fedrec.recoverers.base import Recoverer
from fedrec.types import RunResult

__all__ = ["Recovery", "help_from_attackers"]


def help_from_attackers(name: str, malicious: Sequence[str]) -> str:
    """Return the error text for a method that asks excluded clients some of which are malicious."""
    return (
        f"{name} asks the excluded clients for help, but {malicious[:10]} are malicious and would "
        "send what they want. HINT: use a recoverer that leaves them alone."
    )


@dataclass(kw_only=True, eq=False)
class Recovery:
    """One call of `FederatedLoop.recover`; see there for the arguments."""

    runtime: Runtime
    federation: Federation
    history: HistoryStore
    recoverer: Recoverer
    exclude: tuple[str, ...]
    attack: Attack | None
    name: str
    resume: bool
    max_rounds: int | None
    server_lr: float | None
    aggregator: Aggregator | None
    batch_policy: str
    on_bad_update: str

    def run(self) -> RunResult:
        """Recover from the start, or go on from the last checkpoint."""
        runtime, history = self.runtime, self.history
        self._prepare()
        state = runtime.ranks.once(self._load) if self.resume else None
        if state is not None:
            torch.set_num_threads(state["execution"]["threads"])
        weights = history.read_round(0, ()).global_weights.to(runtime.device)
        self.execution = runtime.plan(self.engine, weights, self.remaining)
        first, seconds, finished = 0, 0.0, False
        if state is None:
            began = time.perf_counter()
            self.recoverer.start(self.view, self.rounds)
            if self.recoverer.assumes_gradients:
                warn_unless_gradients(self.federation, self.remaining, self.name)
            found = self.recoverer.initial_weights(self.view)
            method = f"{type(self.recoverer).__name__}.initial_weights"
            weights = returned(method, found, weights.shape, weights.dtype).to(runtime.device)
            self._forget_earlier_run()  # only now: a method that refuses to start destroys nothing
            seconds = time.perf_counter() - began
        else:
            weights, first, seconds = self._restore(state)
            finished = state["finished"]
        self.meter = Meter(
            ledger=self.ledger,
            estimate_errors=EstimateErrors(self.folder, first, self.exclude),
            client_seconds=self.client_seconds,
        )
        log = runtime.metrics_log(self.folder, f"recover/{self.name}/", first)
        steps = list(self.recoverer.rounds(self.view, self.rounds))
        self.steps = steps = steps[: runtime.limit(len(steps))]
        if state is None and steps and steps[0] > 0 and self.engine.buffers.values is not None:
            # A recovery that starts later starts from the buffers of the round before.
            last = history.read_round(min(steps[0], self.rounds) - 1, ()).to(runtime.device)
            self.engine.buffers.values = last.buffers
        if not finished:
            num_clients = sum(len(view.remaining) for view in self.view.shards().values())
            size = self.federation.layout.num_parameters
            kept = self.recoverer.kept_bytes(num_clients, size)
            runtime.announce(self.execution, recovery_bytes(num_clients, size, kept))
        runtime.call("on_recover_start", self.name, self.rounds, first)
        if not finished:
            weights, seconds = self._steps(steps, first, weights, seconds, log)
            self._write_results(weights, seconds)
        log.close()
        result = RunResult(
            name=self.name,
            global_weights=weights,
            rounds=state["rounds"] if state and finished else len(steps),
            seconds=seconds,
            curve=log.curve(),
            execution=carried_out(self.execution, self.engine.executor),
            buffers=self.engine.buffers.values,
            ledger=self.ledger,
            diagnostics=state["diagnostics"]
            if state and finished
            else self.recoverer.diagnostics(),
            client_seconds=self.client_seconds,
            estimate_errors=tuple(self.meter.estimate_errors.rows),
            trained=self.federation.module,
            layout=copy.copy(self.federation.layout),
            checkpoint=None if self.folder is None else self.folder / "model.ckpt",
        )
        runtime.call("on_recover_end", result)
        return result

    def _steps(
        self, steps: Sequence[int], first: int, weights: Tensor, seconds: float, log: MetricsLog
    ) -> tuple[Tensor, float]:
        """Do the rounds from `first` on; return the final weights and the seconds spent."""
        saved, every = time.monotonic(), self.runtime.settings.checkpoint_every
        live, checked = self.engine.executor.live, self.folder is None
        self.reader = RoundReader(self.view, [t for t in steps if t >= first], self.runtime.device)
        try:
            with stop_between_rounds(at_once=live) as stop:
                for t in steps:
                    if t < first:
                        continue
                    weights, spent = self._round(t, weights, log)
                    seconds += spent
                    if not checked:
                        check_state(self._states())
                        checked = True
                    due = time.monotonic() - saved >= every or (live and self.meter.asked > 0)
                    ranks = self.runtime.ranks
                    signal, due = ranks.agree(t, weights, stop=stop.signal, save=due)
                    if signal or due:
                        self._save(weights, t + 1, seconds)
                        saved = time.monotonic()
                    if signal:
                        stop.signal = signal
                        kept = "nothing, for want of a run folder" if self.folder is None else "all"
                        stop.obey(f"after round {t} of {self.name}", f"Stored: {kept}.")
        finally:
            self.reader.close()
            self.meter.estimate_errors.close()
            log.close()
        return weights, seconds

    def _prepare(self) -> None:
        """Check that everything fits together, and set up what `run` works with."""
        runtime, federation, manifest = self.runtime, self.federation, self.history.manifest
        layout = federation.layout
        self.history.check_model(layout.fingerprint, layout.num_parameters)
        # Another process may be recording, and ranks do not look at the same time.
        self.recorded = recorded = min(runtime.ranks.gather(len(self.history.rounds())))
        if recorded == 0:
            raise ConfigurationError(
                "The history has no round yet. HINT: record before you recover."
            )
        if self.max_rounds is not None and self.max_rounds > recorded:
            raise ConfigurationError(
                expected("max_rounds", f"at most the {recorded} recorded rounds", self.max_rounds)
            )
        self.rounds = runtime.limit(self.max_rounds or recorded)
        known = set(manifest.clients)
        unknown = sorted(set(self.exclude) - known)
        if unknown:
            raise ConfigurationError(
                expected("exclude", "ids of recorded clients", unknown, known=sorted(known)[:20])
            )
        absent = sorted(known - set(self.exclude) - set(federation.client_ids))
        if absent:
            raise ConfigurationError(
                f"The federation lacks recorded clients {absent[:10]}. "
                "HINT: exclude clients that have left."
            )
        self.remaining = tuple(c for c in manifest.clients if c not in set(self.exclude))
        if not self.remaining:
            raise ConfigurationError(
                expected("exclude", "fewer than all clients", list(self.exclude))
            )
        sharding = runtime.shard(tuple(manifest.clients), manifest.execution.get("num_shards"))
        self.view = HistoryView(
            self.history, self.remaining, sharding=sharding, ranks=runtime.ranks
        )
        forgotten = [c for c in self.history.forgotten if c in self.remaining]
        if forgotten:
            raise ConfigurationError(
                f"Clients {forgotten} cannot take part: they were forgotten, and the history has "
                "nothing of theirs. HINT: exclude them."
            )
        if self.recoverer.needs_server_data and federation.server_data is None:
            raise ConfigurationError(no_server_data(type(self.recoverer).__name__))
        if self.recoverer.needs_excluded_client:
            self._require_cooperation()
        self._require_same_training()
        attackers = federation.malicious if self.attack is not None else ()
        self.engine = Engine(
            federation=federation,
            phase="recover",
            executor=runtime.choose_executor(sharding),
            sharding=sharding,
            aggregator=self.aggregator or build(manifest.aggregator, Aggregator, "aggregator"),
            server_lr=self.server_lr or manifest.server_lr,
            attack=self.attack,
            malicious=frozenset(attackers) - frozenset(self.exclude),
            seed=manifest.seed,
            device=runtime.device,
            autocast=runtime.autocast,
            batch_policy=self.batch_policy,
            on_bad_update=self.on_bad_update,
        )
        if self.engine.executor.live:
            self._require_same_keys()
        self.engine.buffers.select(manifest.buffers)
        place = Path("recover", self.name)
        self.folder = None if runtime.folder is None else runtime.folder / place
        own_folder = None if runtime.own_folder is None else runtime.own_folder / place
        self.shard_files = ShardFiles(own_folder, self.exclude, self.history)
        self.client_seconds: dict[str, float] = {}
        self.ledger = CostLedger(num_rounds=self._rounds_of_clients())

    def _require_cooperation(self) -> None:
        """Refuse a method that asks excluded clients if some have left or are malicious."""
        name, exclude = type(self.recoverer).__name__, set(self.exclude)
        gone = sorted(exclude.difference(self.federation.client_ids))
        if gone:
            raise ConfigurationError(
                f"{name} asks the excluded clients for help, but {gone[:10]} are not in the "
                "federation. HINT: use another recoverer once they have left."
            )
        malicious = sorted(exclude.intersection(self.federation.malicious))
        if self.attack is not None and malicious:
            raise ConfigurationError(help_from_attackers(name, malicious))

    def _require_same_training(self) -> None:
        """Refuse a federation whose clients differ from the recorded ones in what they send."""
        manifest, federation = self.history.manifest, self.federation
        if self.attack is not None:
            then, now = (
                set(m) & set(self.remaining) for m in (manifest.malicious, federation.malicious)
            )
            if then != now:
                raise ConfigurationError(
                    f"Of the clients that take part, {sorted(then)} were malicious in the "
                    f"recording, but {sorted(now)} are in this federation. HINT: build it with "
                    "`malicious=history.manifest.malicious`."
                )
        if self.batch_policy == "fresh":
            return
        sizes = {client.client_id: client.num_samples for client in federation.clients}
        differing = [c for c in self.remaining if sizes[c] != manifest.clients[c]]
        if differing:
            first = differing[0]
            raise ConfigurationError(
                f"Client {first!r} had {manifest.clients[first]} samples in the recording, "
                f"but has {sizes[first]} now, so that it would train on other batches. HINT: "
                "build the federation from the same data, split in the same way; "
                '`batch_policy="fresh"` gives up replaying the recorded batches.'
            )
        recorded, current = manifest.training, training_of(federation)
        for client_id in self.remaining:
            then_args = recorded.get(client_id, recorded.get("*", {}))
            now_args = current.get(client_id, current.get("*", {}))
            if then_args != now_args:
                raise ConfigurationError(
                    f"Client {client_id!r} trained with {dict(then_args)} in the recording, but "
                    f"would with {dict(now_args)} now. HINT: build the federation with the same "
                    'arguments; `batch_policy="fresh"` gives up replaying the recorded batches.'
                )

    def _require_same_keys(self) -> None:
        """Refuse live clients that do not have the keys of the recorded ones."""
        recorded, current = self.history.manifest.training, training_of(self.federation)
        for client_id in self.remaining:
            then = recorded.get(client_id, recorded.get("*", {})).get("key")
            now = current.get(client_id, current.get("*", {})).get("key")
            if then not in (None, now):
                what = "no key was asked for" if now is None else f"its key is {now}"
                raise ConfigurationError(
                    f"Client {client_id!r} had the key {then} in the recording, but {what} now. "
                    "HINT: give the executor its `keys`: the recorded one, and behind it one that "
                    "the client has got since."
                )

    def _rounds_of_clients(self) -> dict[str, int]:
        """Return the number of recorded rounds that each remaining client took part in."""
        counts = dict.fromkeys(self.remaining, 0)
        for t in range(self.rounds):
            for client_id in self.view.cohort(t):
                counts[client_id] += 1
        if self.recoverer.needs_excluded_client:  # in the ledger, too, but with no rounds to save
            counts |= dict.fromkeys(self.exclude, 0)
        return counts

    # -- one round ------------------------------------------------------------------------------

    def _round(self, t: int, weights: Tensor, log: MetricsLog) -> tuple[Tensor, float]:
        """Do one round; return the next weights and the seconds spent, evaluation left out."""
        runtime, engine, meter = self.runtime, self.engine, self.meter
        began = time.perf_counter()
        # In rounds after the recording, all remaining clients may be asked.
        cohort = self.view.cohort(t) if t < self.recorded else self.remaining
        logged: dict[str, float] = {}
        new = weights
        meter.begin_round()
        if cohort:  # a round whose whole cohort is excluded makes no step
            ctx = self._context(t, cohort, weights, logged)
            runtime.call("on_round_start", ctx)
            method = f"{type(self.recoverer).__name__}.step"
            with left_alone(method, RecoveryError, global_weights=weights):
                new = self.recoverer.step(t, weights, ctx)
            new = returned(method, new, weights.shape, weights.dtype)
            if new is not meter.stepped and nonfinite_rows(new[None]):
                raise RecoveryError(
                    f"{self.name} gave non-finite global weights in round {t}. "
                    "HINT: ask clients more often (a smaller `correction_period`)."
                )
            engine.end_round()
        spent = time.perf_counter() - began - meter.comparing
        fixed = {"fixed": float(meter.fixed)} if meter.fixed else {}
        values, tested = {"asked": float(meter.asked), **fixed, **logged}, dict[str, float]()
        if runtime.evaluates(t, self.rounds) or t == self.steps[-1]:
            buffers = engine.buffers.values
            tested = runtime.evaluate_curve(self.federation, new, self.attack, buffers)
        log.write(t, values, tested)
        values = {**values, **tested}
        if cohort:
            runtime.call("on_round_end", ctx, values)
        return new, spent

    def _context(
        self, t: int, cohort: tuple[str, ...], weights: Tensor, logged: dict[str, float]
    ) -> MeteredContext:
        """Return the context of the recoverer in a round."""
        runtime, engine = self.runtime, self.engine
        asking = engine.context(t, cohort, weights, logged.__setitem__)
        helping = self.exclude if self.recoverer.needs_excluded_client else ()
        return asking.extended(
            MeteredContext,
            purpose="recoverer",
            max_rounds=self.rounds,
            excluded=self.exclude,
            server_lr=engine.server_lr,
            name=self.name,
            asking=asking,
            engine=engine,
            meter=self.meter,
            recorded=self.view,
            reader=self.reader,
            may_be_asked=frozenset((*cohort, *helping)),
            on_updates=lambda ctx, sent: runtime.call("on_updates", ctx, sent),
        )

    # -- files ----------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint has to agree with."""
        engine = self.engine
        return {
            "store_id": self.history.manifest.store_id,
            "recoverer": self.recoverer.spec(),
            "exclude": sorted(self.exclude),
            "max_rounds": self.rounds,
            "server_lr": engine.server_lr,
            "aggregator": engine.aggregator.spec(),
            "attack": None if self.attack is None else self.attack.spec(),
            "batch_policy": self.batch_policy,
            "on_bad_update": self.on_bad_update,
        }

    def _checkpoint(self) -> Path | None:
        return None if self.folder is None else self.folder / "checkpoint.npz"

    def _forget_earlier_run(self) -> None:
        """Remove the files of an earlier recovery of the same name."""
        if self.folder is not None:
            for name in ("checkpoint.npz", "diagnostics.csv", "ledger.csv", "model.ckpt"):
                (self.folder / name).unlink(missing_ok=True)
        self.shard_files.remove()

    def _load(self) -> dict[str, Any] | None:
        """Return the checkpoint's state, or `None` without one; refuse that of another recovery."""
        path = self._checkpoint()
        if path is None and not self.runtime.settings.fast_dev_run:
            raise ConfigurationError(
                "Cannot resume a recovery without a run folder. HINT: pass `default_root_dir=` to "
                "the loop, in both runs."
            )
        if path is None or not path.exists():
            return None
        state = load_state(path, self.history)
        current = self._identity()
        differences = [k for k, v in current.items() if state["identity"].get(k) != v]
        if differences:
            raise ConfigurationError(
                f"The checkpoint {path} is of another recovery (it differs in "
                f"{', '.join(differences)}). HINT: use another `name`, or `resume=False`."
            )
        return state

    def _restore(self, state: dict[str, Any]) -> tuple[Tensor, int, float]:
        """Bring all components into their states at the checkpoint.

        Returns:
            The weights, the next round, and the seconds spent so far.
        """
        engine, device = self.engine, self.runtime.device
        require_same_plan(state["execution"], self.execution, "the recovery")
        if not state["finished"]:
            self.recoverer.load_state_dict(on_device(state["recoverer"], device))
            engine.aggregator.load_state_dict(on_device(state["aggregator"], device))
            if self.attack is not None:
                self.attack.load_state_dict(on_device(state["attack"], device))
            engine.last_aggregate = on_device(state["last_aggregate"], device)
        if state["shard_files"] is not None:
            self.runtime.ranks.each(lambda: self._restore_shards(state))
        engine.executor.departure = state["departure"]
        if engine.buffers.values is not None:
            engine.buffers.values = state["buffers"].to(device)
        self.ledger.load_state_dict(state["ledger"])
        self.client_seconds = dict(state["client_seconds"])
        callbacks = self.runtime.settings.callbacks
        for callback, saved in zip(callbacks, state["callbacks"], strict=False):
            callback.load_state_dict(saved)
        return state["weights"].to(device), state["next"], state["seconds"]

    def _restore_shards(self, state: dict[str, Any]) -> None:
        """Bring the recoverer into its state at the checkpoint, for this process's shards."""
        shards = [shard for shard in self.view.shards() if shard is not None]
        states = self.shard_files.read(shards, state["shard_files"], state["next"])
        self.recoverer.load_shard_states(on_device(states, self.runtime.device), self.view)

    def _save(
        self, weights: Tensor, next_round: int, seconds: float, finished: bool = False
    ) -> None:
        """Write a checkpoint: what is of shards first, each in its own process, then all else."""
        ranks, files = self.runtime.ranks, self.shard_files
        # What is of clients is large, and a finished recovery does not need it.
        own = {} if finished else self.recoverer.shard_states()
        written = any(ranks.each(lambda: files.write(own, next_round)))
        turn = files.turn if written else None
        state = {
            "next": next_round,
            "seconds": seconds,
            "finished": finished,
            "weights": weights,
            **({} if finished else self._states()),
            "shard_files": turn,
            "diagnostics": self.recoverer.diagnostics(),
        }
        ranks.once(lambda: self._write_checkpoint(state))
        files.remove(all_but=turn)

    def _states(self) -> dict[str, Any]:
        """Return what components remember, and the last aggregate, which may be an update."""
        return {
            "recoverer": self.recoverer.state_dict(),
            "aggregator": self.engine.aggregator.state_dict(),
            "attack": {} if self.attack is None else self.attack.state_dict(),
            "last_aggregate": self.engine.last_aggregate,
        }

    def _write_checkpoint(self, state: dict[str, Any]) -> None:
        path = self._checkpoint()
        if path is None:
            return
        engine, callbacks = self.engine, self.runtime.settings.callbacks
        register_derived(path, without=self.exclude)
        save_state(
            path,
            {
                **state,
                "identity": self._identity(),
                "execution": self.execution,
                "client_seconds": self.client_seconds,
                "rounds": len(self.steps),
                "buffers": engine.buffers.values,
                "buffer_spec": self.federation.layout.buffer_spec,
                "departure": engine.executor.departure,
                "ledger": self.ledger.state_dict(),
                "callbacks": [callback.state_dict() for callback in callbacks],
            },
            None if state["finished"] else self.history,
        )

    def _write_results(self, weights: Tensor, seconds: float) -> None:
        """Write ledger and model, then mark the recovery as finished."""
        self.runtime.ranks.once(lambda: self._write_files(weights))
        self._save(weights, self.rounds, seconds, finished=True)

    def _write_files(self, weights: Tensor) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ledger.to_csv(self.folder / "ledger.csv")
        module = self.federation.module
        self.federation.layout.load(module, weights)
        if self.engine.buffers.values is not None:
            self.federation.layout.load_buffers(module, self.engine.buffers.values)
        write_atomically(self.folder / "model.ckpt", lightning_checkpoint(module, self.rounds))
        for file in ("ledger.csv", "model.ckpt"):
            log_file(self.runtime.loggers, self.folder / file, f"recover/{self.name}/{file}")
