"""Text sources: what the user writes on the command line, read as a stream of documents."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aatc_cli.errors import AatcError, UsageError
from aatc_cli.text.builtin import builtin_documents
from aatc_cli.text.files import checked_file, decoded, is_json, reading

HUB_FORM = "hf:dataset:config:split:field"
FORMS = f"builtin:python-docs, path/to/file.txt, file.jsonl:field or {HUB_FORM}, each with an optional @weight"

_WEIGHT = re.compile(r"(.*)@([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", re.DOTALL | re.ASCII)
_JSON_LINES = re.compile(r"(.*\.jsonl)(?::(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TextSource:
    """One source of text with its weight in the mixture.

    ``name`` is what manifests record: the specification without weight and without folders (``builtin:python-docs``,
    ``file.txt``, ``file.jsonl:field``). ``location`` is where it is read from: a built-in name, a path, or the name
    or local folder of a dataset.
    """

    kind: Literal["builtin", "file", "jsonl", "hub"]
    name: str
    location: str
    field: str | None = None
    config: str | None = None
    split: str | None = None
    weight: float = 1.0


def parse_source(spec: str) -> TextSource:
    """Read a text specification; raises `UsageError` when its form or its weight is wrong. Opens no file.

    Forms: ``builtin:NAME``, ``path/to/file.txt``, ``file.jsonl:field``, ``hf:dataset:config:split:field``, where
    dataset may be a local folder of data files. Only a trailing ``@number`` is a weight.
    """
    match = _WEIGHT.fullmatch(spec)
    body = match[1] if match else spec
    weight = float(match[2]) if match else 1.0
    if not (math.isfinite(weight) and weight > 0):
        raise UsageError(f"the weight of {spec!r} must be a positive number", f"for instance {body}@0.5")
    if not body:
        raise UsageError(f"the text source {spec!r} names no text", f"write {FORMS}")
    if body.startswith("builtin:"):
        return TextSource("builtin", body, body.removeprefix("builtin:"), weight=weight)
    if body.startswith("hf:"):
        return _parse_hub(body, weight)
    lines = _JSON_LINES.fullmatch(body)
    if lines is None:
        return TextSource("file", Path(body).name, body, weight=weight)
    name, field = Path(lines[1]).name, lines[2] or None
    return TextSource("jsonl", f"{name}:{field}" if field else name, lines[1], field=field, weight=weight)


def _parse_hub(body: str, weight: float) -> TextSource:
    # split from the right: the folder of a local dataset may contain ':'
    parts = body.removeprefix("hf:").rsplit(":", 3)
    if len(parts) != 4 or not all(parts):
        raise UsageError(
            f"the dataset {body!r} does not have the form {HUB_FORM}", "most datasets have the config 'default'"
        )
    dataset, config, split, field = parts
    shown = Path(dataset).name if _is_folder(dataset) else dataset
    name = f"hf:{shown}:{config}:{split}:{field}"
    return TextSource("hub", name, dataset, field=field, config=config, split=split, weight=weight)


def _is_folder(dataset: str) -> bool:
    """Whether a dataset is a local folder: it is there, or its name could not be one of a hub (owner/name)."""
    return os.path.isdir(dataset) or dataset.startswith((".", "/")) or dataset.count("/") > 1


def documents(source: TextSource) -> Iterator[str]:
    """The documents of ``source`` one by one, without those that are only white space.

    Raises `AatcError` when the source cannot be read, is damaged, or holds no text, and `UsageError` when a JSON
    lines file comes without the field to read. Errors come when the stream is read, not when it is made.
    """
    readers = {"builtin": _builtin, "file": _text_file, "jsonl": _json_lines, "hub": _hub}
    seen = used = 0
    for document in readers[source.kind](source):
        seen += 1
        if document.strip():
            used += 1
            yield document
    if not used:
        what = f"only white space in its {seen} documents" if seen else "no documents"
        raise AatcError(f"the text {source.location!r} holds {what}", "give a source that holds text")


def _builtin(source: TextSource) -> Iterator[str]:
    yield from builtin_documents(source.location)


def _text_file(source: TextSource) -> Iterator[str]:
    path = checked_file(source.location, FORMS)
    with reading(path):
        data = path.read_bytes()
    text = decoded(data, str(path))
    if path.suffix.lower() == ".json" and is_json(text):
        raise AatcError(
            f"{path} is one JSON document, whose brackets and field names are no text",
            "write JSON lines, one object a line, into a .jsonl file and name the field: file.jsonl:field",
        )
    yield text


def _json_lines(source: TextSource) -> Iterator[str]:
    path = checked_file(source.location, FORMS)
    with reading(path), open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"line {number} of {path}"
            text = decoded(line, where)
            if not text.strip():
                continue
            record = _json_object(text, where)
            if source.field is None:
                raise UsageError(
                    f"the JSON lines file {path} needs the field to read; its first record has {_fields(record)}",
                    f"name one after a colon: {path}:{next(iter(record), 'text')}",
                )
            yield from _texts(record, source.field, where)


def _hub(source: TextSource) -> Iterator[str]:
    assert source.field is not None
    for number, record in enumerate(_hub_records(source), start=1):
        yield from _texts(record, source.field, f"record {number} of the dataset {source.location!r}")


def _hub_records(source: TextSource) -> Iterator[Mapping[str, Any]]:
    local = _is_folder(source.location)
    if local and not os.path.isdir(source.location):
        raise AatcError(f"there is no folder {source.location}", "check the path of the dataset's folder")
    try:
        # imported here: it takes seconds, and only this kind of source needs it
        from datasets import load_dataset

        yield from load_dataset(source.location, source.config, split=source.split, streaming=True)
    except Exception as error:
        # the hub client fails with errors of many libraries; the user needs one sentence and the first line of theirs
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if local:
            raise AatcError(
                f"the folder {source.location} cannot be read as a dataset ({reason})",
                f"check the config {source.config!r}, the split {source.split!r} and the data files in it",
            ) from error
        raise AatcError(
            f"the dataset {source.location!r} cannot be read: no network or no hub was reachable, or the hub does not "
            f"have this dataset, config or split ({reason})",
            "check the name, or give a local file instead: path/to/file.txt or file.jsonl:field",
        ) from error


def _texts(record: Mapping[str, Any], field: str, where: str) -> list[str]:
    """The documents in ``field`` of one record: a string, or each string of a list."""
    if field not in record:
        raise AatcError(
            f"{where} has no field {field!r}; it has {_fields(record)}", "name a field that every record has"
        )
    value = record[field]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise AatcError(
            f"the field {field!r} in {where} is neither a string nor a list of strings",
            f"name a field that holds text; the record has {_fields(record)}",
        )
    if not all(_is_unicode(text) for text in texts):
        raise AatcError(f"the field {field!r} in {where} holds half of a surrogate pair", "mend or remove that record")
    return texts


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can escape but no tokenizer and no hash can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AatcError(f"{where} is not valid JSON: {error}", "write one JSON object per line") from error
    if not isinstance(record, dict):
        raise AatcError(f"{where} is not a JSON object", "write one JSON object per line")
    return record


def _fields(record: Mapping[str, Any]) -> str:
    return f"the fields {', '.join(record)}" if record else "no fields"
