"""Keys of nodes, as files."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from fedrec.exceptions import ConfigurationError
from fedrec.flower import node_key_fingerprint
from fedrec.flower.credentials import make_node_key
from fedrec.flower.nodes import key_fingerprint


def test_names_that_differ_behind_a_dot_have_keys_of_their_own(tmp_path: Path) -> None:
    """The fingerprint is that of the key as the SuperLink gives it to a server: PEM."""
    names = ("site.a", "site.b")
    made = {name: make_node_key(tmp_path / name) for name in names}
    for name in names:
        private = load_ssh_private_key((tmp_path / name).read_bytes(), None)
        pem = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        assert made[name] == key_fingerprint(pem)
        assert made[name] == node_key_fingerprint(tmp_path / f"{name}.pub")
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert made["site.a"] != made["site.b"]


@pytest.mark.parametrize("name", ["node", "nothing"])
def test_a_file_that_is_no_public_key_is_said(tmp_path: Path, name: str) -> None:
    make_node_key(tmp_path / "node")
    with pytest.raises(ConfigurationError, match=r"Expected `path` to be .*HINT.*\.pub"):
        node_key_fingerprint(tmp_path / name)
