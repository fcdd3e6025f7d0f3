"""Tokens and certificates for tests: files as an operator would make them."""

from __future__ import annotations

import json
import ssl
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from select_service.edge.security.tokens import new_token
from tests.wait import PATIENCE_S


@dataclass
class TokenFile:
    """A token file, and the tokens that are in it as hashes."""

    path: Path
    tokens: dict[str, str] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, *scopes: str, **fields: Any) -> str:
        """Write a record with a new token; returns the token."""
        token, digest = new_token()
        self.tokens[name] = token
        self.records.append({"name": name, "sha256": digest, "scopes": scopes, **fields})
        self.write()
        return token

    def add_certificate(self, name: str, certificate: str, *scopes: str, **fields: Any) -> None:
        """Write a record of somebody who is known by a certificate."""
        self.records.append({"name": name, "certificate": certificate, "scopes": scopes, **fields})
        self.write()

    def drop(self, name: str) -> None:
        """Take a record out."""
        self.records = [one for one in self.records if one["name"] != name]
        self.write()

    def write(self) -> None:
        self.path.write_text("".join(json.dumps(one) + "\n" for one in self.records))

    @property
    def setting(self) -> dict[str, Any]:
        """For a service that reads it."""
        return {"token_file": str(self.path)}

    def line(self, name: str) -> str:
        """The header line that shows a token."""
        return f"authorization: Bearer {self.tokens[name]}"

    def header(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[name]}"}


class Authority:
    """A certificate authority of its own, with openssl."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        self.cert = directory / f"{name}.pem"
        self.key = directory / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", self.key, "-out", self.cert, "-days", "2", "-subj", f"/CN={name}"),
        )

    def issue(self, name: str, *names: str, cert: Path | None = None) -> tuple[Path, Path]:
        """A certificate for a common name, localhost and other names, and its key."""
        key = (cert or self.directory / f"{name}.pem").with_suffix(".key")
        cert = cert or self.directory / f"{name}.pem"
        request = self.directory / f"{name}.csr"
        extensions = self.directory / f"{name}.ext"
        san = ",".join(["DNS:localhost", "IP:127.0.0.1", *names])
        extensions.write_text(f"subjectAltName={san}\n")
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", key, "-out", request, "-subj", f"/CN={name}"),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key),
            *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", cert),
        )
        return cert, key

    def serving(self, name: str) -> dict[str, Any]:
        """For a service that shows such a certificate."""
        cert, key = self.issue(name)
        return {"tls_cert": str(cert), "tls_key": str(key)}

    def client(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """What believes this authority, and shows a certificate of its own."""
        context = ssl.create_default_context(cafile=str(self.cert))
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(
        ["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=PATIENCE_S
    )
