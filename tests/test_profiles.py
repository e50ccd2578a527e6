from __future__ import annotations

from pathlib import Path

import pytest

from aatc_cli import profiles
from aatc_cli.config import HeadGroups
from aatc_cli.errors import AatcError
from aatc_cli.profiles import available, dump, load_model_profile, load_recipe, profiles_dir
from aatc_cli.text.sources import parse_source

RECIPE = 'name = "mine"\nsummary = "s"\n'
PROFILE = (
    'name = "m"\nmodel = "o/m"\ncontext = 512\n[geometry]\nlayers = 2\nheads = 4\nkv_heads = 2\nhead_dim = 4\n'
    'hidden_size = 16\n[calibration.rates]\nsources = ["builtin:python-docs"]\nsamples = 3\nlength = 64\n'
)


def refused(load: object, path: Path, content: str | bytes, *parts: str) -> AatcError:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(AatcError) as caught:
        load(str(path))  # type: ignore[operator]
    assert caught.value.hint
    assert "\n" not in caught.value.message
    for part in parts:
        assert part in caught.value.message
    return caught.value


def test_the_names_that_are_packaged() -> None:
    assert {"paper", "fp16", "var-only", "per-layer", "global", "no-query", "no-output"} <= set(available("recipes"))
    assert {"llama-3.1-8b-instruct", "qwen2.5-7b-instruct", "smollm2-135m-instruct"} <= set(available("models"))


@pytest.mark.parametrize("name", available("recipes"))
def test_every_recipe_reads_and_is_called_as_its_file(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.summary
    assert type(recipe).model_validate(dump(recipe)) == recipe


@pytest.mark.parametrize("name", available("models"))
def test_every_model_profile_reads_and_its_texts_parse(name: str) -> None:
    profile = load_model_profile(name)
    assert profile.name == name
    assert profile.head_groups_why
    for mixture in (profile.calibration.rates, profile.calibration.transform):
        for source in mixture.sources if mixture else []:
            parse_source(source)
        assert mixture is None or mixture.length <= profile.context


def test_the_paper_recipe_is_the_paper() -> None:
    recipe = load_recipe("paper")
    assert (recipe.window.sinks, recipe.window.recent, recipe.window.flush) == (4, 128, 16)
    assert (recipe.protect.layers, recipe.protect.key_extra, recipe.protect.value_extra) == (3, 1.0, 0.0)
    assert (recipe.min_bits, recipe.max_bits, recipe.normalize_percentile) == (0, 16, 95.0)
    assert (recipe.key_weight, recipe.value_weight, recipe.allocator) == ("query", "output", "waterfill")


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("no-query", {"key_weight"}),
        ("no-output", {"value_weight"}),
        ("var-only", {"key_weight", "value_weight"}),
        ("per-layer", {"allocator"}),
        ("global", {"allocator"}),
    ],
)
def test_an_ablation_differs_from_the_paper_in_its_axis_alone(name: str, differs: set[str]) -> None:
    paper, other = dump(load_recipe("paper")), dump(load_recipe(name))
    assert {key for key in paper if paper[key] != other[key]} - {"name", "summary"} == differs


@pytest.mark.parametrize(
    ("keys", "values", "groups", "folder"),
    [
        ("profile", "profile", (2, 2), "metric"),
        ("per-head", "profile", (8, 2), "metric-keys-per-head"),
        ("profile", "all", (2, 1), "metric-values-all"),
        ("per-head", "all", (8, 1), "metric-keys-per-head-values-all"),
        ("all", "all", (1, 1), "metric-keys-all-values-all"),
    ],
)
def test_head_groups_of_a_recipe(keys: str, values: str, groups: tuple[int, int], folder: str) -> None:
    recipe = load_recipe("loss-aware").model_copy(update={"key_groups": keys, "value_groups": values})
    chosen = recipe.head_groups(8, HeadGroups.both(2))
    assert (chosen.of("k"), chosen.of("v")) == groups
    assert recipe.transform_name == folder


@pytest.mark.parametrize("widths", [[], [1, 2], [0, 2, 1, 16], [0, 8], [0, 4, 4, 16], [0, 16, 17]])
def test_widths_rise_from_the_least_to_the_most(tmp_path: Path, widths: list[int]) -> None:
    says = "widths must rise from min_bits to max_bits"
    refused(load_recipe, tmp_path / "x.toml", RECIPE + f"widths = {widths}\n", says)
    path = tmp_path / "y.toml"
    path.write_text(RECIPE + "widths = [0, 1, 2, 4, 8]\nmax_bits = 8\n")
    assert load_recipe(str(path)).allowed_widths == (0, 1, 2, 4, 8)
    assert load_recipe("paper").allowed_widths == tuple(range(17))


def test_a_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(RECIPE + "[window]\nsinks = 0\nrecent = 8\nflush = 4\n")
    assert load_recipe(str(path)).window.recent == 8
    path.write_text(PROFILE)
    assert load_model_profile(str(path)).geometry.channels == 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("maxbits = 3\n", "maxbits: Extra inputs"),
        ("max_bits = 17\n", "max_bits: "),
        ('min_bits = "2"\n', "min_bits: Input should be a valid integer"),
        ("min_bits = true\n", "min_bits: "),
        ("min_bits = 2.0\n", "min_bits: "),
        ("[window]\nflush = 200\n", "flush (200) must not exceed"),
        ("[window]\nsink = 1\n", "window.sink: "),
        ("[protect]\nkey_extra = nan\n", "protect.key_extra: "),
        ("[protect]\nkey_extra = -1.0\n", "protect.key_extra: "),
        ('allocator = "magic"\n', "allocator: "),
        ("normalize_percentile = inf\n", "normalize_percentile: "),
        ("window = 3\n", "window: "),
    ],
)
def test_a_recipe_is_read_strictly(tmp_path: Path, change: str, says: str) -> None:
    refused(load_recipe, tmp_path / "bad.toml", RECIPE + change, "recipe bad.toml", says)


@pytest.mark.parametrize("name", ["../up", "a/b", "", " ", ".hidden", "-x", "a b", "ü"])
def test_a_recipe_name_is_one_plain_file_name(tmp_path: Path, name: str) -> None:
    refused(load_recipe, tmp_path / "bad.toml", f'name = "{name}"\nsummary = "s"\n', "name: ")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("kv_heads = 2", "kv_heads = 3", "heads (4) must be a multiple of kv_heads (3)"),
        ("context = 512", "context = 512\nhead_groups = 3", "head_groups (3) must divide kv_heads (2)"),
        ("layers = 2", "", "geometry.layers: Field required"),
        ("layers = 2", "layers = 0", "geometry.layers: "),
        ("samples = 3", "samples = 0", "calibration.rates.samples: "),
        ('["builtin:python-docs"]', "[]", "calibration.rates.sources: "),
        ('["builtin:python-docs"]', '"a.txt"', "calibration.rates.sources: "),
        ("[calibration.rates]", "[calibration.transform]", "calibration.rates: Field required"),
        ('model = "o/m"', "model = 3", "model: "),
    ],
)
def test_a_model_profile_is_read_strictly(tmp_path: Path, old: str, new: str, says: str) -> None:
    changed = PROFILE.replace(old, new)
    assert changed != PROFILE
    refused(load_model_profile, tmp_path / "bad.toml", changed, "model profile bad.toml", says)


def test_every_wrong_field_is_named_at_once(tmp_path: Path) -> None:
    refused(load_recipe, tmp_path / "bad.toml", RECIPE + "a = 1\nmax_bits = 99\n", "a: Extra", "max_bits: ", "; ")


@pytest.mark.parametrize(
    "content", [b"name = ", b"\xff\xfe", b"name = 1\nname = 2", b"a = " + b"[" * 100_000, b"\x00", b"{}"]
)
def test_what_is_not_toml(tmp_path: Path, content: bytes) -> None:
    refused(load_recipe, tmp_path / "bad.toml", content, "bad.toml is not valid TOML")


def test_empty_toml_names_the_fields(tmp_path: Path) -> None:
    refused(load_recipe, tmp_path / "bad.toml", "", "name: Field required", "summary: Field required")


def test_a_profile_is_not_a_recipe(tmp_path: Path) -> None:
    refused(load_recipe, tmp_path / "bad.toml", PROFILE, "geometry: Extra inputs")
    refused(load_model_profile, tmp_path / "bad.toml", RECIPE, "geometry: Field required")


@pytest.mark.parametrize("name", ["papper", "none.toml", "", ".", "/"])
def test_unknown_names_list_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AatcError, match="no recipe named") as caught:
        load_recipe(name)
    assert "paper, paper-fused, " in str(caught.value.hint)
    with pytest.raises(AatcError, match="no model profile named") as caught:
        load_model_profile(name)
    assert "llama-3.1-8b-instruct" in str(caught.value.hint)


def test_a_folder_called_toml_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "x.toml").mkdir()
    with pytest.raises(AatcError, match="no recipe named"):
        load_recipe(str(tmp_path / "x.toml"))


def test_no_profile_is_chosen_by_part_of_a_name() -> None:
    for name in ("llama", "qwen2.5", "Llama-3.1-8B-Instruct", "paper.toml.bak"):
        with pytest.raises(AatcError):
            load_model_profile(name)


def test_packaged_profiles_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "aatc_cli"
    package.mkdir(parents=True)
    monkeypatch.setattr(profiles, "__file__", str(package / "profiles.py"))
    assert profiles_dir() == tmp_path / "site" / "profiles"
    (package / "_profiles").mkdir()
    assert profiles_dir() == package / "_profiles"
