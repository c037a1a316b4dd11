"""The loop that records, recovers and tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrec._checks import (
    check_bool,
    check_choice,
    check_float,
    check_instance,
    check_int,
    check_recording,
    check_recovery,
)
from fedrec.aggregators.base import Aggregator
from fedrec.attacks.base import Attack
from fedrec.callbacks import Callback, RichProgressBar
from fedrec.detectors.base import Detector
from fedrec.exceptions import ConfigurationError, expected
from fedrec.executors import Executor
from fedrec.federation import ClientSampler, Federation
from fedrec.history.base import HistoryStore
from fedrec.loop.evaluation import named_metrics
from fedrec.loop.recording import Recording
from fedrec.loop.recovery import Recovery
from fedrec.loop.runtime import Runtime
from fedrec.recoverers.base import Recoverer
from fedrec.types import Detection, RunResult

__all__ = ["FederatedLoop"]

_PRECISIONS = ("32-true", "bf16-mixed")


class FederatedLoop:
    r"""Runs rounds: records a training, recovers from a recording, tests weights.

    Arguments are named like those of Lightning's `Trainer`.

    Args:
        accelerator: `"cpu"`, `"cuda"` (or `"gpu"`), or `"auto"` for CUDA if there is a device.
        devices: Processes on each node: one for each GPU, or any number on a CPU. With several,
            clients are shared among them, see `docs/scale.md`; Lightning Fabric starts them by
            running the same command again, unless torchrun or SLURM have.
        num_nodes: Number of machines.
        strategy: `"ddp"`, or `"auto"` for the same where there are several devices.
        num_shards: Number of shards that clients are divided into, which decide the bits of a
            result in place of the number of devices; `None` for one on one device and for 8 (or
            as many as devices, but no more than clients) on several. A recovery takes that of the
            recording.
        timeout: Seconds that a process waits for another before the run ends with an error.
        precision: `"32-true"`, or `"bf16-mixed"` for forward and backward in bfloat16.
        executor: `"sequential"`; `"vectorized"` for `VectorizedExecutor`, which chooses the fastest
            way that gives the same updates; `"auto"` for the same, without its warning if clients
            have to be computed one after another; or an `Executor`.
        callbacks: One or more `Callback`.
        logger: `True` for metrics.csv in the run folder, `False` for nothing, or one or more of
            Lightning's loggers beside the file (step = round).
        enable_progress_bar: Show a bar if there is a terminal.
        eval_every: Rounds between evaluations of the curves; `None` for a twentieth of all rounds.
        eval_samples: Test samples used for curves (a fixed subset); `None` for all.
        metrics: Metrics to compute on the test data besides TER and ASR, for curves and by `test`:
            a torchmetrics metric, a list of them, a `MetricCollection`, or a dict from names to
            metrics. They get the output of `forward` and the labels; copies of them are used.
        default_root_dir: Run folder, for metrics, ledgers and checkpoints; `None` writes no file.
        seed: Seed of the recording: every random draw is a function of it.
        deterministic: Make torch refuse operations that are not deterministic.
        fast_dev_run: Do only 3 rounds (or this many) and write no file.
        checkpoint_every: Seconds between checkpoints of a recovery, and, while recording, of an
            aggregation rule that has a memory. A recovery from live clients stores one after each
            round in which it has asked them, too.
        num_threads: Threads that torch computes with on a CPU; `None` for one thread if the model
            has fewer than 20,000 parameters (starting several would take longer than the work) or
            clients are in several shards, and torch's own choice otherwise.

    Raises:
        ConfigurationError: If an argument is out of range.

    Examples:
        >>> from fedrec.aggregators import Median
        >>> from fedrec.data import Digits
        >>> from fedrec.federation import Federation
        >>> from fedrec.history import MemoryHistory
        >>> from fedrec.models import MLP
        >>> from fedrec.recoverers import HistoricalOnly
        >>> federation = Federation.from_data(Digits(num_clients=4), MLP(in_features=64))
        >>> loop, history = FederatedLoop(fast_dev_run=2), MemoryHistory()
        >>> loop.record(federation, Median(), history, max_rounds=100, server_lr=0.1).rounds
        2
        >>> result = loop.recover(federation, history, HistoricalOnly(), exclude=["client-0"])
        >>> result.ledger.acp()
        1.0
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int = 1,
        num_nodes: int = 1,
        strategy: str = "auto",
        num_shards: int | None = None,
        timeout: float = 1800.0,
        precision: str = "32-true",
        executor: str | Executor = "auto",
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: Any = True,
        enable_progress_bar: bool = True,
        eval_every: int | None = None,
        eval_samples: int | None = 2000,
        metrics: Any = None,
        default_root_dir: str | Path | None = None,
        seed: int = 0,
        deterministic: bool = False,
        fast_dev_run: bool | int = False,
        checkpoint_every: float = 30.0,
        num_threads: int | None = None,
    ) -> None:
        check_choice("accelerator", accelerator, ("auto", "cpu", "gpu", "cuda"))
        if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            raise ConfigurationError(
                expected("accelerator", "one that is there", accelerator, hint="no CUDA device is.")
            )
        devices = check_int("devices", devices, minimum=1)
        num_nodes = check_int("num_nodes", num_nodes, minimum=1)
        check_choice("strategy", strategy, ("auto", "ddp"))
        if num_shards is not None:
            num_shards = check_int("num_shards", num_shards, minimum=1)
            if num_shards < devices * num_nodes:
                requirement = f"at least the {devices * num_nodes} devices"
                raise ConfigurationError(expected("num_shards", requirement, num_shards))
        timeout = check_float("timeout", timeout, minimum=0, open_minimum=True)
        check_choice("precision", precision, _PRECISIONS)
        if not isinstance(executor, Executor):
            check_choice("executor", executor, ("auto", "sequential", "vectorized"))
        if eval_every is not None:
            eval_every = check_int("eval_every", eval_every, minimum=1)
        if eval_samples is not None:
            eval_samples = check_int("eval_samples", eval_samples, minimum=1)
        seed = check_int("seed", seed, minimum=0)
        if not isinstance(fast_dev_run, bool):
            fast_dev_run = check_int("fast_dev_run", fast_dev_run, minimum=1)
        checkpoint_every = check_float("checkpoint_every", checkpoint_every, minimum=0)
        if num_threads is not None:
            num_threads = check_int("num_threads", num_threads, minimum=1)
        self.accelerator = accelerator
        self.devices = devices
        self.num_nodes = num_nodes
        self.strategy = strategy
        self.num_shards = num_shards
        self.timeout = timeout
        self.precision = precision
        self.executor = executor
        for entry in logger if isinstance(logger, list | tuple) else [logger]:
            # Checked by its method, not its class: loggers of `lightning.pytorch` will do, too.
            is_logger = callable(getattr(entry, "log_metrics", None))
            is_logger = is_logger and not isinstance(entry, type)
            if not is_logger and entry is not None and not isinstance(entry, bool):
                requirement = "true, false, or one or more of Lightning's loggers"
                raise ConfigurationError(expected("logger", requirement, logger))
        if not isinstance(default_root_dir, str | Path | None):
            requirement = "the path of a folder, or None"
            raise ConfigurationError(expected("default_root_dir", requirement, default_root_dir))
        self.logger = logger
        self.enable_progress_bar = enable_progress_bar
        self.eval_every = eval_every
        self.eval_samples = eval_samples
        self.metrics = named_metrics(metrics)
        self.default_root_dir = None if default_root_dir is None else Path(default_root_dir)
        self.seed = seed
        self.deterministic = check_bool("deterministic", deterministic)
        self.fast_dev_run = fast_dev_run
        self.checkpoint_every = checkpoint_every
        self.num_threads = num_threads
        #: The store that is written or read, for callbacks; `None` between runs.
        self.history: HistoryStore | None = None
        own: list[Callback] = [callbacks]  # type: ignore[list-item]
        if callbacks is None or isinstance(callbacks, list | tuple):
            own = list(callbacks or [])
        for callback in own:
            check_instance("callbacks", callback, Callback)
        self.callbacks = list(own)
        #: Device, hooks, files and tests, which recordings, recoveries and tests have in common.
        self.runtime = Runtime(self)
        # Here the other processes are started, before anything else takes time.
        is_first = self.runtime.ranks.is_first
        if enable_progress_bar and is_first:
            self.callbacks.append(RichProgressBar())

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the first of its run, which alone prints and writes files."""
        return self.runtime.ranks.is_first

    def record(
        self,
        federation: Federation,
        aggregator: Aggregator,
        history: HistoryStore,
        *,
        max_rounds: int,
        server_lr: float,
        attack: Attack | None = None,
        detector: Detector | None = None,
        stop_on_detection: bool = False,
        sampler: ClientSampler | None = None,
        on_bad_update: str = "raise",
        resume: bool = False,
        recipe: Mapping[str, Any] | None = None,
    ) -> RunResult:
        """Train, and store every round.

        Args:
            federation: Clients, model, test data.
            aggregator: Aggregation rule.
            history: The store for the rounds; it has to be empty unless `resume`.
            max_rounds: Number of rounds $T$.
            server_lr: Learning rate of the server step; gradients are means over samples.
            attack: The attack of the malicious clients, or `None`.
            detector: A detector that observes every round, or `None`.
            stop_on_detection: Whether the detector's decision ends the recording.
            sampler: Chooses the clients of each round; `None` for all of them.
            on_bad_update: For an update that is not finite, `"raise"` an error, or `"drop"` it:
                leave the client out of the round, and store the reason in the round's record.
            resume: Go on where the history ends; start afresh if it is empty.
            recipe: Resolved recipe to keep in the manifest.

        Returns:
            Final weights, curve and the detector's verdict.

        Raises:
            ConfigurationError: If the history holds another recording, or the recording is to stop
                on detection without a detector.
            UpdateError: If a client's update is not finite and `on_bad_update="raise"`.
            KeyboardInterrupt: After Ctrl-C, between two rounds, and with live clients in the middle
                of one; every round done is stored.
        """
        max_rounds, server_lr = check_recording(
            max_rounds=max_rounds,
            server_lr=server_lr,
            on_bad_update=on_bad_update,
            stop_on_detection=stop_on_detection,
            detector=detector,
        )
        check_instance("federation", federation, Federation)
        check_instance("aggregator", aggregator, Aggregator)
        check_instance("history", history, HistoryStore)
        check_instance("attack", attack, Attack, optional=True)
        check_instance("detector", detector, Detector, optional=True)
        check_instance("sampler", sampler, ClientSampler, optional=True)
        history.require_writers(self.runtime.ranks)
        with self.runtime.running(federation, history):
            self.runtime.check_evaluation(federation, attack)
            return Recording(
                runtime=self.runtime,
                federation=federation,
                aggregator=aggregator,
                history=history,
                max_rounds=self.runtime.limit(max_rounds),
                server_lr=server_lr,
                attack=attack,
                detector=detector,
                stop_on_detection=stop_on_detection,
                sampler=sampler,
                on_bad_update=on_bad_update,
                resume=resume,
                recipe=recipe,
            ).run()

    def recover(
        self,
        federation: Federation,
        history: HistoryStore,
        recoverer: Recoverer,
        exclude: Sequence[str] | Detection,
        *,
        attack: Attack | None = None,
        name: str | None = None,
        resume: bool = False,
        max_rounds: int | None = None,
        server_lr: float | None = None,
        aggregator: Aggregator | None = None,
        batch_policy: str = "replay",
        on_bad_update: str = "raise",
    ) -> RunResult:
        """Get a clean model back from a recording.

        Aggregation rule, learning rate, number of rounds, seed and initial weights are those of the
        recording, unless overridden here.

        Args:
            federation: The same clients and model as in the recording.
            history: The recording; not changed.
            recoverer: The method.
            exclude: Ids of the clients to leave out, or a detector's verdict.
            attack: The attack: malicious clients that are *not* excluded go on with it, and its
                trigger is used to measure the attack success rate.
            name: Name of the result and of its folder; the recoverer's class name by default.
            resume: Go on from the last checkpoint in the run folder; start afresh if there is none.
            max_rounds: Number of rounds, at most those recorded.
            server_lr: Learning rate in place of the recorded one.
            aggregator: Aggregation rule in place of the recorded one.
            batch_policy: `"replay"`: clients draw the mini-batches of the recording again;
                `"fresh"`: they draw others.
            on_bad_update: As in `record`.

        Returns:
            Final weights, curve and the ledger of what clients were asked for.

        Raises:
            ConfigurationError: If arguments, federation and recording do not fit together.
            HistoryError: If the history cannot be read.
            RecoveryError: If the method cannot go on.
            KeyboardInterrupt: After Ctrl-C, between two rounds, with a checkpoint; with live
                clients in the middle of one.
        """
        max_rounds, server_lr = check_recovery(
            max_rounds=max_rounds,
            server_lr=server_lr,
            batch_policy=batch_policy,
            on_bad_update=on_bad_update,
        )
        check_instance("federation", federation, Federation)
        check_instance("history", history, HistoryStore)
        check_instance("recoverer", recoverer, Recoverer)
        check_instance("attack", attack, Attack, optional=True)
        check_instance("aggregator", aggregator, Aggregator, optional=True)
        if isinstance(exclude, str) or not isinstance(exclude, Detection | Iterable):
            raise ConfigurationError(expected("exclude", "a list of client ids", exclude))
        excluded = exclude.malicious if isinstance(exclude, Detection) else tuple(exclude)
        with self.runtime.running(federation, history):
            self.runtime.check_evaluation(federation, attack)
            return Recovery(
                runtime=self.runtime,
                federation=federation,
                history=history,
                recoverer=recoverer,
                exclude=excluded,
                attack=attack,
                name=name or type(recoverer).__name__,
                resume=resume,
                max_rounds=max_rounds,
                server_lr=server_lr,
                aggregator=aggregator,
                batch_policy=batch_policy,
                on_bad_update=on_bad_update,
            ).run()

    def test(
        self,
        federation: Federation,
        global_weights: RunResult | Tensor,
        *,
        attack: Attack | None = None,
        buffers: Tensor | None = None,
    ) -> dict[str, float | None]:
        """Test a model on the whole test set.

        Args:
            federation: Model and test data.
            global_weights: What `record` or `recover` returned, or weights of shape $(d,)$.
            attack: The attack whose success rate is measured, or `None`.
            buffers: Averaged buffers beside weights, shape $(b,)$; a result has its own.

        Returns:
            `{"ter": ..., "asr": ...}`, fractions in [0, 1], and the loop's `metrics` by name. An
            `asr` that is undefined, the undefined `ter` of a regression (which needs `metrics`),
            and a metric that is not finite are `None`.

        Raises:
            ConfigurationError: If the federation has no test data, or these do not fit the model,
                the attack or a metric, or averaged buffers are missing.
        """
        check_instance("federation", federation, Federation)
        if isinstance(global_weights, RunResult):
            result = global_weights
            global_weights, buffers = result.global_weights, result.buffers
        check_instance("global_weights", global_weights, Tensor)
        if buffers is None and federation.buffers == "average" and federation.layout.num_buffers:
            # With those of the untrained model, figures would be wrong and look right.
            hint = "pass the result in place of its weights: `test(federation, result)`."
            requirement = "given beside weights, since this federation averages buffers"
            raise ConfigurationError(expected("buffers", requirement, None, hint=hint))
        check_instance("attack", attack, Attack, optional=True)
        dataset, device = federation.test_dataset, self.runtime.device
        if dataset is None:
            raise ConfigurationError(
                expected(
                    "federation.test_dataset", "a data set", None, hint="pass `test_dataset=`."
                )
            )
        with self.runtime.running(federation):
            federation.module.to(device)
            weights = global_weights.to(device)
            return self.runtime.evaluate(federation, dataset, weights, attack, buffers)
