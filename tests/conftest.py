"""What every test may rely on: no network, and one thread."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator

import pytest
import torch

from fedrec.history.codecs import CODECS


@pytest.fixture(scope="session", autouse=True)
def _single_thread() -> None:
    """Bits depend on the number of threads, and threads of parallel runs steal from each other."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _offline() -> Iterator[None]:
    """Nothing in fedrec needs a network, so nothing may try."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: object) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address):
            raise OSError(f"Tests are offline, but something connects to {address!r}.")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        yield


@pytest.fixture(autouse=True)
def _codecs() -> Iterator[None]:
    """Forget the codecs that a test registers."""
    before = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(before)


def _is_loopback(address: object) -> bool:
    host = address[0] if isinstance(address, tuple) else ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
