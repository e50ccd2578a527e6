"""Names and values of needles: adjective-noun pairs, numbers of seven digits, UUIDs; and a vocabulary to count."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from random import Random
from typing import Literal

Kind = Literal["words", "numbers", "uuids"]

_ADJECTIVES = """
    able ample amused ancient artful avid bitter black blue bold bouncy brainy brave brief bright brisk broad bronze
    busy calm candid careful charming chilly civil clean clever cold common cool cosmic crisp curious daring dark deep
    dense double dusty eager early earnest easy elder empty even exact fair famous fancy fast fine firm flat fluffy
    fond frank fresh gentle giant glad golden grand grateful gray green handy happy hardy hidden hollow honest humble
    icy ideal jolly keen kind large late lively lonely loud loyal lucky merry mild modest narrow neat noble odd old
    open orange oval pale patient plain polite proud purple quick quiet rapid rare ready red regal rich robust rosy
    round royal rural rustic safe salty shiny short shy silent silver simple slim slow smooth soft solid steady sunny
    swift tall tame tidy tiny tough tranquil urban vast vivid warm weary white wild wise witty young zesty"""
_NOUNS = """
    acorn actor airport almond anchor ankle apple apron arrow artist author autumn badge bagel balcony bamboo banana
    banjo barley barn basin basket beacon beaver bell bench bicycle bird biscuit blanket boat bottle branch bread
    breeze brick bridge broom brother bucket butter button cabin cable cactus camel camera candle canoe canyon carpet
    carrot castle cattle cave cedar cellar chain chair chalk cheese cherry chess church circle clay cliff clock cloud
    clover coach coast coat cobbler coffee comet compass copper coral corner cotton cousin crane crayon cricket crown
    cup curtain daisy dancer desert desk diamond doctor dolphin donkey door dragon drum eagle echo editor elbow engine
    falcon farmer feather fence ferry fiddle field finger flag flame flute forest fork fossil fountain fox garden
    garlic gate ginger giraffe glacier glove goose grape guitar hammer harbor harp harvest hat hawk hazel hedge helmet
    heron hill hockey honey horse hotel island ivory jacket jaguar jar jelly jewel judge jungle kettle key kitchen
    kite ladder lagoon lake lamp lantern leaf lemon letter library lily lion lizard lobster locket lumber magnet mango
    maple marble market mason meadow melon metal mirror mitten monkey moon moose mountain museum napkin needle nest
    noodle novel oak oasis ocean olive onion orbit orchard otter oven owl oyster palace panda paper parrot peach pearl
    pebble pencil pepper piano pickle pigeon pillow pilot planet plum pocket poem pond pony potato prairie printer
    puzzle quartz quilt rabbit radio raft ribbon river robin rocket saddle sailor salmon sandal satchel school scooter
    shadow sheep shell shovel singer sister sled snail sock spider spoon squirrel stable station statue stone stove
    summer swan table teacher temple thimble thunder ticket tiger timber tomato tower train trumpet tulip tunnel
    turtle valley velvet village violin walnut wagon walrus weaver whale wheat whistle willow window winter wizard wolf
    zebra"""

ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
_WORD = re.compile(r"(?<![\w.])[a-z]{3,10}(?![\w.(])")


def draw(kind: Kind, random: Random) -> str:
    """One key or value: ``bold-acorn``, ``4871532``, or a random UUID of version 4."""
    if kind == "numbers":
        return str(random.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=random.getrandbits(128), version=4))
    return f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"


def draw_distinct(kind: Kind, count: int, random: Random, taken: Iterable[str] = ()) -> list[str]:
    """``count`` different ones, none of them in ``taken``: RULER's own draw may repeat, which leaves two answers."""
    seen, found = set(taken), list[str]()
    while len(found) < count:
        word = draw(kind, random)
        if word not in seen:
            seen.add(word)
            found.append(word)
    return found


def vocabulary(text: str) -> list[str]:
    """Distinct single words to count: the lists of this file and the plain lower-case words of ``text``, sorted."""
    return sorted({*ADJECTIVES, *NOUNS, *_WORD.findall(text)})
