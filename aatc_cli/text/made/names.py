"""Names of people and places with numbers, each of which is spoken of again further down."""

from __future__ import annotations

from random import Random

from aatc_cli.text.made.words import GIVEN, PLACES, SURNAMES, THINGS, TRADES

_FIRST = (
    "{name} is a {trade} from {place}, born in {year}.",
    "In {year} {name}, {trade} by trade, moved to {place}.",
    "{place} was the home of {name}, who worked there as a {trade} from {year} on.",
)
_LATER = (
    "It was {name} who brought the {thing} to {place}.",
    "{name} never returned to {place} after {year}.",
    "The {thing} that {name} had bought in {year} was sold again.",
    "Nobody but {name} knew the {trade} of {place}.",
    "{name} paid {amount} for the {thing}.",
)


def names_document(random: Random) -> str:
    """Six people are introduced, and then spoken of in turn by their full names."""
    people = []
    for _ in range(6):
        people.append(
            {
                "name": f"{random.choice(GIVEN)} {random.choice(SURNAMES)}",
                "trade": random.choice(TRADES),
                "place": random.choice(PLACES),
                "year": str(random.randint(1780, 1990)),
            }
        )
    said = [random.choice(_FIRST).format(**person) for person in people]
    for _ in range(26):
        person, thing = random.choice(people), random.choice(THINGS)
        said.append(random.choice(_LATER).format(**person, thing=thing, amount=random.randint(2, 9000)))
    return " ".join(said) + "\n"
