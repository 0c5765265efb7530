"""Asking for public files: over https, by five redirects at most, at no address of a private network, with no key.

Where the machine's login names a proxy, it is asked: of the names that only it can look up it decides alone.
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
    """The answer to a request for a public file; UrlRefused `not_public` for an address within somebody's network."""
    demand_https(request.full_url)
    return open_with(urllib.request.build_opener(Redirects(), Https()), request)


def demand_https(url: str) -> None:
    """Refuse every other scheme."""
    if not url.startswith("https://"):
        raise UrlRefused("not_public", "it is not asked for over https")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects, each over https."""

    max_redirections = MOST_REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Optional[urllib.request.Request]:
        """The next request, which asks for the same range."""
        demand_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Https(urllib.request.HTTPSHandler):
    """Connects by `PublicConnection`."""

    def https_open(self, req: urllib.request.Request) -> Any:
        """The answer over a connection of its own."""
        return self.do_open(PublicConnection, req, context=ssl.create_default_context())


class PublicConnection(http.client.HTTPSConnection):
    """A connection to the very address that was looked up and found to be public, and not to the name once more."""

    def connect(self) -> None:
        """Connect to the first address of the name, if all of them are public, or by the proxy of the login."""
        target = getattr(self, "_tunnel_host", None)
        if target:
            with suppress(socket.gaierror):  # A network with a proxy may know no names but its own.
                demand_public(target, addresses_of(target, 443))
            super().connect()
            return
        found = addresses_of(self.host, self.port)
        demand_public(self.host, found)
        self.sock = socket.create_connection((found[0], self.port), self.timeout)
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def addresses_of(host: str, port: Any) -> List[str]:
    """Where a name leads."""
    return [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def demand_public(host: str, found: List[str]) -> None:
    """Refuse a host with an address within somebody's network."""
    if not all(is_public(address) for address in found):
        raise UrlRefused("not_public", "%s is at an address that is not public" % host)


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.is_global and not found.is_multicast
