"""Protection of a server without API keys from the web pages that its user visits.

A page of any site can send requests to the loopback address of its visitor. With DNS rebinding it can also read the
answers. The headers Host and Origin reveal such requests, because the browser sets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from areno.schema.values import format_value
from areno.server.errors import ApiError

_LOCAL = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class OriginGuard:
    hosts: frozenset[str] = field(default_factory=frozenset)  # further names that Host may have, with or without a port
    origins: frozenset[str] = field(default_factory=frozenset)  # of web pages, such as https://example.com

    def check_request(self, request: web.Request) -> None:
        host = request.headers.get("Host", "").lower()
        if not {host, _host_without_port(host)} & {*_LOCAL, *self.hosts}:
            known = ", ".join([*_LOCAL, *sorted(self.hosts)])
            text = f"the header Host is {format_value(host)}; without an API key, only {known} are served"
            raise ApiError(403, f"{text} (--allowed-hosts)")
        origin = request.headers.get("Origin")
        if (
            origin is not None
            and origin not in self.origins
            and _host_without_port(origin.partition("://")[2]) not in _LOCAL
        ):
            text = f"the header Origin is {format_value(origin)}; without an API key, web pages need --allowed-origins"
            raise ApiError(403, text)

    def cors_headers(self, request: web.Request) -> dict[str, str]:
        """Return the CORS headers for a page of an allowed origin, or {} for other requests."""
        origin = request.headers.get("Origin")
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"} if origin in self.origins else {}

    def preflight_response(self, request: web.Request) -> web.Response | None:
        if request.method != "OPTIONS" or not self.cors_headers(request):
            return None
        asked = request.headers.get("Access-Control-Request-Headers", "*")
        allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": asked}
        return web.Response(status=204, headers=allowed)


def _host_without_port(authority: str) -> str:
    name, _, port = authority.rpartition(":")
    return name if port.isdecimal() else authority
