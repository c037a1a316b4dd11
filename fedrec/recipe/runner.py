"""Running a recipe: record, detect, recover, report. Steps that are done already are kept."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from fedrec._derived import register_derived
from fedrec._files import write_atomically
from fedrec.callbacks import Callback, LoopSettings
from fedrec.exceptions import (
    AggregationError,
    ConfigurationError,
    FileWriteError,
    HistoryError,
    MethodsFailedError,
    RecoveryError,
    ShapeError,
    UpdateError,
    expected,
)
from fedrec.federation import Federation
from fedrec.history import HistoryStore, LMDBHistory, ShardedHistory
from fedrec.history.tools.opening import history_folder, store_class
from fedrec.loop import FederatedLoop
from fedrec.loop.loggers import end_runs, log_file
from fedrec.recipe.failures import raise_failures, reason_of
from fedrec.recipe.folder import (
    DETECTION,
    RECORD,
    RECORDED,
    RunFolder,
    is_same,
    num_shards,
    recording_part,
)
from fedrec.recipe.measures import Model, is_measured, measure, recorded_model
from fedrec.recipe.model_fit import check_fit
from fedrec.recipe.repair import history_is_gone, repair
from fedrec.recipe.results import (
    collect_results,
    excluded_clients,
    recovery_spec,
)
from fedrec.recipe.schema import Recipe, build_parts, folder_name
from fedrec.recipe.step_results import detection_result, method_result, recording_result
from fedrec.report import write_report
from fedrec.types import Detection, RunResult

__all__ = ["STEPS", "is_done", "is_recorded", "run"]

_log = logging.getLogger(__name__)

STEPS = ("record", "detect", "recover")

# Errors that all processes raise at the same point, from what they all know.
_ALIKE = (AggregationError, ConfigurationError, RecoveryError, ShapeError, UpdateError)


def run(
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    output_dir: str | Path = "runs",
    overwrite: bool = False,
    steps: Sequence[str] = STEPS,
    progress: bool = True,
) -> dict[str, Any]:
    """Run a recipe in its run folder, and write `results.json` and `report.html`.

    With `loop.fast_dev_run`, the run folder is a temporary one, and nothing is kept.

    Running the same recipe again does only what is missing: an interrupted recording or recovery
    goes on, a finished one is kept. A recipe with the same recording and other recoverers or
    another detector reuses the recording. If the detector flags nobody, there is nothing to recover
    from, and no recovery is made; with `exclude: []` in the recipe, recoveries are made anyway.

    Deleted files of a finished recovery are made again. A deleted history is not recorded again: if
    a step that is still to do needs it, an error says so.

    Args:
        recipe: A recipe from `load_recipe`.
        folder: The run folder; by default the recipe's name in `output_dir`.
        output_dir: The folder of run folders.
        overwrite: Remove an existing run first.
        steps: Which of `"record"`, `"detect"` and `"recover"` to do.
        progress: `False` for no progress bars, whatever the recipe says.

    Returns:
        The content of `results.json`: all rates, ACP too, are fractions in [0, 1].

    Raises:
        ConfigurationError: If the folder holds another recording or is in use, or a step needs a
            recording that is missing.
        MethodsFailedError: If some of the methods failed, once all others are done.
        KeyboardInterrupt: After an interrupt, once the run can be resumed.
        SystemExit: With several devices, in all processes but the first, when that is done.
    """
    for step in steps:
        if step not in STEPS:
            raise ConfigurationError(expected("steps", "steps of a run", step, known=STEPS))
    with ExitStack() as stack:
        if (recipe.config.get("loop") or {}).get("fast_dev_run"):
            # A trial run must not leave files that later count as results of the recipe.
            output_dir = stack.enter_context(TemporaryDirectory(prefix="fedrec-"))
            folder = None
        where = RunFolder(Path(output_dir) / recipe.name if folder is None else folder)
        session = _Session(recipe, where, progress)
        if not session.ranks.is_first:
            session.follow()
        with session.leading(), where.alone():
            return _run(session, overwrite, steps)


def is_done(recipe: Recipe, folder: str | Path) -> bool:
    """Return whether a run folder holds the results of all steps of a recipe.

    Args:
        recipe: A recipe from `load_recipe`.
        folder: The run folder, which need not exist.
    """
    where = RunFolder(folder)
    return where.recipe_file.exists() and _Session(recipe, where, False).is_done(STEPS)


def is_recorded(recipe: Recipe, folder: str | Path) -> bool:
    """Return whether a run folder holds the recording of a recipe.

    Args:
        recipe: A recipe from `load_recipe`.
        folder: The run folder, which need not exist.
    """
    return _Session(recipe, RunFolder(folder), False).is_recorded()


def _run(session: _Session, overwrite: bool, steps: Sequence[str]) -> dict[str, Any]:
    where = session.folder
    before = where.recipe_file.read_bytes() if where.recipe_file.exists() else None
    where.open(session.recipe, session.recording, overwrite=overwrite)
    failed: MethodsFailedError | None = None
    worked = False
    try:
        if "recover" in steps:
            repair(where, session.recipe)
        goes_on = "record" in steps and session.lost_rounds() > 0
        if session.is_done(steps) and not goes_on:
            _log.info("Everything in `%s` is done already.", where.path)
            session.measure()
        else:
            worked = True
            with session.history:
                session.do(steps)
    except MethodsFailedError as error:
        failed = error
    except ConfigurationError:
        # A recipe that cannot be run must not replace the folder's recipe.
        if before is not None and not overwrite:
            write_atomically(where.recipe_file, before)
        raise
    results = collect_results(where)
    if failed is not None:
        results["failures"] = failed.failures
        failed.results = results
    for text in results["warnings"]:
        _log.warning("%s", text)
    try:
        where.write("results.json", results)
        page = write_report(where.path)
    except FileWriteError as error:
        if failed is None:
            raise
        _log.warning("%s", error)
        raise failed from error
    if worked:
        log_file(session.loop.runtime.loggers, page, page.name)
        end_runs(session.loop.runtime.loggers)
    if failed is not None:
        raise failed
    return results


class _Session:
    """One call of `run`: the recipe's objects, and its steps."""

    def __init__(self, recipe: Recipe, folder: RunFolder, progress: bool) -> None:
        self.recipe = recipe
        self.folder = folder
        self.parts = build_parts(recipe)
        self.recording = recording_part(recipe, self.parts)
        quietly = {} if progress else {"enable_progress_bar": False}
        self.loop = FederatedLoop(**{**self.parts.loop, **quietly, "default_root_dir": folder.path})
        self.loop.callbacks.append(_Resumed())
        self.ranks = self.loop.runtime.ranks
        self.is_busy = False
        self.loop.runtime.can_do_without_ter = bool(self.parts.metrics)
        self.models: dict[str, Model] = {}

    @cached_property
    def federation(self) -> Federation:
        return Federation.from_data(self.parts.data, self.parts.model, **self.parts.federation)

    @cached_property
    def history(self) -> HistoryStore:
        cls, arguments = self.parts.history
        path = self.folder.path / "history"
        is_there = history_folder(self.folder.path) == path
        if is_there and cls in (LMDBHistory, ShardedHistory):
            cls = store_class(path)  # the shards may have been made, or merged, since
        elif cls is LMDBHistory and num_shards(self.recipe.config.get("loop") or {}) > 1:
            cls = ShardedHistory
        if self.is_on_disk:
            arguments = {**arguments, "path": path}
        return cls(**arguments)

    @property
    def is_on_disk(self) -> bool:
        """Whether the history outlives this process."""
        return "path" in inspect.signature(self.parts.history[0]).parameters

    def is_recorded(self) -> bool:
        """Return whether the recording is finished."""
        return self.folder.recorded(self.recording) is not None

    def lost_rounds(self) -> int:
        """Return how many rounds of the finished recording were dropped from its history since."""
        done = self.folder.recorded(self.recording)
        if done is None or not self.is_on_disk:
            return 0
        with suppress(HistoryError), self.history:  # a finished run does without its history
            if not self.history.is_empty:
                return int(done["history"]["rounds"]) - len(self.history.rounds())
        return 0

    def is_done(self, steps: Sequence[str]) -> bool:
        """Return whether all steps are done; the history may have been deleted since."""
        if not self.is_recorded():
            return False
        results = collect_results(self.folder)
        detected = results["detection"] is not None or not self.detects(steps)
        recovered = len(results["methods"]) == len(self.parts.recoverers)
        recovered = recovered or self.flagged_nobody()
        return detected and (recovered or "recover" not in steps)

    def detects(self, steps: Sequence[str]) -> bool:
        """Return whether to run the detector: as `steps` say; in a whole run, if it is needed."""
        if "detect" not in steps or "recover" not in steps:
            return "detect" in steps
        excludes_are_listed = not isinstance(self.parts.exclude, str) and self.parts.recoverers
        return self.parts.detector is not None and not excludes_are_listed

    def flagged_nobody(self) -> bool:
        """Return whether recoveries leave out the detected clients, and none was detected."""
        if self.loop.fast_dev_run:  # methods are to be tried, even if few rounds flag nobody
            return False
        by_detector = isinstance(self.parts.exclude, str)
        return by_detector and excluded_clients(self.folder, self.recipe.config) == []

    def do(self, steps: Sequence[str]) -> None:
        if "record" in steps:
            self.record()
        if self.detects(steps):
            self.detect()
        if "recover" in steps and self.parts.recoverers:
            self.recover()

    # -- what all processes do ------------------------------------------------------------------

    def _all(self, step: str, *arguments: Any) -> Any:
        """Do a step of the run in all processes; return what it gives in this one."""
        self.ranks.broadcast((step, arguments))
        self.is_busy = self.ranks.size > 1
        try:
            result = self._do(step, arguments)
        except _ALIKE:
            self.is_busy = False
            raise
        self.is_busy = False
        return result

    def _do(self, step: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return getattr(self, f"_do_{step}")(*arguments)
        finally:
            if self.ranks.size > 1:
                self.history.close()
                del self.history  # until the next step, rank 0 reads all of it

    def _do_record(self) -> RunResult:
        return self.loop.record(
            self.federation,
            self.parts.aggregator,
            self.history,
            attack=self.parts.attack,
            detector=self.parts.detector if self.parts.stop_on_detection else None,
            resume=True,
            recipe=self.recipe.config,
            **self.parts.record,
        )

    def _do_detect(self) -> Detection:
        assert self.parts.detector is not None
        self.history.attach(self.ranks)
        return self.parts.detector.detect(self.history)

    def _do_recover(self, label: str, exclude: list[str], resume: bool) -> RunResult:
        return self.loop.recover(
            self.federation,
            self.history,
            self.parts.recoverers[label],
            exclude,
            attack=self.parts.attack,
            name=folder_name(label),
            resume=resume,
            **self.parts.recover,
        )

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Let the other processes go at the end, unless they are in the middle of a round."""
        try:
            yield
        finally:
            if not self.is_busy:
                self.ranks.broadcast(("end", ()))

    def follow(self) -> NoReturn:
        """Do what rank 0 does, in silence, until it is done; then end this process."""
        nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
        sys.stdout = sys.stderr = nowhere
        try:
            while True:
                step, arguments = self.ranks.broadcast(("", ()))
                if step == "end":
                    break
                with suppress(*_ALIKE):  # rank 0 has raised it, too, and says so
                    self._do(step, arguments)
        except BaseException as error:
            self.ranks.leave(error)
            self.loop.runtime.log_error(error)
            raise
        raise SystemExit(0)

    # -- steps ----------------------------------------------------------------------------------

    def record(self) -> None:
        done = self.folder.recorded(self.recording)
        is_there = not self.history.is_empty
        if done and is_there and len(self.history.rounds()) >= done["history"]["rounds"]:
            _log.info("Recording: kept, %d rounds.", done["rounds"])
            return
        if done and not is_there and self.is_on_disk:
            raise history_is_gone(self.folder)
        check_fit(self.recipe, self.parts.data)
        for remark in self.parts.remarks:
            _log.warning("%s", remark)
        self.folder.write(RECORD, {"spec": self.recording})
        parts = self.parts
        total = self.loop.runtime.limit(parts.record["max_rounds"])
        if self.history.is_empty:
            # Recoveries and detections of a deleted history do not belong to the new recording.
            shutil.rmtree(self.folder.path / "recover", ignore_errors=True)
            for name in (DETECTION, self.folder.measures_file(RECORDED)):
                (self.folder.path / name).unlink(missing_ok=True)
            _log.info("Recording %d rounds of %s.", total, self.federation)
        else:
            _log.info("Recording: going on at round %d of %d.", len(self.history.rounds()), total)
        try:
            result = self._all("record")
        except Exception:
            # Without any round there is nothing to keep, and a corrected recipe could not go on.
            if self.history.is_empty or not self.history.rounds():
                self.history.close()
                shutil.rmtree(self.folder.path / "history", ignore_errors=True)
                (self.folder.path / RECORD).unlink(missing_ok=True)
            elif done:  # lost rounds cannot be made again; what is left is as good as before
                self.folder.write(RECORD, {"spec": self.recording, "result": done})
            raise
        kept = recording_result(result, self.history, synthetic=self.parts.data.synthetic)
        kept = {**self._test(result), **kept}
        self.folder.write(RECORD, {"spec": self.recording, "result": kept})
        if result.detection is not None and self.parts.stop_on_detection:
            self._write_detection(result.detection)

    def detect(self) -> dict[str, Any]:
        self._need_recording()
        spec = {"detector": self.recipe.config["detector"]}
        done = self.folder.result(DETECTION, spec)
        if done is not None:
            return done
        detector = self.parts.detector
        if detector is None:
            raise ConfigurationError("Expected a `detector` in the recipe, but there is none.")
        _log.info("Detecting with %r.", detector)
        return self._write_detection(self._all("detect"))

    def _write_detection(self, detection: Detection) -> dict[str, Any]:
        result = detection_result(detection, self.history.manifest.malicious)
        spec = {"detector": self.recipe.config["detector"]}
        self.folder.write_detection({"spec": spec, "result": result})
        if detection.malicious:
            _log.info("Flagged as malicious: %s.", ", ".join(detection.malicious))
        else:
            _log.warning("%s flagged nobody.", type(self.parts.detector).__name__)
        return result

    def recover(self) -> None:
        self._need_recording()
        exclude = self.parts.exclude
        if isinstance(exclude, str):
            exclude = self.detect()["malicious"]
        self.models[RECORDED] = recorded_model(self.history)
        self.measure()  # now, so that a metric that does not fit fails before hours of recoveries
        if self.flagged_nobody():
            _log.warning(
                "Nobody was flagged, so there is nothing to recover from, and no recovery was "
                "made. HINT: try another detector, or list clients in `recover.exclude`; with an "
                "empty list, the methods run and leave nobody out."
            )
            return
        failures: dict[str, Exception] = {}
        for i, label in enumerate(self.parts.recoverers):
            try:
                self._recover(i, label, list(exclude))
            except Exception as error:
                if self.is_busy:  # the other processes are in the middle of a round
                    raise
                failures[label] = error
                _log.warning("%s failed: %s", label, reason_of(error))
        self.measure()
        files = {k: self.folder.path / self.folder.failure_file(k) for k in self.parts.recoverers}
        raise_failures(failures, files)

    def _recover(self, i: int, label: str, exclude: list[str]) -> None:
        """Recover with a method, unless its recovery is done."""
        file, failure = self.folder.recovery_file(label), self.folder.failure_file(label)
        spec = recovery_spec(self.recipe.config, i, exclude)
        if self.folder.result(file, spec) is not None:
            _log.info("%s: kept.", label)
            return
        begun, weights = self.folder.read(file), self.folder.path / self.folder.weights_file(label)
        is_other = begun is not None and not is_same(begun["spec"], spec)
        # Weights of an earlier, other recovery are kept aside until the new one has started.
        earlier = weights.with_name(f"earlier-{weights.name}")
        if begun is not None and is_other:
            earlier.unlink(missing_ok=True)
            if weights.exists():
                register_derived(earlier, without=begun["spec"]["exclude"])
                weights.rename(earlier)
        (self.folder.path / failure).unlink(missing_ok=True)
        self.folder.write(file, {"spec": spec})
        noun = "client" if len(exclude) == 1 else "clients"
        _log.info("Recovering without %d %s: %s.", len(exclude), noun, label)
        try:
            result = self._all("recover", label, exclude, not is_other)
        except ConfigurationError:
            if begun is not None:
                if is_other and earlier.exists():
                    register_derived(weights, without=begun["spec"]["exclude"])
                    earlier.rename(weights)
                self.folder.write(file, begun)
            raise
        earlier.unlink(missing_ok=True)
        self.models[label] = Model(
            result.global_weights.cpu(), result.buffers, self.federation.layout.buffer_spec
        )
        kept = {**self._test(result), **method_result(result)}
        kept["recorded"] = len(self.history.rounds())
        self.folder.write(file, {"spec": spec, "result": kept})

    def measure(self) -> None:
        """Measure the models that have not been measured yet."""
        if is_measured(self.folder, self.recipe.config) and RECORDED not in self.models:
            return
        if RECORDED not in self.models and (self.folder.path / "history").exists():
            with self.history:
                self.models[RECORDED] = recorded_model(self.history)
        measure(
            self.folder,
            self.recipe.config,
            runtime=self.loop.runtime,
            federation=self.federation,
            metrics=self.parts.metrics,
            models=self.models,
        )

    def _test(self, result: RunResult) -> dict[str, float | None]:
        if self.federation.test_dataset is None:
            return {"ter": None, "asr": None}
        return self.loop.test(
            self.federation,
            result.global_weights,
            attack=self.parts.attack,
            buffers=result.buffers,
        )

    def _need_recording(self) -> None:
        if self.is_recorded() and self.history.is_empty and self.is_on_disk:
            raise history_is_gone(self.folder)
        if not self.is_recorded() or self.history.is_empty:
            raise ConfigurationError(
                f"`{self.folder.path}` has no finished recording. HINT: `fedrec record "
                f"{self.folder.recipe_file} --output-dir {self.folder.path.parent}` makes one."
            )


class _Resumed(Callback):
    """Logs the round from which an interrupted recovery goes on."""

    def on_recover_start(
        self, loop: LoopSettings, name: str, max_rounds: int, first_round: int
    ) -> None:
        """Log the round, unless it is the first."""
        if first_round:
            rounds = f" of {max_rounds}" if first_round < max_rounds else ""
            _log.info("%s: going on at round %d%s.", name, first_round, rounds)
