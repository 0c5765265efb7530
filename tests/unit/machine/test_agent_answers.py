"""Tests of the agent: it starts quickly, is plain Python 3.8, and serves only permitted files, byte for byte."""

from __future__ import annotations

import ast
import io
import json
import os
import random
import subprocess
import sys
import threading
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from conftest import Box

from gpurun.remote import client
from gpurun.remote.agent.__main__ import VERBS
from gpurun.remote.client import AGENT, agent_zip
from gpurun.remote.interface import FarRefusal
from tests.refusals import refusal


def finished(box: Box, name: str, content: bytes) -> None:
    """Write a finished file and its manifest, as the trainer leaves them."""
    path = box.folder / "out" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    files = [{"name": name, "bytes": len(content), "sha256": "0" * 64, "kind": "sample", "step": 1}]
    (box.folder / "out" / "MANIFEST.json").write_text(json.dumps({"v": 1, "latest": 1, "best": None, "files": files}))


def test_the_agent_is_one_file_for_python_3_8_without_packages() -> None:
    zipped = zipfile.ZipFile(io.BytesIO(agent_zip()))
    for name in zipped.namelist():
        tree = ast.parse(zipped.read(name), feature_version=(3, 8))
        imported = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        own = {module for module in imported if module.replace(".", "/") + ".py" in zipped.namelist()}
        assert {module.partition(".")[0] for module in imported - own} <= set(sys.stdlib_module_names), name


def test_the_same_sources_always_make_the_same_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = agent_zip()
    for source in sorted(AGENT.glob("*.py"), reverse=True):
        (tmp_path / source.name).write_bytes(source.read_bytes())
        (tmp_path / source.name).chmod(0o600)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "files.pyc").write_bytes(b"built here")
    monkeypatch.setattr(client, "AGENT", tmp_path)
    assert agent_zip() == here
    assert all(entry.compress_type == zipfile.ZIP_STORED for entry in zipfile.ZipFile(io.BytesIO(here)).infolist())


def test_every_verb_of_the_agent_is_where_its_door_looks_for_it() -> None:
    for verb, module in VERBS.items():
        assert callable(getattr(import_module(f"gpurun.remote.agent.{module}"), verb))


def test_a_poll_loads_nothing_heavy(box: Box) -> None:
    command = box.agent_argv("poll", "--want", "{}")
    command[1:1] = ["-X", "importtime"]
    printed = subprocess.run(command, cwd=box.folder, capture_output=True, check=True, text=True).stderr
    loaded = {line.rpartition("|")[2].strip() for line in printed.splitlines()}
    assert not loaded & {"typing", "subprocess", "tarfile", "hashlib", "argparse", "shutil", "platform", "threading"}
    assert {name for name in loaded if "gpurun" in name} <= {"gpurun", "gpurun.remote", "gpurun.remote.agent"} | {
        f"gpurun.remote.agent.{name}" for name in ("job_state", "job_status", "system")
    }


def test_polling_a_growing_file_loses_and_doubles_nothing(box: Box) -> None:
    path, dice = box.folder / "out" / "events.jsonl", random.Random(7)
    path.parent.mkdir(exist_ok=True)
    whole = b"".join(json.dumps({"step": i, "é": "x" * dice.randrange(60)}).encode() + b"\n" for i in range(2000))

    def write() -> None:
        with open(path, "ab", buffering=0) as out:
            at = 0
            while at < len(whole):
                at += out.write(whole[at : at + dice.randrange(1, 3000)])

    writer, got = threading.Thread(target=write), b""
    writer.start()
    while len(got) < len(whole):
        chunk = box.far.poll({"events.jsonl": (len(got), dice.randrange(1, 9000)), "trainer.log": (0, 10)}).chunks
        assert chunk["trainer.log"].data == b""
        got += chunk["events.jsonl"].data
    writer.join()
    assert got == whole
    assert box.far.poll({"events.jsonl": (len(whole) + 5, 10)}).chunks["events.jsonl"].data == b""


def test_poll_serves_three_files_and_no_link(box: Box) -> None:
    with refusal(FarRefusal, "far.no_such_file", "'../agent.pyz'"):
        box.far.poll({"../agent.pyz": (0, 10)})
    (box.folder / "out").mkdir(exist_ok=True)
    os.symlink("/etc/passwd", box.folder / "out" / "trainer.log")
    with pytest.raises(FarRefusal):
        box.far.poll({"trainer.log": (0, 10)})


def test_get_serves_finished_files_only(box: Box, tmp_path: Path) -> None:
    finished(box, "checkpoints/000001.state.json", b"0123456789")
    (box.folder / "out" / "other").write_bytes(b"unfinished")
    argv = box.agent_argv("get", "--name", "checkpoints/000001.state.json", "--offset", "4", "--most", "3")
    assert box.machine.call(argv, timeout_s=10).stdout.partition(b"\n")[2] == b"456"
    for name in ("other", "../agent.pyz", "/etc/passwd", "checkpoints", ".", "checkpoints/../other"):
        reply = box.machine.call(box.agent_argv("get", "--name", name, "--offset", "0", "--most", "9"), timeout_s=10)
        assert json.loads(reply.stdout)["error"]["code"] == "no_such_file"
    listed = (box.folder / "out/MANIFEST.json").read_text().replace("checkpoints/000001.state.json", "../agent.pyz")
    (box.folder / "out/MANIFEST.json").write_text(listed)
    reply = box.machine.call(
        box.agent_argv("get", "--name", "../agent.pyz", "--offset", "0", "--most", "9"), timeout_s=10
    )
    assert json.loads(reply.stdout)["error"]["code"] == "no_such_file"


@pytest.mark.parametrize(
    "words",
    [[], ["dance"], ["poll"], ["poll", "--root"], ["poll", "--root", ".", "--want", "[]"], ["get", "--root", "."]],
)
def test_words_that_make_no_sense_are_a_refusal_in_json(box: Box, words: list[str]) -> None:
    reply = box.machine.call([sys.executable, "-I", "-S", "agent.pyz", *words], timeout_s=10)
    assert reply.exit_code == 1
    assert json.loads(reply.stdout)["error"]["code"] == "usage"


def test_hello_finds_the_python_that_has_torch_and_start_uses_it(box: Box) -> None:
    fake = box.folder / "python-with-torch"
    fake.write_text('#!/bin/sh\necho \'{"version": "9.9", "cuda": null, "devices": []}\'\n')
    fake.chmod(0o755)
    facts = box.far.hello(python=str(fake))
    assert (facts.torch.found, facts.torch.version, facts.torch.python) == (True, "9.9", str(fake))
    assert facts.codecs[-1] == "gzip"
    assert facts.shipped_sha256 is None
    box.far.start({**box.job(""), "argv": ["{python}", "-m", "trainer.train"]})
    box.until_exited()
    assert b"9.9" in box.far.poll({"trainer.log": (0, 99)}).chunks["trainer.log"].data


def test_without_torch_a_job_that_needs_it_is_refused(box: Box) -> None:
    assert not box.far.hello(python="/no/such/python").torch.found
    with refusal(FarRefusal, "far.no_torch"):
        box.far.start({**box.job(""), "argv": ["{python}", "-m", "trainer.train"]})
