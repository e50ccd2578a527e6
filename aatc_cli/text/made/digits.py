"""Digits: sums written out, sequences, hexadecimal dumps, and numbers that come again."""

from __future__ import annotations

from random import Random


def digits_document(random: Random) -> str:
    """Some forty lines of one kind of digits."""
    return random.choice((_sums, _sequences, _dump, _ledger))(random)


def _sums(random: Random) -> str:
    lines = []
    for _ in range(60):
        a, b = random.randint(10, 99999), random.randint(10, 99999)
        sign, value = random.choice((("+", a + b), ("-", a - b), ("*", a * b)))
        lines.append(f"{a} {sign} {b} = {value}")
    return "\n".join(lines) + "\n"


def _sequences(random: Random) -> str:
    lines = []
    for _ in range(30):
        start, step = random.randint(0, 5000), random.randint(2, 300)
        lines.append(", ".join(str(start + step * place) for place in range(12)))
    return "\n".join(lines) + "\n"


def _dump(random: Random) -> str:
    lines = []
    for place in range(0, 45 * 16, 16):
        found = bytes(random.randrange(256) for _ in range(16))
        lines.append(f"{place:08x}  {found.hex(' ')}")
    return "\n".join(lines) + "\n"


def _ledger(random: Random) -> str:
    """Accounts that are named again and again, with a balance that is kept."""
    accounts = {str(random.randint(10**7, 10**8 - 1)): 0 for _ in range(6)}
    lines = []
    for number in range(55):
        account, change = random.choice(list(accounts)), random.randint(-900, 1200)
        accounts[account] += change
        lines.append(f"{number + 1:03} account {account} {change:+d} balance {accounts[account]}")
    return "\n".join(lines) + "\n"
