"""Hadamard matrices as rotations: orders that are a power of two times one that Paley's constructions give.

A row of n equal-sized entries spreads one loud channel over all n evenly, which is what uniform quantizers want of it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from aatc_cli.errors import AatcError


@lru_cache(maxsize=32)
def hadamard(order: int) -> Tensor:
    """An orthonormal matrix [order, order] whose entries are all 1 / sqrt(order) in size; float64.

    Orders 1, 2, p + 1 for a prime p of the form 4k + 3 (Paley I), 2 (p + 1) for one of the form 4k + 1 (Paley II), and
    twice any order that is known (Sylvester). Raises `AatcError` for an order that this does not reach.
    """
    signs = _signs(order)
    if signs is None:
        raise AatcError(
            f"no Hadamard matrix of order {order} is known here", "use a recipe whose transform is not a Hadamard one"
        )
    return signs / math.sqrt(order)


def random_signs(size: int, seed: int = 0) -> Tensor:
    """``size`` signs +1 or -1, a function of (seed, size) alone: a random rotation is these, then `hadamard`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + size)
    return torch.randint(0, 2, (size,), generator=generator).to(torch.float64) * 2 - 1


def _signs(order: int) -> Tensor | None:
    if order in (1, 2):
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:order, :order]
    if order < 4 or order % 4:
        return None
    half = _signs(order // 2)
    if half is not None:
        return torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))
    if _is_prime(order - 1):
        return _paley_one(order - 1)
    if order // 2 % 4 == 2 and _is_prime(order // 2 - 1):
        return _paley_two(order // 2 - 1)
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _residues(prime: int) -> Tensor:
    """Jacobsthal's matrix [p, p]: entry (i, j) is 1 where i - j is a square modulo p, -1 where it is none, else 0."""
    squares = {value * value % prime for value in range(1, prime)}
    character = [0.0] + [1.0 if value in squares else -1.0 for value in range(1, prime)]
    return torch.tensor([[character[(i - j) % prime] for j in range(prime)] for i in range(prime)], dtype=torch.float64)


def _bordered(prime: int, corner: float) -> Tensor:
    """Jacobsthal's matrix with a first row of ones and a first column of ``corner``: [p + 1, p + 1]."""
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0], matrix[1:, 1:] = 1.0, corner, _residues(prime)
    return matrix


def _paley_one(prime: int) -> Tensor:
    return torch.eye(prime + 1, dtype=torch.float64) + _bordered(prime, -1.0)


def _paley_two(prime: int) -> Tensor:
    symmetric = _bordered(prime, 1.0)
    one = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(symmetric, one) + torch.kron(torch.eye(prime + 1, dtype=torch.float64), other)
