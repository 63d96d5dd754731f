"""Several servers that replicate every stream: one URL for all, and what each must know of the others.

Between hosts they talk by TLS alone, in both directions: each shows the certificate of the run and takes no
other key. The certificate is for no host in particular, so it is the key that is looked at, not a name.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.engine.certificates import KEY
from arriero.engine.nats_access import derived

_USER = "arriero"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A server among others: its `name`, the same in every life of it, and host:port at which it is reached
    by the others, and they by it.
    """

    name: str
    route: str
    others: tuple[str, ...]


def together(urls: Sequence[str]) -> str:
    """One URL of several servers, which a client takes in any order; those with TLS show one certificate."""
    _, mark, query = urls[0].partition("?")
    return ",".join(url.partition("?")[0] for url in urls) + mark + query


def servers(url: str) -> list[str]:
    """The URLs of the servers that `url` names, without what is said of their certificate."""
    return url.partition("?")[0].split(",")


def hold(host: str, port: int = 0) -> socket.socket:
    """A port (0: a free one) that no other process is given while this socket is open. Raises OSError.

    It is bound and never listens, and Linux lets a server that sets SO_REUSEADDR, as ours does, listen there.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
    except BaseException:
        held.close()
        raise
    return held


def replication(cluster: Cluster, token: str, certificate: Path | None, timeout_s: int) -> str:
    """The part of a server's configuration about the others; `certificate` where they are on other hosts."""
    password = derived(token, "routes")
    routes = [f"nats-route://{_USER}:{password}@{other}" for other in cluster.others]
    port = cluster.route.rpartition(":")[2]
    lines = [
        "name: arriero",
        f"listen: {json.dumps(f'0.0.0.0:{port}' if certificate else cluster.route)}",
        f"advertise: {json.dumps(cluster.route)}",
        f"authorization {{ user: {_USER}, password: {json.dumps(password)}, timeout: {timeout_s} }}",
        f"routes: {json.dumps(routes)}",
    ]
    if certificate:
        files = {"cert_file": certificate, "key_file": certificate.with_name(KEY), "ca_file": certificate}
        tls = [f"{key}: {json.dumps(str(path))}" for key, path in files.items()]
        # `insecure` leaves the name unchecked where we connect; the key is checked on both sides.
        tls += ["verify: true", "insecure: true", f'pinned_certs: ["{_key_of(certificate)}"]']
        lines.append(f"tls {{ {', '.join(tls)}, timeout: {timeout_s} }}")
    inner = "\n  ".join(lines)
    return f"server_name: {json.dumps(cluster.name)}\ncluster {{\n  {inner}\n}}\n"


def replicas_of(cluster: dict[str, Any]) -> dict[str, str]:
    """What each server of a stream does, from what JetStream says of its `cluster`; by name, in order."""
    found = {str(cluster["leader"]): "leads"} if cluster.get("leader") else {}
    for replica in cluster.get("replicas") or ():
        does = "is away" if replica.get("offline") else "follows" if replica["current"] else "is behind"
        found[str(replica["name"])] = does
    return dict(sorted(found.items()))


def _key_of(certificate: Path) -> str:
    """SHA-256 of the public key in a certificate, as servers pin it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
