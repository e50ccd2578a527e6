"""Progress in a log: a line at the start and one every so often, none under -q; bars are for terminals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from aatc_cli.console import detail, progress, say, set_loudness, working
from aatc_cli.console.waiting import duration


@pytest.fixture(autouse=True)
def loudness() -> Iterator[None]:
    yield
    set_loudness("usual")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aatc_cli.console.waiting.BEAT", 0.05)


def lines(capsys: Any) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_log_is_never_silent_for_long(capsys: Any, soon: None) -> None:
    with progress("collect", 10, 2) as ticker:
        time.sleep(0.12)
        ticker.advance(4, text="collect: gradients")
        time.sleep(0.12)
    first, *later = lines(capsys)
    assert first == "collect: 8 steps"
    assert later[0].startswith("collect: 2 of 10 steps, 0 s so far")
    assert "left" not in later[0]
    assert later[-1].startswith("collect: gradients: 6 of 10 steps, 0 s so far, about 0 s left")


def test_short_work_leaves_no_line(capsys: Any) -> None:
    with working("opening the model"):
        pass
    with progress("collect", 3) as ticker:
        ticker.advance(3)
    assert lines(capsys) == ["collect: 3 steps"]


def test_long_work_without_steps_says_that_it_goes_on(capsys: Any, soon: None) -> None:
    with working("opening the model"):
        time.sleep(0.12)
    assert lines(capsys)[0] == "opening the model: 0 s so far"


def test_lines_end_with_the_work(capsys: Any, soon: None) -> None:
    with pytest.raises(ValueError, match="broken"), working("opening"):
        raise ValueError("broken")
    time.sleep(0.12)
    assert lines(capsys) == []


def test_loudness(capsys: Any, soon: None) -> None:
    detail("more")
    set_loudness("quiet")
    say("log")
    with working("opening"), progress("collect", 3) as ticker:
        time.sleep(0.12)
        ticker.advance()
    assert lines(capsys) == []
    set_loudness("verbose")
    detail("more")
    say("log")
    assert lines(capsys) == ["more", "log"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (89, "89 s"), (91, "1.5 min"), (120, "2 min"), (600, "10 min"), (5399, "90 min"), (5400, "1.5 h")],
)
def test_duration(seconds: float, said: str) -> None:
    assert duration(seconds) == said
