"""`gpurun forward`: forward ports of a run's machine to this computer's loopback."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from typing import Annotated

import typer

from gpurun.cli.local_port import LOCALHOST, is_free
from gpurun.cli.options import RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import SetupError, UsageError

app = typer.Typer(rich_markup_mode=None)
_PAIR = re.compile(r"([0-9]{1,5})(?::([0-9]{1,5}))?")
_TICK_S = 0.1
_FORBIDDEN = "administratively prohibited"
_NOBODY = "Connection refused"


@verb(app, "forward", examples=["gpurun forward fox-41 8888", "gpurun forward fox-41 8889:8888 6006"])
def forward(
    session: Session,
    run: RunArgument,
    ports: Annotated[
        list[str] | None,
        typer.Argument(metavar="PORT", help="A port of the machine, or HERE:THERE (default: its JupyterLab)."),
    ] = None,
) -> Result:
    """Forward ports of a run's machine to 127.0.0.1, until Ctrl-C or until the machine ends.

    An open connection does not extend a deadline.
    """
    from gpurun.cli.openssh import program, ssh_argv, ssh_environment, tunnel_into_job, tunnel_words
    from gpurun.cli.run_control import resolve_run_name
    from gpurun.lifecycle.ways_in import config_of, way_to_run

    pairs, link = _parse_port_pairs(ports or []), ""
    name = resolve_run_name(session, run)
    if not pairs:
        from gpurun.cli.dev_doors import lab_of, link_of
        from gpurun.cli.local_port import free_port
        from gpurun.ledger.runs import look_at_run

        lab = lab_of(session, look_at_run(session.home, name))
        pairs = [(free_port(lab.port), lab.port)]
        link = link_of(lab, pairs[0][0])
    way, config = way_to_run(session.home, name, session.clock), config_of(session.home)
    if way.entry is None or way.job:
        line = tunnel_into_job(config, way, pairs, "NODE")
        hint = f"If the cluster lets you log in to your job's node (gpurun ssh {name} -- hostname names it): {line}"
        if link:
            session.say(f"JupyterLab, once its port is forwarded: {link}")
        raise UsageError(
            "forward.cluster", f"{name} is a job of a cluster, and gpurun cannot forward its ports.", hint=hint
        )
    if program() is None:
        hint = "Install OpenSSH's client (openssh-client). gpurun ssh works without it."
        raise SetupError("forward.no_openssh", "Forwarding needs `ssh`, which is not installed.", hint=hint)
    _require_free_ports(name, pairs)
    options = ["-T", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-o", "LogLevel=INFO"]
    options += tunnel_words(pairs)
    process = subprocess.Popen(
        ssh_argv(config, way.entry, *options),
        env=ssh_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    tunnel = _Tunnel(session, process, name, link)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        tunnel.keep(pairs)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        done = ", ".join(f"{LOCALHOST}:{here}" for here, _ in pairs)
        return Result(data={"run": name, "ports": _pairs_as_data(pairs)}, text=f"Closed: {done}. {name} continues.")
    finally:
        signal.signal(signal.SIGTERM, before)
        process.kill()
        process.wait()
    raise tunnel.why_ended()


class _Tunnel:
    """A process of ssh that forwards ports; a thread reads its messages."""

    def __init__(self, session: Session, process: subprocess.Popen[bytes], run: str, link: str = "") -> None:
        self._session, self._process, self._run, self._link = session, process, run, link
        self._words: list[str] = []
        self._is_forbidden = False
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def keep(self, pairs: list[tuple[int, int]]) -> None:
        """Wait until the tunnel ends, and announce the ports once they are open."""
        is_open = False
        while self._process.poll() is None:
            if not is_open and not any(is_free(here) for here, _ in pairs):
                is_open = True
                for here, there in pairs:
                    self._session.say(f"http://{LOCALHOST}:{here} is port {there} of {self._run}'s machine.")
                if self._link:
                    self._session.say(f"JupyterLab: {self._link}")
                self._session.say("Ctrl-C closes them; the run continues.")
            self._session.clock.sleep(_TICK_S)
        self._reader.join()

    def why_ended(self) -> SetupError:
        """Return the error that says why the tunnel ended, from the messages of ssh."""
        run = self._run
        if self._is_forbidden:
            hint = "Its sshd_config sets that (AllowTcpForwarding). Copy files with scp instead: gpurun ssh-config"
            return SetupError("forward.forbidden", f"The SSH server of {run}'s machine forbids forwarding.", hint=hint)
        why = self._words[-1] if self._words else "the machine ended it"
        hint = f"gpurun ps shows the state of {run}; if its machine is running, try again."
        return SetupError("forward.ended", f"The connection to {run}'s machine has ended: {why}.", hint=hint)

    def _listen(self) -> None:
        from gpurun.core.untrusted import last_words

        assert self._process.stderr is not None
        for line in self._process.stderr:
            if _FORBIDDEN.encode() in line:
                self._is_forbidden = True
                self._process.terminate()
            elif _NOBODY.encode() in line and b"open failed" in line:
                self._session.say("Nothing listens on that port of the machine yet.")
            elif said := last_words(line).rstrip("."):
                self._words.append(said)


def _parse_port_pairs(ports: list[str]) -> list[tuple[int, int]]:
    """Parse `PORT` and `HERE:THERE` as (here, there); UsageError if one is invalid or a port is named twice."""
    pairs = list[tuple[int, int]]()
    for text in ports:
        found = _PAIR.fullmatch(text)
        here, there = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not (0 < here < 65536 and 0 < there < 65536):
            hint = "Write a number from 1 to 65535, or two: 8889:8888 forwards port 8888 there to 8889 here."
            raise UsageError("forward.port", f"{text!r} is not a port.", hint=hint)
        if here in dict(pairs):
            hint = f"Use another local port: {here + 1}:{there}."
            raise UsageError("forward.port_twice", f"Port {here} is named twice.", hint=hint)
        pairs.append((here, there))
    return pairs


def _require_free_ports(run: str, pairs: list[tuple[int, int]]) -> None:
    """Raise UsageError, with the command for the next free port, if a local port is in use."""
    for here, _ in pairs:
        if is_free(here):
            continue
        ports = {port for port, _ in pairs}
        free = next((port for port in range(max(here, 1023) + 1, 65536) if port not in ports and is_free(port)), None)
        line = " ".join(f"{free if port == here else port}:{there}" for port, there in pairs)
        hint = f"Use the next free port: gpurun forward {run} {line}" if free else "Close what listens there."
        raise UsageError(
            "forward.port_taken", f"Port {here} of this computer is in use, or you may not use it.", hint=hint
        )


def _pairs_as_data(pairs: list[tuple[int, int]]) -> list[dict[str, int]]:
    return [{"here": here, "there": there} for here, there in pairs]
