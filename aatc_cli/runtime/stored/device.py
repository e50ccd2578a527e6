"""The codec of stored chunks on a GPU: its kernels, where there are any for its code."""

from __future__ import annotations

from dataclasses import replace

from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.device_decode import DeviceDecoder, device_available
from aatc_cli.runtime.stored.device_encode import DeviceEncoder


def on_device(codec: StoredCodec) -> StoredCodec:
    """The codec with kernels of a GPU; as it is where there is none, or the code has none."""
    code = codec.code
    if not device_available(codec.device) or not isinstance(code, TileCode):
        return codec
    try:
        decoder = DeviceDecoder(code, codec.rotation, codec.tokens, codec.device)
    except AatcError:
        return codec
    try:
        coder = DeviceEncoder(code, codec.device)
    except AatcError:
        coder = None
    return replace(codec, fast=decoder, coder=coder)
