"""Second mentions: of names and numbers alone, once before and far enough, in the same tokens."""

from __future__ import annotations

import pytest

from aatc_cli.text.mentions import Mention, mentions

FILLER = "and so on it goes for ever "


def found(text: str, least: int = 40) -> list[tuple[str, Mention]]:
    tokens = list(text.encode())
    places = mentions(tokens, lambda ids: bytes(ids).decode(errors="replace"), least)
    return [(bytes(tokens[place.again : place.again + place.size]).decode(), place) for place in places]


def test_a_name_and_a_number_are_found_where_they_come_again() -> None:
    text = f"we met Zelda in 1987, {FILLER * 3}when Zelda left {FILLER}in 1987."
    [(name, zelda), (number, year)] = found(text)
    assert (name, zelda.kind, number, year.kind) == ("Zelda", "name", "1987", "number")
    assert text[zelda.first :].startswith("Zelda in")
    assert text[zelda.again :].startswith("Zelda left")
    assert zelda.gap == text.rindex("Zelda") - text.index("Zelda") - 5


@pytest.mark.parametrize(
    "text",
    [
        f"we met Zelda, {FILLER}and Zelda left",  # too near
        f"we met Zelda and Zelda, {FILLER * 3}when Zelda left",  # mentioned twice before
        f"we met zelda, {FILLER * 3}when Zelda left",  # written otherwise the first time
        f"we met zelda, {FILLER * 3}when zelda left",  # no name
        f"we left. There it was. {FILLER * 3}and so. There it is",  # large for its place
        f"we met Al {FILLER * 3}when Al left",  # too short
        f"we had 7 {FILLER * 3}and 7 more",  # one digit
        f"we met Zelda {FILLER * 3}and Zeldas left",  # another word
    ],
)
def test_what_is_no_second_mention(text: str) -> None:
    assert found(text) == []


def test_tokens_hold_the_word_and_a_blank_before_it_alone() -> None:
    """Words as tokens with their blanks; a token that holds more than the word makes no place of it."""
    pieces = ["we", " met", " Zelda", " far", " away", " when", " Zelda", " left", " and", " Zelda's"]
    assert mentions(range(len(pieces)), lambda ids: "".join(pieces[i] for i in ids), 2) == []
    alike = [0, 1, 2, 3, 4, 5, 2, 7]
    assert mentions(alike, lambda ids: "".join(pieces[i] for i in ids), 2) == [Mention(2, 6, 1, "name")]
    joined = ["we", " met", " Zelda,", " far", " away", " when"]
    assert mentions([0, 1, 2, 3, 4, 5, 2], lambda ids: "".join(joined[i] for i in ids), 2) == []
