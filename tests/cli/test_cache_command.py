"""aatc cache and aatc advise through their own entry point, on a tiny model with a plan of tiles."""

from __future__ import annotations

import sys

import pytest
import torch


@pytest.fixture(scope="module")
def longer(new_model, tmp_path_factory):
    """A tiny model whose context holds more than two chunks."""
    return new_model(tmp_path_factory.mktemp("models") / "longer", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def run(longer, tmp_path_factory, corpus):
    """A run with one plan of tiles at 2 bits."""
    from aatc_cli.__main__ import main

    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache") / "run"
    at = ["--run", str(folder)]
    collect = ["--samples", "4", "--fisher", "4", "--length", "256", "--below", "2"]
    for command in (
        ["collect", *at, "--model", str(longer), "--text", str(corpus), *collect],
        ["whiten", *at, "--recipe", "loss-aware-tiles"],
        ["allocate", *at, "--recipe", "loss-aware-tiles", "--budget", "3"],
        ["whiten", *at, "--recipe", "stored-fixed"],
        ["allocate", *at, "--recipe", "stored-fixed", "--budget", "2"],
    ):
        patch.setattr(sys, "argv", ["aatc", *command, "-q"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
    patch.undo()
    return folder


@pytest.fixture
def asked(run, longer, tmp_path, corpus):
    text = tmp_path / "prompt.txt"
    text.write_text(corpus.read_text()[:400])
    return [
        "--plan", str(run / "plans" / "loss-aware-tiles-3"), "--model", str(longer),
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
    assert "use --new-tokens 595 or less" in aatc("cache", "get", *asked, "--new-tokens", "596").err
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


def test_a_limit_below_one_prefix_removes_nothing(aatc, asked, tmp_path, corpus):
    """A store cannot be kept within less than the prefix takes: it says so, and what was there stays."""
    store = ["--store", str(tmp_path / "store")]
    aatc("cache", "put", *asked)
    (tmp_path / "prompt.txt").write_text(corpus.read_text()[:430])
    outcome = aatc("cache", "put", *asked, "--limit", "1KB")
    assert outcome.code == 1
    assert "--limit leaves 1,000 to the whole store" in outcome.err
    found = aatc("cache", "list", *store, "--json").json
    assert [prefix["tokens"] for prefix in found["prefixes"]] == [400, 430]


def test_a_store_for_reading_is_checked(aatc, asked, tmp_path, monkeypatch):
    from aatc_cli.artifacts.store import Store

    aatc("cache", "put", *asked)

    def read_only(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Store, "writing", read_only)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert aatc("cache", "check", "--store", str(tmp_path / "store")).out.startswith("0 damaged")


def test_advice_on_what_is_not_there(aatc, run):
    plan = ["--plan", str(run / "plans" / "loss-aware-tiles-3"), "--link", "1GB/s"]
    endless = aatc("advise", *plan, "--decode", "1GB/s", "--recompute", "inf", "--json")
    assert (endless.code, endless.err.splitlines()[0]) == (2, "Error: --recompute must be a number of seconds, got inf")
    device = aatc("advise", *plan, "--device", "cuda:99")
    assert device.code == 1
    assert "CUDA devices that torch sees" in device.err


def test_no_model_for_a_prefix(aatc, asked):
    where = asked.index("--model")
    outcome = aatc("cache", "put", *asked[:where], *asked[where + 2 :])
    assert outcome.code == 2
    assert "--profile" not in outcome.err


def test_whole_chunks_go_on_as_what_they_decode_to(aatc, run, asked, longer, tmp_path, corpus):
    """A plan that predicts is kept in chunks. The same text through the codec by hand: the same tokens follow."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.models.adapter import attention_sites
    from aatc_cli.runtime.stored.live import fill, pages_of
    from aatc_cli.runtime.stored.opening import codec_for

    words = corpus.read_text()[:600]
    (tmp_path / "prompt.txt").write_text(words[:560])
    asked[1] = str(run / "plans" / "stored-fixed-2")
    first = aatc("cache", "put", *asked, "--json").json
    assert (first["tokens"], first["there"]) == (512, False)
    assert 0 < first["bytes"] <= first["new"] < first["uncompressed"]
    assert aatc("cache", "put", *asked, "--json").json["there"]
    (tmp_path / "prompt.txt").write_text(words)
    got = aatc("cache", "get", *asked, "--new-tokens", "8", "--json").json
    assert (got["stored"], got["tokens"]) == (512, 600)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(longer), AutoTokenizer.from_pretrained(longer)
    ids, sites = tokenizer(words, return_tensors="pt")["input_ids"], attention_sites(model)
    cache, again = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        codec = codec_for(Plan.open(run / "plans" / "stored-fixed-2"), model)
        chunks = codec.encode_run(pages_of(cache, sites, 0, 512, torch.float16), 0)
        fill(again, sites, codec.decode_run(chunks, 0, torch.float32), torch.float32)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=again, max_new_tokens=8, do_sample=False
        )
    assert got["text"] == tokenizer.decode(out[0, 600:])
    # one damaged chunk ends the prefix before it; without any, nothing is read
    found = sorted((tmp_path / "store" / "chunks").glob("*/??/*"))
    assert len(found) == 2
    data = bytearray(found[0].read_bytes())
    data[-80] ^= 1
    found[0].write_bytes(data)
    assert "does not match" in aatc("cache", "check", "--store", str(tmp_path / "store")).out
    less = aatc("cache", "get", *asked, "--new-tokens", "1", "--json")
    assert less.code == 1 or less.json["stored"] == 256
    (tmp_path / "prompt.txt").write_text(words[:200])
    asked[5] = str(tmp_path / "new")
    assert "no whole chunk" in aatc("cache", "put", *asked).err
    assert not (tmp_path / "new").exists()


def test_a_store_that_is_none_and_a_text_that_is_none(aatc, asked, tmp_path):
    assert aatc("cache", "list", "--store", str(tmp_path / "none")).code == 1
    (tmp_path / "prompt.txt").unlink()
    assert "cannot be read" in aatc("cache", "put", *asked).err


@pytest.mark.parametrize("plan", ["loss-aware-tiles-3", "stored-fixed-2"])
def test_a_put_that_fails_leaves_no_store(aatc, run, asked, tiny_qwen2, tmp_path, plan):
    asked[1] = str(run / "plans" / plan)
    (tmp_path / "prompt.txt").write_text("")
    assert "no tokens" in aatc("cache", "put", *asked).err
    (tmp_path / "prompt.txt").write_text("too long " * 150)
    assert "1350 tokens are more than the model's context of 1024" in aatc("cache", "put", *asked).err
    asked[3] = str(tiny_qwen2)
    assert "not the one" in aatc("cache", "put", *asked).err
    assert not (tmp_path / "store").exists()


def test_a_budget_beyond_all_widths_is_said(aatc, run):
    asked = ("allocate", "--run", run, "--recipe", "loss-aware-tiles", "--budget")
    assert "no channel left to give bits to" in aatc(*asked, 15).err
    assert "no channel left" not in aatc(*asked, 3).err


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
