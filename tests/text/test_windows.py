from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from aatc_cli.errors import AatcError, UsageError
from aatc_cli.text import windows as module
from aatc_cli.text.sources import TextSource
from aatc_cli.text.windows import consecutive_windows, draw_windows, largest_remainder


def encode(text: str) -> list[int]:
    return list(text.encode())


def numbered(path: Path, slots: int, mark: str = "n") -> Path:
    """A file whose every 8 bytes are another slot: n0000000 n0000001 ..."""
    path.write_text("".join(f"{mark}{index:07d}" for index in range(slots)))
    return path


def texts(tokens: torch.Tensor) -> list[str]:
    return [bytes(row).decode() for row in tokens.tolist()]


def test_draw_takes_whole_slots_once_and_shuffles_the_texts(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.txt", 40, "a"), numbered(tmp_path / "b.txt", 50, "b")
    drawn = draw_windows([f"{a}@3", str(b)], encode, samples=20, length=8, seed=5)
    assert drawn.tokens.dtype == torch.int64
    assert drawn.tokens.shape == (20, 8)
    found = texts(drawn.tokens)
    assert set(found) <= {f"a{i:07d}" for i in range(40)} | {f"b{i:07d}" for i in range(50)}
    assert len(set(found)) == 20
    marks = "".join(text[0] for text in found)
    assert (marks.count("a"), marks.count("b")) == (15, 5)
    assert "ab" in marks
    assert "ba" in marks
    in_order = [text for text in found if text[0] == "a"]
    assert in_order != sorted(in_order)


def test_draw_records(tmp_path: Path) -> None:
    a = numbered(tmp_path / "a.txt", 40)
    b = tmp_path / "b.jsonl"
    b.write_text("".join(json.dumps({"t": f"document {i} ü"}) + "\n" for i in range(9)))
    drawn = draw_windows([f"{a}@3", f"{b}:t"], encode, samples=8, length=8, seed=5)
    joined = "\n\n".join(f"document {i} ü" for i in range(9)).encode()
    first, second = drawn.records
    assert first.model_dump() == {
        "name": "a.txt",
        "weight": 3.0,
        "sha256": hashlib.sha256(a.read_bytes()).hexdigest(),
        "tokens": 320,
        "windows": 6,
    }
    assert second.model_dump() == {
        "name": "b.jsonl:t",
        "weight": 1.0,
        "sha256": hashlib.sha256(joined).hexdigest(),
        "tokens": len(joined),
        "windows": 2,
    }
    assert drawn.digest == hashlib.sha256(drawn.tokens.numpy().astype("<i8").tobytes()).hexdigest()
    slots = {joined[start : start + 8] for start in range(0, len(joined) - 7, 8)}
    from_b = [bytes(row) for row in drawn.tokens.tolist() if bytes(row) in slots]
    assert len(from_b) == 2


def test_draw_depends_on_the_seed_alone(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.txt", 60, "a"), numbered(tmp_path / "b.txt", 60, "b")

    def draw(seed: int, *files: Path, samples: int = 12) -> module.Windows:
        return draw_windows([str(file) for file in files], encode, samples=samples, length=8, seed=seed)

    one = draw(1, a, b)
    torch.manual_seed(99)
    again = draw(1, a, b)
    assert torch.equal(one.tokens, again.tokens)
    assert (one.digest, one.records) == (again.digest, again.records)
    other = draw(2, a, b)
    assert set(texts(other.tokens)) != set(texts(one.tokens))
    assert other.digest != one.digest
    assert other.records == one.records
    # each text has a draw of its own, so texts of the same size give other places
    assert {text[1:] for text in texts(one.tokens) if text[0] == "a"} != {
        text[1:] for text in texts(one.tokens) if text[0] == "b"
    }
    # a second text does not change what the first one gives
    alone = set(texts(draw(1, a, samples=6).tokens))
    assert alone == {text for text in texts(one.tokens) if text[0] == "a"}


def test_draw_of_all_slots_is_the_whole_text(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.txt", 10)
    drawn = draw_windows([str(path)], encode, samples=10, length=8, seed=0)
    assert sorted(texts(drawn.tokens)) == [f"n{i:07d}" for i in range(10)]


def test_draw_with_bos(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.txt", 12)
    drawn = draw_windows([str(path)], encode, samples=12, length=9, seed=0, bos=0)
    assert drawn.tokens.shape == (12, 9)
    assert drawn.tokens[:, 0].eq(0).all()
    assert sorted(texts(drawn.tokens[:, 1:])) == [f"n{i:07d}" for i in range(12)]


def test_draw_without_enough_text(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.txt", 10)
    with pytest.raises(AatcError, match=r"'a\.txt' has 10 windows of 8 tokens, but 11 are needed") as caught:
        draw_windows([str(path)], encode, samples=11, length=8, seed=0)
    assert "--samples" in str(caught.value.hint)
    assert "--length" in str(caught.value.hint)


def test_draw_refuses_a_text_without_a_window(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.txt", 10), numbered(tmp_path / "b.txt", 10)
    with pytest.raises(AatcError, match=r"'b\.txt' gets none of the 4 windows") as caught:
        draw_windows([f"{a}@9", str(b)], encode, samples=4, length=8, seed=0)
    assert "--samples" in str(caught.value.hint)


def test_wrong_values_are_usage_errors(tmp_path: Path) -> None:
    path = str(numbered(tmp_path / "a.txt", 10))
    for values in ({"samples": 0, "length": 8}, {"samples": 1, "length": 1}, {"samples": -3, "length": 8}):
        with pytest.raises(UsageError) as caught:
            draw_windows([path], encode, seed=0, **values)
        assert caught.value.hint
    with pytest.raises(UsageError):
        draw_windows([], encode, samples=1, length=8, seed=0)
    for values in ({"length": 1}, {"length": 8, "limit": 0}, {"length": 8, "stride": 0}, {"length": 8, "stride": -2}):
        with pytest.raises(UsageError) as caught:
            consecutive_windows(path, encode, **{"limit": None, **values})
        assert caught.value.hint


class Endless:
    """Stands in for a hub source without an end; fails the test instead of hanging it."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, source: TextSource) -> Iterator[str]:
        for index in itertools.count():
            assert index < 5000, "the source was read without bound"
            self.read += 1
            yield f"document {index:06d}"


def test_an_endless_source_is_read_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Endless()
    monkeypatch.setattr(module, "documents", endless)
    drawn = draw_windows(["hf:o/n:default:train:text"], encode, samples=5, length=30, seed=3)
    (record,) = drawn.records
    # a document and its separator are 17 bytes
    assert 4 * 5 * 30 <= record.tokens < 4 * 5 * 30 + 17
    assert endless.read == -(-(4 * 5 * 30 + 2) // 17)
    used = "\n\n".join(f"document {i:06d}" for i in range(endless.read))
    assert record.sha256 == hashlib.sha256(used.encode()).hexdigest()


def test_consecutive_windows_read_no_more_than_the_limit_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Endless()
    monkeypatch.setattr(module, "documents", endless)
    cut = consecutive_windows("hf:o/n:default:train:text", encode, length=30, limit=4, stride=10)
    assert cut.tokens.shape == (4, 30)
    assert 60 <= cut.records[0].tokens < 60 + 17


def test_a_file_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "documents", lambda source: (f"document {i:06d}" for i in range(300)))
    drawn = draw_windows(["a.jsonl:text"], encode, samples=2, length=10, seed=0)
    assert drawn.records[0].tokens == 300 * 17 - 2


def test_consecutive_windows(tmp_path: Path) -> None:
    path = tmp_path / "a.raw"
    path.write_text("abcdefghijk")
    assert texts(consecutive_windows(str(path), encode, length=4, limit=None).tokens) == ["abcd", "efgh"]
    assert texts(consecutive_windows(str(path), encode, length=4, limit=1).tokens) == ["abcd"]
    assert texts(consecutive_windows(str(path), encode, length=4, limit=9).tokens) == ["abcd", "efgh"]
    assert texts(consecutive_windows(str(path), encode, length=11, limit=None).tokens) == ["abcdefghijk"]
    strided = consecutive_windows(str(path), encode, length=4, limit=None, stride=3)
    assert texts(strided.tokens) == ["abcd", "defg", "ghij"]
    with_bos = consecutive_windows(str(path), encode, length=4, limit=None, bos=ord("^"))
    assert texts(with_bos.tokens) == ["^abc", "^def", "^ghi"]
    (record,) = with_bos.records
    assert (record.name, record.tokens, record.windows) == ("a.raw", 11, 3)
    assert record.sha256 == hashlib.sha256(b"abcdefghijk").hexdigest()
    assert with_bos.digest == hashlib.sha256(with_bos.tokens.numpy().astype("<i8").tobytes()).hexdigest()


def test_consecutive_windows_join_documents_by_a_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "one"}\n{"t": " "}\n{"t": "two"}\n')
    cut = consecutive_windows(f"{path}:t", encode, length=8, limit=None)
    assert texts(cut.tokens) == ["one\n\ntwo"]


def test_consecutive_windows_of_too_short_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc")
    with pytest.raises(AatcError, match="has 3 tokens, fewer than the 4 of one window") as caught:
        consecutive_windows(str(path), encode, length=4, limit=None)
    assert "--length" in str(caught.value.hint)
    # with bos in front three tokens of text are enough
    assert texts(consecutive_windows(str(path), encode, length=4, limit=None, bos=ord("^")).tokens) == ["^abc"]


def closest_by_search(weights: list[str], total: int) -> list[int]:
    """Of all whole shares with this total, the nearest to the quotas in squares; on a tie the earlier get more."""
    quotas = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    candidates = (
        shares for shares in itertools.product(range(total, -1, -1), repeat=len(weights)) if sum(shares) == total
    )
    return list(min(candidates, key=lambda s: sum((a - q) ** 2 for a, q in zip(s, quotas, strict=True))))


def test_largest_remainder_is_the_closest_share() -> None:
    for weights in itertools.product(["0.1", "0.2", "0.3", "1", "1.5", "1e-05"], repeat=3):
        for total in (1, 2, 5, 7):
            expected = closest_by_search(list(weights), total)
            assert largest_remainder([float(w) for w in weights], total) == expected, (weights, total)


def test_largest_remainder_by_hand() -> None:
    assert largest_remainder([0.5, 0.5], 256) == [128, 128]
    assert largest_remainder([1, 1, 1], 8) == [3, 3, 2]
    assert largest_remainder([47, 16, 15.8, 12, 6.1, 3.1], 10) == [5, 2, 1, 1, 1, 0]
    assert largest_remainder([2], 7) == [7]
