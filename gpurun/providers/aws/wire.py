"""Sends requests to AWS. No other module of the providers uses boto3 or decides what is retried at AWS.

The SDK's own retries are off. They would repeat a launch that failed for lack of capacity or whose answer was lost, and
the time that they wait would not count towards gpurun's limits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from math import inf
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gpurun import __version__
from gpurun.core.aws_session import AwsSession
from gpurun.core.background_call import Background
from gpurun.core.clock import Clock
from gpurun.core.crashpoint import crashpoint
from gpurun.core.errors import SetupError
from gpurun.core.retry import Retry
from gpurun.providers.base import Rejected, Throttled, Unknown

AwsReply = dict[str, Any]
"""An answer as boto3 returns it."""

T = TypeVar("T")
FALLBACK_REGION = "us-east-1"
_HOME_REGIONS = {"cn-": "cn-north-1", "us-gov-": "us-gov-west-1"}
"""The first region of each partition whose credentials do not work in the fallback region."""
_AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws", ".api.amazonwebservices.com.cn")
CONNECT_S, READ_S, EXCHANGE_S = 5, 25, 30.0
"""The limit on a whole exchange: READ_S alone would never expire for a server that sends byte by byte."""
PATIENCE_S = 60.0
_LOST_TRIES = 3
_MOST_PAGES = 1_000
_AT_ONCE = 20
_READ_ONLY_PREFIXES = ("describe_", "get_", "list_", "dry_")
_THROTTLED = frozenset(
    {"RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException",
     "RequestThrottled", "RequestThrottledException", "BandwidthLimitExceeded", "EC2ThrottledException", "SlowDown"}
)  # fmt: skip
_UNUSABLE_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "NoRegionError",
    "InvalidRegionError", "InvalidConfigError", "ConfigParseError", "ConfigNotFound", "InfiniteLoopConfigError",
    "TokenRetrievalError", "NoAuthTokenError", "SSOError", "UnauthorizedSSOTokenError", "SSOTokenLoadError",
    "PendingAuthorizationExpiredError", "LoginError", "UnknownCredentialError", "RefreshWithMFAUnsupportedError",
)  # fmt: skip


class AwsRefused(Exception):
    """AWS answered with an error code. The caller decides what the code means."""

    clock_ahead_s: float | None = None
    """How many seconds this machine's clock was ahead of AWS's, by the Date header of this answer."""

    def __init__(self, operation: str, code: str, words: str, status: int) -> None:
        super().__init__(f"{code}: {words}")
        self.operation = operation
        self.code = code
        self.status = status


class AwsClients:
    """Sends requests with the credentials that the SDK finds, through one client for each service and region."""

    clock_ahead_s: float | None = None
    """How many seconds this machine's clock is ahead of AWS's, by the last Date header; None before the first."""

    def __init__(self, clock: Clock, region: str | None = None) -> None:
        self.clock = clock
        self._given = region
        self._session = AwsSession(clock)
        self._clients: dict[tuple[str, str], Any] = {}
        self._clients_of: Any = None
        self._lock = threading.RLock()

    @property
    def chosen_region(self) -> str | None:
        """Return the given region, or else the one in the SDK's configuration; None if there is neither."""
        return self._given or self._open_session().region_name

    @property
    def region(self) -> str:
        """Return the region for requests that need no particular one: the chosen region if the SDK knows it.

        If the SDK does not know the chosen region, requests to it would only fail to connect.
        """
        chosen = self.chosen_region or FALLBACK_REGION
        session = self._open_session()
        if any(
            chosen in session.get_available_regions("ec2", partition)
            for partition in session.get_available_partitions()
        ):
            return chosen
        return next((home for prefix, home in _HOME_REGIONS.items() if chosen.startswith(prefix)), FALLBACK_REGION)

    def call(self, service: str, region: str, operation: str, *, once: bool = False, **parameters: Any) -> AwsReply:
        """Send a request and return the answer; AwsRefused for an error code, Unknown if the answer is not clear.

        Throttled requests are retried. Lost answers and server errors are retried, too, unless `once` is set: then the
        caller must handle the first one, because AWS may have carried out the request.
        """
        throttled = Retry(self.clock, 0.25, longest_s=16.0, limit_s=PATIENCE_S, jitter=0.25)
        unclear = Retry(self.clock, 0.25, longest_s=16.0, limit_s=PATIENCE_S, jitter=0.25, tries=_LOST_TRIES - 1)
        while True:
            try:
                return self._send(service, region, operation, parameters)
            except AwsRefused as refused:
                words = f"AWS {region} gave no clear answer to {operation}: {refused}"
                if refused.code in _THROTTLED:
                    throttled.wait(Throttled(words))
                elif once or refused.status < 500:
                    raise
                else:
                    unclear.wait(Unknown(words))
            except Unknown as unknown:
                if once:
                    raise
                unclear.wait(unknown)

    def pages(self, service: str, region: str, operation: str, key: str, **parameters: Any) -> Iterator[Any]:
        """Yield every item of a listing, from all its pages; Unknown if a page has no list, or the pages do not end.

        The SDK accepts any XML as an answer, such as a proxy's error page. Its missing list is not an empty list.
        """
        more: AwsReply = {}
        for _ in range(_MOST_PAGES):
            answer = self.call(service, region, operation, **parameters, **more)
            if not isinstance(answer.get(key), list):
                raise Unknown(f"AWS {region} answered {operation} without its list")
            yield from answer[key]
            token = answer.get("NextToken")
            if not token:
                return
            if more.get("NextToken") == token:
                break
            more = {"NextToken": token}
        raise Unknown(f"AWS {region} sent a listing without an end for {operation}")

    @property
    def endpoint(self) -> str:
        """Return the address of EC2 in the SDK's settings; "" if it is AWS's own, or if the settings are not usable."""
        try:
            url = str(self._get_client("ec2", self.region).meta.endpoint_url)
        except (Unknown, SetupError):
            return ""
        return "" if (urlsplit(url).hostname or "").endswith(_AWS_DOMAINS) else url

    def is_near(self, service: str, region: str) -> bool:
        """Return whether the endpoint is on this machine, as only an emulator's is."""
        host = urlsplit(self._get_client(service, region).meta.endpoint_url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def serves(self, service: str, region: str) -> bool:
        """Return whether the SDK lists the region for a service."""
        return region in self._open_session().get_available_regions(service)

    def key_ends_wall(self) -> float:
        """Return when the credentials expire; infinity if never or if they are renewed, 0 if the time is not known."""
        try:
            found = self._session.keyed().get_credentials()
            token = found.get_frozen_credentials().token if found else None
        except Exception as error:
            raise _explain(error, "credentials", self.region) from error
        if found is None or not token or found.method not in ("env", "shared-credentials-file", "config-file"):
            return inf
        ends = getattr(found, "_expiry_time", None)
        return ends.timestamp() if isinstance(ends, datetime) else 0.0

    def _send(self, service: str, region: str, operation: str, parameters: AwsReply) -> AwsReply:
        """Send one request and return the answer. Every exception of the SDK becomes an error of `_explain`."""
        client = self._get_client(service, region)
        changes = not operation.startswith(_READ_ONLY_PREFIXES) and not parameters.get("DryRun")
        if changes:
            crashpoint(f"before aws.{operation}")
        sent_wall = self.clock.wall()
        exchange = Background[AwsReply](lambda: getattr(client, operation)(**parameters))
        if not exchange.wait(EXCHANGE_S):
            raise Unknown(f"AWS {region} gave no complete answer to {operation} within {EXCHANGE_S:.0f} s")
        try:
            answer = exchange.result()
        except Exception as error:
            explained = _explain(error, operation, region)
            if isinstance(explained, AwsRefused):
                explained.clock_ahead_s = self._compare_clocks(getattr(error, "response", {}), sent_wall)
            raise explained from error
        if changes:
            crashpoint(f"after aws.{operation}")
        self._compare_clocks(answer, sent_wall)
        return answer

    def _compare_clocks(self, answer: AwsReply, sent_wall: float) -> float | None:
        """Store and return the clock skew. A Date header has whole seconds, so it is half a second early on average."""
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
        wall = (sent_wall + self.clock.wall()) / 2
        try:
            ahead_s = round(wall - parsedate_to_datetime(date).timestamp() - 0.5, 1)
        except (ValueError, TypeError, OverflowError):
            return None
        self.clock_ahead_s = ahead_s
        return ahead_s

    def _open_session(self) -> Any:
        try:
            return self._session.boto()
        except Exception as error:
            raise _explain(error, "opening", self._given or "") from error

    def _get_client(self, service: str, region: str) -> Any:
        try:
            session = self._session.keyed()
        except Exception as error:
            raise _explain(error, "credentials", region) from error
        with self._lock:  # Threads may share a client, but must not create clients at the same time.
            if session is not self._clients_of:
                self._clients, self._clients_of = {}, session
            client = self._clients.get((service, region))
            if client is None:
                from botocore.config import Config  # type: ignore[import-untyped]

                config = Config(
                    connect_timeout=CONNECT_S,
                    read_timeout=READ_S,
                    retries={"mode": "standard", "total_max_attempts": 1},
                    user_agent_extra=f"gpurun/{__version__}",
                )
                try:
                    client = session.client(service, region_name=region, config=config)
                except Exception as error:
                    raise _explain(error, service, region) from error
                self._clients[service, region] = client
            return client


def query_regions(regions: Sequence[str], look: Callable[[str], T]) -> tuple[dict[str, T], dict[str, Exception]]:
    """Query several regions at the same time. Return the answers and the errors, each by region."""

    def look_at(region: str) -> T | Exception:
        try:
            return look(region)
        except (Unknown, AwsRefused, SetupError) as error:
            return error

    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(1, len(regions)))) as pool:
        answers = dict(zip(regions, pool.map(look_at, regions), strict=True))
    found = {region: answer for region, answer in answers.items() if not isinstance(answer, Exception)}
    return found, {region: answer for region, answer in answers.items() if isinstance(answer, Exception)}


def _explain(error: Exception, operation: str, region: str) -> Exception:
    """Return gpurun's error for an exception of the SDK.

    AwsRefused for an error code, SetupError for unusable credentials, Rejected for a request that was not sent; else
    Unknown.
    """
    from botocore.exceptions import (  # type: ignore[import-untyped]
        ClientError,
        ParamValidationError,
    )
    from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

    if isinstance(error, Unknown | AwsRefused | SetupError | Rejected):
        return error
    if isinstance(error, ClientError):
        details = error.response.get("Error", {})
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
        words = str(details.get("Message") or "").partition("Encoded authorization failure message")[0]
        return AwsRefused(operation, str(details.get("Code") or "?"), " ".join(words.split())[:500], status)
    if isinstance(error, ParamValidationError):
        return Rejected(f"{operation} was not sent: the SDK does not accept it")
    if {cls.__name__ for cls in type(error).__mro__} & set(_UNUSABLE_CREDENTIALS):
        hint = "Run `aws configure` or `aws sso login`, or set AWS_PROFILE; then `gpurun doctor`."
        return SetupError("auth.aws", f"The AWS SDK finds no usable credentials: {error}.", hint=hint)
    if isinstance(error, RuntimeError) and "expired" in str(error):
        return SetupError(
            "auth.aws", "The AWS credentials have expired.", hint="Renew them; then gpurun doctor --online."
        )
    if isinstance(error, ResponseParserError):  # Its message quotes the whole answer, such as a proxy's page.
        return Unknown(f"the answer to {operation} from {region} does not have the form of an AWS answer")
    return Unknown(f"AWS {region} gave no answer to {operation}: {error or type(error).__name__}")
