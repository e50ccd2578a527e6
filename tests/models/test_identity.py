"""A model is known by all of its weights, its whole tokenizer and its configuration, and by nothing else."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aatc_cli.artifacts.manifest import require_model
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.models import hash_cache
from aatc_cli.models.fingerprint import fingerprint
from aatc_cli.models.hash_cache import Stamp, cache_folder, recall, remember
from aatc_cli.models.loading import find_model, identify, load_config, load_model, load_tokenizer
from aatc_cli.models.weights import weight_files

WEIGHTS = "model.safetensors"
SQUARE = "model.layers.2.self_attn.q_proj.weight"


def weights_of(folder: Path) -> str:
    return fingerprint(weight_files(find_model(str(folder))))


def identity_of(folder: Path):
    source = find_model(str(folder))
    return identify(source, load_config(source), load_tokenizer(source))


@pytest.fixture
def copy(tiny_llama, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


@pytest.fixture
def forgetful(monkeypatch, tmp_path) -> Path:
    """An empty cache folder and an empty memory, and every file counts as settled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hash_cache, "_memory", {})
    monkeypatch.setattr(hash_cache, "_SETTLED", -10.0)
    return tmp_path / "cache"


def shard(folder: Path, parts: int, reverse: bool = False) -> None:
    """Cut the weights into files of which an index tells, as `save_pretrained` does for a large model."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors, reverse=reverse)
    files = [f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
    for part, file in enumerate(files):
        save_file({name: tensors[name] for name in names[part::parts]}, folder / file, metadata={"format": "pt"})
    where = {name: files[index % parts] for index, name in enumerate(names)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_every_tensor_counts(copy):
    """Zeroed in its place: the file keeps its size, and nothing but one tensor differs."""
    tensors, seen = load_file(copy / WEIGHTS), {weights_of(copy)}
    for name in tensors:
        save_file(tensors | {name: torch.zeros_like(tensors[name])}, copy / WEIGHTS, metadata={"format": "pt"})
        seen.add(weights_of(copy))
    # norms of ones are not zeros, and no tensor was zero before
    assert len(seen) == 1 + len(tensors)


def test_every_byte_of_a_large_file_counts(tmp_path):
    """What a sample of chunks passes over: one number in 40 MB."""
    big = torch.zeros(10_000_000)
    found = set()
    for place in (None, 123_456, 5_000_001, 9_999_999):
        values = big.clone()
        if place is not None:
            values[place] = 1.0
        save_file({"w": values}, tmp_path / WEIGHTS)
        found.add(fingerprint([tmp_path / WEIGHTS]))
    assert len(found) == 4


def test_names_dtypes_and_shapes_count(tmp_path):
    found = set()
    for tensors in (
        {"a": torch.zeros(4)},
        {"b": torch.zeros(4)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(8).half()},
    ):
        save_file(tensors, tmp_path / WEIGHTS)
        found.add(fingerprint([tmp_path / WEIGHTS]))
    assert len(found) == 4


def test_copies_in_other_files_are_one_model(copy):
    whole = weights_of(copy)
    tensors = load_file(copy / WEIGHTS)
    # what lies beside the weights and is not read
    (copy / "consolidated.safetensors").write_bytes(b"of another program")
    (copy / "optimizer.bin").write_bytes(b"of another program")
    assert weights_of(copy) == whole
    shard(copy, 3)
    assert weights_of(copy) == whole
    for file in copy.glob("model-*"):
        file.unlink()
    save_file(tensors, copy / WEIGHTS, metadata={"format": "pt"})
    (copy / f"{WEIGHTS}.index.json").unlink()
    shard(copy, 2, reverse=True)
    assert weights_of(copy) == whole
    loaded = load_model(find_model(str(copy))).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    for file in [*copy.glob("model-*"), copy / f"{WEIGHTS}.index.json"]:
        file.unlink()
    torch.save(tensors, copy / "pytorch_model.bin")
    assert weights_of(copy) == whole


def test_a_tensor_in_two_files_is_refused(copy):
    shard(copy, 2)
    first, second = sorted(copy.glob("model-*"))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: torch.zeros(2)}, second)
    with pytest.raises(AatcError, match=f"two weight files hold the tensor {name}"):
        weights_of(copy)


def test_what_is_remembered_is_of_exactly_that_file(copy, forgetful):
    """A write that restores size and time of change is still another file."""
    path = copy / WEIGHTS
    before, stat = weights_of(copy), path.stat()
    assert recall(Stamp.of(path)) is not None
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert weights_of(copy) != before


def test_what_is_remembered_is_used_by_the_next_process(copy, forgetful, monkeypatch):
    before = weights_of(copy)
    monkeypatch.setattr(hash_cache, "_memory", {})
    monkeypatch.setattr("aatc_cli.models.fingerprint._measured", lambda path: pytest.fail("it was read again"))
    assert weights_of(copy) == before


@pytest.mark.parametrize("damage", ["digit", "cut", "list", "form"])
def test_a_damaged_record_is_measured_again(copy, forgetful, monkeypatch, damage):
    before = weights_of(copy)
    (record,) = (forgetful / "aatc" / "weights").glob("*.json")
    data = json.loads(record.read_text())
    digit = data["hashes"][0][3]
    data["hashes"][0][3] = ("1" if digit[0] == "0" else "0") + digit[1:]
    texts = {"digit": json.dumps(data), "cut": record.read_text()[:99], "list": "[]", "form": json.dumps({"form": 9})}
    record.write_text(texts[damage])
    monkeypatch.setattr(hash_cache, "_memory", {})
    assert weights_of(copy) == before


def test_a_file_just_written_is_not_remembered(copy, forgetful, monkeypatch):
    monkeypatch.setattr(hash_cache, "_SETTLED", 4.0)
    (copy / WEIGHTS).touch()
    weights_of(copy)
    assert not forgetful.exists()
    assert recall(Stamp.of(copy / WEIGHTS)) is None


@pytest.mark.parametrize("place", ["file", "relative", "homeless"])
def test_a_cache_that_cannot_be_written_is_no_error(copy, forgetful, monkeypatch, place):
    wanted = weights_of(copy)
    monkeypatch.setattr(hash_cache, "_memory", {})
    blocked = copy / "blocked"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", {"file": str(blocked), "relative": "cache", "homeless": ""}[place])
    monkeypatch.setenv("HOME", "" if place == "homeless" else str(blocked))
    monkeypatch.setattr("os.path.expanduser", lambda path: path if place == "homeless" else str(blocked))
    assert weights_of(copy) == wanted
    assert not Path("cache").exists()
    assert (cache_folder() is None) == (place == "homeless")


def test_processes_that_remember_at_once(copy, forgetful):
    stamp = Stamp.of(copy / WEIGHTS)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: remember(stamp, [["w", "F32", [index], "0" * 64]]), range(200)))
    hash_cache._memory.clear()
    assert recall(stamp) is not None
    assert len(list((forgetful / "aatc" / "weights").iterdir())) == 1


def test_files_that_change_during_a_command_are_refused(copy, new_model, tmp_path):
    other = new_model(tmp_path / "other", seed=7)
    source = find_model(str(copy))
    identify(source, load_config(source), load_tokenizer(source))
    shutil.copy(other / WEIGHTS, copy / WEIGHTS)
    with pytest.raises(AatcError, match=r"model\.safetensors changed while the command ran"):
        load_model(source)
    source = find_model(str(copy))
    load_config(source)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(AatcError, match=r"config\.json changed while the command ran"):
        load_model(source)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "config_hash"),
        ({"rms_norm_eps": 1e-3}, "config_hash"),
        ({"hidden_act": "gelu"}, "config_hash"),
        ({"attention_bias": False}, None),
        ({"use_cache": False}, None),
        ({"_name_or_path": "elsewhere"}, None),
    ],
)
def test_the_configuration_counts(copy, change, field):
    before = identity_of(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    after = identity_of(copy)
    differing = [name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)]
    assert differing == ([field] if field else [])


def byte_pairs(folder: Path, change=lambda data: None) -> Path:
    """Give the model a tokenizer with merges, changed as its file is."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    for pair in ("th", "he", "in"):
        vocabulary.setdefault(pair, len(vocabulary))
    data["model"]["merges"] = [["t", "h"], ["h", "e"], ["i", "n"]]
    change(data)
    path.write_text(json.dumps(data, ensure_ascii=False))
    return folder


CHANGES = {
    "merge": lambda data: data["model"]["merges"].pop(),
    "order": lambda data: data["model"]["merges"].reverse(),
    "normalizer": lambda data: data.update(normalizer={"type": "Lowercase"}),
    "pre_tokenizer": lambda data: data["pre_tokenizer"].update(add_prefix_space=True),
    "added": lambda data: data["added_tokens"].append(data["added_tokens"][0] | {"id": 259, "content": "<more>"}),
    "decoder": lambda data: data.update(decoder={"type": "Fuse"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_whole_tokenizer_counts(copy, tmp_path, what):
    """Each of them leaves the vocabulary, and most the tokens of any one sentence, as they were."""
    byte_pairs(copy)
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    byte_pairs(other, CHANGES[what])
    one, two = identity_of(copy), identity_of(other)
    assert one.tokenizer_hash != two.tokenizer_hash
    assert one.weights_fingerprint == two.weights_fingerprint


def test_what_does_not_change_tokens_does_not_count(copy):
    byte_pairs(copy)
    before = load_tokenizer(find_model(str(copy)))

    def rewrite(data):
        model = data["model"]
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
        model["vocab"] = dict(reversed(model["vocab"].items()))
        data["version"], data["truncation"] = "1.0", None

    byte_pairs(copy, rewrite)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    after = load_tokenizer(find_model(str(copy)))
    assert before.digest == after.digest
    # the template is told apart, for those who read it
    assert before.chat_digest is None
    assert after.chat_digest is not None
    # and a call that cuts leaves nothing behind
    after.raw("text " * 9, truncation=True, max_length=4)
    assert load_tokenizer(find_model(str(copy))).digest == before.digest


def test_artifacts_of_before_are_refused_and_told_why(copy):
    """An earlier aatc read a part of the weights: its hash of the same model says nothing about the rest."""
    now = identity_of(copy)
    before = now.model_copy(update={"weights_fingerprint": "0" * 64})
    says = "weights_fingerprint was of an earlier aatc, whose hash did not cover all of it"
    with pytest.raises(ArtifactError, match=says) as caught:
        require_model(now, before, "the plan")
    assert "collect statistics" in str(caught.value.hint)
    with pytest.raises(ArtifactError, match="tokenizer_hash was of an earlier aatc"):
        require_model(now, now.model_copy(update={"tokenizer_hash": "0" * 64}), "the plan")
    with pytest.raises(ArtifactError, match='weights_fingerprint was "tensors:0'):
        require_model(now, now.model_copy(update={"weights_fingerprint": "tensors:" + "0" * 64}), "the plan")


def edit(file: str, **changes):
    def change(folder: Path) -> None:
        data = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(data | changes))

    return change


def tensors(change):
    def rewrite(folder: Path) -> None:
        parts = load_file(folder / WEIGHTS)
        change(parts)
        save_file({name: part.contiguous() for name, part in parts.items()}, folder / WEIGHTS)

    return rewrite


def swap(parts) -> None:
    one, two = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    parts[one], parts[two] = parts[two], parts[one]


def shard_beside(folder: Path) -> None:
    """A single file beside an index is what the loader takes."""
    tensors_before = load_file(folder / WEIGHTS)
    shard(folder, 2)
    save_file({name: 2 * part for name, part in tensors_before.items()}, folder / WEIGHTS)


def repoint(folder: Path) -> None:
    """The weights are a link, as in a hub's cache, and the link leads to another file of the same size and time."""
    stat = (folder / WEIGHTS).stat()
    (folder / WEIGHTS).rename(folder / "blob-1")
    parts = load_file(folder / "blob-1")
    save_file({name: 2 * part for name, part in parts.items()}, folder / "blob-2", metadata={"format": "pt"})
    os.utime(folder / "blob-2", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (folder / WEIGHTS).symlink_to("blob-2")


def rename_over(folder: Path) -> None:
    stat = (folder / WEIGHTS).stat()
    repoint(folder)
    (folder / WEIGHTS).unlink()
    (folder / "blob-2").rename(folder / WEIGHTS)
    os.utime(folder / WEIGHTS, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def merges_in_files(folder: Path) -> None:
    """No tokenizer.json, but the two files of before there was one."""
    data = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(data["model"]["vocab"] | {"th": 257}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\n")
    (folder / "tokenizer.json").unlink()
    edit("tokenizer_config.json", tokenizer_class="GPT2Tokenizer")(folder)


# ways to another model with the look of the first
WAYS = {
    "two layers change places": tensors(swap),
    "a tensor is transposed": tensors(lambda parts: parts.update({SQUARE: parts[SQUARE].T})),
    "a sign of one number": tensors(lambda parts: parts[SQUARE].view(-1)[7].neg_()),
    "zero becomes minus zero": tensors(lambda parts: parts[SQUARE].view(-1)[7:8].fill_(-0.0)),
    "the weights in half precision": tensors(lambda parts: parts.update({n: p.half() for n, p in parts.items()})),
    "a single file beside the shards": shard_beside,
    "a link that leads elsewhere": repoint,
    "a file of the same size and time in its place": rename_over,
    "another scaling of positions": edit(
        "config.json", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "a sliding window": edit(
        "config.json", model_type="mistral", sliding_window=16, architectures=["MistralForCausalLM"]
    ),
    "tokens that end a text": edit("generation_config.json", eos_token_id=[256, 10]),
    "a tokenizer that cuts special tokens": edit("tokenizer_config.json", split_special_tokens=True),
    "another end token": edit("tokenizer_config.json", eos_token="!"),
    "a tokenizer of other files": merges_in_files,
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_another_model_of_the_same_look(copy, forgetful, way):
    before = identity_of(copy)
    WAYS[way](copy)
    after = identity_of(copy)
    hashes = ("config_hash", "weights_fingerprint", "tokenizer_hash")
    assert [name for name in hashes if getattr(before, name) != getattr(after, name)]


def test_a_single_file_beside_shards_is_what_is_loaded_and_named(copy):
    shard_beside(copy)
    (copy / "alone").mkdir()
    shutil.copy(copy / WEIGHTS, copy / "alone" / WEIGHTS)
    assert weights_of(copy) == fingerprint([copy / "alone" / WEIGHTS])
    loaded, held = load_model(find_model(str(copy))).state_dict(), load_file(copy / WEIGHTS)
    assert all(torch.equal(loaded[name], part) for name, part in held.items())
    torch.save({name: 3 * part for name, part in held.items()}, copy / "pytorch_model.bin")
    assert weights_of(copy) == fingerprint([copy / "alone" / WEIGHTS])
    assert torch.equal(load_model(find_model(str(copy))).state_dict()[SQUARE], held[SQUARE])


@pytest.mark.real
def test_the_real_model_is_read_whole_and_remembered(real_model_path, forgetful, monkeypatch):
    cold = weights_of(real_model_path)
    monkeypatch.setattr("aatc_cli.models.fingerprint._measured", lambda path: pytest.fail("it was read again"))
    assert weights_of(real_model_path) == cold
    assert len(load_file(real_model_path / WEIGHTS)) == 272
