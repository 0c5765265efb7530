"""The application of user-data inside a guest, in cloud-init's order; a failure is printed and the boot continues."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.emulators.guests.cloud_config import CloudConfig, WrittenFile
from tests.emulators.guests.furnish import add_keys, write
from tests.emulators.guests.spec import Spec


def before_sshd(spec: Spec, *, first_boot: bool) -> None:
    """Run bootcmd; on the first boot, also write the files and the host keys."""
    assert spec.cloud is not None
    config, root = spec.cloud, spec.root
    for complaint in config.complaints if first_boot else ():
        print(f"cloud-init: {complaint}", flush=True)
    _run("bootcmd", config.bootcmd, spec)
    if first_boot:
        for file in config.write_files:
            _write_file(file, root)
        _host_keys(config, root / "etc/ssh")


def let_in(config: CloudConfig, user: tuple[Path, int, int], name: str) -> None:
    """Add the keys of the user-data for the user, and all of the user's keys for root.

    With `disable_root`, a login as root only prints a refusal. Root gets no keys if this process runs as the user.
    """
    home, uid, gid = user
    add_keys(home, uid, gid, config.ssh_authorized_keys)
    if uid == os.geteuid():
        return
    listed = home / ".ssh" / "authorized_keys"
    keys = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    word = f'Please login as the user \\"{name}\\" rather than the user \\"root\\".'
    refusal = f"no-port-forwarding,no-agent-forwarding,no-X11-forwarding,command=\"echo '{word}';echo;exit 142\""
    add_keys(Path("/root"), 0, 0, keys, options=refusal if config.disable_root else "")


def after_sshd(spec: Spec, *, first_boot: bool) -> None:
    """Run runcmd and the script, on the first boot only."""
    assert spec.cloud is not None
    if first_boot:
        _run("runcmd", spec.cloud.runcmd, spec)
        _run("user-data", spec.cloud.script, spec)


def _run(name: str, text: str, spec: Spec) -> None:
    """Write a program of the user-data to the disk and run it to its end."""
    if not text:
        return
    program = spec.root / "var/lib/cloud" / name
    write(program, text, 0o700)
    code = subprocess.run([program], env=spec.base_env, check=False).returncode
    if code:
        print(f"cloud-init: {name} ended with {code}", flush=True)


def _write_file(file: WrittenFile, root: Path) -> None:
    place = root / file.path.lstrip("/")
    try:
        if file.append:
            with open(place, "ab") as end:
                end.write(file.content)
        else:
            write(place, file.content, file.permissions)
        if os.geteuid() == 0:
            user, _, group = file.owner.partition(":")
            shutil.chown(place, user, group or None)
    except (OSError, LookupError) as error:
        print(f"cloud-init: write_files: {file.path}: {error}", flush=True)


def _host_keys(config: CloudConfig, folder: Path) -> None:
    """Write the given host keys; if there are none, generate those that ssh_genkeytypes names."""
    for kind in config.ssh_genkeytypes if not config.ssh_keys else ():
        file = folder / f"ssh_host_{kind}_key"
        if config.ssh_deletekeys:
            file.unlink(missing_ok=True)
        if not file.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(file)], check=False)
    for name, text in config.ssh_keys.items():
        kind, _, half = name.partition("_")
        file = folder / f"ssh_host_{kind}_key{'.pub' if half == 'public' else ''}"
        write(file, text.rstrip("\n") + "\n", 0o644 if half == "public" else 0o600)
    for public in sorted(folder.glob("ssh_host_*.pub")):
        subprocess.run(["ssh-keygen", "-lf", str(public)], check=False)
