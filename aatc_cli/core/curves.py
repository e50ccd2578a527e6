"""Distortion curves: mean squared error of scalar quantizers on a channel of energy 1 at 0 .. 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.config import MAX_BITS

# a quarter for every bit, exactly (paper, Eq. waterfilling-keys)
EXPONENTIAL = tuple(2.0 ** (-2 * bits) for bits in range(MAX_BITS + 1))

# mean squared error on a unit normal at 0..16 bits; constants, so that plans do not depend on a machine's libraries
DISTORTION = (
    1.0,
    0.363380227632,
    0.117481847829,
    0.0345477607885,
    0.00950100800819,
    0.00250466835567,
    0.000644239665317,
    0.00016347822998,
    8.76861857838e-05,
    2.49190296459e-05,
    6.99700519683e-06,
    1.94441312857e-06,
    5.35536536531e-07,
    1.46369327797e-07,
    3.97393959667e-08,
    1.07269830699e-08,
    2.88092145932e-09,
)

# the same with evenly spaced levels at every width
DISTORTION_UNIFORM = (
    1.0,
    0.363380227632,
    0.118846050384,
    0.0374396593915,
    0.0115428844314,
    0.00349521136151,
    0.00104004540879,
    0.000304332770824,
    *DISTORTION[8:],
)

assert len(DISTORTION) == len(DISTORTION_UNIFORM) == MAX_BITS + 1


def restoring_gain(distortion: float, share: float) -> float:
    """What levels with error D are multiplied with when codes are read: 1 / (1 - share D)."""
    return 1.0 / (1.0 - share * distortion)


def restored(distortion: Sequence[float], share: float) -> tuple[float, ...]:
    """Costs of levels moved outward, relative to what losing the channel costs as noise that averages out over tokens.

    With the levels of least error D a latent x is read as (1 - D) x and noise of variance D (1 - D); moved by a gain g
    it is g (1 - D) x and g^2 D (1 - D). What is missing of x, a = 1 - g (1 - D), is missing from all tokens alike and
    adds up, so its square is counted twice. A channel without bits has none of x: 2.
    """
    costs = []
    for bits, error in enumerate(distortion):
        gain = restoring_gain(error, share) if bits else 0.0
        costs.append(2.0 * (1.0 - gain * (1.0 - error)) ** 2 + gain**2 * error * (1.0 - error))
    return tuple(costs)
