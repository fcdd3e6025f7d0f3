"""Who asks, and in which forms: the handlers that understand the header lines of a request.

For each pair of forms, and for each who may not see all, there is an `Api` of its own, made when
somebody speaks so. `asgi.py` and `fast_lane.py` ask with what they have read of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.edge.codec.answers import JSON_WRITER, msgpack_writer
from select_service.edge.codec.forms import Form, answer_type, form_of
from select_service.edge.http.calls import Head

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope

    from select_service.edge.driver import Driver
    from select_service.edge.http.api import Api
    from select_service.edge.security.authority import Authority, Grant
    from select_service.edge.tenancy.views import TenantView

__all__ = ["CERTIFICATE", "Speaking"]

CERTIFICATE: Final = "select_service.certificate"
"""Key of the scope: names in the certificate the client has shown, which only the carrier knows."""


class Speaking:
    """Understands the heads of one door."""

    def __init__(self, api: Api, authority: Authority | None) -> None:
        """Speak JSON with everybody, to begin with.

        Args:
            api: does that, for callers who may see all.
            authority: who may do what; None: everybody everything.
        """
        self._api, self._authority = api, authority
        self._apis: dict[tuple[Form, bytes | None, Grant | None], Api] = {
            (Form.JSON, None, None): api
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
        """Return what header lines mean.

        Args:
            content_type: the Content-Type header.
            accept: the Accept headers, joined by commas.
            credentials: the Authorization headers, joined by commas.
            certificate: names in the certificate the client has shown.
        """
        form = form_of(content_type)
        grant = None
        if self._authority is not None:
            grant = self._authority.grant(credentials, certificate)
        view = None if grant is None or grant.sees_all else grant
        key = (form or Form.JSON, None if accept is None else answer_type(accept), view)
        api = self._apis.get(key)
        if api is None:
            api = self._apis[key] = self._api_for(*key)
        return Head(api, form is not None, content_type is not None, grant)

    def head_in(self, scope: Scope) -> Head:
        """Return what the header lines of an ASGI scope mean."""
        content_type, accept, credentials = None, None, None
        for name, value in scope["headers"]:
            if name == b"content-type":
                content_type = value
            elif name == b"accept":
                accept = value if accept is None else accept + b"," + value
            elif name == b"authorization":
                credentials = value if credentials is None else credentials + b"," + value
        return self.head_of(content_type, accept, credentials, scope.get(CERTIFICATE, ()))

    def _api_for(self, reads: Form, name: bytes | None, grant: Grant | None) -> Api:
        """Return the handlers for one pair of forms, and for one who may not see all."""
        writer = JSON_WRITER if name is None else msgpack_writer(name)
        if grant is None or self._authority is None:
            return self._api.speaking(reads, writer)
        from select_service.edge.tenancy.views import Outside, TenantView  # see `late`

        note, tenants = self._authority.note_foreign, grant.tenants
        seen: Callable[[Driver], object] | None = None
        if grant.name is None:
            seen = Outside
        elif tenants is not None:

            def seen(service: Driver) -> TenantView:
                return TenantView(service, tenants, note)

        brief = None if grant.may_read else grant.refusal
        return self._api.speaking(reads, writer, seen, brief)
