"""A process that has imported everything once, and forks Flower's commands from then on.

Flower starts a process for every message to a client, and importing torch there costs seconds each
time. Run the SuperNode under this module, and each of these processes is forked in milliseconds:

    python -m fedrec.flower.warm flower-supernode --superlink example.org:8000 ...

It needs nothing of Flower but the names of its commands: a folder with commands of the same names
comes first on the path of what is started, and they hand their arguments over.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

__all__ = ["WarmProcess"]

#: Commands that Flower itself starts.
_COMMANDS = ("flower-superexec", "flwr-clientapp", "flwr-serverapp")

#: What processes of a federation need, and their apps; each of them would import it again.
_MODULES = (
    "sklearn.datasets",
    "fedrec.aggregators",
    "fedrec.attacks",
    "fedrec.detectors",
    "fedrec.flower.client_app",
    "fedrec.flower.executor",
    "fedrec.history.lmdb",
    "fedrec.loop",
    "fedrec.models",
    "fedrec.recoverers",
    "flwr.clientapp",
    "flwr.serverapp",
    "httpcore",
    "uvicorn.protocols.http.auto",
)

#: Seconds after which an idle SuperNode asks for messages again, in place of Flower's own 3.
POLL_VARIABLE = "FEDREC_FLOWER_POLL"

_SHIM = """#!{python} -IS
import json, os, socket, struct, sys
s = socket.socket(socket.AF_UNIX)
s.connect({address!r})
head = json.dumps({{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
                   "env": dict(os.environ), "cwd": os.getcwd()}}).encode()
socket.send_fds(s, [struct.pack("<I", len(head))], [1, 2])
s.sendall(head)
s.recv(4)
"""


class WarmProcess:
    """A warm process, and what it has forked; all of it ends when this object is closed.

    It ends, too, when the process that made this object dies, whatever the way.

    Args:
        environment: Environment of the warm process; `None` for this one's.

    Examples:
        >>> with WarmProcess() as warm:  # doctest: +SKIP
        ...     node = warm.start(["flower-supernode", "--help"])
        ...     node.wait()
        0
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="fedrec-warm-")  # readable by its owner
        bin_folder = Path(self.folder.name) / "bin"
        bin_folder.mkdir()
        self._address = str(Path(self.folder.name) / "socket")
        for command in _COMMANDS:
            shim = bin_folder / command
            shim.write_text(_SHIM.format(python=sys.executable, address=self._address))
            shim.chmod(0o700)
        self._forked: list[Forked] = []
        #: Folder to put first on the path of what starts Flower's commands.
        self.bin_folder = bin_folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, "--serve", self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environment is None else dict(environment),
        )

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: int = 1,
        errors: int = 2,
    ) -> Forked:
        """Start a command of Flower in a process of its own, which leads its own session.

        Args:
            command: The command's name and arguments.
            environment: Its environment, `None` for this process's; `PATH` is extended.
            output: File descriptor of its standard output.
            errors: File descriptor of its standard error.
        """
        if self._process.stdout is not None:  # the first time: wait until all is imported
            if self._process.stdout.readline() != b"ready\n":
                raise RuntimeError("The warm process did not start; its errors are above.")
            self._process.stdout.close()
            self._process.stdout = None
        env = dict(os.environ if environment is None else environment)
        env["PATH"] = f"{self.bin_folder}{os.pathsep}{env.get('PATH', '')}"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        head = json.dumps({"argv": list(command), "env": env, "cwd": str(Path.cwd())}).encode()
        socket.send_fds(connection, [struct.pack("<I", len(head))], [output, errors])
        connection.sendall(head)
        process = Forked(connection, struct.unpack("<I", _receive(connection, 4))[0])
        self._forked.append(process)
        return process

    def close(self) -> None:
        """End the warm process and everything that it has forked."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # which it waits for
            self._process.stdin = None
        if self._process.stdout is not None:
            self._process.stdout.close()
            self._process.stdout = None
        self._process.wait()
        for process in self._forked:
            process.wait()
        self.folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Forked:
    """A command that a warm process runs.

    Args:
        connection: To the warm process, which sends the exit status.
        pid: Process id, and the id of its process group.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative after a signal, or `None` while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait until it has ended, and return the exit status."""
        if self.returncode is None:
            try:
                self.returncode = struct.unpack("<i", _receive(self._connection, 4))[0]
            except EOFError:  # the warm process has ended, and with it all that it had forked
                self.returncode = -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal to it and to the processes that it has started, and wait for its end."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)
            self.wait()


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


# -- the warm process -----------------------------------------------------------------------------


def _serve(address: str) -> None:
    """Import everything, then fork a process for each request, until standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who own this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent(signal.SIGKILL)
    if select.select([0], [], [], 0)[0]:  # it has died already
        return
    for module in _MODULES:  # other versions of Flower may do without some
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for command in ("flower-supernode", "flower-superlink", "flwr", *_COMMANDS):
        _entry_point(command)
    gc.collect()
    gc.freeze()  # or the first collection in each process copies all memory
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    _die_with_parent(0)  # from now on it is told by its standard input, and ends what it has forked
    try:
        os.write(1, b"ready\n")
    except BrokenPipeError:  # whoever started this process has gone
        return
    os.dup2(2, 1)
    running: dict[int, socket.socket] = {}
    try:
        while True:
            watched: list[Any] = [listener, 0]
            readable, _, _ = select.select(watched, [], [], 0.05)
            _reap(running)
            if listener in readable:
                connection, _ = listener.accept()
                pid = _fork(connection, [listener, *running.values()])
                if pid is not None:
                    running[pid] = connection
            if 0 in readable and not os.read(0, 1):
                break
    finally:
        if os.getpid() == _OWN_PID:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                _end(running, signum)


_OWN_PID = os.getpid()
_PR_SET_PDEATHSIG = 1


def _die_with_parent(signum: int) -> None:
    """Let the kernel send this process a signal when its parent dies; 0 for none."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))


def _end(running: dict[int, socket.socket], signum: int) -> None:
    """Send a signal to all that run, and wait up to a second until they have ended."""
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signum)
    for _ in range(100):
        _reap(running)
        if not running:
            return
        select.select([], [], [], 0.01)


def _reap(running: dict[int, socket.socket]) -> None:
    """Take note of processes that have ended, and tell who started them."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = running.pop(pid)
        with contextlib.suppress(OSError), connection:
            connection.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))


def _fork(connection: socket.socket, inherited: Sequence[socket.socket]) -> int | None:
    """Fork a process for a request; return its id, or `None` if the request was broken."""
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
        request = json.loads(_receive(connection, struct.unpack("<I", head)[0]))
    except (EOFError, OSError, ValueError, struct.error):
        connection.close()
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("<I", pid))
        return pid
    status = 1
    try:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, descriptor in enumerate(descriptors, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for own in (connection, *inherited):
            own.close()
        status = _run(**request)
    except KeyboardInterrupt:
        status = 130
    except BaseException:  # noqa: BLE001 - nothing may reach the loop of the warm process
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(argv: list[str], env: dict[str, str], cwd: str) -> int:
    """Run a command of Flower in this process, and return its exit status."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv
    sys.path[0:0] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p not in sys.path]
    _ask_more_often()
    try:
        _entry_point(argv[0])()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


@functools.cache
def _entry_point(command: str) -> Any:
    (found,) = entry_points(group="console_scripts", name=command)
    return found.load()


def _ask_more_often() -> None:
    """Shorten Flower's pauses to the seconds of an environment variable.

    These are the pause of an idle SuperNode, and that before a part of a message that has not
    arrived yet is asked for again. Where asking itself takes long, as on a busy machine, a pause is
    three times as long as that, or Flower's own: else nodes that ask would leave no time for work.
    """
    seconds = os.environ.get(POLL_VARIABLE)
    if seconds is None:
        return
    limit = float(seconds)
    module: Any = importlib.import_module("flwr.supernode.start_client_internal")
    if hasattr(module, "time"):  # its own name for the standard module
        brief, woke = SimpleNamespace(**vars(time)), time.monotonic()

        def sleep(seconds: float) -> None:
            nonlocal woke
            worked = time.monotonic() - woke
            time.sleep(min(seconds, max(limit, 3 * worked)))
            woke = time.monotonic()

        brief.sleep = sleep
        module.time = brief
    module = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    defaults = module.pull_objects.__kwdefaults__ or {}
    if "initial_backoff" in defaults:
        defaults["initial_backoff"] = limit


@contextlib.contextmanager
def _interruptible(process: Forked) -> Iterator[None]:
    """Hand Ctrl-C and SIGTERM on to a process."""

    def hand_on(signum: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)

    before = {s: signal.signal(s, hand_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def main() -> int:
    """Run the command that the arguments are."""
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2])
        os._exit(0)  # taking all modules down takes longer than what they were imported for
    if not sys.argv[1:]:
        sys.stderr.write("usage: python -m fedrec.flower.warm flower-supernode ...\n")
        return 2
    with WarmProcess() as warm:
        process = warm.start(sys.argv[1:])
        with _interruptible(process):
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
