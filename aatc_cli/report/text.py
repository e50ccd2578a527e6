"""Numbers as text, the same everywhere in the report."""

from __future__ import annotations

MISSING = "-"
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def number(value: float | None) -> str:
    """Three significant digits, plain between 0.0001 and a million and with an exponent outside; a dash for None."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    power = int(exponent)
    if -4 <= power < 6:
        return f"{float(f'{value:.2e}'):.{max(0, 2 - power)}f}"
    return f"{mantissa}e{power}"


def signed(value: float | None) -> str:
    """`number` with its sign written out."""
    return f"+{number(value)}" if value is not None and value > 0 else number(value)


def change(value: float | None, stderr: float | None) -> str:
    """A difference with its sign and its standard error, where there is one."""
    return signed(value) if value is None or stderr is None else f"{signed(value)} ± {number(stderr)}"


def spread(mean: float | None, stderr: float | None) -> str:
    """A mean with its standard error, or the mean alone when there is none (a single window)."""
    return number(mean) if mean is None or stderr is None else f"{number(mean)} ± {number(stderr)}"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return number(share) if share is None else f"{number(100 * share)} %"


def percent_with_error(share: float | None, stderr: float | None) -> str:
    """A mean share as a percentage with its standard error in points, or alone when there is none."""
    return percent(share) if share is None or stderr is None else f"{number(100 * share)} ± {number(100 * stderr)} %"


def size(count: int) -> str:
    """Bytes in decimal units: ``184 MB``."""
    for unit, scale in _UNITS:
        if count >= 0.9995 * scale:
            return f"{number(count / scale)} {unit}"
    return f"{count} B"
