"""Functions that fill a guest's file system: users, sshd, and its own programs. They run once, inside the guest."""

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
# The paths of a program on a real machine; a timer may use its absolute path.
_PLACES = {
    "systemctl": ("usr/bin/systemctl", "usr/sbin/poweroff", "usr/sbin/halt", "usr/sbin/reboot"),
    "shutdown": ("usr/sbin/shutdown",),
    "systemd-run": ("usr/bin/systemd-run",),
    "guest-sshd": ("usr/local/sbin/guest-sshd",),
}
_SFTP = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
_PYTORCH = "opt/pytorch/bin/python"


def shims() -> dict[str, str]:
    """Return the guest's own programs, texts by name; call this while all files of this computer are visible."""
    return {file.name: file.read_text(encoding="utf-8") for file in _SHIMS.iterdir()}


def furnish(spec: Spec, programs: dict[str, str]) -> None:
    """Fill the guest's root with all that a machine needs before it boots."""
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
    """Return the home, uid and gid of the user who logs in; create the user if missing."""
    return add_user(spec.user) if spec.whole else (spec.root / "home", os.geteuid(), os.getegid())


def _furnish_processes(root: Path, spec: Spec) -> None:
    """Create the folders of a guest of plain processes, and the program that starts each session in its home."""
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
    """Set up what only a whole machine has: names, sudo and python3; remove the programs that its faults name."""
    write(root / "etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
    # Without name resolution, no program in the guest can reach a real cloud by mistake.
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
    """Write a program, in place of any file at this path."""
    write(place, text, 0o755)


def write(place: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace a file; a link is replaced itself, and its target stays."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.write_bytes(content if isinstance(content, bytes) else content.encode())
    place.chmod(mode)


def add_user(name: str) -> tuple[Path, int, int]:
    """Return a user's home, uid and gid; create a missing user with a locked password and sudo without a password."""
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
    """Add keys, each with `options`, to the authorized_keys of a user."""
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
    """Return the environment of a session in a guest of plain processes, where no init sets it."""
    guards = ("GPURUN_GUARD_FOLDER", "GPURUN_GUARD_SSH_FOLDER")  # A session on a machine does not have them either.
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
    """Install the Python that runs the tests, which has torch, at the path of the Python in clouds' images."""
    (root / _PYTORCH).unlink(missing_ok=True)
    if not spec.faults.python3_missing:
        install(root / _PYTORCH, _python_script(spec))


def _configure_sshd(root: Path, spec: Spec) -> None:
    """Configure an sshd that accepts only keys, on the guest's own address, without this computer's host keys."""
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
