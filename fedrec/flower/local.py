"""A federation of real processes on this machine: SuperLink, SuperNodes and runs, over TLS."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fedrec.exceptions import FedrecError
from fedrec.flower.credentials import make_certificates, make_node_key, public_file
from fedrec.flower.warm import POLL_VARIABLE, Forked, WarmProcess

__all__ = ["LocalFederation"]

_NAME = "fedrec-local"
_PATIENCE = 600.0  # seconds that a SuperLink has for its start


class LocalFederation:
    """Starts a SuperLink and SuperNodes on the loopback interface, and runs apps on them.

    Traffic is encrypted, and every node has a key of its own that the SuperLink knows. All
    processes end when this object is closed or this process dies, whatever the way. Nothing is
    installed at run time, and Flower's telemetry and search for updates are off.

    Args:
        folder: Where certificates, keys, Flower's files and logs are kept.
        poll: Seconds after which an idle SuperNode asks for messages; Flower's own are 3. Each
            time costs the SuperLink some milliseconds.
        database: Whether the SuperLink keeps its state on disk, so that it goes on after it was
            killed.

    Attributes:
        keys: Fingerprints of the nodes' keys by client id, for the `keys` of a `FlowerExecutor`.

    Examples:
        >>> with LocalFederation("runs/here") as federation:  # doctest: +SKIP
        ...     for i in range(5):
        ...         federation.start_node(f"client-{i}")
        ...     federation.run("my_app", {"mode": "record"})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        poll: float = 0.3,
        database: bool = False,
    ) -> None:
        self.folder = Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keys: dict[str, str] = {}
        self.database = database
        self._tls = self.folder / "tls"
        make_certificates(self._tls)
        self.port = free_port()
        #: Environment of all processes.
        self.environment = {
            **os.environ,
            # Flower starts its commands by name, and this one's may not be activated.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": f"{poll:g}",
            "OMP_NUM_THREADS": "1",  # processes share the cores already
            POLL_VARIABLE: f"{poll:g}",
        }
        self._warm = WarmProcess(self.environment)
        self._processes: dict[str, Forked] = {}

    # -- processes ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the SuperLink, and wait until it answers; also after it was killed."""
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self._tls}/ca.pem"\n'
        )
        self._start(
            "superlink",
            "flower-superlink",
            *("--ssl-ca-certfile", self._tls / "ca.pem"),
            *("--ssl-certfile", self._tls / "server.pem"),
            *("--ssl-keyfile", self._tls / "server.key"),
            *("--host", "127.0.0.1", "--port", self.port),
            *(("--database", self.folder / "superlink.db") if self.database else ()),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        )
        self._wait_for_superlink()
        self._list()

    def start_node(
        self,
        client_id: str,
        config: Mapping[str, str | int | float | bool] | None = None,
        *,
        root_certificates: Path | None = None,
    ) -> Forked:
        """Start the SuperNode of a client; its key is made and registered the first time.

        Args:
            client_id: The client.
            config: More of the node's configuration.
            root_certificates: Certificates to trust in place of the federation's own.
        """
        key = self.folder / "keys" / client_id
        if client_id not in self.keys:
            self.keys[client_id] = make_node_key(key)
            self.flwr("supernode", "register", public_file(key), _NAME)
        values = {"client-id": client_id, **(config or {})}
        return self._start(
            client_id,
            "flower-supernode",
            *("--root-certificates", root_certificates or self._tls / "ca.pem"),
            *("--superlink", f"127.0.0.1:{self.port}", "--port", free_port()),
            *("--auth-supernode-private-key", key),
            *("--node-config", " ".join(f"{k}={json.dumps(v)}" for k, v in values.items())),
        )

    def restart_node(
        self, client_id: str, config: Mapping[str, str | int | float | bool] | None = None
    ) -> Forked:
        """Start the SuperNode of a client again, until it is connected.

        A SuperLink takes a node for connected until it has missed two heartbeats, which is up to a
        minute, and sends a new one with the same key away. A node that was stopped by SIGTERM says
        good-bye, and is let in at once.

        Args:
            client_id: The client.
            config: More of the node's configuration.
        """
        log = self.folder / f"{client_id}.log"
        while True:
            begin = log.stat().st_size
            process = self.start_node(client_id, config)
            while process.poll() is None:
                if b"SuperNode ID:" in log.read_bytes()[begin:]:
                    return process
                time.sleep(0.1)
            time.sleep(2.0)

    def process(self, name: str) -> Forked:
        """Return a running process: `"superlink"`, or that of a client's node."""
        return self._processes[name]

    def kill(self, name: str) -> None:
        """Kill a process at once (SIGKILL), as a power cut would."""
        self._processes.pop(name).kill()

    def _start(self, name: str, *command: object) -> Forked:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = self._warm.start(
                [str(part) for part in command],
                environment=self.environment,
                output=log.fileno(),
                errors=log.fileno(),
            )
        self._processes[name] = process
        return process

    def _wait_for_superlink(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and self._processes["superlink"].poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise FedrecError(f"The superlink did not start; see {self.folder / 'superlink.log'}.")

    # -- runs -----------------------------------------------------------------------------------

    def flwr(self, *arguments: object) -> str:
        """Run the command `flwr`, and return what it printed.

        Raises:
            FedrecError: If it fails.
        """
        path = self.folder / "flwr.out"
        with path.open("wb") as file:
            process = self._warm.start(
                ["flwr", *map(str, arguments)],
                environment={**self.environment, "NO_COLOR": "1", "TERM": "dumb"},
                output=file.fileno(),
                errors=file.fileno(),
            )
            status = process.wait()
        text = path.read_text()
        if status != 0:
            raise FedrecError(f"`flwr {' '.join(map(str, arguments[:2]))}` failed: {text}")
        return text

    def submit(self, app: str | os.PathLike[str], config: Mapping[str, Any]) -> str:
        """Start a run of an app, and return its id.

        Args:
            app: Folder of the app, with its pyproject.toml.
            config: Values that override those in `[tool.flwr.app.config]`.
        """
        overrides = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        said = self.flwr(
            *("run", Path(app).resolve(), _NAME, "--run-config", overrides, "--format", "json")
        )
        answer = _json(said)
        if "run-id" not in answer:
            raise FedrecError(f"The run did not start: {answer.get('error-message', said)}")
        return str(answer["run-id"])

    def status(self, run_id: str) -> dict[str, Any]:
        """Return what Flower says about a run: status, traffic and more."""
        said = self._list("--run-id", run_id, "--format", "json")
        run: dict[str, Any] = _json(said)["runs"][0]
        return run

    def _list(self, *options: str) -> str:
        """Run `flwr list`, again if it fails: a busy SuperLink answers after Flower's patience."""
        tries = 1
        while True:
            try:
                return self.flwr("list", _NAME, *options)
            except FedrecError:
                if tries == 10 or self._processes["superlink"].poll() is not None:
                    raise
            tries += 1
            time.sleep(1.0)

    def wait(self, run_id: str) -> dict[str, Any]:
        """Wait until a run has ended, and return what Flower says about it.

        Raises:
            FedrecError: If it failed.
        """
        while not str((run := self.status(run_id))["status"]).startswith("finished"):
            # It reads the log until the run is over: to ask again and again costs more. If the
            # SuperLink has gone, the next question fails, too.
            with contextlib.suppress(FedrecError):
                self.flwr("log", run_id, _NAME)
        if run["status"] != "finished:completed":
            log = self.folder / "superlink.log"
            why = f"{run['status']} ({run['status-details']})"
            raise FedrecError(f"The run ended with {why}; see {log}.")
        return run

    def run(self, app: str | os.PathLike[str], config: Mapping[str, Any]) -> dict[str, Any]:
        """Run an app to its end, see `submit` and `wait`."""
        return self.wait(self.submit(app, config))

    def close(self) -> None:
        """End all processes."""
        self._warm.close()
        self._processes.clear()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _json(text: str) -> dict[str, Any]:
    """Return the JSON object in what a command printed, which may print more before it."""
    start = text.index("{")
    value: dict[str, Any] = json.loads(text[start : text.rindex("}") + 1])
    return value
