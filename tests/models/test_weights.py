"""Weights that are not there or not whole, and what lies beside them: each is one error that names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from aatc_cli.errors import AatcError
from aatc_cli.models import hub, loading
from aatc_cli.models.loading import find_model, identify, load_config, load_model, load_tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 538090408\n"


@pytest.fixture
def copy(tiny_llama, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


def pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text(POINTER)


def cut(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[:-100])


def cut_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:20])


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def no_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"not json")


def sharded(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def outside(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": f"../{WEIGHTS}"}}))


def bad_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text("[]")


def pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def none(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")


def named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (pointer, r"copy/model\.safetensors is a pointer of Git LFS"),
        (cut, r"copy/model\.safetensors is cut short: it has \d+ of \d+ bytes"),
        (cut_header, r"copy/model\.safetensors is cut short"),
        (empty, r"copy/model\.safetensors is cut short"),
        (no_header, r"copy/model\.safetensors has no valid header"),
        (sharded, r"copy/model-00002-of-00002\.safetensors is missing, which model\.safetensors\.index\.json names"),
        (outside, "does not say which files beside it hold the weights"),
        (bad_index, "is not a JSON object"),
        (pickle, r"pytorch_model\.bin cannot be read|cannot load copy"),
        (none, r"has no weight files .* consolidated\.safetensors is not read"),
        (named, "names its weight file itself"),
    ],
)
def test_weights_that_are_not_whole(copy, damage, says):
    damage(copy)
    source = find_model(str(copy))
    config, tokenizer = load_config(source), load_tokenizer(source)
    for act in (lambda: identify(source, config, tokenizer), lambda: load_model(source)):
        with pytest.raises(AatcError, match=says):
            act()


def test_an_adapter_in_the_folder_is_refused(copy, refuses, tmp_path):
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base", "peft_type": "LORA"}')
    says = ("an adapter (adapter_config.json) lies beside the weights of copy",)
    for verb in (("collect", "--length", "48"), ("inspect",), ("eval", "--recipe", "fp16")):
        refuses(*verb, "--model", copy, says=says, folder=tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_never_runs(copy, monkeypatch, file):
    """Neither without asking nor, at a terminal, by asking."""
    (copy / "theirs.py").write_text("raise SystemExit('their code ran')")
    data = json.loads((copy / file).read_text())
    if file == "config.json":
        data |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}}
    else:
        data |= {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.T", None]}}
    (copy / file).write_text(json.dumps(data))
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail("it asked"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    load = load_config if file == "config.json" else load_tokenizer
    with pytest.raises(AatcError, match="needs code that comes with the model, which aatc never runs"):
        load(find_model(str(copy)))


def test_a_model_without_a_tokenizer(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(AatcError, match=r"copy has no tokenizer: there is no tokenizer\.json in"):
        load_tokenizer(find_model(str(copy)))
    (copy / "tokenizer.json").write_text(POINTER)
    with pytest.raises(AatcError, match="cannot load copy"):
        load_tokenizer(find_model(str(copy)))


def test_a_mistyped_path_is_told_at_once(monkeypatch):
    """One question to the hub and no second, and both readings of the name in the answer."""
    asked = []

    class Hub:
        def model_info(self, repository, **options):
            asked.append((repository, options["timeout"]))
            raise OSError("Name or service not known")

    monkeypatch.setattr(hub, "HfApi", Hub)
    says = "there is no folder models/llama, and of the hub's model models/llama nothing is in the cache"
    with pytest.raises(AatcError, match=says):
        find_model("models/llama")
    assert asked == [("models/llama", 10.0)]


def test_a_model_of_the_hub_is_one_commit(copy, monkeypatch, tmp_path):
    """All that is read of it is of the commit that its name meant when the command began."""
    snapshot, fetched = tmp_path / "snapshots" / ("c" * 40), []
    snapshot.mkdir(parents=True)

    class Entry:
        def __init__(self, name):
            self.rfilename = name

    class Hub:
        def model_info(self, repository, revision, timeout):
            assert revision is None
            files = [Entry(path.name) for path in copy.iterdir()]
            return type("Info", (), {"sha": "c" * 40, "siblings": [*files, Entry("onnx/model.onnx")]})()

    def download(repository, name, revision):
        assert (repository, revision) == ("owner/model", "c" * 40)
        fetched.append(name)
        return shutil.copy(copy / name, snapshot / name)

    monkeypatch.setattr(hub, "HfApi", Hub)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    source = find_model("owner/model")
    assert WEIGHTS not in fetched
    found = identify(source, load_config(source), load_tokenizer(source))
    assert (found.name, found.revision) == ("owner/model", "c" * 40)
    assert sorted(fetched) == sorted(path.name for path in copy.iterdir())
    local = find_model(str(copy))
    assert found.weights_fingerprint == identify(local, load_config(local), load_tokenizer(local)).weights_fingerprint
    assert load_model(source).config.hidden_size == 64


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError("unable to mmap 538090408 bytes from file <m>: Cannot allocate memory (12)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["python", "mapping", "torch"],
)
def test_little_memory_while_loading_is_one_error(copy, monkeypatch, error):
    def fail(*args, **keywords):
        raise error

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(AatcError, match="not enough memory to load copy"):
        load_model(find_model(str(copy)))
