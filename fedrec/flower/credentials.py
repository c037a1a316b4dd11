"""Certificates and keys for a federation, in the formats that Flower reads."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from fedrec._files import write_atomically
from fedrec.exceptions import ConfigurationError, expected
from fedrec.flower.nodes import key_fingerprint

__all__ = ["make_certificates", "make_node_key", "node_key_fingerprint", "public_file"]


# Names and addresses of the server, and for how long its certificate is valid.
_HOSTS = (x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost"))
_VALID = dt.timedelta(days=90)


def make_certificates(folder: Path) -> None:
    """Write a certificate authority and a certificate that it signs, for a server on this machine.

    `ca.pem` goes to every node, `server.pem` and `server.key` stay with the SuperLink. The
    authority's own key is not kept: to renew, make all of them again.

    Args:
        folder: Where to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedrec federation")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)

    def builder(name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + _VALID)
        )

    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    of_authority = (
        builder(issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA384())
    )
    of_server = (
        builder(subject, server.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(_HOSTS), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(authority, hashes.SHA384())
    )
    (folder / "ca.pem").write_bytes(of_authority.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(of_server.public_bytes(Encoding.PEM))
    secret = server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(folder / "server.key", secret, private=True)


def make_node_key(path: Path) -> str:
    """Write a new private key for a node to `path`, and its public key to `path` with `.pub`.

    Args:
        path: File of the private key, for `--auth-supernode-private-key`.

    Returns:
        The fingerprint of the public key, for the `keys` of a `FlowerExecutor`.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    write_atomically(path, secret, private=True)
    public = key.public_key()
    public_file(path).write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return node_key_fingerprint(public_file(path))


def public_file(path: Path) -> Path:
    """Return the file of the public key beside that of a private key, as `ssh-keygen` names it."""
    return path.with_name(f"{path.name}.pub")


def node_key_fingerprint(path: str | os.PathLike[str]) -> str:
    """Return the fingerprint of a node's public key, for `keys` of a server.

    Args:
        path: The public key's file, as `ssh-keygen` writes it.

    Returns:
        32 hexadecimal digits.

    Raises:
        ConfigurationError: If the file has no public key.
    """
    try:
        key = load_ssh_public_key(Path(path).read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        hint = 'the file that ends in ".pub".'
        raise ConfigurationError(
            expected("path", "the file of a public key", str(path), hint=hint)
        ) from error
    return key_fingerprint(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
