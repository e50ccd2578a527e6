"""Ways to damage an artifact: its files as they lie on the disk, its tensors, and what is recorded of them."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from aatc_cli.artifacts.manifest import MANIFEST, TENSORS, digest_of
from aatc_cli.artifacts.tensor_file import tensor_digest

JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**70,
    0.5,
    -0.5,
    1e308,
    "",
    "x",
    "../../etc/passwd",
    [],
    [1],
    {},
    {"x": 1},
)


# damage to a file as it lies on the disk


def _flip(draw: random.Random, data: bytearray) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 16))):
        data[draw.randrange(len(data))] ^= draw.randrange(1, 256)


def _truncate(draw: random.Random, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


def _insert(draw: random.Random, data: bytearray) -> None:
    place = draw.choice((0, len(data), draw.randrange(len(data))))
    data[place:place] = draw.randbytes(draw.choice((1, 8, 100)))


def _blank(draw: random.Random, data: bytearray) -> None:
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.choice((1, 8, 512)))
    data[start:stop] = bytes(stop - start)


def _shuffle(draw: random.Random, data: bytearray) -> None:
    size = draw.choice((1, 4, 64))
    a, b = (draw.randrange(max(1, len(data) - size)) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def _header(draw: random.Random, data: bytearray) -> None:
    """The length of a safetensors header is a lie; in another file some first bytes are."""
    length = draw.choice((0, 1, 2**63 - 1, 2**64 - 1, 10**8, 10**8 + 1, len(data), draw.randrange(2**40)))
    data[:8] = length.to_bytes(8, "little")


BYTES = (_flip, _truncate, _insert, _blank, _shuffle, _header)


def damage_file(draw: random.Random, file: Path, elsewhere: Path) -> str:
    """Damage one file: its bytes, or what lies in its place."""
    what = draw.random()
    if what < 0.06:
        # the right content, but out of the run: to accept it is to have followed the link
        shutil.copy(file, elsewhere)
        file.unlink()
        file.symlink_to(draw.choice((str(elsewhere), os.path.relpath(elsewhere, file.parent))))
        return f"{file.name} is a link"
    if what < 0.1:
        file.unlink()
        how = draw.choice(("absent", "folder", "pipe"))
        {"absent": lambda: None, "folder": file.mkdir, "pipe": lambda: os.mkfifo(file)}[how]()
        return f"{file.name} is {how}"
    if what < 0.12:
        with file.open("r+b") as handle:
            handle.truncate(1 << 40)
        return f"{file.name} is a terabyte of holes"
    data, change = bytearray(file.read_bytes()), draw.choice(BYTES)
    change(draw, data)
    file.write_bytes(data)
    return f"{file.name}: {change.__name__}"


# damage to what is recorded, and a digest that agrees with it


def _paths(data: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [where] * bool(where) + [path for key, value in inner for path in _paths(value, (*where, key))]


def damage_record(draw: random.Random, raw: dict[str, Any]) -> str:
    """Remove, add, rename or re-type one field anywhere in a record, or one of every kind of claim."""
    # a field of the top first: there are many more entries of tensors than of all else
    field = draw.choice([key for key in raw if key != "digest"])
    path = draw.choice(_paths({field: raw[field]}))
    owner: Any = raw
    for step in path[:-1]:
        owner = owner[step]
    old, how = owner[path[-1]], draw.choice(("remove", "junk", "add", "rename", "number", "text"))
    if how == "remove":
        owner.pop(path[-1])
    elif how == "add" and isinstance(old, dict):
        old["../../../surprise"] = draw.choice(JUNK)
    elif how == "rename" and isinstance(owner, dict):
        owner[draw.choice(("/etc/passwd", "../x", "", path[-1] + " "))] = owner.pop(path[-1])
    elif how == "number" and isinstance(old, int | float) and not isinstance(old, bool):
        owner[path[-1]] = draw.choice((-old - 1, old + 1, old * 2 + 3, 2**40, float(old) + 0.25))
    elif how == "text" and isinstance(old, str):
        owner[path[-1]] = draw.choice((old + "x", old[:-1] + "\u0000", "0" * 64, f"../../{old}", old.upper() + "é"))
    else:
        owner[path[-1]] = draw.choice([junk for junk in JUNK if type(junk) is not type(old) or junk != old])
    return f"{how} {'.'.join(map(str, path))}: {old!r:.40}"


def sign(raw: dict[str, Any]) -> None:
    """Give a record the digest it would have if it were genuine."""
    raw["digest"] = digest_of({key: value for key, value in raw.items() if key not in ("digest", "provenance")})


def _poison(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    flat = tensor.view(-1)
    if tensor.is_floating_point() and flat.numel():
        flat[draw.randrange(flat.numel())] = draw.choice((float("nan"), float("inf"), float("-inf")))
        return tensor
    return torch.cat([flat, flat[:1]]) if flat.numel() else torch.ones(3, dtype=tensor.dtype)


def _signs(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    flat = tensor.view(-1)
    flat[draw.randrange(flat.numel())] = draw.choice((-1.0, -1e-30, 0.0)) if tensor.is_floating_point() else 17
    return tensor


def damage_tensors(draw: random.Random, parts: dict[str, torch.Tensor]) -> tuple[str, bool]:
    """Damage one or two tensors; what was done, and whether no reader may take it even with a hash that agrees."""
    full = [name for name, tensor in parts.items() if tensor.numel()]
    name = draw.choice(full)
    tensor, how = parts[name], draw.choice(("poison", "sign", "swap", "drop", "add", "rename", "dtype", "shape"))
    fatal = True
    if how == "poison":
        parts[name] = _poison(draw, tensor)
    elif how == "sign":
        parts[name] = _signs(draw, tensor)
        least = float(parts[name].min())
        fatal = least < 0 and re.search(r"\.(variance|weight|fisher)$", name) is not None
        fatal = fatal or (least <= 0 and name.endswith(".scale"))
    elif how == "swap":
        other = draw.choice([n for n in full if n != name])
        parts[name], parts[other] = parts[other], tensor
        fatal = (parts[name].dtype, parts[name].shape) != (tensor.dtype, tensor.shape)
        name = f"{name} and {other}"
    elif how == "drop":
        parts.pop(name)
    elif how == "add":
        parts["../../" + name] = tensor.clone()
        fatal = False
    elif how == "rename":
        parts[draw.choice(("/", "../", "layers.99.")) + name] = parts.pop(name)
    elif how == "dtype":
        parts[name] = tensor.to(torch.int32 if tensor.dtype != torch.int32 else torch.int64)
    else:
        parts[name] = tensor.reshape(1, *tensor.shape)
    return f"{how} {name}", fatal


def record_of(path: Path) -> Path:
    """The JSON file of an artifact."""
    return path if path.is_file() else path / MANIFEST


def write_tensors(path: Path, parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write the tensors of an artifact and what a manifest says of them."""
    save_file({name: tensor.contiguous() for name, tensor in parts.items()}, path / TENSORS)
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "sha256": tensor_digest(tensor),
        }
        for name, tensor in sorted(parts.items())
    }


def damage(draw: random.Random, kind: str, path: Path, elsewhere: Path) -> tuple[str, str]:
    """Damage an artifact; what was done, and what a reader may do with it.

    "same": refuse it, or read what was there before. "refuse". "any": the digest was made to agree and the values are
    possible, so that it is another artifact, not a damaged one; it may only not end in anything but an `AatcError`.
    """
    record, whole = record_of(path), draw.random()
    if whole < 0.4:
        file = record if kind == "evaluation" or draw.random() < 0.4 else path / TENSORS
        return damage_file(draw, file, elsewhere / file.name), "same"
    raw = json.loads(record.read_text(encoding="utf-8"))
    signed = draw.random() < 0.5
    if kind != "evaluation" and whole < 0.6:
        parts = load_file(path / TENSORS)
        what, fatal = damage_tensors(draw, parts)
        entries = write_tensors(path, parts)
        if signed:
            raw["tensors"] = entries
            sign(raw)
            record.write_text(json.dumps(raw), encoding="utf-8")
        return f"{what}{', signed' * signed}", "same" if not signed else "refuse" if fatal else "any"
    if draw.random() < 0.1:
        raw["schema_version"] = draw.choice((0, 4, 99, "2", 2.0, None, True, -1))
        what, may = f"schema version {raw['schema_version']!r}", "refuse"
    else:
        what = damage_record(draw, raw)
        may = "same" if not signed or what.split()[1].split(".")[0] == "provenance:" else "any"
    if signed:
        sign(raw)
    record.write_text(json.dumps(raw), encoding="utf-8")
    return f"{what}{', signed' * signed}", may
