"""The key with which a machine is to end itself: looked at before a plan or a launch rests on it."""

from __future__ import annotations

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError
from gpurun.core.secrets import Secret
from gpurun.providers._http import Http
from gpurun.providers.errors import RejectedFor, bad_key
from gpurun.providers.lambdalabs import ssh_keys

_HINT = "Give another key: gpurun auth set lambda-guard."


class GuardKey:
    """`http` asks with it; None where it is the user's own key, which has been looked at with every request."""

    def __init__(self, secret: Secret, http: Http | None, clock: Clock, pause_s: float) -> None:
        self.secret = secret
        self._http = http
        self._clock = clock
        self._pause_s = pause_s

    @property
    def is_own(self) -> bool:
        """Whether it is another key than the user's."""
        return self._http is not None

    def require_taken(self) -> None:
        """SetupError where Lambda does not take it: nothing would end the machine, and nobody would hear of that."""
        if self._http is not None:
            self._ssh_keys(self._http)

    def require_sight(self, key_name: str) -> None:
        """RejectedFor where it does not see the SSH key that was just registered, and so would not see the machine."""
        if self._http is None:
            return
        try:
            is_seen = key_name in self._ssh_keys(self._http)
        except SetupError as error:
            raise RejectedFor(error) from error
        if not is_seen:
            what = "The key for --lambda-guard is of another account, so it could not end the machine."
            raise RejectedFor(bad_key(what, hint=_HINT))

    def _ssh_keys(self, http: Http) -> list[str]:
        """The names that it sees; the account's limit on requests is of both keys together."""
        self._clock.sleep(self._pause_s)
        try:
            return ssh_keys.list_key_names(http)
        except SetupError as error:
            raise SetupError(error.code, f"The key for --lambda-guard does not do. {error.what}", hint=_HINT) from error
        finally:
            self._clock.sleep(self._pause_s)
