"""Plans that travel: one folder, the hub, and every --plan that takes them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aatc_cli.artifacts import hub
from aatc_cli.artifacts.plan import Plan

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def shipped(aatc: Any, run_folder: Path, evaluated: Any, tmp_path: Path) -> Path:
    """The plan of the run, measured, as a folder; the run itself is gone."""
    evaluated(run_folder, "paper-3", one=0.0125)
    done = aatc("export", run_folder / "plans" / "paper-3", tmp_path / "out" / "shipped", "--json")
    assert done.code == 0, done.err
    digest = Plan.open(run_folder / "plans" / "paper-3").digest
    size = sum(file.stat().st_size for file in (tmp_path / "out" / "shipped").rglob("*") if file.is_file())
    assert done.json == {"place": str(tmp_path / "out" / "shipped"), "digest": digest, "bytes": size}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shipped"]
    shutil.rmtree(run_folder)
    return tmp_path / "out" / "shipped"


def test_it_needs_nothing_beside_it(aatc: Any, shipped: Path, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    checked = aatc("allocate", "--check", shipped)
    assert checked.code == 0, checked.err
    assert "identical" in checked.out
    measured = aatc(
        *("eval", "--run", tmp_path / "new", "--plan", shipped, "--model", tiny_llama, "--text", corpus),
        *("--length", 160, "--limit", 1, "--json"),
    )
    assert measured.code == 0, measured.err
    assert [each["recipe"] for each in measured.json] == ["paper"]
    assert aatc("inspect", "--plan", shipped, "--json").json["recipe"] == "paper"
    seen = aatc("inspect", shipped, "--json").json
    assert [(plan["kl"], plan["stale"]) for plan in seen["plans"]] == [
        ({"one": {"mean": 0.0125, "stderr": 0.001}}, None)
    ]


def test_the_card(shipped: Path) -> None:
    text = (shipped / "README.md").read_text("utf-8")
    plan = Plan.open(shipped / "plans" / "paper-3")
    for part in (
        "# paper-3 for tiny-llama",
        f"| 8,192 | 4.2 MB | {plan.layout.bytes(8192) / 1e6:,.1f} MB |",
        "| KL, nats per token | one | 63 | 0.0125 ± 0.001 |",
        "| corpus.txt | 1 | 8 |",
        "aatc allocate --recipe paper --budget 3",
        f"Plan `{plan.digest}`",
        plan.model.weights_fingerprint,
    ):
        assert part in text, part
    [collect] = re.findall(r"^aatc collect .*$", text, re.M)
    assert "--model tiny-llama --text corpus.txt@1 --samples 8 --length 64 --seed 0 --rows 256" in collect
    assert "\naatc whiten --recipe paper\n" in text
    assert str(shipped.parent.parent) not in text


def test_the_card_names_what_is_not_usual(aatc: Any, run_folder: Path, tmp_path: Path) -> None:
    options = ("--percentile", 98, "--head-groups", 2, "--force")
    assert aatc("whiten", "--run", run_folder, *options).code == 0
    assert aatc("allocate", "--run", run_folder, "--ratio", 3, "--context", 4096).code == 0
    assert aatc("export", run_folder / "plans" / "paper-3x-4096", tmp_path / "out").code == 0
    text = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "\naatc whiten --recipe paper --head-groups 2 --percentile 98\n" in text
    assert "\naatc allocate --recipe paper --ratio 3 --context 4096\n" in text
    assert "Nothing was measured" in text


def test_damage_is_refused(aatc: Any, shipped: Path) -> None:
    file = shipped / "transforms" / "whiten" / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused = aatc("allocate", "--check", shipped)
    assert refused.code == 1
    assert "damaged" in refused.err


def test_nothing_is_replaced_unasked(aatc: Any, run_folder: Path, tmp_path: Path, snapshot: Any) -> None:
    plan = run_folder / "plans" / "paper-3"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear", "utf-8")
    before = snapshot(tmp_path)
    for target in (mine, run_folder, plan):
        refused = aatc("export", plan, target, "--force")
        assert (refused.code, snapshot(tmp_path)) == (1, before)
    assert aatc("export", plan, tmp_path / "out").code == 0
    again = aatc("export", plan, tmp_path / "out")
    assert again.code == 1
    assert "--force" in again.err
    assert aatc("export", plan, tmp_path / "out", "--force").code == 0


def test_a_folder_of_several_plans(aatc: Any, run_folder: Path, tmp_path: Path) -> None:
    assert aatc("allocate", "--run", run_folder, "--budget", 4, "-q").code == 0
    refused = aatc("export", run_folder, tmp_path / "out")
    assert refused.code == 1
    assert "holds 2 plans, not one: paper-3, paper-4" in refused.err


class FakeHub:
    """A hub of folders: what was uploaded is what is downloaded, by commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.constants = SimpleNamespace(HF_HOME=str(root / "home"))
        self.downloads = 0

    def HfApi(self) -> FakeHub:  # noqa: N802
        return self

    def create_repo(self, repository: str, *, exist_ok: bool) -> None:
        assert exist_ok

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, allow_patterns: list[str]) -> Any:
        assert "paper-3 for tiny-llama" in commit_message
        shutil.copytree(folder_path, self.root / repo_id / COMMIT)
        return SimpleNamespace(oid=COMMIT)

    def snapshot_download(self, repository: str, *, revision: str, allow_patterns: list[str], local_dir: Path) -> str:
        source = self.root / repository / revision
        if not source.is_dir():
            raise OSError("404: there is no such commit")
        self.downloads += 1
        shutil.copytree(source, local_dir)
        return str(local_dir)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(hub, "_hub", lambda: fake)
    return fake


def test_to_the_hub_and_back(aatc: Any, run_folder: Path, fake_hub: FakeHub) -> None:
    done = aatc("export", run_folder / "plans" / "paper-3", "hub:someone/plans")
    place, digest = done.out.split()
    assert place == f"hub:someone/plans@{COMMIT}"
    shutil.rmtree(run_folder)
    for _ in range(2):
        checked = aatc("allocate", "--check", place)
        assert checked.code == 0, checked.err
        assert digest[:12] in checked.out
    # the second time it is there already
    assert fake_hub.downloads == 1


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("hub:someone/plans", 2, "does not say which commit"),
        ("hub:someone/plans@main", 2, "does not say which commit"),
        ("hub:someone", 2, "is not a name on the hub"),
        ("hub:a/b/c@" + COMMIT, 2, "is not a name on the hub"),
        ("hub:someone/else@" + COMMIT, 1, "404: there is no such commit"),
    ],
)
def test_names_on_the_hub_that_are_refused(aatc: Any, fake_hub: FakeHub, name: str, code: int, says: str) -> None:
    refused = aatc("inspect", "--plan", name)
    assert (refused.code, refused.out) == (code, "")
    assert says in refused.err
    assert "Hint: " in refused.err
    assert not list(fake_hub.root.rglob("plans"))


def test_an_upload_makes_the_commit(aatc: Any, run_folder: Path, fake_hub: FakeHub) -> None:
    assert aatc("export", run_folder / "plans" / "paper-3", f"hub:someone/plans@{COMMIT}").code == 2


def test_the_real_client_has_what_is_called() -> None:
    import inspect

    import huggingface_hub

    assert huggingface_hub.constants.HF_HOME
    download = inspect.signature(huggingface_hub.snapshot_download).parameters
    assert {"repo_id", "revision", "allow_patterns", "local_dir"} <= set(download)
    upload = inspect.signature(huggingface_hub.HfApi.upload_folder).parameters
    assert {"repo_id", "folder_path", "commit_message", "allow_patterns"} <= set(upload)
    assert "exist_ok" in inspect.signature(huggingface_hub.HfApi.create_repo).parameters
