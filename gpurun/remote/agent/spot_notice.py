"""The notice that a machine is about to be taken away, which EC2 gives on the machine two minutes before that."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

EVERY_S, TALK_S = 2.0, 2.0
TOKEN_PATH, NOTICE_PATH = "/latest/api/token", "/latest/meta-data/spot/instance-action"


def listen(base_url: str, on_notice: Callable[[], None]) -> None:
    """Ask every few seconds, in a thread, and call `on_notice` once there is a notice."""
    threading.Thread(target=_listen, args=(base_url, on_notice), daemon=True).start()


def _listen(base_url: str, on_notice: Callable[[], None]) -> None:
    while not is_given(base_url):
        time.sleep(EVERY_S)
    on_notice()


def is_given(base_url: str) -> bool:
    """Return whether the metadata service (IMDSv2) has a notice. No reply, an error or an invalid reply means none."""
    try:
        token = _request("PUT", base_url + TOKEN_PATH, "X-aws-ec2-metadata-token-ttl-seconds", "60")
        return bool(_request("GET", base_url + NOTICE_PATH, "X-aws-ec2-metadata-token", token))
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _request(method: str, url: str, header: str, value: str) -> str:
    """Send a request with one header, and return the reply's text. Raise OSError (or HTTPError) if there is none."""
    request = urllib.request.Request(url, headers={header: value}, method=method)
    # No proxy is used, because this address is on the machine itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TALK_S) as answer:
        return str(answer.read(4096).decode("ascii"))
