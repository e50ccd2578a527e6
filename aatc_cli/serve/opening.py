"""What every plugin is told in its engine's own configuration, and the codec that comes of it.

{"plan": "run/plans/loss-aware-tiles-2", "model": "folder or hub id", "device": "cpu", "chunk": 256, ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.shipped import find_plan
from aatc_cli.config import Settings
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import explain
from aatc_cli.runtime.stored.codec import CHUNK, StoredCodec
from aatc_cli.runtime.stored.opening import fastest, open_codec


class PluginSettings(Settings):
    """What a plugin is told: which plan, of which model, and where chunks are coded."""

    plan: str = Field(description="plan directory, exported folder, or hub:owner/name@COMMIT")
    model: str = Field(description="hub id, folder or .gguf file of the model that the engine serves")
    device: str = Field("cpu", description="where chunks are coded")
    chunk: int = Field(CHUNK, description="tokens of a chunk; the engine's page where it stores by pages")
    threads: int = Field(0, ge=0, description="of a CPU; 0 is torch's number")
    store: str | None = Field(None, description="folder of the store, of plugins that keep chunks themselves")
    limit: str | None = Field(None, description="bytes that the store may take: 100GB")


def settings_of(config: Mapping[str, Any] | None) -> PluginSettings:
    """The settings under "aatc" of an engine's extra configuration; raises `UsageError` for wrong ones."""
    given = (config or {}).get("aatc")
    if not isinstance(given, Mapping):
        raise UsageError(
            'the engine\'s extra configuration has no "aatc"', 'give {"aatc": {"plan": ..., "model": ...}}'
        )
    try:
        return PluginSettings(**given)
    except ValidationError as error:
        raise UsageError(
            f'"aatc" of the extra configuration: {explain(error)}', "see docs/serving/stored.md"
        ) from error


def codec_of(settings: PluginSettings, tokens: int | None = None) -> StoredCodec:
    """The codec that the settings name, with the fastest decoder there is; raises as `open_codec`."""
    plan = Plan.open(find_plan(Path(settings.plan) if not settings.plan.startswith("hub:") else settings.plan))
    codec = open_codec(plan, find_model(settings.model), tokens=tokens or settings.chunk, device=settings.device)
    return fastest(codec, settings.threads)


def require_version(package: str, tested: tuple[str, ...]) -> str:
    """The version of an engine; raises `AatcError` for one whose interface was not read: release by release.

    tested: the beginnings of versions, "0.33.".
    """
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise AatcError(f"{package} is not installed", f"this plugin runs inside {package}") from error
    if not found.startswith(tested):
        known = ", ".join(f"{start}*" for start in tested)
        raise AatcError(
            f"{package} {found} is not among the versions that this plugin knows: {known}",
            f"install one of these, or a later aatc; {package} changes this interface between releases",
        )
    return found
