"""Where a model comes from: a .gguf file, a folder, or a hub id, which becomes the folder of one commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aatc_cli.errors import AatcError
from aatc_cli.models.hub import Snapshot, open_snapshot

ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class ModelSource:
    """``reference`` is the folder that is read, ``gguf`` a file inside it, ``snapshot`` where the folder came from.

    ``seen`` is what its files were when they were first looked at (`steady`).
    """

    name: str
    reference: str
    gguf: str | None = None
    snapshot: Snapshot | None = None
    seen: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def folder(self) -> Path:
        """The folder that is read."""
        return Path(self.reference)

    @property
    def revision(self) -> str | None:
        """The commit of a model of the hub."""
        return self.snapshot.commit if self.snapshot else None

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for every ``from_pretrained`` call: no code of the model's own, and nothing fetched."""
        kept = {"trust_remote_code": False, "local_files_only": True}
        return kept | ({"gguf_file": self.gguf} if self.gguf else {})


def find_model(spec: str, revision: str | None = None) -> ModelSource:
    """Resolve ``--model``: a .gguf file, a folder with config.json, or a hub id ``owner/name``; raises `AatcError`.

    Of a hub id the commit is fixed here and the small files are fetched; weights come when they are read.
    """
    if not spec:
        raise AatcError("the model's name is empty", "give a hub id (owner/name), a folder, or a .gguf file")
    path = Path(spec)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise AatcError(f"there is no model file {spec}", "give a .gguf file; make model fetches the default one")
        return ModelSource(name=path.name, reference=str(path.parent), gguf=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise AatcError(f"the folder {spec} has no config.json", "give a folder saved by save_pretrained")
        return _without_adapter(ModelSource(name=path.resolve().name, reference=str(path)))
    if path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1 or "/" not in spec:
        raise AatcError(f"{spec} is not a model", "give a hub id (owner/name), a folder, or a .gguf file")
    snapshot = open_snapshot(spec, revision)
    return _without_adapter(ModelSource(name=spec, reference=str(snapshot.folder), snapshot=snapshot))


def _without_adapter(source: ModelSource) -> ModelSource:
    """Raise `AatcError` for an adapter beside the weights: some loaders apply it, others pass it over."""
    if (source.folder / ADAPTER).exists():
        raise AatcError(
            f"an adapter ({ADAPTER}) lies beside the weights of {source.name}: with and without it they are two models",
            "merge it (merge_and_unload, save_pretrained) and give that folder, or move the adapter elsewhere",
        )
    return source
