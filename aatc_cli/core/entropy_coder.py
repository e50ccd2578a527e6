"""The entropy coder: asymmetric numeral systems of the package constriction, whole streams of symbols at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core.stepped_tables import MODELS, TOTAL, WIDEST, likelihoods
from aatc_cli.errors import AatcError

Symbols = NDArray[np.int32]
# what symbols are told by: the resolution, and the model of likelihoods
Table = tuple[int, int]


def encoded(parts: Sequence[tuple[Table, Symbols]]) -> bytes:
    """Bytes of streams of symbols, which `decoded` gives back in the same order; raises `AatcError` without the coder.

    Symbols are 0 .. 2 MOST + 1 of `core.stepped_tables.likelihoods`.
    """
    coder = _stream().stack.AnsCoder()
    for table, symbols in reversed(parts):
        coder.encode_reverse(symbols, _model(table))
    found: bytes = coder.get_compressed().astype("<u4").tobytes()
    return found


class Decoder:
    """Reads the streams of `encoded` one after another."""

    def __init__(self, data: bytes) -> None:
        self._coder = _stream().stack.AnsCoder(np.frombuffer(data, dtype="<u4").astype(np.uint32))

    def take(self, table: Table, count: int) -> Symbols:
        """The next ``count`` symbols."""
        found: Symbols = self._coder.decode(_model(table), count)
        return found

    @property
    def empty(self) -> bool:
        """Whether nothing is left, as after all that was encoded."""
        return bool(self._coder.is_empty())


def code_lengths(width: int, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bits that symbols with ``counts`` [2 MOST + 2] take under every model. -> [MODELS]."""
    found: NDArray[np.float64] = _bits(width) @ counts
    return found


@lru_cache
def tables_digest() -> int:
    """A checksum of all likelihoods: who has others would read other symbols."""
    found = 0
    for width in range(1, WIDEST + 1):
        for model in range(MODELS):
            found = crc32(likelihoods(width, model).astype("<i8").tobytes(), found)
    return found


@lru_cache
def _bits(width: int) -> NDArray[np.float64]:
    return np.stack([np.log2(TOTAL / likelihoods(width, model)) for model in range(MODELS)])


@lru_cache(maxsize=WIDEST * MODELS)
def _model(table: Table) -> Any:
    shares = likelihoods(*table).astype(np.float64) / TOTAL
    return _stream().model.Categorical(shares, perfect=False)


def _stream() -> Any:
    try:
        import constriction
    except ImportError as error:
        problem = "codes of variable length are read and written by the package constriction, which is not installed"
        raise AatcError(problem, "pip install 'aatc[stored]', or plan with a quantizer of fixed size") from error
    return constriction.stream
