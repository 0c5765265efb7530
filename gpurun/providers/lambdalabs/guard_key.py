"""The key with which a machine should end itself: checked before a plan or a launch relies on it."""

from __future__ import annotations

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError
from gpurun.core.secrets import Secret
from gpurun.providers._http import Http
from gpurun.providers.errors import RejectedFor, bad_key
from gpurun.providers.lambdalabs import ssh_keys

_HINT = "Give another key: gpurun auth set lambda-guard."


class GuardKey:
    """`http` sends requests with it; None if it is the user's own key, which every request checks."""

    def __init__(self, secret: Secret, http: Http | None, clock: Clock, pause_s: float) -> None:
        self.secret = secret
        self._http = http
        self._clock = clock
        self._pause_s = pause_s

    @property
    def is_own(self) -> bool:
        """Return whether it is another key than the user's."""
        return self._http is not None

    def require_taken(self) -> None:
        """Raise SetupError if Lambda refuses it: nothing would end the machine, and that would stay unnoticed."""
        if self._http is not None:
            self._ssh_keys(self._http)

    def require_sight(self, key_name: str) -> None:
        """Raise RejectedFor if it does not see the newly registered SSH key, and so would not see the machine."""
        if self._http is None:
            return
        try:
            is_seen = key_name in self._ssh_keys(self._http)
        except SetupError as error:
            raise RejectedFor(error) from error
        if not is_seen:
            what = "The key for --lambda-guard belongs to another account, so it could not end the machine."
            raise RejectedFor(bad_key(what, hint=_HINT))

    def _ssh_keys(self, http: Http) -> list[str]:
        """Return the names that it sees; the account's limit on requests counts both keys together."""
        self._clock.sleep(self._pause_s)
        try:
            return ssh_keys.list_key_names(http)
        except SetupError as error:
            raise SetupError(error.code, f"The key for --lambda-guard fails. {error.what}", hint=_HINT) from error
        finally:
            self._clock.sleep(self._pause_s)
