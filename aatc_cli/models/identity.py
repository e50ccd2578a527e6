"""Which model it is, by content: configuration, weights and tokenizer, not where it lies or what it is called."""

from __future__ import annotations

import json
from typing import Any

from aatc_cli.artifacts.manifest import ModelIdentity, digest_of
from aatc_cli.models.adapter import geometry_of
from aatc_cli.models.fingerprint import fingerprint
from aatc_cli.models.source import ModelSource
from aatc_cli.models.steady import check_steady
from aatc_cli.models.tokenizer import Tokenizer
from aatc_cli.models.weights import read_json, weight_files

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


def identify(source: ModelSource, config: Any, tokenizer: Tokenizer) -> ModelIdentity:
    """The identity of what lies at ``source`` now; raises `AatcError` for weights that are not whole."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    return ModelIdentity(
        name=source.name,
        revision=source.revision,
        architecture=str(config.model_type),
        config_hash=digest_of(json.loads(json.dumps(settings | _ends(source, config), default=str))),
        weights_fingerprint=weights_fingerprint(source),
        tokenizer_hash=tokenizer.digest,
        geometry=geometry_of(config),
    )


def _ends(source: ModelSource, config: Any) -> dict[str, Any]:
    """The tokens that end a generated text, where generation_config.json says others than the configuration."""
    path = source.folder / "generation_config.json"
    if source.gguf or not path.is_file():
        return {}
    found = _tokens(read_json(path).get("eos_token_id"))
    return {"generation_eos": found} if found and found != _tokens(config.get_text_config().eos_token_id) else {}


def _tokens(ids: Any) -> list[int]:
    return sorted(set([ids] if isinstance(ids, int) else ids or []))


def weights_fingerprint(source: ModelSource) -> str:
    """`fingerprint` of the files that the weights are read from; raises `AatcError` when they changed meanwhile."""
    files = weight_files(source)
    check_steady(source, files)
    return fingerprint(files)
