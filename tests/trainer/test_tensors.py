"""Tests of our safetensors files: the safetensors package reads ours, we read the package's, and damage is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.checkpoint import TensorFileError, read_tensors, write_tensors

TENSORS = {
    "wte.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "half": torch.tensor([1.5, -2.0]).bfloat16(),
    "step": torch.tensor(7.0),
    "none": torch.empty(0, 5),
    "turned": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
    "näme": torch.tensor([1, 2, 255], dtype=torch.uint8),
}


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        write_tensors(file.write, tensors)


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[k], wanted[k]) and found[k].dtype == wanted[k].dtype for k in wanted
    )


def test_a_file_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path / "x", TENSORS)
    assert equal(read_tensors(tmp_path / "x"), TENSORS)


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="the reference reader is a test dependency only")
    write(tmp_path / "ours", TENSORS)
    assert equal(package.load_file(tmp_path / "ours"), TENSORS)
    package.save_file({k: v.contiguous() for k, v in TENSORS.items()}, tmp_path / "its", metadata={"a": "b"})
    assert equal(read_tensors(tmp_path / "its"), TENSORS)


def test_every_truncation_and_every_lying_header_is_found(tmp_path: Path) -> None:
    write(tmp_path / "x", TENSORS)
    content = (tmp_path / "x").read_bytes()
    broken = [content[:length] for length in range(0, len(content), 7)] + [content + b"\0"]
    broken.append(content.replace(b'"shape":[3,4]', b'"shape":[9,4]'))
    broken.append(content.replace(b'"F32"', b'"F99"'))
    broken.append(content.replace(b'"data_offsets":[0,48]', b'"data_offsets":[8,56]'))
    broken.append(b"\xff" * 8 + content[8:])
    for damaged in broken:
        (tmp_path / "y").write_bytes(damaged)
        with pytest.raises(TensorFileError):
            read_tensors(tmp_path / "y")


def entry(shape: object, offsets: object) -> bytes:
    return json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "header",
    [
        entry([1 << 60], [0, 1 << 62]),
        entry([1], [0, "4"]),
        entry([1.0], [0, 4]),
        entry([float("inf")], [0, 4]),
        entry([0, 10**30], [0, 0]),
        b"[" * 100_000,
    ],
    ids=["more than any memory", "offsets", "half tensors", "no number", "no index", "nested"],
)
def test_an_absurd_header_is_refused_before_any_memory_is_taken(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(TensorFileError):
        read_tensors(tmp_path / "x")
