"""aatc doctor: a sound installation, and each way it says that it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aatc_cli.errors import AatcError
from aatc_cli.stages import doctor, selftest

STEPS = ["model", "collect", "whiten", "allocate", "eval", "packed cache"]


def test_a_sound_installation(aatc: Any, tmp_path: Path) -> None:
    outcome = aatc("doctor", "--run", tmp_path / "run", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = {each["name"]: each for each in outcome.json["findings"]}
    assert outcome.json["ok"] is True
    assert {name for name in found if name.startswith("selftest")} == {f"selftest: {step}" for step in STEPS}
    assert all(found[name]["state"] == "ok" for name in ("torch", "disk", "memory", *(f"selftest: {s}" for s in STEPS)))
    assert "bytes as predicted" in found["selftest: packed cache"]["detail"]
    # nothing of it stays
    assert list(tmp_path.iterdir()) == []


def broken(*arguments: Any, **options: Any) -> Any:
    raise AatcError("something is wrong here", "mend it")


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("model", "selftest.write_tiny_llama"),
        ("collect", "selftest.collect"),
        ("whiten", "selftest.whiten"),
        ("allocate", "selftesting.planned.allocate"),
        ("eval", "selftesting.divergence.evaluate"),
        ("packed cache", "selftesting.agreement.attach_codecs"),
    ],
)
def test_the_step_that_fails_is_named(
    aatc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, name: str
) -> None:
    monkeypatch.setattr(f"aatc_cli.stages.{name}", broken)
    outcome = aatc("doctor", "--run", tmp_path)
    assert outcome.code == 1
    assert f"Error: selftest: {step} failed: something is wrong here\nHint: " in outcome.err
    done = STEPS[: STEPS.index(step)]
    assert [s for s in STEPS if f"selftest: {s}" in outcome.out] == [*done, step]


def test_errors_of_libraries_are_findings_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def crash(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(selftest, "collect", crash)
    [failed] = doctor.diagnose(tmp_path).failed
    assert (failed.name, failed.detail) == ("selftest: collect", "RuntimeError: no such operator")


def test_a_cache_of_other_bytes_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from aatc_cli.runtime.state import CompressedState

    genuine = CompressedState.bytes_live
    monkeypatch.setattr(CompressedState, "bytes_live", lambda self: genuine(self) + 1)
    [failed] = doctor.diagnose(tmp_path).failed
    assert failed.name == "selftest: packed cache"
    assert "the byte law says" in failed.detail


def test_a_missing_package(aatc: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    genuine = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("scipy", "gguf") else genuine(name))
    outcome = aatc("doctor", "--run", tmp_path, "--json")
    assert outcome.code == 1
    states = {each["name"]: each["state"] for each in outcome.json["findings"]}
    assert (states["scipy"], states["gguf"]) == ("failed", "absent")
    assert not any(name.startswith("selftest") for name in states)


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_LEAST_DISK", 1 << 62)
    [failed] = doctor.diagnose(tmp_path / "not" / "yet" / "there").failed
    assert failed.name == "disk"
    assert str(tmp_path) in failed.detail
