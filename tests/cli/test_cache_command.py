"""aatc cache and aatc advise through their own entry point, on a tiny model with a plan of tiles."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def run(tiny_llama, tmp_path_factory, corpus):
    """A run with one plan of tiles at 2 bits."""
    from aatc_cli.__main__ import main

    folder = tmp_path_factory.mktemp("cache") / "run"
    at = ["--run", str(folder)]
    for command in (
        ["collect", *at, "--model", str(tiny_llama), "--text", str(corpus), "--samples", "4", "--fisher", "4", "--length", "256"],
        ["whiten", *at, "--recipe", "loss-aware-tiles"],
        ["allocate", *at, "--recipe", "loss-aware-tiles", "--budget", "3"],
    ):
        assert main([*command, "-q"]) == 0
    return folder


@pytest.fixture
def asked(run, tiny_llama, tmp_path, corpus):
    text = tmp_path / "prompt.txt"
    text.write_text(corpus.read_text()[:400])
    return [
        "--plan", str(run / "plans" / "loss-aware-tiles-3"), "--model", str(tiny_llama), "--store", str(tmp_path / "store"),
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
