"""The codec of stored chunks on a CPU: the kernels of numba, where there are any for its code."""

from __future__ import annotations

from dataclasses import replace

import torch

from aatc_cli.core.tile_sizes import TILE
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.host_decode import HostDecoder, host_available
from aatc_cli.runtime.stored.host_encode import HostEncoder
from aatc_cli.runtime.stored.host_rows import HostRows


def with_threads(codec: StoredCodec, threads: int = 0) -> StoredCodec:
    """The codec with its kernels on a CPU; as it is where numba is missing or the code has no tables.

    threads: how many work at once, torch's number without one.
    """
    code = codec.code
    if not host_available() or codec.device != "cpu" or not isinstance(code, TileCode):
        return codec
    if any(layer.rule.tile != TILE for layer in code.layers):
        return codec
    count = threads or torch.get_num_threads()
    try:
        decoder = HostDecoder(code, codec.rotation, codec.geometry.kv_heads, count)
    except AatcError:
        return codec
    opener = HostRows(codec.rotation, count)
    try:
        return replace(codec, fast=decoder, coder=HostEncoder(code, count), opener=opener)
    except AatcError:
        return replace(codec, fast=decoder, opener=opener)
