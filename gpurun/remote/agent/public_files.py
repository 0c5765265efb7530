"""Requests for public files: over https, with at most five redirects, never to a private network, without a key.

If the machine's login names a proxy, the proxy is used. For names that only the proxy can resolve, the proxy alone
decides.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import urllib.request
from contextlib import suppress

from gpurun.remote.agent.presigned import UrlRefused, open_with

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Optional

MOST_REDIRECTS = 5


def opened_public(request: urllib.request.Request) -> Any:
    """Return the reply to a request for a public file. Raise UrlRefused `not_public` for a private address."""
    demand_https(request.full_url)
    return open_with(urllib.request.build_opener(Redirects(), Https()), request)


def demand_https(url: str) -> None:
    """Raise UrlRefused unless the URL is https."""
    if not url.startswith("https://"):
        raise UrlRefused("not_public", "the URL is not https")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects, each of them over https."""

    max_redirections = MOST_REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Optional[urllib.request.Request]:
        """Return the next request, for the same range."""
        demand_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Https(urllib.request.HTTPSHandler):
    """Connects with `PublicConnection`."""

    def https_open(self, req: urllib.request.Request) -> Any:
        """Return the reply over a separate connection."""
        return self.do_open(PublicConnection, req, context=ssl.create_default_context())


class PublicConnection(http.client.HTTPSConnection):
    """A connection to exactly the address that was resolved and found public. The name is not resolved again."""

    def connect(self) -> None:
        """Connect to the first address of the name if all of them are public, or through the login's proxy."""
        target = getattr(self, "_tunnel_host", None)
        if target:
            with suppress(socket.gaierror):  # A network with a proxy may resolve only its own names.
                demand_public(target, addresses_of(target, 443))
            super().connect()
            return
        found = addresses_of(self.host, self.port)
        demand_public(self.host, found)
        self.sock = socket.create_connection((found[0], self.port), self.timeout)
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def addresses_of(host: str, port: Any) -> List[str]:
    """Return the addresses of a name."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def demand_public(host: str, found: List[str]) -> None:
    """Raise UrlRefused for a host with an address in a private network."""
    if not all(is_public(address) for address in found):
        raise UrlRefused("not_public", "%s is at an address that is not public" % host)


def is_public(address: str) -> bool:
    """Return whether an address is on the open internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.is_global and not found.is_multicast
