"""S3 on this computer: moto stores the objects; the emulator checks keys, regions, permissions, clocks and expiry.

A test can read the requests (`calls`), revoke permissions (`denied`), set the service's clock (`ahead_s`), let
presigned URLs expire (`expire`), break off answers (`cut`), and alter stored objects (`alter`).
"""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any, Self
from urllib.parse import parse_qs

from werkzeug.serving import WSGIRequestHandler, make_server

KEY, SECRET = "AKIAEMULATEDS3EXAMPLE", "emulated-s3-secret-key-0123456789abcd"
BUCKET, ACCOUNT, SKEW_S = "shards", "123456789012", 900
_SCOPE = re.compile(r"(?:Credential=)?([^/,=]+)/\d{8}/([^/]+)/s3/aws4_request")
_ERROR = "<Error><Code>{}</Code><Message>{}</Message>{}<RequestId>emulated</RequestId></Error>"
_NEEDS = {"PUT": "s3:PutObject", "DELETE": "s3:DeleteObject", "GET": "s3:GetObject", "HEAD": "s3:GetObject"}


class Refused(Exception):
    """The refusal of a request: its HTTP status, S3's error code, the message, and more XML for the body."""

    def __init__(self, status: int, code: str, message: str, more: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message, self.more = status, code, message, more


@dataclass(frozen=True)
class Call:
    """One request: method, key, query, the size of its body, and whether its URL was presigned."""

    method: str
    key: str
    query: str
    sent_bytes: int
    by_url: bool


class S3Emulator:
    """An emulated S3 with one bucket, `shards`, of one account."""

    def __init__(self, region: str = "us-east-1") -> None:
        self.region, self.denied, self.calls = region, set[str](), list[Call]()
        self.ahead_s = 0.0
        self.wants_equal_pieces = False
        self._pieces: dict[tuple[str, int], int] = {}
        self.lock = threading.Lock()
        self._expiring = self._cuts = self._unavailable = 0
        self._failure = (503, "SlowDown")
        self._puts_left: int | None = None
        self._lost = self._protected = ""

    def __enter__(self) -> Self:
        from moto.moto_server.werkzeug_app import create_backend_app
        from moto.s3.models import s3_backends

        s3_backends.reset()
        self._moto = create_backend_app("s3")
        self.objects = s3_backends[ACCOUNT]["aws"]
        self.objects.create_bucket(BUCKET, self.region)
        self._server = make_server("127.0.0.1", 0, self._door, threaded=True, request_handler=_Handler)
        self._server.emulator = self  # type: ignore[attr-defined]
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.objects.buckets[BUCKET].keys if key.startswith(prefix))

    def content(self, key: str) -> bytes:
        return bytes(self.objects.get_object(BUCKET, key).value)

    def alter(self, key: str, content: bytes | None = None) -> None:
        """Change an object's content but keep its ETag, so that no checksum of S3 shows the change.

        Without `content`, flip one bit of the last byte.
        """
        found = self.objects.get_object(BUCKET, key)
        old = bytes(found.value)
        tag = found.etag
        found.value = content if content is not None else old[:-1] + bytes([old[-1] ^ 1])
        found._etag = tag.strip('"')

    def expire(self, requests: int) -> None:
        """Refuse the next `requests` requests with presigned URLs as expired."""
        self._expiring = requests

    def cut(self, answers: int) -> None:
        """Close the connection in the middle of the next `answers` answers of more than 1,000 bytes."""
        self._cuts = answers

    def fail(self, requests: int, status: int = 503, code: str = "SlowDown") -> None:
        """Refuse the next `requests` requests, by default with 503 SlowDown."""
        self._unavailable, self._failure = requests, (status, code)

    def deny_after(self, puts: int | None) -> None:
        """Accept only `puts` more uploads by presigned URL and refuse the rest; None accepts any number."""
        self._puts_left = puts

    def deny_writing_of(self, ending: str) -> None:
        """Refuse to write objects whose keys end with `ending`; "" refuses none."""
        self._protected = ending

    def lose_answer_to(self, name: str) -> None:
        """Store the next upload whose key ends with `name`, but close its connection without an answer."""
        self._lost = name

    def uploaded_bytes(self, prefix: str = "") -> int:
        return sum(call.sent_bytes for call in self.calls if call.method == "PUT" and call.key.startswith(prefix))

    def _door(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        query = parse_qs(environ.get("QUERY_STRING", ""))
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        by_url = "X-Amz-Signature" in query
        with self.lock:
            self.calls.append(Call(environ["REQUEST_METHOD"], key, environ.get("QUERY_STRING", ""), len(body), by_url))
            try:
                self._check(environ, query, bucket, key)
                self._check_pieces(environ["REQUEST_METHOD"], query, body)
            except Refused as refused:
                return _answer_no(refused, environ, start_response, self.region if refused.more else "")
            head: dict[str, Any] = {}
            content = b"".join(self._moto(environ, lambda status, headers, *_: head.update(s=status, h=headers)))
            is_cut = bool(self._cuts and len(content) > 1000)
            self._cuts -= is_cut
            is_lost = bool(self._lost) and key.endswith(self._lost) and environ["REQUEST_METHOD"] == "PUT"
            self._lost = "" if is_lost else self._lost
        if is_lost:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        if is_cut:
            half = content[: len(content) // 2]
            start_response(head["s"], head["h"])(half)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        start_response(head["s"], [*head["h"], ("x-amz-bucket-region", self.region)])
        return [content]

    def _check(self, environ: dict[str, Any], query: dict[str, list[str]], bucket: str, key: str) -> None:
        """Refuse a request for its bucket, key id, region, time or permissions, or because a test requested it."""
        if self._unavailable:
            self._unavailable -= 1
            raise Refused(*self._failure, "Please reduce your request rate.")
        if bucket != BUCKET:
            raise Refused(404, "NoSuchBucket", "The specified bucket does not exist")
        signed = query.get("X-Amz-Credential", [environ.get("HTTP_AUTHORIZATION", "")])[0]
        scope = _SCOPE.search(signed)
        if scope is None:
            raise Refused(403, "AccessDenied", "Access Denied")
        if scope[1].split(" ")[-1] != KEY:
            raise Refused(403, "InvalidAccessKeyId", "The key id you provided does not exist.")
        if scope[2] != self.region:
            words = f"The authorization header is malformed; the region '{scope[2]}' is wrong"
            raise Refused(400, "AuthorizationHeaderMalformed", words, f"<Region>{self.region}</Region>")
        self._check_clock(environ, query)
        if self._puts_left is not None and environ["REQUEST_METHOD"] == "PUT" and "X-Amz-Signature" in query:
            self._puts_left -= 1
            if self._puts_left < 0:
                raise Refused(403, "AccessDenied", "Access Denied")
        action = "s3:ListBucket" if not key else _NEEDS.get(environ["REQUEST_METHOD"], "s3:PutObject")
        is_protected = bool(self._protected) and action == "s3:PutObject" and key.endswith(self._protected)
        if action in self.denied or is_protected:
            words = f"User: arn:aws:iam::{ACCOUNT}:user/me is not authorized to perform: {action} on resource: it"
            raise Refused(403, "AccessDenied", words)

    def _check_pieces(self, method: str, query: dict[str, list[str]], body: bytes) -> None:
        """Refuse to complete an upload from pieces of unequal size, as R2 does, if `wants_equal_pieces`."""
        upload = query.get("uploadId", [""])[0]
        if method == "PUT" and upload:
            self._pieces[upload, int(query["partNumber"][0])] = len(body)
        if method == "POST" and upload and self.wants_equal_pieces:
            numbers = sorted(int(number) for number in re.findall(rb"<PartNumber>(\d+)<", body))
            *others, last = (self._pieces[upload, number] for number in numbers)
            if len({*others}) > 1 or last > max(others, default=last):
                raise Refused(400, "InvalidPart", "All non-trailing parts must have the same length.")

    def _check_clock(self, environ: dict[str, Any], query: dict[str, list[str]]) -> None:
        now = self.now()
        stamp = query.get("X-Amz-Date", [environ.get("HTTP_X_AMZ_DATE", "")])[0]
        signed = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        if "X-Amz-Expires" not in query:
            if abs(signed - now) > SKEW_S:
                raise Refused(403, "RequestTimeTooSkewed", "The difference between the request time is too large.")
            return
        if signed > now + SKEW_S:
            raise Refused(403, "AccessDenied", "Request is not valid yet")
        if self._expiring or signed + int(query["X-Amz-Expires"][0]) < now:
            self._expiring -= self._expiring > 0
            raise Refused(403, "AccessDenied", "Request has expired")

    def now(self) -> float:
        return time.time() + self.ahead_s


def _answer_no(
    refused: Refused, environ: dict[str, Any], start_response: Callable[..., Any], region: str
) -> Iterable[bytes]:
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else _ERROR.format(
        refused.code, refused.message, refused.more
    ).encode()  # fmt: skip
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    start_response(f"{refused.status} -", headers + ([("x-amz-bucket-region", region)] if region else []))
    return [body]


class _Handler(WSGIRequestHandler):
    server: Any

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(self.server.emulator.now(), usegmt=True)

    def log(self, *args: Any) -> None:
        """Log nothing."""
