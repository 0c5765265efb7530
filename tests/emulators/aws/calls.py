"""One request to AWS in any of its protocols, and the replies and errors of each protocol."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.sax.saxutils import escape

_XML_EC2 = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error><Code>{}</Code><Message>{}</Message></Error>'
    "</Errors><RequestID>emulated</RequestID></Response>"
)
_XML_QUERY = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<ErrorResponse><Error><Type>Sender</Type><Code>{}</Code><Message>{}'
    "</Message></Error><RequestId>emulated</RequestId></ErrorResponse>"
)
_SCOPE = re.compile(r"Credential=([^/,]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_SCHEDULES = {"POST": "CreateSchedule", "DELETE": "DeleteSchedule", "GET": "GetSchedule", "PUT": "UpdateSchedule"}


class Fault(Enum):
    """A fault of one request."""

    DROP_REQUEST = "the connection ends and nothing was done"
    DROP_ANSWER = "it is done, and the connection ends"
    ERROR_AFTER = "it is done, and the answer is an internal error"
    ERROR = "nothing is done, and the answer is an internal error"
    THROTTLED = "too many requests"
    NO_CAPACITY = "no capacity"
    LIE = "the answer says that it was done, and nothing was"
    EXPIRED = "the session has expired"
    UNSEEN_GROUP = "the firewall group was made so recently that it is not seen here yet"
    NOT_JSON = "the answer is a proxy's page"


@dataclass(frozen=True)
class Reply:
    """An answer: HTTP status, body and content type."""

    status: int
    body: bytes
    kind: str = "text/xml"


class AwsError(Exception):
    """An error that AWS returns."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


@dataclass
class Call:
    """A parsed request. `form` has the parameters of the query protocol, `json` the body in the other protocols."""

    service: str
    region: str
    action: str
    key: str
    form: dict[str, str]
    json: Any
    environ: dict[str, Any]

    def texts(self, name: str) -> list[str]:
        """Return the values of a numbered list: `InstanceId.1`, `InstanceId.2`, ..."""
        numbered = re.compile(rf"{re.escape(name)}\.(\d+)")
        found = [(int(m[1]), value) for key, value in self.form.items() if (m := numbered.fullmatch(key))]
        return [value for _, value in sorted(found)]

    def filters(self) -> dict[str, list[str]]:
        names = sorted({key.split(".")[1] for key in self.form if key.startswith("Filter.")}, key=int)
        return {self.form[f"Filter.{n}.Name"]: self.texts(f"Filter.{n}.Value") for n in names}

    def set_filters(self, filters: dict[str, list[str]]) -> None:
        kept = {key: value for key, value in self.form.items() if not key.startswith("Filter.")}
        for n, (name, values) in enumerate(filters.items(), 1):
            kept[f"Filter.{n}.Name"] = name
            kept |= {f"Filter.{n}.Value.{i}": value for i, value in enumerate(values, 1)}
        self.set_form(kept)

    def set_form(self, form: dict[str, str]) -> None:
        """Replace the request's form parameters, and rebuild the body that moto parses from them."""
        self.form = form
        body = urlencode(form).encode()
        self.environ["wsgi.input"] = io.BytesIO(body)
        self.environ["CONTENT_LENGTH"] = str(len(body))


def read_call(environ: dict[str, Any]) -> Call:
    """Parse a request: its signature has key, region and service; its body or headers have the action."""
    scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    key, region, service = (scope[1], scope[2], scope[3]) if scope else ("", "", "")
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    form: dict[str, str] = {}
    payload: Any = None
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        form = dict(parse_qsl(body.decode(), keep_blank_values=True))
        action = form.get("Action", "")
    else:
        payload = json.loads(body) if body else {}
        action = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2] or _rest_action(environ)
    return Call(service, region, action, key, form, payload, environ)


def error_reply(call: Call, error: AwsError) -> Reply:
    """Return the error in the protocol of the service."""
    if call.service == "ec2":
        return Reply(error.status, _XML_EC2.format(error.code, escape(error.message)).encode())
    if call.form:
        return Reply(error.status, _XML_QUERY.format(error.code, escape(error.message)).encode())
    body = json.dumps({"__type": error.code, "message": error.message}).encode()
    return Reply(error.status, body, "application/x-amz-json-1.1")


def json_reply(payload: Any) -> Reply:
    return Reply(200, json.dumps(payload).encode(), "application/x-amz-json-1.1")


def ec2_reply(action: str, inner: str) -> Reply:
    """Return a successful reply of EC2 with this XML in it."""
    space = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
    text = f"<{action}Response {space}><requestId>emulated</requestId>{inner}</{action}Response>"
    return Reply(200, text.encode())


def _rest_action(environ: dict[str, Any]) -> str:
    path = environ.get("PATH_INFO", "")
    if path.rstrip("/") == "/schedules":
        return "ListSchedules"
    return _SCHEDULES.get(environ["REQUEST_METHOD"], "") if path.startswith("/schedules/") else path
