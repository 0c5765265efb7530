"""Fills a guest's file system: users, sshd, the programs that are not this machine's own. Runs inside, once."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.emulators.guests.spec import PATH, Spec

_SHIMS = Path(__file__).with_name("shims")
# Where a program lies in a real machine; a timer may name it by its whole path.
_PLACES = {
    "systemctl": ("usr/bin/systemctl", "usr/sbin/poweroff", "usr/sbin/halt", "usr/sbin/reboot"),
    "shutdown": ("usr/sbin/shutdown",),
    "systemd-run": ("usr/bin/systemd-run",),
    "guest-sshd": ("usr/local/sbin/guest-sshd",),
}
_SFTP = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
_PYTORCH = "opt/pytorch/bin/python"


def shims() -> dict[str, str]:
    """Return the texts of the guest's own programs; to be called while this machine's files are still all visible."""
    return {file.name: file.read_text(encoding="utf-8") for file in _SHIMS.iterdir()}


def furnish(spec: Spec, programs: dict[str, str]) -> None:
    """Make the guest's root a machine's: afterwards it only has to be booted."""
    root = spec.root
    for name, places in _PLACES.items():
        for place in places:
            install(root / place, programs[name])
    if spec.is_container:
        install(root / "start.sh", programs["start.sh"])
    if spec.gpus:
        install(root / "usr/bin/nvidia-smi", programs["nvidia-smi"])
        write(root / "etc/guest-gpus.csv", _gpu_table(spec))
    else:
        (root / "usr/bin/nvidia-smi").unlink(missing_ok=True)
    _give_pytorch(root, spec)
    _configure_sshd(root, spec)
    if spec.whole:
        _furnish_machine(root, spec, programs)
    else:
        _furnish_processes(root, spec)
    add_keys(*home_of(spec), spec.authorized_keys)


def home_of(spec: Spec) -> tuple[Path, int, int]:
    """Return the home, id and group of the user who logs in, who is made if missing."""
    return add_user(spec.user) if spec.whole else (spec.root / "home", os.geteuid(), os.getegid())


def _furnish_processes(root: Path, spec: Spec) -> None:
    """Make the folders of a guest that is plain processes, and a session that begins in its home."""
    for folder in ("home", "tmp", "run", "var/lib"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in _session_env(spec).items())
    sftp = next((place for place in _SFTP if os.path.exists(place)), "sftp-server")
    install(
        root / "etc/guest-session",
        f"""#!/bin/sh
{exports}cd
[ "$SSH_ORIGINAL_COMMAND" = internal-sftp ] && exec {sftp}
exec sh ${{SSH_ORIGINAL_COMMAND:+-c}} "${{SSH_ORIGINAL_COMMAND:--l}}"
""",
    )


def _furnish_machine(root: Path, spec: Spec, programs: dict[str, str]) -> None:
    """Set up what only a machine with a root of its own has: users, names, and programs that are taken away."""
    write(root / "etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
    # No name is ever resolved: what the guest runs cannot reach a real cloud by mistake.
    write(root / "etc/resolv.conf", "")
    write(root / "etc/machine-id", f"{uuid.uuid4().hex}\n")
    (root / "usr/local/lib/guest").mkdir(parents=True, exist_ok=True)
    if not shutil.which("sudo", path=PATH) and (setpriv := shutil.which("setpriv", path=PATH)):
        as_root = root / "usr/local/lib/guest/as-root"
        shutil.copy(setpriv, as_root)
        as_root.chmod(0o4755)
        install(root / "usr/bin/sudo", programs["sudo"])
    if not shutil.which("python3", path=PATH):
        install(root / "usr/local/bin/python3", _python_script(spec))
    for name, gone in (("python3*", spec.faults.python3_missing), ("zstd*", spec.faults.zstd_missing)):
        for folder in {os.path.realpath(folder) for folder in PATH.split(":")} if gone else ():
            for program in Path(folder).glob(name):
                program.unlink()


def install(place: Path, text: str) -> None:
    """Put a program there, whatever lay there before."""
    write(place, text, 0o755)


def write(place: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace a file, never following a link that leads elsewhere."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.write_bytes(content if isinstance(content, bytes) else content.encode())
    place.chmod(mode)


def add_user(name: str) -> tuple[Path, int, int]:
    """Return the user's home, id and group; who is missing is made, with a locked password and sudo without one."""
    users = [line.split(":") for line in Path("/etc/passwd").read_text(encoding="utf-8").splitlines()]
    known = next((line for line in users if line[0] == name), None)
    if known is None:
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        uid = next(number for number in range(1000, 60000) if str(number) not in {line[2] for line in users})
        known = [name, "x", str(uid), str(uid), name, f"/home/{name}", shell]
        for file, line in (("passwd", ":".join(known)), ("group", f"{name}:x:{uid}:"), ("shadow", f"{name}:*:::::::")):
            with open(f"/etc/{file}", "a", encoding="utf-8") as lines:
                lines.write(line + "\n")
        if os.path.isdir("/etc/sudoers.d"):
            write(Path(f"/etc/sudoers.d/90-{name}"), f"{name} ALL=(ALL) NOPASSWD:ALL\n", 0o440)
    home, uid, gid = Path(known[5]), int(known[2]), int(known[3])
    home.mkdir(parents=True, exist_ok=True)
    os.chown(home, uid, gid)
    return home, uid, gid


def add_keys(home: Path, uid: int, gid: int, keys: Sequence[str], options: str = "") -> None:
    """Let the holders of these keys log in."""
    if not keys:
        return
    folder, file = home / ".ssh", home / ".ssh" / "authorized_keys"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(file, "a", encoding="utf-8") as lines:
        lines.writelines(f"{options} {key.strip()}".lstrip() + "\n" for key in keys)
    file.chmod(0o600)
    for path in (folder, file):
        os.chown(path, uid, gid)


def _session_env(spec: Spec) -> dict[str, str]:
    """Return a session's environment, which no init of its own gives it."""
    guards = ("GPURUN_GUARD_FOLDER", "GPURUN_GUARD_SSH_FOLDER")  # A session knows them as little as in a machine.
    kept = {name: value for name, value in spec.base_env.items() if name not in guards}
    return {**kept, **spec.session_env}


def _gpu_table(spec: Spec) -> str:
    rows = (
        f"{index},{gpu.name},GPU-{uuid.uuid4()},{gpu.memory_mib},{gpu.driver_version},{gpu.uncorrected_ecc},4,0,31,52.08"
        for index, gpu in enumerate(spec.gpus)
    )
    return "\n".join(rows) + "\n"


def _python_script(spec: Spec) -> str:
    path = f'PYTHONPATH="{":".join(spec.python_path)}" ' if spec.python_path else ""
    return f'#!/bin/sh\n{path}exec "{spec.python}" "$@"\n'


def _give_pytorch(root: Path, spec: Spec) -> None:
    """Put a Python with torch, the one that runs the tests, where clouds' images have theirs."""
    (root / _PYTORCH).unlink(missing_ok=True)
    if not spec.faults.python3_missing:
        install(root / _PYTORCH, _python_script(spec))


def _configure_sshd(root: Path, spec: Spec) -> None:
    """Configure an sshd that takes keys only, on the guest's own address, with none of this machine's host keys."""
    folder = root / "etc/ssh"
    folder.mkdir(parents=True, exist_ok=True)
    for key in folder.glob("ssh_host_*"):
        key.unlink()
    settings = [
        f"Port {spec.port}", f"ListenAddress {spec.host}", f"PidFile {root / 'run/sshd.pid'}", "UsePAM no",
        "PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitRootLogin prohibit-password",
        "UseDNS no", "PrintMotd no", "PrintLastLog no", "Subsystem sftp internal-sftp", "AcceptEnv LANG LC_*",
    ]  # fmt: skip
    if not spec.whole:
        settings += [f"AuthorizedKeysFile {root}/home/.ssh/authorized_keys", "StrictModes no"]
        settings += [f"ForceCommand {root}/etc/guest-session"]
        if not spec.faults.wrong_host_key:
            settings += [f"HostKey {folder}/ssh_host_{kind}_key" for kind in ("ecdsa", "ed25519")]
    elif spec.session_env:
        settings.append("SetEnv " + " ".join(f'{name}="{value}"' for name, value in spec.session_env.items()))
    if spec.faults.wrong_host_key:
        other = root / "etc/guest_other_host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
        settings.append(f"HostKey {other}")
    write(folder / "sshd_config", "\n".join(settings) + "\n")
    write(root / "etc/guest-sshd-delay", f"{spec.faults.sshd_delay_s}\n")
    write(root / "etc/guest-sshd-program", f"{spec.sshd}\n")
