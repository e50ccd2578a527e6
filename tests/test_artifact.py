from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aatc_cli.artifacts import artifact as module
from aatc_cli.artifacts.artifact import ArtifactWriter, open_artifact, unchanged
from aatc_cli.artifacts.disk import replace_directory, write_text
from aatc_cli.artifacts.manifest import MANIFEST, TENSORS, Manifest, ModelIdentity, TextRecord, digest_of, require_model
from aatc_cli.artifacts.tensor_file import TensorFile, tensor_digest
from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError, ArtifactError, SettingsMismatchError

MODEL = ModelIdentity(
    name="tiny",
    revision=None,
    architecture="llama",
    config_hash="c" * 64,
    weights_fingerprint="w" * 64,
    tokenizer_hash="t" * 64,
    geometry=Geometry(layers=2, heads=4, kv_heads=2, head_dim=4, hidden_size=16),
)
TEXT = TextRecord(name="a.txt", weight=0.5, sha256="a" * 64, tokens=100, windows=3)
HARDLY_ANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "b.double": torch.randn(3, 5, dtype=torch.float64, generator=generator),
        "a.bytes": torch.arange(7, dtype=torch.uint8),
        "c.half": torch.randn(2, 2, generator=generator).to(torch.bfloat16).T,
        "d.scalar": torch.tensor(1.5),
        "e.none": torch.zeros(0, 4),
    }


def write(path: Path, parts: dict[str, torch.Tensor] | None = None, **changes: Any) -> Manifest:
    wanted: dict[str, Any] = {"settings": {"samples": 3, "deep": {"x": 0.1}}, "model": MODEL, "texts": [TEXT]} | changes
    with ArtifactWriter(path, "stats") as writer:
        for name, tensor in (tensors() if parts is None else parts).items():
            writer.add(name, tensor)
        return writer.commit(**wanted)


def read(path: Path) -> dict[str, torch.Tensor]:
    return dict(open_artifact(path, "stats").tensors())


def edit(path: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = False) -> None:
    """Change the manifest's JSON; with ``sign`` give it the digest it would have if it were genuine."""
    raw = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    change(raw)
    if sign:
        raw["digest"] = digest_of({key: value for key, value in raw.items() if key not in ("digest", "provenance")})
    (path / MANIFEST).write_text(json.dumps(raw), encoding="utf-8")


def refused(path: Path, *parts: str) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        read(path)
    assert caught.value.hint
    for part in parts:
        assert part in caught.value.message
    return caught.value


def test_round_trip(tmp_path: Path) -> None:
    written = write(tmp_path / "deep" / "er" / "stats", provenance={"note": "x"})
    artifact = open_artifact(tmp_path / "deep" / "er" / "stats", "stats")
    assert artifact.manifest == written
    found = dict(artifact.tensors())
    assert list(found) == sorted(tensors())
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert sorted(path.name for path in (tmp_path / "deep" / "er" / "stats").iterdir()) == [MANIFEST, TENSORS]
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["stats"]


def test_digest_covers_everything_but_provenance(tmp_path: Path) -> None:
    digest = write(tmp_path / "a").digest
    backwards = dict(reversed(tensors().items()))
    assert write(tmp_path / "b", backwards, settings={"deep": {"x": 0.1}, "samples": 3}).digest == digest
    assert write(tmp_path / "c", provenance={"host": "elsewhere"}).digest == digest
    other = tensors() | {"d.scalar": torch.tensor(1.5000001)}
    variants = [
        write(tmp_path / "d", other),
        write(tmp_path / "e", settings={"samples": 4}),
        write(tmp_path / "f", model=MODEL.model_copy(update={"config_hash": "d" * 64})),
        write(tmp_path / "g", inputs={"stats": "1"}),
        write(tmp_path / "h", results={"tokens": 1}),
        write(tmp_path / "i", texts=[]),
        write(tmp_path / "j", tensors() | {"f": torch.zeros(1)}),
    ]
    assert len({digest, *(manifest.digest for manifest in variants)}) == 8


def test_tensor_digest_is_of_the_bytes_in_row_major_order() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    expected = hashlib.sha256(b"".join(value.to_bytes(4, "little") for value in (0, 3, 1, 4, 2, 5))).hexdigest()
    assert tensor_digest(tensor.T) == expected
    assert tensor_digest(tensor) != expected


class Stop(BaseException):
    """Stands for a signal: not an ordinary exception."""


def stop(*_: object, **__: object) -> None:
    raise Stop


def test_nothing_appears_unless_the_block_ends_after_commit(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "new" / "stats", "stats") as writer:
        writer.add("a", torch.zeros(1))

    def raises_after_commit() -> None:
        with ArtifactWriter(tmp_path / "new" / "stats", "stats") as writer:
            writer.commit(settings={}, model=MODEL)
            raise Stop

    with pytest.raises(Stop):
        raises_after_commit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "point", ["TensorFile.add", "TensorFile.finish", "write_text", "flush", "replace_directory", "os.rename"]
)
@pytest.mark.parametrize("there", [True, False], ids=["replacing", "new"])
def test_failing_anywhere_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, there: bool
) -> None:
    if there:
        write(tmp_path / "stats")
    with monkeypatch.context() as patch:
        owner, _, name = point.rpartition(".")
        patch.setattr({"os": os, "TensorFile": TensorFile}.get(owner, module), name, stop)
        with pytest.raises(Stop):
            write(tmp_path / "stats", {"a": torch.ones(1)})
    assert [path.name for path in tmp_path.iterdir()] == (["stats"] if there else [])
    if there:
        assert torch.equal(read(tmp_path / "stats")["b.double"], tensors()["b.double"])


def test_a_failed_second_rename_brings_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(tmp_path / "stats")
    rename, calls = os.rename, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", second_fails)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path / "stats", {"a": torch.ones(1)})
    assert open_artifact(tmp_path / "stats", "stats").manifest == old
    assert [path.name for path in tmp_path.iterdir()] == ["stats"]


def test_replace_is_whole(tmp_path: Path) -> None:
    write(tmp_path / "stats")
    (tmp_path / "stats" / "stray").write_text("old")
    new = write(tmp_path / "stats", {"a": torch.ones(2)})
    assert open_artifact(tmp_path / "stats", "stats").manifest == new
    assert sorted(path.name for path in tmp_path.rglob("*")) == [MANIFEST, "stats", TENSORS]


def test_replace_directory_onto_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a")
    replace_directory(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert set(read(tmp_path / "b")) == set(tensors())


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from aatc_cli.artifacts.artifact import ArtifactWriter, ModelIdentity\n"
        "from aatc_cli.errors import AatcError\n"
        "model = ModelIdentity.model_validate_json(sys.argv[3])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with ArtifactWriter(Path(sys.argv[1]), 'stats') as writer:\n"
        "        writer.add('a', torch.zeros(10000))\n"
        "        writer.commit(settings={}, model=model)\n"
        "except (AatcError, OSError) as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    root = str(Path(module.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "stats"), root, MODEL.model_dump_json()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "File too large" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_write_text_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.json", "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(Stop):
            write_text(tmp_path / "a.json", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "stats"
    write(path, provenance={"note": "anything"})
    return path


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "stats"))


@HARDLY_ANY
@given(data=st.data())
def test_any_flipped_byte_of_the_tensors_is_refused(intact: Path, tmp_path: Path, data: st.DataObject) -> None:
    original = (intact / TENSORS).read_bytes()
    where = data.draw(st.integers(0, len(original) - 1))
    bits = data.draw(st.integers(1, 255))
    damaged = bytearray(original)
    damaged[where] ^= bits
    shutil.copytree(intact, tmp_path / "stats", dirs_exist_ok=True)
    (tmp_path / "stats" / TENSORS).write_bytes(damaged)
    try:
        found = read(tmp_path / "stats")
    except ArtifactError:
        return
    # only a byte that means nothing, padding of the header, may pass
    assert {name: t.tolist() for name, t in found.items()} == {name: t.tolist() for name, t in tensors().items()}
    header = int.from_bytes(original[:8], "little")
    assert 8 <= where < 8 + header


def test_every_flipped_data_byte_is_refused(copy: Path) -> None:
    original = (copy / TENSORS).read_bytes()
    start = 8 + int.from_bytes(original[:8], "little")
    for where in range(start, len(original)):
        damaged = bytearray(original)
        damaged[where] ^= 1
        (copy / TENSORS).write_bytes(damaged)
        refused(copy, "does not match its recorded hash")


@HARDLY_ANY
@given(data=st.data())
def test_a_flipped_byte_of_the_manifest_is_refused_or_means_the_same(
    intact: Path, tmp_path: Path, data: st.DataObject
) -> None:
    original = (intact / MANIFEST).read_bytes()
    damaged = bytearray(original)
    damaged[data.draw(st.integers(0, len(original) - 1))] ^= data.draw(st.integers(1, 255))
    shutil.copytree(intact, tmp_path / "stats", dirs_exist_ok=True)
    (tmp_path / "stats" / MANIFEST).write_bytes(damaged)
    try:
        found = open_artifact(tmp_path / "stats", "stats").manifest
    except ArtifactError:
        return
    assert found.model_copy(update={"provenance": {}}) == Manifest.model_validate_json(original).model_copy(
        update={"provenance": {}}
    )


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
@pytest.mark.parametrize("left", [0, 1, 7, 8, 60, -1])
def test_truncated(copy: Path, name: str, left: int) -> None:
    content = (copy / name).read_bytes()
    # the manifest ends with a line break that carries nothing
    (copy / name).write_bytes(content[:left] if left >= 0 else content.rstrip()[:-1])
    refused(copy, "cannot be read")


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
def test_missing_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    refused(copy, name)


def test_added_removed_and_renamed_tensors(copy: Path) -> None:
    parts = load_file(copy / TENSORS)
    for changed in (
        parts | {"extra": torch.zeros(1)},
        {name: tensor for name, tensor in parts.items() if name != "a.bytes"},
        {("A.bytes" if name == "a.bytes" else name): tensor for name, tensor in parts.items()},
    ):
        save_file(changed, copy / TENSORS)
        refused(copy, "does not hold the tensors that the manifest lists")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_another_dtype(copy: Path, dtype: torch.dtype) -> None:
    parts = load_file(copy / TENSORS)
    parts["b.double"] = parts["b.double"].view(torch.int64) if dtype == torch.int64 else parts["b.double"].to(dtype)
    save_file(parts, copy / TENSORS)
    refused(copy, "'b.double'")


def test_another_shape(copy: Path) -> None:
    parts = load_file(copy / TENSORS)
    parts["b.double"] = parts["b.double"].reshape(5, 3)
    save_file(parts, copy / TENSORS)
    refused(copy, "'b.double' has another shape than recorded")


def test_an_unknown_tensor_is_named(intact: Path) -> None:
    with pytest.raises(ArtifactError, match="no tensor 'nonsense'"):
        open_artifact(intact, "stats").tensor("nonsense")


@pytest.mark.parametrize("version", [2, 0, "1", 1.0, True, None])
def test_another_schema_names_both(copy: Path, version: object) -> None:
    edit(copy, lambda raw: raw.update(schema_version=version), sign=True)
    error = refused(copy, f"schema version {version!r}", "reads version 1")
    assert "the aatc that wrote it" in str(error.hint)


def test_schema_versions_are_of_the_kind(tmp_path: Path) -> None:
    for kind, version in (("stats", 1), ("transform", 2), ("plan", 2)):
        with ArtifactWriter(tmp_path / kind, kind) as writer:
            writer.add("x", torch.arange(3.0))
            writer.commit(settings={}, model=MODEL)
        assert open_artifact(tmp_path / kind, kind).manifest.schema_version == version
        edit(tmp_path / kind, lambda raw, other=3 - version: raw.update(schema_version=other), sign=True)
        with pytest.raises(ArtifactError, match=f"schema version {3 - version}; this aatc reads version {version}"):
            open_artifact(tmp_path / kind, kind)


@pytest.mark.parametrize("field", sorted(set(Manifest.model_fields) - {"schema_version"}))
def test_a_removed_field(copy: Path, field: str) -> None:
    edit(copy, lambda raw: raw.pop(field), sign=field != "digest")
    refused(copy, field)


@pytest.mark.parametrize("inside", [(), ("model",), ("model", "geometry"), ("texts", 0), ("tensors", "a.bytes")])
def test_an_added_field(copy: Path, inside: tuple[str | int, ...]) -> None:
    def add(raw: Any) -> None:
        for step in inside:
            raw = raw[step]
        raw["surprise"] = 1

    edit(copy, add, sign=True)
    refused(copy, "surprise")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda raw: raw["texts"][0].update(tokens="100"), "texts.0.tokens"),
        (lambda raw: raw["texts"][0].update(tokens=100.0), "texts.0.tokens"),
        (lambda raw: raw["texts"][0].update(weight="0.5"), "texts.0.weight"),
        (lambda raw: raw["model"].update(revision=7), "model.revision"),
        (lambda raw: raw["model"]["geometry"].update(layers="2"), "model.geometry.layers"),
        (lambda raw: raw["model"]["geometry"].update(layers=True), "model.geometry.layers"),
        (lambda raw: raw["model"]["geometry"].update(kv_heads=3), "multiple of kv_heads"),
        (lambda raw: raw["model"]["geometry"].update(head_dim=-4), "model.geometry.head_dim"),
        (lambda raw: raw["tensors"]["a.bytes"].update(shape="7"), "tensors.a.bytes.shape"),
        (lambda raw: raw["tensors"]["a.bytes"].update(sha256="short"), "tensors.a.bytes.sha256"),
        (lambda raw: raw.update(settings=[]), "settings"),
        (lambda raw: raw.update(texts={}), "texts"),
        (lambda raw: raw.update(kind="statistics"), "kind"),
    ],
)
def test_a_field_of_another_type_is_not_coerced(copy: Path, change: Any, field: str) -> None:
    edit(copy, change, sign=True)
    refused(copy, field)


def test_a_changed_value_with_the_old_digest(copy: Path) -> None:
    edit(copy, lambda raw: raw["settings"].update(samples=4))
    refused(copy, "does not match its own digest")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["settings", "provenance"])
def test_numbers_that_are_not_json(copy: Path, text: str, field: str) -> None:
    content = (copy / MANIFEST).read_text(encoding="utf-8")
    changed = content.replace(f'"{field}": {{', f'"{field}": {{"bad": {text},', 1)
    assert changed != content
    (copy / MANIFEST).write_text(changed, encoding="utf-8")
    if field == "provenance" and text == "1e999":
        return  # an ordinary JSON number, in the part that nothing depends on
    refused(copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["settings", "results"])
def test_nan_is_not_written(tmp_path: Path, field: str, value: float) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        write(tmp_path / "stats", **{field: {"x": value}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"3", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": 1}', b"9" * 5000]
)
def test_a_manifest_of_anything_else(copy: Path, content: bytes) -> None:
    (copy / MANIFEST).write_bytes(content)
    refused(copy, str(copy))


def test_wrong_kind_names_both(intact: Path) -> None:
    with pytest.raises(ArtifactError, match="holds a stats, not a plan") as caught:
        open_artifact(intact, "plan")
    assert "aatc allocate" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "verb"), [("stats", "aatc collect"), ("transform", "aatc whiten"), ("plan", "aatc allocate")]
)
def test_absent_names_the_command(tmp_path: Path, kind: Any, verb: str) -> None:
    with pytest.raises(ArtifactError, match=f"there is no {kind}") as caught:
        open_artifact(tmp_path / "none", kind)
    assert verb in str(caught.value.hint)


def test_a_folder_without_manifest_and_a_file_are_not_artifacts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        refused(path, "is not an artifact")


def test_symlinked_tensors_are_refused(copy: Path, tmp_path: Path) -> None:
    (copy / TENSORS).rename(tmp_path / "elsewhere")
    (copy / TENSORS).symlink_to(tmp_path / "elsewhere")
    refused(copy, "not a regular file")
    (copy / TENSORS).unlink()
    (copy / TENSORS).mkdir()
    refused(copy, "not a regular file")


def test_a_huge_claimed_shape_allocates_nothing(copy: Path) -> None:
    """A header that claims a tebibyte, with and without a manifest that agrees; the address space is limited."""
    shape = [1 << 20, 1 << 17]
    header = json.dumps({"a": {"dtype": "F64", "shape": shape, "data_offsets": [0, 8 << 37]}}).encode()
    (copy / TENSORS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))

    def claim(raw: dict[str, Any]) -> None:
        raw["tensors"] = {"a": {"dtype": "float64", "shape": shape, "sha256": "0" * 64}}

    edit(copy, claim, sign=True)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from aatc_cli.artifacts.artifact import open_artifact\n"
        "from aatc_cli.errors import ArtifactError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "try: dict(open_artifact(Path(sys.argv[1]), 'stats').tensors())\n"
        "except ArtifactError as error: print(error)\n"
    )
    root = Path(module.__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", code, str(copy)], capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stderr
    assert "is damaged" in result.stdout


def test_a_huge_claimed_header_is_refused(copy: Path) -> None:
    (copy / TENSORS).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    refused(copy, "cannot be read")


def wanted(**changes: Any) -> dict[str, Any]:
    return {
        "settings": {"samples": 3, "deep": {"x": 0.1}},
        "model": MODEL.model_dump(mode="json"),
        "texts": [TEXT.model_dump(mode="json")],
        "inputs": {},
    } | changes


def test_unchanged(intact: Path, tmp_path: Path) -> None:
    found = unchanged(intact, "stats", wanted(), force=False)
    assert found is not None
    assert found.texts == [TEXT]
    assert unchanged(intact, "stats", wanted(), force=True) is None
    assert unchanged(tmp_path / "none", "stats", wanted(), force=False) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": {"samples": 4, "deep": {"x": 0.1}}}, "settings.samples was 3, now 4"),
        ({"settings": {"samples": 3, "deep": {"x": 0.2}}}, "settings.deep.x was 0.1, now 0.2"),
        ({"settings": {"samples": 3, "deep": {"x": 0.1}, "new": 1}}, "settings.new was null, now 1"),
        ({"inputs": {"stats": "abc"}}, 'inputs.stats was null, now "abc"'),
        ({"texts": []}, "texts was "),
        (
            {"texts": [TEXT.model_copy(update={"sha256": "b" * 64}).model_dump(mode="json")]},
            f'texts[0].sha256 was "{"a" * 12}...", now "{"b" * 12}..."',
        ),
        (
            {"model": MODEL.model_copy(update={"tokenizer_hash": "u" * 64}).model_dump(mode="json")},
            "model.tokenizer_hash",
        ),
    ],
)
def test_changed_names_both_values_and_the_remedy(intact: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsMismatchError) as caught:
        unchanged(intact, "stats", wanted(**changes), force=False)
    assert says in caught.value.message
    assert "--force" in str(caught.value.hint)


def test_many_differences_are_cut(intact: Path) -> None:
    with pytest.raises(SettingsMismatchError) as caught:
        unchanged(intact, "stats", wanted(settings={str(i): i for i in range(9)}), force=False)
    assert caught.value.message.endswith("; ...")
    assert caught.value.message.count("was null") == 5


def test_damaged_is_not_taken_as_unchanged(copy: Path) -> None:
    (copy / TENSORS).unlink()
    with pytest.raises(ArtifactError, match="damaged") as caught:
        unchanged(copy, "stats", wanted(), force=False)
    assert "--force" in str(caught.value.hint)
    assert unchanged(copy, "stats", wanted(), force=True) is None


def test_a_model_is_its_content_and_not_its_name(intact: Path) -> None:
    renamed = MODEL.model_copy(update={"name": "copy", "revision": "abc"})
    require_model(renamed, MODEL, "the plan")
    assert unchanged(intact, "stats", wanted(model=renamed.model_dump(mode="json")), force=False) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "qwen2"},
        {"config_hash": "d" * 64},
        {"weights_fingerprint": "d" * 64},
        {"tokenizer_hash": "d" * 64},
        {"geometry": MODEL.geometry.model_copy(update={"layers": 3})},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_model_is_refused_by_the_field(changes: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError) as caught:
        require_model(MODEL.model_copy(update=changes), MODEL, "the plan")
    assert next(iter(changes)) in caught.value.message
    assert "the plan" in caught.value.message


def test_every_error_is_an_aatc_error() -> None:
    assert issubclass(ArtifactError, AatcError)
    assert issubclass(SettingsMismatchError, AatcError)
