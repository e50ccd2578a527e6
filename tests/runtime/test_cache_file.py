"""A saved cache goes on exactly where it stopped, and nothing but the same plan and model may read it."""

from __future__ import annotations

import json

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.cache_file import load_cache, save_cache

WINDOW = Window(sinks=2, recent=8, flush=4)


@pytest.fixture
def llama(tiny_llama):
    return load_model(find_model(str(tiny_llama)), dtype="bfloat16")


@pytest.fixture
def saved(llama, codecs, tmp_path):
    """A folder with the cache of a left-padded batch of two."""
    ids, mask = tokens_of(30, batch=2), torch.ones(2, 30, dtype=torch.long)
    mask[0, :11] = 0
    with attach_codecs(llama, codecs(4, 32, 2, "mixed"), WINDOW) as session, torch.no_grad():
        cache = session.new_cache()
        llama(ids, attention_mask=mask, **{session.keyword: cache})
        save_cache(cache, session, tmp_path / "cache")
    return tmp_path / "cache"


def tokens_of(length, seed=1, batch=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 11, 40])
def test_a_loaded_cache_goes_on_exactly(llama, codecs, tmp_path, length):
    sites = codecs(4, 32, 2, "mixed")
    with attach_codecs(llama, sites, WINDOW) as session:
        cache = session.new_cache()
        llama(tokens_of(length), **{session.keyword: cache})
        save_cache(cache, session, tmp_path / "c")
    with attach_codecs(llama, sites, WINDOW) as session:
        loaded = load_cache(session, tmp_path / "c")
        for name, tensor in cache.state.tensors().items():
            assert torch.equal(loaded.state.tensors()[name], tensor)
        live = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in loaded.state.tensors().values()}
        assert sum(s.nbytes() for s in live.values()) == session.spec.layout.bytes(length)
        for t in range(20):
            step = tokens_of(1, seed=t)
            got, expected = (llama(step, **{session.keyword: c}).logits for c in (loaded, cache))
            assert torch.equal(got, expected)


@torch.no_grad()
def test_a_padded_batch_keeps_its_padding(llama, codecs, saved):
    ids, mask = tokens_of(31, batch=2), torch.ones(2, 31, dtype=torch.long)
    mask[0, :11] = 0
    with attach_codecs(llama, codecs(4, 32, 2, "mixed"), WINDOW) as session:
        cold = session.new_cache()
        llama(tokens_of(30, batch=2), attention_mask=mask[:, :30], **{session.keyword: cold})
        loaded = load_cache(session, saved)
        step = ids[:, 30:]
        got, expected = (llama(step, attention_mask=mask, **{session.keyword: c}).logits for c in (loaded, cold))
        assert torch.equal(got, expected)
        assert loaded.get_seq_length() == 31


def test_another_plan_window_or_model_is_refused(llama, codecs, saved, new_model, tmp_path):
    other = load_model(find_model(str(new_model(tmp_path / "other", seed=5))), dtype="bfloat16")
    same = codecs(4, 32, 2, "mixed")
    for model, sites, window, what in (
        (llama, codecs(4, 32, 2, "mixed", seed=50), WINDOW, "plan"),
        (llama, same, Window(sinks=2, recent=8, flush=2), "plan"),
        (other, same, WINDOW, "model"),
    ):
        with attach_codecs(model, sites, window) as session, pytest.raises(ArtifactError, match=f"another {what}"):
            load_cache(session, saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: f.joinpath("manifest.json").unlink(), "no saved cache"),
        (lambda f: f.joinpath("tensors.safetensors").unlink(), "is missing"),
        (lambda f: f.joinpath("manifest.json").write_text("{"), "cannot be read"),
        (lambda f: f.joinpath("manifest.json").write_text("[]"), "cannot be read"),
        (lambda f: edit(f, schema_version=1), "schema version 1; this aatc reads version 2"),
        (lambda f: edit(f, columns=31), "own digest"),
        (lambda f: edit(f, extra=1), "not valid"),
        (lambda f: flip(f / "tensors.safetensors", -1), "not the one recorded"),
        (lambda f: cut(f / "tensors.safetensors"), "cannot be read"),
    ],
)
def test_damage_is_refused(llama, codecs, saved, change, says):
    change(saved)
    with attach_codecs(llama, codecs(4, 32, 2, "mixed"), WINDOW) as session, pytest.raises(ArtifactError, match=says):
        load_cache(session, saved)


def edit(folder, **fields):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def cut(file):
    file.write_bytes(file.read_bytes()[:-10])


def test_a_failed_save_leaves_what_was_there(llama, codecs, saved, monkeypatch):
    import aatc_cli.runtime.cache_file as module

    before = {file.name: file.read_bytes() for file in saved.iterdir()}

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(module, "write_text", full)
    with attach_codecs(llama, codecs(4, 32, 2, "mixed"), WINDOW) as session, pytest.raises(AatcError, match="no space"):
        save_cache(session.new_cache(), session, saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert {file.name for file in saved.parent.iterdir()} == {saved.name, f".{saved.name}.lock"}
