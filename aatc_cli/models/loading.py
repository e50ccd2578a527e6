"""Load a model and its tokenizer from a hub id, a folder or a .gguf file, and say exactly which model it is."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from aatc_cli.artifacts.manifest import ModelIdentity, digest_of
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.adapter import geometry_of
from aatc_cli.models.kept import kept
from aatc_cli.models.placement import find_device

_CHUNK = 1 << 16
_CHUNKS = 256
# fields that change without the model's function changing: where it lies, who wrote it, how it is run
_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
    "_attn_implementation_autoset",
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: ``reference`` is what transformers loads, ``gguf`` a file inside it."""

    name: str
    reference: str
    gguf: str | None = None
    revision: str | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for every ``from_pretrained`` call."""
        extra: dict[str, Any] = {"gguf_file": self.gguf} if self.gguf else {}
        return extra | ({"revision": self.revision} if self.revision else {})


@dataclass(frozen=True)
class Tokenizer:
    """The two things this tool needs of a tokenizer: plain encoding, and the BOS it puts in front by itself."""

    encode: Callable[[str], list[int]]
    bos: int | None
    digest: str
    raw: Any


def find_model(spec: str, revision: str | None = None) -> ModelSource:
    """Resolve ``--model``: a .gguf file, a folder with config.json, or a hub id ``owner/name``; raises `AatcError`."""
    path = Path(spec)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise AatcError(f"there is no model file {spec}", "give a .gguf file; make model fetches the default one")
        return ModelSource(name=path.name, reference=str(path.parent), gguf=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise AatcError(f"the folder {spec} has no config.json", "give a folder saved by save_pretrained")
        return ModelSource(name=path.resolve().name, reference=str(path))
    if path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1 or "/" not in spec:
        raise AatcError(f"{spec} is not a model", "give a hub id (owner/name), a folder, or a .gguf file")
    return ModelSource(name=spec, reference=spec, revision=revision)


def load_config(source: ModelSource) -> Any:
    """The model's configuration object, without its weights."""
    return _attempt(source, lambda: AutoConfig.from_pretrained(source.reference, **source.keywords))


def empty_model(source: ModelSource, config: Any) -> Any:
    """The model of ``config`` with its modules and shapes, but no memory behind its weights."""
    with torch.device("meta"):
        return _attempt(source, lambda: AutoModelForCausalLM.from_config(config))


@kept
def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The model's tokenizer, with no special tokens added by `Tokenizer.encode`.

    Raises `AatcError` where transformers makes another tokenizer of a .gguf file than the model's own.
    """
    raw = _attempt(source, lambda: AutoTokenizer.from_pretrained(source.reference, **source.keywords))
    if source.gguf and str(load_config(source).model_type).startswith("gemma") and _is_unigram(raw):
        raise AatcError(
            f"transformers {version('transformers')} makes another tokenizer of {source.gguf} than the model's own",
            "install transformers 5.24 or newer, or give the model's folder",
        )
    with_special = raw("a")["input_ids"]
    bos = raw.bos_token_id if raw.bos_token_id is not None and with_special[:1] == [raw.bos_token_id] else None
    # the length warning compares a whole text with the model's context; windows are cut afterwards
    raw.model_max_length = 1 << 60

    def encode(text: str) -> list[int]:
        ids: list[int] = raw(text, add_special_tokens=False)["input_ids"]
        return ids

    vocabulary = digest_of(sorted(raw.get_vocab().items()))
    probe = encode("The quick brown fox, 12345 times:\n\n\tnaïve 世界!")
    return Tokenizer(encode=encode, bos=bos, digest=digest_of([vocabulary, probe]), raw=raw)


def _is_unigram(raw: Any) -> bool:
    """Whether a tokenizer cuts text by the likelihood of its pieces, as none of Gemma does: they merge pairs."""
    backend = getattr(raw, "backend_tokenizer", None)
    return type(getattr(backend, "model", None)).__name__ == "Unigram"


@kept
def load_model(
    source: ModelSource, *, device: str = "cpu", dtype: str = "auto", device_map: str | dict[str, Any] | None = None
) -> Any:
    """The causal language model in evaluation mode on ``device``. ``auto`` is float32 on a CPU, bfloat16 elsewhere.

    With a ``device_map`` accelerate places it: "auto" fills the GPUs in turn, then main memory, then the disk, or a
    device for every module by name; ``device`` then only decides the dtype.

    Raises `AatcError` when weights are absent or of another shape: transformers would draw them at random.
    """
    keywords: dict[str, Any] = {"dtype": pick_dtype(device, dtype), "ignore_mismatched_sizes": True} | source.keywords
    if device_map is not None:
        keywords["device_map"] = device_map
    model, report = _attempt(
        source, lambda: AutoModelForCausalLM.from_pretrained(source.reference, output_loading_info=True, **keywords)
    )
    remedy = "the configuration and the weight files do not belong together: fetch the model again"
    if report["missing_keys"]:
        count, first = len(report["missing_keys"]), min(report["missing_keys"])
        raise AatcError(f"{source.name} has no weights for {count} of its parameters, {first} among them", remedy)
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        problem = f"{source.name} has {name} of shape {list(found)}, its configuration asks for {list(wanted)}"
        raise AatcError(problem, remedy)
    return (model if device_map is not None else model.to(device)).eval()


def leading_device(device: str, *, spread: bool) -> str:
    """The device that names dtype and clock: ``device``, or for a model that is spread, CUDA where there is any.

    Raises `UsageError` for a spread model with a device of its own.
    """
    if not spread:
        return device
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device-map auto places the model itself, not on {device}", "leave out --device")
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(device: str, dtype: str) -> torch.dtype:
    """The torch dtype for ``--dtype``; raises `AatcError` for a device that is not there."""
    wanted = find_device(device)
    if dtype == "auto":
        return torch.float32 if wanted.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def identify(source: ModelSource, config: Any, tokenizer: Tokenizer) -> ModelIdentity:
    """Name the model by content: configuration, weight files and tokenizer, not by where it lies."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    return ModelIdentity(
        name=source.name,
        revision=source.revision or getattr(config, "_commit_hash", None),
        architecture=str(config.model_type),
        config_hash=digest_of(json.loads(json.dumps(settings, default=str))),
        weights_fingerprint=fingerprint(weight_files(source)),
        tokenizer_hash=tokenizer.digest,
        geometry=geometry_of(config),
    )


def weight_files(source: ModelSource) -> list[Path]:
    """The files that hold the weights, in name order; raises `AatcError` when there are none."""
    if source.gguf:
        return [Path(source.reference) / source.gguf]
    folder = Path(source.reference)
    if not folder.is_dir():
        found = _attempt(source, lambda: cached_file(source.reference, "config.json", revision=source.revision))
        folder = Path(found).parent
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise AatcError(f"{source.name} has no weight files (*.safetensors)", "download the model's weights first")
    return files


def fingerprint(files: Iterable[Path]) -> str:
    """sha256 over each file's size and up to 256 evenly spaced 64 KiB chunks; small files are covered whole."""
    total = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        total.update(f"{size};".encode())
        offsets = range(0, size, _CHUNK)
        if len(offsets) > _CHUNKS:
            last = len(offsets) - 1
            offsets_used = [offsets[i * last // (_CHUNKS - 1)] for i in range(_CHUNKS)]
        else:
            offsets_used = list(offsets)
        with path.open("rb") as handle:
            for offset in offsets_used:
                handle.seek(offset)
                total.update(handle.read(_CHUNK))
    return total.hexdigest()


def quiet_transformers() -> None:
    """Keep transformers' own advice off stderr, where this tool writes its log, and its bars where no one watches."""
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\..*")


def _attempt(source: ModelSource, load: Callable[[], Any]) -> Any:
    quiet_transformers()
    try:
        return load()
    except AatcError:
        raise
    except ImportError as error:
        needed = [error.name] if error.name else [name for name in ("gguf", "accelerate") if find_spec(name) is None]
        if not needed:
            raise AatcError(f"cannot load {source.name}: {_first(error)}", "install the package it asks for") from error
        packages = " ".join(needed)
        raise AatcError(f"cannot load {source.name} without {packages}", f"pip install {packages}") from error
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for the same user mistake
        raise AatcError(
            f"cannot load {source.name}: {_first(error)}",
            "check the path; a hub id needs network access or a filled cache, a folder or .gguf file needs neither",
        ) from error


def _first(error: Exception) -> str:
    """The first line of what an error says, or its name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
