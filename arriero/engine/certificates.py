"""The certificate of a run's message broker: made when it starts, trusted by name of its file alone."""

from __future__ import annotations

import logging
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from arriero.engine.broker import BrokerError

CERTIFICATE, KEY = "broker.crt", "broker.key"
_VALID = timedelta(days=365)
_CLOCKS = timedelta(days=1)  # hosts whose clocks are behind


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate in `folder`; its key is for the owner alone. Those that are there are kept.

    Clients trust this one certificate and no authority, so it is for no host in particular.
    """
    certificate, key = folder / CERTIFICATE, folder / KEY
    if certificate.exists() and key.exists():
        return certificate
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "arriero broker")])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.unlink(missing_ok=True)
    with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    certificate.write_bytes(signed.public_bytes(pem))
    return certificate


def address(host: str, port: int, certificate: Path) -> str:
    """The URL that `trusting` understands."""
    return f"tls://{place(host, port)}?{urlencode({'ca': str(certificate)})}"


def place(host: str, port: int) -> str:
    """host:port, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Harmless(logging.Filter):
    """asyncio warns whenever a connection of nats-py with TLS is closed by the server."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "eof_received" not in str(record.msg)


_HARMLESS = _Harmless()


def trusting(url: str) -> ssl.SSLContext | None:
    """For `tls://host:port?ca=FILE`: trust the certificate in FILE, whatever host shows it. Else None.

    Raises BrokerError if it can't be read.
    """
    parts = urlsplit(url)
    if parts.scheme != "tls":
        return None
    certificate = parse_qs(parts.query)["ca"][0]
    try:
        context = ssl.create_default_context(cafile=certificate)
    except OSError as error:  # ssl.SSLError too
        raise BrokerError(f"the broker's certificate {certificate} can't be read: {error}") from None
    context.check_hostname = False
    logging.getLogger("asyncio").addFilter(_HARMLESS)  # once: it is the same filter
    return context
