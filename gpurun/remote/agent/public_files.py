"""Asking for public files: over https, by five redirects at most, at no address of a private network, with no key."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import urllib.request

from gpurun.remote.agent.presigned import UrlRefused, answered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

MOST_REDIRECTS = 5


def opened_public(request: urllib.request.Request) -> Any:
    """The answer to a request for a public file; UrlRefused `not_public` for an address within somebody's network."""
    demand_https(request.full_url)
    return answered(urllib.request.build_opener(urllib.request.ProxyHandler({}), Redirects(), Https()), request)


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
        """Connect to the first address of the name, if all of them are public."""
        found = [one[4] for one in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)]
        for address in found:
            if not is_public(str(address[0])):
                raise UrlRefused("not_public", "%s is at an address that is not public" % self.host)
        self.sock = socket.create_connection((str(found[0][0]), self.port), self.timeout)
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.is_global and not found.is_multicast
