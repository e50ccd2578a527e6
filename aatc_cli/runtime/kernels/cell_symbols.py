"""Symbols of the storage code to and from bytes, and latents to cells, in machine code made by numba at first use."""

# numba reads no annotations
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import numpy as np
from numba import njit

LANES, WORD, LOW, TOTAL_BITS, SYMBOL_BITS = 8, 16, 1 << 16, 12, 7
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "cache": False}
_MASK, _SYMBOL = np.uint64((1 << TOTAL_BITS) - 1), np.uint64((1 << SYMBOL_BITS) - 1)
_BITS, _WORD, _LOW = np.uint64(TOTAL_BITS), np.uint64(WORD), np.uint64(LOW)
_U, _ONE, _LANE = np.uint64, np.uint64(1), np.uint64(LANES - 1)
_EIGHTH, _SEVEN, _BYTE = np.uint64(3), np.uint64(7), np.uint64(8)
_ROOM, _PLACE, _SHARE = np.uint64(32 - TOTAL_BITS), np.uint64(SYMBOL_BITS), np.uint64(TOTAL_BITS + SYMBOL_BITS)


@njit(**_OPTIONS)
def decode(words, entries, runs, tokens, columns, levels, plain, outside, out):
    """Put levels of all symbols of a layer into ``out`` [T, columns]; whether the stream is what was written.

    words: uint16, the states of the lanes first. entries: of all tables, one after another. runs [R, 9]: row of the
    tables, first of ``tokens``, tokens of a tile, tiles, distance of tiles in ``tokens``, first of ``columns``, how
    many, where the level of code 0 stands, plain bits. plain: their bytes and one more. outside: symbols without share.
    """
    state = np.empty(LANES, dtype=np.uint64)
    for lane in range(LANES):
        state[lane] = _U(words[2 * lane]) | (_U(words[2 * lane + 1]) << _WORD)
    at, place, bit, beyond, last = _U(2 * LANES), _U(0), _U(0), _U(0), _U(words.size)
    # places of no sign: one that may be negative is looked at before every load
    flat, wide, many_outside = out.ravel(), _U(out.shape[1]), _U(outside.size)
    for run in range(runs.shape[0]):
        table = _U(runs[run, 0]) << _BITS
        count, first, many = runs[run, 2], runs[run, 5], runs[run, 6]
        origin, shift = runs[run, 7], _U(runs[run, 8])
        mask = (_ONE << shift) - _ONE
        for tile in range(runs[run, 3]):
            begin = runs[run, 1] + tile * runs[run, 4]
            for row in range(begin, begin + count):
                token = _U(tokens[_U(row)]) * wide
                for c in range(first, first + many):
                    lane = place & _LANE
                    x = state[lane]
                    entry = _U(entries[table + (x & _MASK)])
                    x = (entry >> _SHARE) * (x >> _BITS) + ((entry >> _PLACE) & _MASK)
                    if x < _LOW:
                        if at >= last:
                            return False
                        x = (x << _WORD) | _U(words[at])
                        at += _ONE
                    state[lane] = x
                    place += _ONE
                    symbol = np.int64(entry & _SYMBOL)
                    code = symbol - 63
                    if symbol == 127:
                        if beyond >= many_outside:
                            return False
                        code = np.int64(outside[beyond])
                        beyond += _ONE
                    if shift:
                        two = _U(plain[bit >> _EIGHTH]) | (_U(plain[(bit >> _EIGHTH) + _ONE]) << _BYTE)
                        code = (code << np.int64(shift)) | np.int64((two >> (bit & _SEVEN)) & mask)
                        bit += shift
                    flat[token + _U(columns[_U(c)])] = levels[_U(origin + code)]
    for lane in range(LANES):
        if state[lane] != _LOW:
            return False
    return at == last and beyond == many_outside


@njit(**_OPTIONS)
def encode_cells(cells, runs, tokens, columns, shares, begins, words, outside, plain):
    """States, and how many words and symbols outside were written, the last first.

    cells [T, E] int16; runs, tokens and columns as of `decode`; shares, begins [rows, symbols] uint32. plain: zeros for
    the bytes of all plain bits and one more.
    """
    state = np.full(LANES, np.uint32(LOW), dtype=np.uint32)
    used, beyond, place, bit = 0, 0, -1, 0
    for run in range(runs.shape[0]):
        count = runs[run, 2] * runs[run, 3] * runs[run, 6]
        place += count
        bit += count * runs[run, 8]
    for run in range(runs.shape[0] - 1, -1, -1):
        share, start = shares[runs[run, 0]], begins[runs[run, 0]]
        count, first, many, shift = runs[run, 2], runs[run, 5], runs[run, 6], runs[run, 8]
        for tile in range(runs[run, 3] - 1, -1, -1):
            begin = runs[run, 1] + tile * runs[run, 4]
            for row in range(begin + count - 1, begin - 1, -1):
                token = tokens[row]
                for c in range(first + many - 1, first - 1, -1):
                    code = np.int64(cells[token, columns[c]])
                    high = code >> shift
                    symbol = high + 63
                    if symbol < 0 or symbol > 126 or share[symbol] == 0:
                        symbol = 127
                        outside[beyond] = high
                        beyond += 1
                    if shift:
                        bit -= shift
                        two = (code & ((1 << shift) - 1)) << (bit & 7)
                        plain[bit >> 3] |= np.uint8(two & 255)
                        plain[(bit >> 3) + 1] |= np.uint8(two >> 8)
                    lane = place & (LANES - 1)
                    place -= 1
                    x, f = state[lane], share[symbol]
                    if _U(x) >= _U(f) << _ROOM:
                        words[used] = x & np.uint32(0xFFFF)
                        used += 1
                        x >>= np.uint32(WORD)
                    over = x // f
                    state[lane] = (over << np.uint32(TOTAL_BITS)) + (x - over * f) + start[symbol]
    return state, used, beyond


@njit(**_OPTIONS)
def code_unit(targets, classes, inverse, largest, origin, levels, loudness, base, shift, cells, read, counts):
    """Cells of a unit, what they are read as in units of their size, and counts of symbols by place and resolution.

    targets [T, E]; classes [T]; inverse, largest, origin, base, shift [n, E]: of a step, of cells, where ``levels``
    have code 0, of ``counts``, plain bits. Written: cells, read [T, E], counts.
    """
    by, half = np.float32(1.0) / loudness, np.float32(0.4)
    for token in range(targets.shape[0]):
        k = classes[token]
        mine, steps, most = targets[token], inverse[k], largest[k]
        # no branch that depends on the sign, which nothing foretells
        for c in range(mine.size):
            z = mine[c] * steps[c] * by
            # what is no number has no place in a table
            z = z if z == z else np.float32(0.0)
            code = np.int64(np.copysign(min(np.floor(abs(z) + half), most[c]), z))
            cells[token, c] = code
            read[token, c] = levels[_U(origin[k, c] + code)] * loudness
            high = code >> shift[k, c]
            counts[_U(base[k, c] + (high + 63 if -63 <= high <= 63 else 127))] += 1
