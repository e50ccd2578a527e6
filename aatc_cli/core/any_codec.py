"""Codecs of a layer's side, of whatever kind: of one vector, of all layers, of tiles, of stored layers."""

from __future__ import annotations

from aatc_cli.core.codec import Codec
from aatc_cli.core.joint import LayersCodec
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.tile_codec import TileCodec

AnyCodec = Codec | LayersCodec | TileCodec | StoredLayer


def of_one_vector(codec: AnyCodec) -> Codec:
    """The codec, which codes every vector alike and by itself; raises `TypeError` for any other kind."""
    if isinstance(codec, LayersCodec | TileCodec | StoredLayer):
        raise TypeError(f"{type(codec).__name__} does not code every vector alike")
    return codec
