"""Interprets header lines: the caller's rights and formats, and the `Api` that serves it.

Each pair of formats, and each caller with a restricted view, has an `Api` of its own, created on
first use. `application.py` and `connection.py` call this with the headers they have read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.edge.codec.encoder import JSON_WRITER, msgpack_writer
from select_service.edge.codec.formats import Format, answer_type, form_of
from select_service.edge.http.calls import Head

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope

    from select_service.edge.driver.driver import Driver
    from select_service.edge.http.api import Api
    from select_service.edge.security.authority import Authority, Grant
    from select_service.edge.tenancy.tenant_view import TenantView

CERTIFICATE: Final = "select_service.certificate"
"""Scope key of the names in the client's certificate, which only the transport knows."""


class Negotiation:
    """Interprets the heads of one application."""

    def __init__(self, api: Api, authority: Authority | None) -> None:
        """Begin with JSON for unrestricted callers.

        Args:
            api: serves those.
            authority: checks tokens; None: all may do everything.
        """
        self._api, self._authority = api, authority
        self._apis: dict[tuple[Format, bytes | None, Grant | None], Api] = {
            (Format.JSON, None, None): api
        }
        if authority is not None:
            authority.on_change(self._apis.clear)

    def head_of(
        self,
        content_type: bytes | None,
        accept: bytes | None,
        credentials: bytes | None = None,
        certificate: tuple[str, ...] = (),
    ) -> Head:
        """Interpret header lines.

        Args:
            content_type: the Content-Type header.
            accept: the Accept headers, joined by commas.
            credentials: the Authorization headers, joined by commas.
            certificate: names in the client's certificate.
        """
        form = form_of(content_type)
        grant = None
        if self._authority is not None:
            grant = self._authority.grant(credentials, certificate)
        view = None if grant is None or grant.sees_all else grant
        key = (form or Format.JSON, None if accept is None else answer_type(accept), view)
        api = self._apis.get(key)
        if api is None:
            api = self._apis[key] = self._api_for(*key)
        return Head(api, form is not None, content_type is not None, grant)

    def head_in(self, scope: Scope) -> Head:
        """Interpret the header lines of an ASGI scope."""
        content_type, accept, credentials = None, None, None
        for name, value in scope["headers"]:
            if name == b"content-type":
                content_type = value
            elif name == b"accept":
                accept = value if accept is None else accept + b"," + value
            elif name == b"authorization":
                credentials = value if credentials is None else credentials + b"," + value
        return self.head_of(content_type, accept, credentials, scope.get(CERTIFICATE, ()))

    def _api_for(self, reads: Format, name: bytes | None, grant: Grant | None) -> Api:
        """Create the `Api` for one pair of formats and, if restricted, one caller."""
        writer = JSON_WRITER if name is None else msgpack_writer(name)
        if grant is None or self._authority is None:
            return self._api.for_formats(reads, writer)
        from select_service.edge.tenancy.tenant_view import (  # see `lazy_imports.py`
            Outside,
            TenantView,
        )

        note, tenants = self._authority.note_foreign, grant.tenants
        seen: Callable[[Driver], object] | None = None
        if grant.name is None:
            seen = Outside
        elif tenants is not None:

            def seen(service: Driver) -> TenantView:
                return TenantView(service, tenants, note)

        brief = None if grant.may_read else grant.refusal
        return self._api.for_formats(reads, writer, seen, brief)
