"""Stats: sums over calibration tokens of every layer, the only artifact that a model was run for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter, Noun, open_artifact
from aatc_cli.artifacts.manifest import Manifest, ModelIdentity, TextRecord
from aatc_cli.config import Settings, Window
from aatc_cli.errors import ArtifactError
from aatc_cli.profiles import dump, explain

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.stats import LayerStats


_BLOCKS = "text.blocks"


class CollectSettings(Settings):
    """What is collected; together with the model and the texts it determines the Stats."""

    samples: int = Field(ge=1, description="Windows over all texts.")
    length: int = Field(ge=2, description="Tokens per window.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of the draw of windows and rows.")
    skip_first: int = Field(4, ge=0, description="Positions per window that enter no statistic (sinks).")
    rows: int = Field(4096, ge=1, description="Rows kept per layer for percentiles.")
    fisher: int = Field(0, ge=0, description="Windows whose loss gradients are collected too, for loss-aware recipes.")
    window: Window = Field(Window(), description="Tokens a query reads exactly; gradients are of the rest.")
    head_groups: int = Field(1, ge=1, description="The profile's head groups: whiten takes them unless told otherwise.")
    first: int | None = Field(None, ge=1, description="Only the first of the windows that are drawn. Default: all.")
    below: int = Field(
        0,
        ge=0,
        le=4,
        description="Layers below whose keys and values each layer's are multiplied with, for prediction.",
    )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        absent = [name for name, asked in (("below", self.below), ("first", self.first)) if not asked]
        return {key: part for key, part in data.items() if key not in absent}

    @property
    def windows(self) -> int:
        """Windows whose sums are in it."""
        return self.samples if self.first is None else self.first

    @property
    def gradients(self) -> int:
        """Windows whose loss gradients are in it."""
        return min(self.fisher, self.windows)

    def tokens(self, windows: int) -> int:
        """Calibration tokens in ``windows`` windows."""
        return windows * (self.length - self.skip_first)


class _Results(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    windows: int = Field(ge=0)
    tokens: int = Field(ge=1)
    fisher_windows: int = Field(ge=0)
    # of no Stats of an earlier aatc
    distinct_tokens: int | None = Field(None, ge=1)
    value_rank: float | None = Field(None, ge=0)


@dataclass(frozen=True, eq=False)
class TextVariety:
    """What tells the calibration text. blocks: `text.overlap.block_hashes`, int64 [M]; distinct: tokens of any kind in
    it; value_rank: `stages.collecting.checks.value_rank`."""

    blocks: Tensor
    distinct: int
    value_rank: float


@dataclass(frozen=True)
class Stats(Noun):
    """Opened Stats. windows, fisher_windows: those whose sums and whose loss gradients are in it; tokens: their sum.

    value_rank, distinct_tokens: the effective rank of the values and the tokens of any kind, to tell text that hardly
    varies; None in Stats of an earlier aatc.
    """

    settings: CollectSettings
    windows: int
    tokens: int
    fisher_windows: int
    value_rank: float | None = None
    distinct_tokens: int | None = None

    @classmethod
    def open(cls, path: Path, *, unfinished: bool = False) -> Self:
        """Open the Stats at ``path``; raises `ArtifactError` when absent or damaged.

        Or when they are the checkpoint of a collect that did not end, unless ``unfinished`` ones are wanted.
        """
        stats = cls._of(open_artifact(path, "stats"))
        stats.check()
        return stats if unfinished else stats._finished()

    @classmethod
    def _of(cls, artifact: Artifact) -> Self:
        manifest = artifact.manifest
        try:
            settings = CollectSettings.model_validate_json(json.dumps(manifest.settings))
            results = _Results.model_validate(manifest.results)
        except ValidationError as error:
            raise artifact.damaged(f"its settings are not those of Stats: {explain(error)}") from error
        windows, fisher_windows = results.windows, results.fisher_windows
        variety = results.value_rank, results.distinct_tokens
        return cls(artifact, settings, windows, results.tokens, fisher_windows, *variety)

    def check(self) -> None:
        """Raise `ArtifactError` unless the token count follows from windows and settings."""
        if self.tokens != self.settings.tokens(self.windows):
            raise self.artifact.damaged("its token count is not that of its windows")

    def _finished(self) -> Self:
        for what, done, wanted in (
            ("windows", self.windows, self.settings.windows),
            ("gradient windows", self.fisher_windows, self.settings.gradients),
        ):
            if done != wanted:
                problem = f"{self.path} is a checkpoint of collect after {done} of {wanted} {what}"
                raise ArtifactError(problem, "run the same aatc collect to finish it")
        return self

    def layer(self, layer: int) -> LayerStats:
        """The accumulated sums of one layer; raises `ArtifactError` on shapes or values that they cannot have."""
        import torch

        from aatc_cli.core.stats import LayerStats
        from aatc_cli.core.tile_sizes import RANKS

        channels, heads, dim = self.geometry.channels, self.geometry.kv_heads, self.geometry.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "k_outer": (channels, channels),
            "v_outer": (channels, channels),
            "k_sum": (channels,),
            "v_sum": (channels,),
            "q_outer": (heads, dim, dim),
            "o_gram": (heads, dim, dim),
            "k_rows": (-1, channels),
            "v_rows": (-1, channels),
            "k_fisher": (channels, channels),
            "v_fisher": (channels, channels),
            "k_ranks": (2, RANKS, heads, dim, dim),
            "v_ranks": (2, RANKS, heads, dim, dim),
            "cross": (self.settings.below + 1 if self.settings.below else 0, 2 * channels, 2 * channels),
        }
        parts = {}
        for part in LayerStats.TENSORS:
            name = f"layers.{layer}.{part}"
            absent = part in LayerStats.OPTIONAL and name not in self.manifest.tensors
            zeros = torch.zeros(shapes[part], dtype=torch.float64) if absent else None
            parts[part] = self.artifact.tensor(name, shapes[part]) if zeros is None else zeros
        for part in ("k_outer", "v_outer", "q_outer", "o_gram", "k_fisher", "v_fisher"):
            if bool((parts[part].diagonal(dim1=-2, dim2=-1) < 0).any()):
                raise self.artifact.damaged(f"tensor 'layers.{layer}.{part}' has a negative sum of squares")
        return LayerStats(count=self.tokens, filled=int(parts["k_rows"].shape[0]), readers=self._readers, **parts)

    @property
    def blocks(self) -> Tensor | None:
        """Hashes of the blocks of the calibration text [M]; None in Stats of an earlier aatc, and of short windows.

        Raises `ArtifactError` for a tensor that does not hold hashes.
        """
        import torch

        if _BLOCKS not in self.manifest.tensors:
            return None
        found = self.artifact.tensor(_BLOCKS)
        if found.dtype != torch.int64 or found.dim() != 1:
            raise self.artifact.damaged(f"tensor {_BLOCKS!r} does not hold hashes")
        return found

    @property
    def _readers(self) -> int:
        """Positions of the gradient windows that read packed tokens, whose sampled tokens the gradients are of."""
        window = self.settings.window
        return max(self.settings.length - window.sinks - window.recent, 0) * self.fisher_windows

    @staticmethod
    def wanted(settings: CollectSettings, model: ModelIdentity, texts: list[TextRecord]) -> dict[str, Any]:
        """What a manifest of these Stats would hold, for `unchanged`."""
        return {
            "settings": dump(settings),
            "model": model.model_dump(mode="json"),
            "texts": [record.model_dump(mode="json") for record in texts],
        }

    @staticmethod
    def write(
        path: Path,
        settings: CollectSettings,
        model: ModelIdentity,
        texts: list[TextRecord],
        layers: Iterable[LayerStats],
        variety: TextVariety,
        *,
        done: tuple[int, int],
        how: Mapping[str, Any],
    ) -> Manifest:
        """Write the sums after ``done`` windows and gradient windows. how: device, dtype and so on, never hashed."""
        windows, fisher = done
        with ArtifactWriter(path, "stats") as writer:
            for index, layer in enumerate(layers):
                for name, tensor in layer.tensors().items():
                    writer.add(f"layers.{index}.{name}", tensor)
            if variety.blocks.numel():
                writer.add(_BLOCKS, variety.blocks)
            return writer.commit(
                settings=dump(settings),
                model=model,
                texts=texts,
                results={
                    "windows": windows,
                    "tokens": settings.tokens(windows),
                    "fisher_windows": fisher,
                    "distinct_tokens": variety.distinct,
                    "value_rank": variety.value_rank,
                },
                provenance=how,
            )
