"""Words that several kinds of made text draw from."""

from __future__ import annotations

_GIVEN = """
    Ada Alma Anton Arno Bela Boris Clara Conrad Dora Edgar Elsa Emil Ester Felix Flora Franz Greta Gustav Hanna Hugo
    Ida Igor Ines Jakob Jana Jonas Karin Karl Kaspar Lena Leo Lotte Ludwig Magda Marta Max Mila Nadia Nils Olga
    Oskar Paula Pavel Rosa Rudolf Selma Simon Tanja Theo Ulla Vera Viktor Wanda Willem Yvonne"""
_SURNAMES = """
    Abbot Arden Barlow Beckett Carver Colby Dalton Draper Eaton Ellery Farrow Fenwick Garrick Granger Harlow Hobbs
    Ingram Jarvis Keating Kendrick Langley Lockhart Mercer Norwood Oakley Pendle Quincy Radford Redmond Sadler
    Selwyn Thorpe Tilbury Underhill Varley Wexford Whitlock Yardley"""
_PLACES = """
    Ashford Bergen Cadiz Delft Elgin Ferrara Ghent Hull Imola Jena Kiruna Lucca Malmo Namur Odense Parma Quimper
    Riga Siena Tartu Udine Vaasa Worms Xanten York Zadar"""
_TRADES = """
    baker binder brewer carpenter clerk cooper dyer farmer founder glazier gunsmith joiner mason miller painter
    pilot potter printer roofer saddler sailor smith tailor tanner teacher weaver"""
_THINGS = """
    anvil barrel basket bell bench blanket boat book bowl box bridge brush bucket cabinet candle carpet cart chair
    chest clock coat cup desk drum engine fence flute frame gate hammer harp jar kettle key ladder lamp lens lock
    loom map mirror mill needle oven pan pen plough pot press pump ring rope saddle saw scale spade stove sword
    table tent tool trunk valve vase violin wagon wheel window"""

GIVEN, SURNAMES, PLACES, TRADES, THINGS = (
    tuple(text.split()) for text in (_GIVEN, _SURNAMES, _PLACES, _TRADES, _THINGS)
)
