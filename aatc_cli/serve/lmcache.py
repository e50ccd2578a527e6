"""LMCache: a serde for its second tier, "aatc" in the configuration of an L2 adapter.

    {"type": "fs", "base_path": "/cache", "serde": {"type": "aatc", "aatc": {"plan": ..., "model": ..., "chunk": 256}}}

LMCache tells a serde neither the position of a chunk nor its place in the text. So keys are coded as they are, after
RoPE: of a plan that was made for keys before RoPE the codec is refused, and there are no exact sinks. `register` makes
the name known; it is imported inside of LMCache alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.pages import Pages
from aatc_cli.serve.opening import codec_of, require_version, settings_of

VERSIONS = ("0.5.6",)
NAME = "aatc"

_base: Any = import_module("lmcache.v1.distributed.serde.base")


class AatcSerializer(_base.Serializer):  # type: ignore[misc]
    """Objects [2, L, n, C] as chunks."""

    def __init__(self, codec: StoredCodec) -> None:
        self.codec = codec

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Write the chunk of ``src`` to ``dst``; the bytes it takes. Raises `AatcError` for another shape."""
        data = self.codec.encode(_pages(src.tensor, self.codec), 0, name=_name(key))
        dst.tensor.view(torch.uint8).flatten()[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return len(data)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Bytes of a chunk, exactly."""
        size = self.codec.nbytes()
        assert size is not None
        return size


class AatcDeserializer(_base.Deserializer):  # type: ignore[misc]
    """Chunks as objects [2, L, n, C]."""

    def __init__(self, codec: StoredCodec) -> None:
        self.codec = codec

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Fill ``dst`` from the chunk in ``src``; raises `ChunkError` for anything else, with nothing written."""
        size = self.codec.nbytes()
        data = src.tensor.view(torch.uint8).flatten()[:size].cpu().numpy().tobytes()
        pages = self.codec.decode(data, 0, dst.tensor.dtype, _name(key))
        dst.tensor.copy_(torch.stack((pages.keys, pages.values)).flatten(3).view(dst.tensor.shape))


def create(kwargs: Mapping[str, Any]) -> Any:
    """The processor of a serde of this configuration; raises `AatcError` for a plan of keys before RoPE."""
    require_version("lmcache", VERSIONS)
    codec = codec_of(settings_of(kwargs))
    if codec.rotation.style != "none":
        raise AatcError(
            "LMCache does not tell where in a text a chunk is, and this plan codes keys before RoPE",
            'use a plan whose recipe has coordinates = "post-rope"',
        )
    if codec.nbytes() is None:
        raise AatcError("LMCache asks for the size of a chunk beforehand", "use a plan whose chunks have one size")
    processor: Any = import_module("lmcache.v1.distributed.serde.async_processor").AsyncSerdeProcessor
    plain = replace(codec, sinks=0)
    return processor(AatcSerializer(plain), AatcDeserializer(plain), max_workers=1)


def register() -> None:
    """Make the serde known to LMCache under its name."""
    import_module("lmcache.v1.distributed.serde.factory").register_serde_factory(NAME, create)


def _name(key: Any) -> bytes:
    """32 bytes of the hash of a chunk, its model and rank."""
    import hashlib

    parts = (key.model_name, str(key.kv_rank), str(key.object_group_id), key.cache_salt)
    return hashlib.sha256("\0".join(parts).encode() + b"\0" + key.chunk_hash).digest()


def _pages(tensor: Tensor, codec: StoredCodec) -> Pages:
    """The keys and values of an object; raises `AatcError` for one of another shape."""
    g = codec.geometry
    wanted = 2 * g.layers * codec.tokens * g.channels
    if tensor.shape[0] != 2 or tensor.numel() != wanted:
        raise AatcError(
            f"an object of shape {list(tensor.shape)} is no chunk of {codec.tokens} tokens of {g.layers} layers",
            "set the chunk of LMCache and of the plugin alike, in the layout [2, layers, tokens, channels]",
        )
    both = tensor.reshape(2, g.layers, codec.tokens, g.kv_heads, g.head_dim)
    return Pages(both[0], both[1])
