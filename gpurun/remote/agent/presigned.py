"""Access to a bucket by presigned URLs: read a range, put an object. A URL is a secret, and never part of a message."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, List, Optional

TALK_S = 30.0
MOST_WORDS_BYTES = 4096


class UrlRefused(Exception):
    """A URL did not work. `code` is the reason: expired, denied, absent, altered, unreachable, ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Stay(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that only the URL itself is used."""

    def redirect_request(self, *_: Any) -> Optional[urllib.request.Request]:
        """Return None, which means that there is no next request."""
        return None


def open_url(request: urllib.request.Request) -> Any:
    """Return a bucket's reply. Raise UrlRefused if it is a refusal, or if there is no reply."""
    return open_with(urllib.request.build_opener(Stay()), request)


def read_range(
    url: str, edges: List[int], open_url: Callable[[urllib.request.Request], Any] = open_url
) -> Iterator[bytes]:
    """Yield a range of an object as it arrives, cut at the offsets in `edges`, which include its start and its end."""
    request = urllib.request.Request(url, headers={"Range": "bytes=%d-%d" % (edges[0], edges[-1] - 1)})
    with open_url(request) as answer:
        if answer.status != 206:
            raise UrlRefused("no_ranges", "parts of an object are not served there")
        for size in (edges[place + 1] - edges[place] for place in range(len(edges) - 1)):
            try:
                data = answer.read(size)
            except (OSError, http.client.HTTPException) as error:
                raise UrlRefused("unreachable", "the connection broke: %s" % type(error).__name__) from None
            if len(data) != size:
                raise UrlRefused("unreachable", "the connection broke")
            yield data


def put_object(url: str, body: Callable[[], Iterator[bytes]], size: int) -> None:
    """Put an object of `size` bytes at the URL. An exception in `body` aborts the upload; then no object is created."""
    headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, data=body(), method="PUT", headers=headers)
    with open_url(request) as answer:
        answer.read(MOST_WORDS_BYTES)


def open_with(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> Any:
    """Return the reply. Raise UrlRefused if it is a refusal, or if there is no reply."""
    try:
        return opener.open(request, timeout=TALK_S)
    except urllib.error.HTTPError as error:
        raise refusal_error(error) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UrlRefused("unreachable", "it cannot be reached: %s" % type(reason).__name__) from None


def refusal_error(error: urllib.error.HTTPError) -> UrlRefused:
    """Return the error for a refusal, with its code but without its text, which may contain the key."""
    try:
        words = error.read(MOST_WORDS_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        words = ""
    found = re.search(r"<Code>([A-Za-z0-9]{1,60})</Code>", words)
    code = found.group(1) if found else str(error.code)
    if "expired" in words.lower() or code in ("ExpiredToken", "RequestExpired"):
        return UrlRefused("expired", "the URL has expired (%s)" % code)
    if error.code in (404, 410):
        return UrlRefused("absent", "there is no such object (%s)" % code)
    if error.code == 416:
        return UrlRefused("altered", "the object is shorter than it was")
    if error.code in (400, 401, 403, 405) or 300 <= error.code < 400:
        return UrlRefused("denied", "the URL is refused (%s)" % code)
    return UrlRefused("unreachable", "the answer was %d (%s)" % (error.code, code))
