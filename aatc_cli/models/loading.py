"""Load a model from a hub id, a folder or a .gguf file, whole and as it is; the door to all that names a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aatc_cli.artifacts.manifest import ModelIdentity, require_model
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.attempt import attempt, quiet_transformers
from aatc_cli.models.identity import identify
from aatc_cli.models.kept import kept
from aatc_cli.models.placement import find_device
from aatc_cli.models.source import ModelSource, find_model
from aatc_cli.models.steady import check_steady
from aatc_cli.models.tokenizer import Tokenizer, load_tokenizer
from aatc_cli.models.weights import weight_files

__all__ = [
    "ModelSource",
    "Tokenizer",
    "empty_model",
    "find_model",
    "identify",
    "leading_device",
    "load_config",
    "load_model",
    "load_same",
    "load_tokenizer",
    "pick_dtype",
    "quiet_transformers",
]


def load_config(source: ModelSource) -> Any:
    """The model's configuration object, without its weights."""
    check_steady(source)
    return attempt(source.name, lambda: AutoConfig.from_pretrained(source.reference, **source.keywords))


def empty_model(source: ModelSource, config: Any) -> Any:
    """The model of ``config`` with its modules and shapes, but no memory behind its weights."""
    with torch.device("meta"):
        return attempt(source.name, lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=False))


@kept
def load_model(
    source: ModelSource, *, device: str = "cpu", dtype: str = "auto", device_map: str | dict[str, Any] | None = None
) -> Any:
    """The causal language model in evaluation mode on ``device``. ``auto`` is float32 on a CPU, bfloat16 elsewhere.

    With a ``device_map`` accelerate places it: "auto" fills the GPUs in turn, then main memory, then the disk, or a
    device for every module by name; ``device`` then only decides the dtype.

    Raises `AatcError` when weights are absent or of another shape, which transformers would draw at random, and when
    files changed since the command looked at them first.
    """
    keywords: dict[str, Any] = {"dtype": pick_dtype(device, dtype), "ignore_mismatched_sizes": True} | source.keywords
    if device_map is not None:
        keywords["device_map"] = device_map
    check_steady(source, weight_files(source))
    model, report = attempt(
        source.name,
        lambda: AutoModelForCausalLM.from_pretrained(source.reference, output_loading_info=True, **keywords),
    )
    check_steady(source, weight_files(source))
    remedy = "the configuration and the weight files do not belong together: fetch the model again"
    if report["missing_keys"]:
        count, first = len(report["missing_keys"]), min(report["missing_keys"])
        raise AatcError(f"{source.name} has no weights for {count} of its parameters, {first} among them", remedy)
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        problem = f"{source.name} has {name} of shape {list(found)}, its configuration asks for {list(wanted)}"
        raise AatcError(problem, remedy)
    # some are saved with the cache switched off, as they were trained
    model.config.use_cache = model.generation_config.use_cache = True
    return (model if device_map is not None else model.to(device)).eval()


def leading_device(device: str, *, spread: bool) -> str:
    """The device that names dtype and clock: ``device``, or for a model that is spread, CUDA where there is any.

    Raises `UsageError` for a spread model with a device of its own.
    """
    if not spread:
        find_device(device)
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


def load_same(source: ModelSource, wanted: ModelIdentity, what: str, *, device: str, dtype: str) -> tuple[Any, Any]:
    """The model and its tokenizer, once it is sure that they are those of the artifact ``what``.

    Raises `ArtifactError` naming the first difference to the model ``wanted``.
    """
    tokenizer = load_tokenizer(source)
    require_model(identify(source, load_config(source), tokenizer), wanted, what)
    return load_model(source, device=device, dtype=dtype), tokenizer.raw
