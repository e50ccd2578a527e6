"""aatc cache and aatc advise through their own entry point, on a tiny model with a plan of tiles."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="module")
def run(tiny_llama, tmp_path_factory, corpus):
    """A run with one plan of tiles at 2 bits."""
    from aatc_cli.__main__ import main

    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache") / "run"
    at = ["--run", str(folder)]
    collect = ["--samples", "4", "--fisher", "4", "--length", "256"]
    for command in (
        ["collect", *at, "--model", str(tiny_llama), "--text", str(corpus), *collect],
        ["whiten", *at, "--recipe", "loss-aware-tiles"],
        ["allocate", *at, "--recipe", "loss-aware-tiles", "--budget", "3"],
    ):
        patch.setattr(sys, "argv", ["aatc", *command, "-q"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
    patch.undo()
    return folder


@pytest.fixture
def asked(run, tiny_llama, tmp_path, corpus):
    text = tmp_path / "prompt.txt"
    text.write_text(corpus.read_text()[:400])
    return [
        "--plan", str(run / "plans" / "loss-aware-tiles-3"), "--model", str(tiny_llama),
        "--store", str(tmp_path / "store"),
        "--file", str(text),
    ]  # fmt: skip


def test_put_get_list_check_gc(aatc, asked, tmp_path, corpus):
    store = ["--store", str(tmp_path / "store")]
    first = aatc("cache", "put", *asked, "--json").json
    assert first["tokens"] == 400
    assert not first["there"]
    assert first["new"] > 0
    again = aatc("cache", "put", *asked, "--json").json
    assert again["there"]
    assert again["new"] == 0
    text = tmp_path / "prompt.txt"
    whole = aatc("cache", "get", *asked, "--new-tokens", "4", "--json").json
    assert whole["tokens"] == 400
    text.write_text(corpus.read_text()[:430])
    longer = aatc("cache", "get", *asked, "--new-tokens", "4", "--json").json
    assert (longer["stored"], longer["tokens"]) == (400, 430)
    found = aatc("cache", "list", *store, "--json").json
    assert found["prefixes"][0]["tokens"] == 400
    assert found["prefixes"][0]["plan"] == "loss-aware-tiles-3"
    assert "400" in aatc("cache", "list", *store).out
    assert aatc("cache", "check", *store).out.startswith("0 damaged")
    thing = next((tmp_path / "store" / "objects").glob("??/*"))
    thing.write_bytes(b"x")
    assert aatc("cache", "check", *store).code == 1
    assert aatc("cache", "get", *asked).code == 1
    assert aatc("cache", "check", *store, "--repair").code == 0
    assert aatc("cache", "gc", *store, "--limit", "0", "--json").json["bytes"] == 0
    assert aatc("cache", "put", *asked, "--json").json["there"] is False


def test_a_store_that_is_none_and_a_text_that_is_none(aatc, asked, tmp_path):
    assert aatc("cache", "list", "--store", str(tmp_path / "none")).code == 1
    (tmp_path / "prompt.txt").unlink()
    assert "cannot be read" in aatc("cache", "put", *asked).err


def test_advice_by_link(aatc, asked):
    plan = asked[:2]
    found = aatc(
        "advise", *plan, "--link", "1Gbps", "--link", "100GB/s", "--decode", "4GB/s", "--recompute", "3", "--json"
    ).json
    slow, quick = found["links"]
    assert (slow["best"], quick["best"]) == ("stored", "raw")
    assert slow["raw_seconds"] == pytest.approx(found["raw_bytes"] / 125e6)
    assert slow["coded_seconds"] == pytest.approx(found["coded_bytes"] / 125e6)
    assert found["ratio"] == pytest.approx(found["raw_bytes"] / found["coded_bytes"])
    assert found["worth_below"] == 4e9
    assert found["worth_above"] == pytest.approx(found["coded_bytes"] / 3)
    # the raw pages of four layers of two heads of 16, keys and values of 2 bytes
    assert found["raw_bytes"] == 32768 * 4 * 2 * 32 * 2
    measured = aatc("advise", *plan, "--link", "1Gbps", "--context", "512")
    assert "1Gbps" in measured.out
    assert aatc("advise", *plan, "--link", "fast").code == 2
