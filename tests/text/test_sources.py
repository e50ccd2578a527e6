from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest

from aatc_cli.errors import AatcError, UsageError
from aatc_cli.text.builtin import MADE_NAMES, builtin_documents, python_topics, split_topics
from aatc_cli.text.made import KINDS
from aatc_cli.text.sources import TextSource, documents, parse_source


def read(spec: str | Path) -> list[str]:
    return list(documents(parse_source(str(spec))))


def fails(spec: str | Path, *parts: str, kind: type[AatcError] = AatcError) -> AatcError:
    """The error of reading ``spec``: of exactly this kind, with every part in its message, and with a remedy."""
    with pytest.raises(AatcError) as caught:
        read(spec)
    assert type(caught.value) is kind
    for part in parts:
        assert part in caught.value.message
    assert caught.value.hint
    return caught.value


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("builtin:python-docs", TextSource("builtin", "builtin:python-docs", "python-docs")),
        ("a/b/notes.txt", TextSource("file", "notes.txt", "a/b/notes.txt")),
        ("a/wiki.test.raw@3", TextSource("file", "wiki.test.raw", "a/wiki.test.raw", weight=3.0)),
        ("a/me@home:1.txt", TextSource("file", "me@home:1.txt", "a/me@home:1.txt")),
        ("a/me@home:1.txt@.25", TextSource("file", "me@home:1.txt", "a/me@home:1.txt", weight=0.25)),
        ("v@2@1e-1", TextSource("file", "v@2", "v@2", weight=0.1)),
        ("a/x.jsonl:text", TextSource("jsonl", "x.jsonl:text", "a/x.jsonl", field="text")),
        ("a:b/x.jsonl:t@y@0.5", TextSource("jsonl", "x.jsonl:t@y", "a:b/x.jsonl", field="t@y", weight=0.5)),
        ("a/x.jsonl", TextSource("jsonl", "x.jsonl", "a/x.jsonl")),
        ("hf:o/n:c:s:f@0.5", TextSource("hub", "hf:o/n:c:s:f", "o/n", "f", "c", "s", weight=0.5)),
        ("hf:/data:x/corpus:c:s:f", TextSource("hub", "hf:corpus:c:s:f", "/data:x/corpus", "f", "c", "s")),
    ],
)
def test_parse_source(spec: str, expected: TextSource) -> None:
    assert parse_source(spec) == expected


@pytest.mark.parametrize(
    "spec", ["x.txt@0", "x.txt@-1", "x.txt@1e999", "x.txt@0.0", "@2", "", "hf:a/b:c:text", "hf:a:::t"]
)
def test_parse_source_refuses(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(spec)
    assert caught.value.hint


@pytest.mark.parametrize("spec", ["x.txt@nan", "x.txt@inf", "x.txt@two", "x.txt@"])
def test_what_is_no_number_stays_in_the_file_name(spec: str) -> None:
    assert parse_source(spec) == TextSource("file", spec, spec)


MADE = "2911e5b60279a000eae412973d529663eb5fa7c25233976c56606bea1b658c2f"


def normalised(document: str) -> set[str]:
    return {" ".join(part.split()) for part in document.split("\n\n") if part.strip()}


def test_builtin_parts_are_the_topics_and_share_no_paragraph() -> None:
    calibration, test = read("builtin:python-docs"), read("builtin:python-docs-test")
    topics = python_topics()
    raw: list[str] = []
    expected_test: list[str] = []
    for index, name in enumerate(sorted(topics)):
        (expected_test if (index + 1) % 5 == 0 else raw).append(topics[name])
    assert test == expected_test
    assert len(calibration) + len(test) == len(topics)
    held_out = set().union(*map(normalised, test))
    assert held_out & set().union(*map(normalised, raw)), "the topics repeat each other; else this test shows nothing"
    assert not held_out & set().union(*map(normalised, calibration))
    assert 0.85 < sum(map(len, calibration)) / sum(map(len, raw)) < 1


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("python-docs", "f71254c0017f59e865830687bb817e5e4ea84bf7eb0b5b38c1a7301784c59b20"),
        ("python-docs-test", "596bf20110f1a0cb1b00e644061fdd8a68adc003a9248652efa9b5b76ae581a9"),
    ],
)
def test_the_builtin_text_is_the_same_under_every_python(name: str, digest: str) -> None:
    """The digest is that of the topics of CPython 3.11.7, with which all figures in docs/ were made."""
    text = "\n\n".join(builtin_documents(name))
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_made_texts_are_the_same_everywhere_and_their_parts_are_not() -> None:
    """A digest of all of them; documents to test on share form and not content with those to calibrate on."""
    digest = hashlib.sha256()
    for name in MADE_NAMES:
        digest.update("\n\n".join(builtin_documents(name)).encode())
    assert digest.hexdigest() == MADE
    for kind in KINDS:
        calibration, test = builtin_documents(kind), builtin_documents(f"{kind}-test")
        assert sum(map(len, test)) > 100_000
        assert len(set(calibration) | set(test)) == len(calibration) + len(test)
    # what is written as sums are sums, and balances are kept
    ledgers = [text for text in builtin_documents("digits-test") if text.startswith("001 account")]
    kept: dict[str, int] = {}
    for line in ledgers[0].splitlines():
        _, _, account, change, _, balance = line.split()
        kept[account] = kept.get(account, 0) + int(change)
        assert kept[account] == int(balance)
    for text in builtin_documents("code-test"):
        if text.startswith("from __future__"):
            compile(text, "made", "exec")


def test_split_topics_takes_out_repeated_paragraphs() -> None:
    calibration, test = split_topics(
        {
            "a": "A\n****\n\nown\n\n  shared\nwords here",
            "b": "b",
            "c": "c",
            "d": "d",
            "e": "A\n=====\n\nshared words\nhere",
        }
    )
    assert test == ["A\n=====\n\nshared words\nhere"]
    assert calibration == ["own\n", "b\n", "c\n", "d\n"]


def test_builtin_unknown_lists_the_names() -> None:
    assert "python-docs, python-docs-test" in str(fails("builtin:shakespeare", "shakespeare").hint)
    with pytest.raises(AatcError):
        builtin_documents("python")


def test_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "a@b:c.raw"
    path.write_bytes("\ufeffone\r\n\n\ntwö\u2028".encode())
    assert read(path) == ["one\r\n\n\ntwö\u2028"]
    assert read(f"{path}@2") == ["one\r\n\n\ntwö\u2028"]


def test_text_file_errors(tmp_path: Path) -> None:
    fails(tmp_path / "absent.txt", "no text file", "absent.txt")
    fails("x" * 5000, "no text file")
    fails(tmp_path, "is a folder")
    path = tmp_path / "a.txt"
    path.write_bytes(b"")
    fails(path, "is empty")
    path.write_bytes(b" \n\t\n")
    fails(path, "only white space")
    path.write_bytes(b"good \xff bad")
    assert "UTF-8" in str(fails(path, "not UTF-8", "byte 5").hint)
    path.write_bytes(gzip.compress(b"text"))
    assert "decompress it first" in str(fails(path, "gzip").hint)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    fails(path, "cannot be read", "Permission denied")


def test_json_lines_documents(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a:b@c.jsonl", [{"t": "one", "l": ["x", " ", "y"]}, {"t": "two\u2028 lines", "l": []}]
    )
    path.write_text(path.read_text() + "\n \n")
    assert read(f"{path}:t") == ["one", "two\u2028 lines"]
    assert read(f"{path}:l@2") == ["x", "y"]


def test_json_lines_needs_a_field(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": 1, "body": "x"}])
    fails(path, "needs the field", "id, body", kind=UsageError)
    fails(f"{path}:", "needs the field", kind=UsageError)


def test_json_lines_errors(tmp_path: Path) -> None:
    fails(f"{tmp_path}/absent.jsonl:text", "no text file")
    path = write_lines(tmp_path / "a.jsonl", [{"t": "x"}, {"u": "y", "v": 1}])
    fails(f"{path}:t", "line 2", "'t'", "u, v")
    for value in (None, 3, ["x", 3], {"x": "y"}):
        write_lines(path, [{"t": "x"}, {"t": "x"}, {"t": value}])
        fails(f"{path}:t", "line 3", "neither a string nor a list")
    for line in (b"{'t': 1}", b'{"t": "x"', b"[" * 100_000):
        path.write_bytes(b'{"t": "x"}\n\n' + line + b"\n")
        fails(f"{path}:t", "line 3", "not valid JSON")
    path.write_bytes(b'["t"]\n')
    fails(f"{path}:t", "line 1", "not a JSON object")
    path.write_bytes(b'{"t": "x"}\n{"t": "\xff"}\n')
    fails(f"{path}:t", "line 2", "not UTF-8")
    path.write_bytes(b'{"t": "\\ud83d"}\n')
    fails(f"{path}:t", "line 1", "surrogate")
    path.write_bytes(b"")
    fails(f"{path}:t", "is empty")
    path.write_bytes(b"\n\n")
    fails(f"{path}:t", "no documents")
    write_lines(path, [{"t": []}])
    fails(f"{path}:t", "no documents")
    write_lines(path, [{"t": " "}, {"t": "\n"}])
    fails(f"{path}:t", "only white space in its 2 documents")
    path.write_bytes(gzip.compress(b'{"t": "x"}'))
    assert "decompress it first" in str(fails(f"{path}:t", "gzip").hint)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"text": "one", "n": ["a", "b"], "i": 1}, {"text": "two", "n": ["c"], "i": 2}])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return folder


def test_dataset_in_a_local_folder(corpus: Path) -> None:
    assert parse_source(f"hf:{corpus}:default:train:text").name == "hf:corpus:default:train:text"
    assert read(f"hf:{corpus}:default:train:text@2") == ["one", "two"]
    assert read(f"hf:{corpus}:default:train:n") == ["a", "b", "c"]


def test_dataset_in_a_local_folder_errors(corpus: Path) -> None:
    fails(f"hf:{corpus}:default:test:text", str(corpus), "cannot be read", "test")
    fails(f"hf:{corpus}:other:train:text", str(corpus), "cannot be read", "other")
    fails(f"hf:{corpus}:default:train:body", "record 1", "'body'", "text, n, i")
    fails(f"hf:{corpus}:default:train:i", "record 1", "neither a string nor a list")
    fails(f"hf:{corpus}/absent:default:train:text", "no folder")


@pytest.mark.parametrize("late", [False, True], ids=["opening", "reading"])
def test_dataset_out_of_reach(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str, *, split: str, streaming: bool) -> Iterable[dict[str, str]]:
        assert (name, config, split, streaming) == ("owner/data", "default", "train", True)

        def rows() -> Iterable[dict[str, str]]:
            yield {"text": "one"}
            raise TimeoutError("no answer\nsecond line")

        if not late:
            raise ConnectionError("no route\nsecond line")
        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load)
    stream = documents(parse_source("hf:owner/data:default:train:text"))
    if late:
        assert next(stream) == "one"
    with pytest.raises(AatcError) as caught:
        next(stream)
    assert "'owner/data'" in caught.value.message
    assert "no network or no hub was reachable" in caught.value.message
    assert ("TimeoutError: no answer" if late else "ConnectionError: no route") in caught.value.message
    assert "second line" not in caught.value.message
    assert "local file" in str(caught.value.hint)


@pytest.mark.parametrize("text", ['["one", "two"]', '{"text": "one"}', '{"text": "one"}\n{"text": "two"}\n'])
def test_a_json_document_is_no_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    assert "file.jsonl:field" in str(fails(path, "data.json is one JSON document").hint)
    # only what is JSON by name and by content
    path.write_text("a note, not JSON")
    assert read(path) == ["a note, not JSON"]
    (tmp_path / "data.txt").write_text(text)
    assert read(tmp_path / "data.txt") == [text]


def test_a_pipe_a_device_and_a_dead_link_are_no_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    fails(tmp_path / "pipe", "pipe is a pipe or a device, not a text file")
    fails("/dev/zero", "/dev/zero is a pipe or a device, not a text file")
    fails(tmp_path / "link", "link is a link that leads nowhere")


@pytest.mark.parametrize("data", ["English".encode("utf-16-le"), b"text\0text", bytes(1000)])
def test_text_with_nuls_is_refused(tmp_path: Path, data: bytes) -> None:
    """English in UTF-16 without a mark is valid UTF-8: it would be calibrated on, letters and NULs in turn."""
    (tmp_path / "text.txt").write_bytes(data)
    fails(tmp_path / "text.txt", "text.txt holds NUL characters")


SPARSE = """
import resource, sys
from aatc_cli.errors import AatcError
from aatc_cli.text.sources import documents, parse_source
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    list(documents(parse_source(sys.argv[1])))
except AatcError as error:
    print(error.message)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc")
def test_a_file_larger_than_memory_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    done = subprocess.run([sys.executable, "-c", SPARSE, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"the text file {path} of {1 << 30} bytes does not fit into memory", done.stderr
