from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aatc_cli.artifacts.tensor_file import TensorFile


def many() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    wide = {
        f"{dtype}".removeprefix("torch."): (torch.rand(3, 5, generator=generator) * 100).to(dtype)
        for dtype in (
            torch.uint8,
            torch.bool,
            torch.float16,
            torch.float64,
            torch.int32,
            torch.bfloat16,
            torch.float32,
            torch.int64,
            torch.int8,
            torch.int16,
        )
    }
    return wide | {
        "odd bytes": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        'naïve "name"': torch.ones(1),
    }


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with TensorFile(path) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
        file.finish()


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", many())
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(many())
    for name, tensor in many().items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_every_tensor_begins_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    write(tmp_path / "x", many())
    raw = (tmp_path / "x").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in many().items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0, name


def test_no_tensors(tmp_path: Path) -> None:
    write(tmp_path / "x", {})
    assert load_file(tmp_path / "x") == {}


def test_a_tensor_may_change_after_it_was_added(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    with TensorFile(tmp_path / "x") as file:
        file.add("a", tensor)
        tensor.zero_()
        file.add("b", tensor)
        file.finish()
    assert load_file(tmp_path / "x")["a"].tolist() == [0, 1, 2, 3]


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    with TensorFile(tmp_path / "x") as file, pytest.raises(KeyError):
        file.add("a", torch.zeros(1, dtype=torch.complex64))
