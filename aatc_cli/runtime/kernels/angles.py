"""Cos and sin in the orders of the decode kernel: of tokens inside a tile, of tile starts, of exact slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.tiles import BLOCK, LANES, TILE

# tiles that share a turned query in the kernel of tiles with classes, and the angle that is far
_SPAN, _FAR = 2, 0.1


def row_angles(frequencies: Tensor, fast: int) -> Tensor:
    """Angles of tokens 0 .. 63 of a tile as float16 pairs. frequencies [D / 2] -> [4, 2, F, 32, 4],
    of the first ``fast`` F eighths of pairs.

    The last axis is cos of pairs 8 j + 2 t and 8 j + 2 t + 1, then their sin; token 8 g + 2 m + h.
    """
    device = frequencies.device
    step = torch.arange(4, device=device)[:, None, None, None]
    row = torch.arange(2, device=device)[:, None, None]
    return _of_lanes(8 * (torch.arange(LANES, device=device) // 4) + 2 * step + row, frequencies, fast)


def span_angles(frequencies: Tensor, fast: int) -> Tensor:
    """Angles of the even tokens of four neighbouring tiles, from the start of the first, as float16 pairs.

    frequencies [D / 2] -> [4 tiles, 4, F, 32, 4], otherwise as `row_angles`: token 64 n + 8 g + 2 m.
    """
    device = frequencies.device
    place = torch.arange(4, device=device)
    token = TILE * place[:, None, None, None] + 8 * (torch.arange(LANES, device=device) // 4) + 2 * place[:, None, None]
    return _of_lanes(token, frequencies, fast)


def _of_lanes(token: Tensor, frequencies: Tensor, fast: int) -> Tensor:
    """Cos and sin of every lane's own ``token`` [.., .., 1, 32] and pairs. -> float16 [.., .., F, 32, 4]."""
    device = frequencies.device
    first = 8 * torch.arange(fast, device=device)[:, None] + 2 * (torch.arange(LANES, device=device) % 4)
    pair = first.unsqueeze(-1) + torch.arange(2, device=device)
    angle = token.unsqueeze(-1).to(torch.float64) * frequencies.to(torch.float64)[pair]
    return torch.cat((angle.cos(), angle.sin()), -1).to(torch.float16)


def tile_angles(frequencies: Tensor, sinks: int, tiles: int) -> Tensor:
    """Angles of the first token of every tile, sinks + 64 n, and of two tiles more.

    -> float32 [tiles + 2, D / 16, 4, 4]: the last axis is cos, cos, sin, sin of pairs 8 j + 2 t and 8 j + 2 t + 1.
    """
    device, pairs = frequencies.device, frequencies.numel()
    start = sinks + TILE * torch.arange(tiles + 2, device=device, dtype=torch.float64)
    angle = (start[:, None] * frequencies.to(torch.float64)).view(tiles + 2, 2 * pairs // BLOCK, 4, 2)
    return torch.cat((angle.cos(), angle.sin()), -1).to(torch.float32)


def slot_angles(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Angles of exact tokens at ``positions`` [n]. -> float32 [n, D / 2, 2]: cos, sin."""
    angle = positions.to(torch.float64)[:, None] * frequencies.to(torch.float64)
    return torch.stack((angle.cos(), angle.sin()), -1).to(torch.float32)


def fast_lots(frequencies: Tensor) -> int:
    """How many lots of 8 rotary pairs hold all those that turn more than 0.1 rad in 64 tokens. frequencies [D / 2].

    What is left out of others, which meet the slope of a query, is half the square of that angle at the ends of two
    tiles: half a percent of a pair's part, and a third of that in the mean.
    """
    far = (frequencies.to(torch.float64) * TILE).view(-1, 8).amax(1) > _FAR
    return max(1, int(far.nonzero().max()) + 1 if bool(far.any()) else 1)


@dataclass(frozen=True)
class TileTurns:
    """Angles for the kernel of tiles with classes, from 64 tokens before the first token behind the sinks.

    place_turns float16 [128, F / 2, 4, 8], of places in two tiles (`_of_places`), and start_turns [tiles / 2,
    D / 16 * 4, 4], of the starts of two tiles or, of slow pairs, of their middle: cos, cos, sin, sin of pairs
    8 j + 2 t and 8 j + 2 t + 1.
    slopes float32 [D / 2]: angle of 64 tokens. place_angles float32 [64, D / 2, 2] and start_angles [n, D / 2, 2], as
    far as the window reaches: cos and sin for exact tokens.
    """

    place_turns: Tensor
    start_turns: Tensor
    slopes: Tensor
    start_angles: Tensor
    place_angles: Tensor

    @classmethod
    def of(cls, frequencies: Tensor, first: int, tiles: int, recent: int) -> TileTurns:
        """Of rotary ``frequencies`` [D / 2], for ``tiles`` tiles and a window of ``recent`` tokens behind them.

        first: the position of the first token behind the sinks.
        """
        device, fast = frequencies.device, fast_lots(frequencies)
        places = torch.arange(_SPAN * TILE, device=device)
        starts = first - TILE + TILE * torch.arange(tiles + 2 + -(-recent // TILE), device=device)
        place_angles, start_angles = slot_angles(frequencies, places), slot_angles(frequencies, starts)
        spans = start_angles[1 : tiles + 2 : _SPAN].clone()
        spans[:, 8 * fast :] = start_angles[2 : tiles + 3 : _SPAN][: len(spans), 8 * fast :]
        near = _of_places(_of_pairs(place_angles[:, : 8 * fast]))
        slopes = (frequencies * TILE).to(torch.float32)
        return cls(near, _of_pairs(spans), slopes, start_angles, place_angles[:TILE])


def _of_places(turns: Tensor) -> Tensor:
    """Of places float16 [n, F * 4, 4] as [n, F / 2, 4, 8]: two lots together, in turn where those are even in number.

    So what lanes read of two places is in other banks as often as not.
    """
    lots = torch.unflatten(turns, 1, (-1, 4))
    even = torch.nn.functional.pad(lots, (0, 0, 0, 0, 0, lots.shape[1] % 2))
    two = torch.unflatten(even, 1, (-1, 2)).transpose(2, 3).flatten(3)
    if two.shape[1] % 2 == 0:
        two[1::2] = torch.unflatten(two[1::2], 1, (-1, 2)).flip(2).flatten(1, 2)
    return two.contiguous()


def _of_pairs(angles: Tensor) -> Tensor:
    """Cos and sin [n, D / 2, 2] as float16 [n, D / 4, 4]: cos of two neighbouring pairs, then their sin."""
    return angles.view(angles.shape[0], -1, 2, 2).transpose(2, 3).flatten(2).to(torch.float16).contiguous()
