"""Tests of the HTTP client for clouds without an SDK, against a local server that misbehaves in many ways."""

from __future__ import annotations

import json
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from decimal import Decimal
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, VirtualClock
from gpurun.core.errors import SetupError
from gpurun.providers import _http
from gpurun.providers._http import Gap, Http
from gpurun.providers.base import Unknown
from tests.refusals import refusal

KEY = "rpa_canary_0123456789"
Script = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """A handler that records each request and answers with the server's next script; the last script repeats."""

    server: Server

    def do_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        self.server.seen.append((self.command, self.path, dict(self.headers.items()), body))
        scripts = self.server.scripts
        (scripts.pop(0) if len(scripts) > 1 else scripts[0])(self)

    do_GET = do_POST = do_DELETE = do_any

    def log_message(self, *words: Any) -> None: ...


class Server(ThreadingHTTPServer):
    """A local server with a list of scripts; `url` is its address."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, scripts: list[Script]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts = scripts
        self.seen: list[tuple[str, str, dict[str, str], str]] = []
        self.open = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@contextmanager
def serving(*scripts: Script) -> Iterator[Server]:
    server = Server(list(scripts))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.open.set()
        server.shutdown()
        server.server_close()
        thread.join()


def says(status: int = 200, text: str = "{}", **headers: str) -> Script:
    def script(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(text.encode())

    return script


def client(url: str, clock: Any = None, **named: Any) -> Http:
    headers = {"Authorization": f"Bearer {KEY}"}
    return Http(url, headers=headers, clock=clock or VirtualClock(), name="acme", **named)


def test_a_request_carries_the_key_the_version_and_json() -> None:
    with serving(says(201, '{"id": "x"}')) as server:
        answer = client(server.url).request("POST", "/pods", query={"a": "b c"}, body={"n": 1})
    assert (answer.status, answer.json) == (201, {"id": "x"})
    method, path, headers, body = server.seen[0]
    assert (method, path, json.loads(body)) == ("POST", "/pods?a=b+c", {"n": 1})
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["User-Agent"].startswith("gpurun/")
    assert headers["Content-Type"] == "application/json"


def test_header_names_are_lower_case_and_prices_are_not_floats() -> None:
    with serving(says(text='{"cost": 14.320000000000001}', RateLimit='"minute";r=59')) as server:
        answer = client(server.url).request("GET", "/")
    assert answer.headers["ratelimit"] == '"minute";r=59'
    assert answer.json == {"cost": Decimal("14.320000000000001")}


@pytest.mark.parametrize("text", ["", "<html>busy</html>", "[" * 100_000, '{"a": NaN}', "1" * 5000, '{"cut": '])
def test_what_is_not_json_is_none(text: str) -> None:
    with serving(says(text=text)) as server:
        assert client(server.url).request("GET", "/").json is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422, 500, 502, 503, 504])
def test_every_other_status_is_the_providers_to_judge(status: int) -> None:
    with serving(says(status, "<html>an edge said this</html>")) as server:
        answer = client(server.url).request("POST", "/pods", body={})
    assert (answer.status, len(server.seen)) == (status, 1)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with serving(says()) as other, serving(says(status, Location=f"{other.url}/pods")) as server:
        assert client(server.url).request("GET", "/pods").status == status
        assert other.seen == []


def test_too_many_requests_waits_as_long_as_the_server_asks() -> None:
    clock = VirtualClock()
    with serving(says(429, Retry_After="17"), says(text='{"ok": 1}')) as server:
        answer = client(server.url, clock).request("GET", "/")
    assert answer.json == {"ok": 1}
    assert 17 <= clock.monotonic() <= 17 * 1.25


def test_the_wait_may_be_told_as_a_date_of_the_servers_own_clock() -> None:
    clock = VirtualClock()
    now = clock.wall() + 5000  # The server's clock differs from ours.

    def busy(handler: Handler) -> None:
        handler.send_response_only(429)
        handler.send_header("Date", formatdate(now, usegmt=True))
        handler.send_header("Retry-After", formatdate(now + 20, usegmt=True))
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with serving(busy, says()) as server:
        assert client(server.url, clock).request("GET", "/").status == 200
    assert 20 <= clock.monotonic() <= 25


@pytest.mark.parametrize("wait", ["", "-5", "soon", "0", "1e9", "١٢"])
def test_a_wait_that_is_not_told_clearly_grows(wait: str) -> None:
    clock = VirtualClock()
    header = {"Retry_After": wait.encode().decode("latin-1")} if wait else {}
    with serving(*[says(429, **header)] * 3, says()) as server:
        client(server.url, clock).request("GET", "/")
    assert 7 <= clock.monotonic() <= 7 * 1.25


@pytest.mark.parametrize("wait", ["3600", "9" * 50])
def test_patience_ends_before_a_wait_that_is_too_long(wait: str) -> None:
    clock = VirtualClock()
    with serving(says(429, Retry_After=wait)) as server, pytest.raises(Unknown, match="429"):
        client(server.url, clock).request("GET", "/", patience_s=60)
    assert clock.monotonic() == 0


def test_patience_ends_under_endless_refusals() -> None:
    clock = VirtualClock()
    with serving(says(429)) as server, pytest.raises(Unknown):
        client(server.url, clock).request("GET", "/", patience_s=60)
    assert clock.monotonic() <= 60


def test_a_least_gap_is_kept_between_requests() -> None:
    clock = VirtualClock()
    with serving(says()) as server:
        http = client(server.url, clock, gap=Gap(1.0, clock))
        http.request("GET", "/")
        assert clock.monotonic() == 0
        http.request("GET", "/")
        clock.sleep(0.75)
        http.request("GET", "/")
    assert clock.monotonic() == 2.0


def test_a_least_gap_is_kept_by_all_who_name_the_same_file(tmp_path: Path) -> None:
    """Lambda counts the requests of all processes of an account together, so they share the gap through a file."""
    clock, turns = VirtualClock(), tmp_path / "turns" / "lambda"
    gaps = [Gap(1.0, clock, turns) for _ in range(3)]
    sent = []
    for gap in (*gaps, *gaps):
        gap.wait()
        sent.append(clock.monotonic())
    assert sent == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("left", ["9e9", "nothing", "", "nan"])
def test_an_old_boots_or_a_crashs_gap_file_causes_no_wait(tmp_path: Path, left: str) -> None:
    clock = VirtualClock()
    (tmp_path / "lambda").write_text(left)
    Gap(1.0, clock, tmp_path / "lambda").wait()
    assert clock.monotonic() == 0.0


def test_a_gap_with_an_unusable_file_binds_this_process_alone(tmp_path: Path) -> None:
    clock = VirtualClock()
    (tmp_path / "lambda").mkdir()
    gap = Gap(1.0, clock, tmp_path / "lambda")
    gap.wait()
    gap.wait()
    assert clock.monotonic() == 1.0


def hang_up(handler: Handler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut_body(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"id": "x"}')


def cut_chunk(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"64\r\n{")


def huge_body(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(_http.BODY_LIMIT_BYTES // 65536 + 2):
        handler.wfile.write(b" " * 65536)


def not_http(handler: Handler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")


def endless_headers(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers = lambda: None  # type: ignore[method-assign]
    for number in range(200):
        handler.send_header(f"X-{number}", "x")
    handler.wfile.write(b"".join(handler._headers_buffer))


@pytest.mark.parametrize("script", [hang_up, cut_body, cut_chunk, huge_body, not_http, endless_headers])
def test_no_whole_answer_is_unknown_and_is_not_asked_again(script: Script) -> None:
    with serving(script) as server:
        with pytest.raises(Unknown, match="acme") as raised:
            client(server.url).request("POST", "/pods", body={})
        assert len(server.seen) == 1
    assert KEY not in "".join(traceback.format_exception(raised.value))


def silent(handler: Handler) -> None:
    handler.server.open.wait(30)


def drip_body(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.open.wait(0.02):
        handler.wfile.write(b" ")


def drip_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while not handler.server.open.wait(0.02):
        handler.wfile.write(b"x")


@pytest.mark.parametrize("script", [silent, drip_body, drip_headers])
def test_the_time_limit_is_for_the_whole_exchange(script: Script) -> None:
    begun = time.monotonic()
    with serving(script) as server, pytest.raises(Unknown, match="too long"):
        client(server.url, SystemClock()).request("GET", "/", timeout_s=0.3)
    assert time.monotonic() - begun < 15, "the server would go on for half a minute, or for ever"


def test_nobody_there_is_unknown() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(Unknown, match="acme"):
            client(f"http://127.0.0.1:{taken.getsockname()[1]}").request("GET", "/")


def test_nothing_is_sent_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose name look-up hangs must not be sent after its time limit.

    Otherwise the machine would be created after gpurun gave up.
    """
    connect = socket.create_connection

    def late(*named: Any, **more: Any) -> socket.socket:
        time.sleep(0.3)
        return connect(*named, **more)

    monkeypatch.setattr(socket, "create_connection", late)
    with serving(says()) as server:
        with pytest.raises(Unknown, match="too long"):
            client(server.url, SystemClock()).request("POST", "/pods", body={}, timeout_s=0.1)
        assert server.seen == []


@pytest.mark.parametrize("ahead", [-90.0, 0.0, 3600.0])
def test_the_clocks_are_compared(ahead: float) -> None:
    clock = VirtualClock(start=round(time.time()) + 0.5 + ahead)

    def dated(handler: Handler) -> None:
        handler.send_response_only(200)
        handler.send_header("Date", formatdate(clock.wall() - ahead, usegmt=True))
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with serving(dated) as server:
        http = client(server.url, clock)
        assert http.clock_ahead_s is None
        http.request("GET", "/")
    assert http.clock_ahead_s == pytest.approx(ahead, abs=1)


@pytest.mark.parametrize("date", ["yesterday", "", "Mon, 99 Nov 99999 99:99:99 GMT"])
def test_a_date_that_is_none_says_nothing(date: str) -> None:
    def dated(handler: Handler) -> None:
        handler.send_response_only(200)
        handler.send_header("Date", date)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with serving(dated) as server:
        http = client(server.url)
        http.request("GET", "/")
    assert http.clock_ahead_s is None


@pytest.mark.parametrize(
    "url",
    [
        "http://api.example.com", "http://10.0.0.7:8080", "ftp://127.0.0.1", "file:///etc/passwd", "api.example.com",
        "", "https://", "https://me:pw@api.example.com", "https://api.example.com?x=1", "https://api.example.com:99999",
        "http://127.0.0.1.example.com", "http://localhost.example.com", "https://[::1",
    ],
)  # fmt: skip
def test_a_key_is_not_sent_to_an_unsafe_url(url: str) -> None:
    with refusal(SetupError, "url.not_safe"):
        client(url)


@pytest.mark.parametrize("key", ["rpa_canary\nX: y", "rpa_canary\r", "rpa_canary_ключ", "rpa_canary\x00"])
def test_a_key_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(SetupError) as raised:
        Http("https://api.example.com", headers={"Authorization": key}, clock=VirtualClock(), name="acme")
    assert "canary" not in "".join(traceback.format_exception(raised.value))


def test_a_proxy_of_the_environment_is_used_and_sees_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as proxy:

        def serve() -> None:
            with closing(proxy.accept()[0]) as line:
                asked.append(line.recv(65536))
                line.sendall(b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(Unknown):
            client("https://api.example.com").request("GET", "/v2/pods")
        thread.join(10)
    assert asked[0].startswith(b"CONNECT api.example.com:443")
    assert KEY.encode() not in asked[0]


def test_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to this computer must not go through a proxy, which would receive the key unencrypted."""
    with serving(says()) as server, serving(says(500)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("no_proxy", "")
        assert client(server.url).request("GET", "/").status == 200
        assert proxy.seen == []


def test_a_certificate_is_accepted_only_if_somebody_vouches(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime
    import ssl

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (tmp_path / "both.pem").write_bytes(pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "both.pem")
    server = Server([says()])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with pytest.raises(Unknown, match=r"(?i)certificate"):
            client(f"https://localhost:{server.server_address[1]}").request("GET", "/")
        assert server.seen == []
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "both.pem"))
        assert client(f"https://localhost:{server.server_address[1]}").request("GET", "/").status == 200
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
