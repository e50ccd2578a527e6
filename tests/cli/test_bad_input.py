"""Every wrong thing a user can give: exit code 1 or 2, one Error line, one Hint line, no traceback, nothing touched."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from aatc_cli.artifacts.manifest import MANIFEST, TENSORS
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run

LENGTH = 48


@pytest.fixture
def collect(tiny_llama: Path, corpus: Path, run_folder: Path) -> Callable[..., list[object]]:
    """The arguments of a collect into the test's run, under a name that is not there yet."""

    def arguments(model: object = tiny_llama, text: object = corpus) -> list[object]:
        return [
            "collect",
            "--run",
            run_folder,
            "--name",
            "new",
            "--model",
            model,
            "--text",
            text,
            "--samples",
            6,
            "--length",
            LENGTH,
        ]

    return arguments


# budgets


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ("--budget 0", 2, "--budget must be a positive number, got 0"),
        ("--budget -1", 2, "--budget must be a positive number, got -1"),
        ("--budget 16.001", 2, "16.001 bits is above the 16 bits a channel can hold"),
        ("--budget 1e308", 2, "above the 16 bits"),
        ("--budget nan", 2, "--budget"),
        ("--budget inf", 2, "--budget"),
        ("--budget -inf", 2, "--budget"),
        ("--budget two", 2, "--budget"),
        ("--budget 2,x", 2, "--budget"),
        ("--budget", 2, "--budget"),
        ("", 2, "exactly one of --budget, --ratio and --bytes is needed, got none"),
        ("--budget 2 --budget 0", 2, "got 0"),
        ("--budget 3 --ratio 4 --context 64", 2, "--budget and --ratio"),
        ("--ratio 4 --bytes 1MB --context 64", 2, "--ratio and --bytes"),
        ("--ratio 4", 2, "--ratio needs --context"),
        ("--bytes 1MB", 2, "--bytes needs --context"),
        ("--ratio 0 --context 64", 2, "--ratio must be a positive number, got 0"),
        ("--ratio -2 --context 64", 2, "got -2"),
        ("--ratio nan --context 64", 2, "--ratio"),
        ("--ratio inf --context 64", 2, "--ratio"),
        ("--ratio 4 --context 0", 2, "--context"),
        ("--ratio 4 --context 1.5", 2, "--context"),
        ("--bytes 0 --context 64", 2, "--bytes must be a positive number"),
        ("--bytes 12XB --context 64", 2, "cannot read the size '12XB'"),
        ("--bytes MB --context 64", 2, "'MB'"),
        ("--bytes -1MB --context 64", 2, "'-1MB'"),
        ("--bytes nan --context 64", 2, "'nan'"),
        (f"--bytes {'9' * 400}GB --context 64", 2, "is no number of bytes"),
        ("--bytes 1B --context 8192", 1, "are not more than the"),
        ("--bytes 60KB --context 8192", 1, "60,000 bytes"),
        ("--ratio 1000 --context 8192", 1, "are not more than the"),
        ("--ratio 2 --context 64", 1, "are not more than the"),
        ("--bytes 230KB --context 8192", 1, "no allocation fits 230,000 bytes"),
        ("--budget 0.5", 1, "cannot pay for 3 protected layers"),
        ("--budget 1e-300", 1, "cannot pay"),
    ],
)
def test_budgets(refuses: Any, run_folder: Path, options: str, code: int, says: str) -> None:
    refuses("allocate", "--run", run_folder, *options.split(), code=code, says=(says,), folder=run_folder)


@pytest.mark.parametrize(
    "options", ["--budget 0", "--budget 17", "--ratio nan", "--bytes 1TB", "--budget 2 --ratio 3", "--context -1"]
)
def test_budgets_to_inspect(refuses: Any, run_folder: Path, options: str) -> None:
    where = ("inspect", "--run", run_folder)
    refuses(*where, *options.split(), code=2, says=(), folder=run_folder)
    refuses("inspect", "--profile", "llama-3.1-8b-instruct", *options.split(), code=2, says=(), folder=run_folder)


def test_budgets_of_plans_that_are_not_there(refuses: Any, run_folder: Path, tiny_llama: Path) -> None:
    refuses("inspect", "--run", run_folder, "--budget", 7, says=("there is no plan at", "paper-7"), folder=run_folder)
    where = ("eval", "--run", run_folder, "--model", tiny_llama)
    refuses(*where, "--budget", 7, says=("there is no plan at", "paper-7"), folder=run_folder)
    refuses(*where, "--recipe", "paper", code=2, says=("recipe paper needs a budget",), folder=run_folder)
    refuses(*where, "--budget", "nan", code=2, says=(), folder=run_folder)


# usage


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bogus", "bogus"),
        ("--bogus", "--bogus"),
        ("collect --bogus", "--bogus"),
        ("collect --samples 0", "--samples"),
        ("collect --samples -3", "--samples"),
        ("collect --samples many", "--samples"),
        ("collect --length 1", "--length"),
        ("collect --seed -1", "--seed"),
        (f"collect --seed {2**31}", "--seed"),
        ("collect --skip-first -1", "--skip-first"),
        ("collect --rows 0", "--rows"),
        ("collect --batch 0", "--batch"),
        ("collect --dtype int8", "--dtype"),
        ("collect --checkpoint-seconds -1", "--checkpoint-seconds"),
        ("collect --calibration both", "--calibration"),
        ("collect", "no model was named"),
        ("eval --budget 2", "no model was named"),
        ("eval --task taste", "--task is a word of the command now"),
        ("eval taste", "taste"),
        ("whiten --transform fourier", "--transform"),
        ("whiten --percentile 0", "(0, 100], got 0"),
        ("whiten --shrinkage 1.01", "[0, 1], got 1.01"),
        ("whiten --shrinkage nan", "got nan"),
        ("whiten --percentile 100.1", "got 100.1"),
        ("whiten --percentile nan", "got nan"),
        ("whiten --head-groups 0", "--head-groups"),
        ("allocate --check x --budget 2", "--check takes recipe and budget from the plan"),
        ("allocate --check x --ratio 0", "--check takes recipe"),
        ("allocate --check x --recipe paper", "--check takes"),
        ("inspect a b c", "c"),
        ("inspect --run", "--run"),
    ],
)
def test_usage(refuses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = refuses(*arguments.split(), code=2, says=(says,), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "aatc" in outcome.err.splitlines()[-1] or "Hint: " in outcome.err.splitlines()[-1]


def test_recipes_and_profiles(refuses: Any, run_folder: Path, tmp_path: Path, tiny_llama: Path) -> None:
    allocate = ("allocate", "--run", run_folder, "--budget", 3)
    outcome = refuses(*allocate, "--recipe", "papper", says=("no recipe named 'papper'",), folder=run_folder)
    assert "paper" in outcome.err.splitlines()[-1]
    refuses(*allocate, "--recipe", "fp16", code=2, says=("recipe fp16 allocates nothing",), folder=run_folder)
    bad = tmp_path / "bad.toml"
    bad.write_text('name = "../../escape"\nsummary = "s"\n')
    refuses(*allocate, "--recipe", bad, says=("recipe bad.toml", "name: "), folder=tmp_path)
    bad.write_text('name = "x"\nsummary = "s"\nmaxbits = 3\n')
    refuses(*allocate, "--recipe", bad, says=("maxbits",), folder=tmp_path)
    bad.write_text("name = ")
    refuses(*allocate, "--recipe", bad, says=("is not valid TOML",), folder=tmp_path)
    bad.write_text('name = "paper"\nsummary = "another paper"\n')
    refuses(
        *allocate,
        "--recipe",
        bad,
        folder=tmp_path,
        says=("settings.recipe.protect.layers was 3, now 0", "settings.recipe.summary was"),
    )
    collect = ("collect", "--run", run_folder, "--model", tiny_llama)
    refuses(*collect, "--profile", "llama", says=("no model profile named 'llama'",), folder=run_folder)
    refuses(
        *collect,
        "--profile",
        "smollm2-135m-instruct",
        folder=run_folder,
        says=("profile smollm2-135m-instruct expects layers = 30, but the model has 4",),
    )
    refuses(
        *collect,
        "--profile",
        "smollm2-135m-instruct",
        "--calibration",
        "transform",
        code=2,
        folder=run_folder,
        says=("profile smollm2-135m-instruct has no transform calibration",),
    )


@pytest.mark.parametrize("name", ["../up", "plans", ".hidden", "a/b", ""])
def test_names_that_leave_the_run(refuses: Any, collect: Any, run_folder: Path, tmp_path: Path, name: str) -> None:
    refuses(*collect(), "--name", name, code=2, says=(repr(name), "cannot be the name"), folder=tmp_path)


# windows


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--length 513", ("513 tokens", "context of 512")),
        ("--length 4", ("windows of 4 tokens", "first 4")),
        ("--samples 1 --length 20", ("16 calibration tokens", "32 channels")),
        ("--samples 100000", ("windows of 48 tokens, but 100000 are needed",)),
        (f"--samples {10**15}", (f"but {10**15} are needed",)),
        (f"--length {10**15}", (f"{10**15} tokens", "512")),
        ("--device foo", ("'foo'",)),
        ("--device mps", ("'mps'",)),
        ("--device meta", ("'meta'",)),
        ("--device cuda:99", ("device cuda:99", "CUDA")),
    ],
)
def test_windows_and_devices(refuses: Any, collect: Any, run_folder: Path, options: str, says: tuple[str, ...]) -> None:
    refuses(*collect(), *options.split(), says=says, folder=run_folder)


def test_windows_to_evaluate(refuses: Any, run_folder: Path, tiny_llama: Path, corpus: Path) -> None:
    where = ("eval", "--run", run_folder, "--model", tiny_llama, "--text", corpus, "--recipe", "fp16")
    refuses(*where, "--length", 513, says=("513 tokens", "context of 512"), folder=run_folder)
    refuses(*where, "--length", 64, "--first", 63, code=2, says=("--first 63",), folder=run_folder)
    refuses(*where, "--device", "cuda:99", says=("device cuda:99", "CUDA"), folder=run_folder)
    where = ("eval", "distortion", *where[1:])
    refuses(*where, "--length", 64, code=2, says=("fp16 has no quantizer",), folder=run_folder)


# text


WORDS = "some words of text\n" * 40
FILES = {
    "empty.txt": b"",
    "space.txt": b" \n\t\n",
    "latin.txt": "caf\xe9 ".encode("latin-1") * 200,
    "packed.txt": gzip.compress(WORDS.encode()),
    "short.txt": b"x" * (LENGTH - 1),
    "few.txt": b"x" * (6 * LENGTH - 1),
    "rows.jsonl": (json.dumps({"body": WORDS, "id": 3}) + "\n").encode() * 9,
    "broken.jsonl": b'{"text": "a"}\n{"text": \n',
    "lists.jsonl": b"[1, 2]\n",
}


@pytest.mark.parametrize(
    ("spec", "code", "says"),
    [
        ("empty.txt", 1, ("empty.txt", "is empty")),
        ("space.txt", 1, ("space.txt", "only white space")),
        ("latin.txt", 1, ("latin.txt", "not UTF-8", "byte 3")),
        ("packed.txt", 1, ("packed.txt", "gzip")),
        ("folder", 1, ("folder is a folder, not a text file",)),
        ("none.txt", 1, ("no text file none.txt",)),
        ("short.txt", 1, ("0 windows of 48 tokens, but 6 are needed",)),
        ("few.txt", 1, ("has 5 windows of 48 tokens, but 6 are needed",)),
        ("rows.jsonl", 2, ("needs the field", "body, id")),
        ("rows.jsonl:text", 1, ("line 1", "no field 'text'", "body, id")),
        ("rows.jsonl:id", 1, ("'id'", "neither a string")),
        ("broken.jsonl:text", 1, ("line 2", "not valid JSON")),
        ("lists.jsonl:text", 1, ("line 1", "not a JSON object")),
        ("builtin:nonsense", 1, ("no built-in text named 'nonsense'",)),
        ("hf:only:three:parts", 2, ("does not have the form",)),
        ("hf:./none:c:s:f", 1, ("there is no folder ./none",)),
        ("short.txt@-1", 2, ("must be a positive number",)),
        ("short.txt@1e999", 2, ("must be a positive number",)),
        ("", 2, ("names no text",)),
    ],
)
def test_texts(
    refuses: Any,
    collect: Any,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    code: int,
    says: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    refuses(*collect(text=spec), code=code, says=says, folder=tmp_path)


def test_a_text_that_gets_no_window(refuses: Any, collect: Any, run_folder: Path, corpus: Path) -> None:
    refuses(*collect(), "--text", f"{corpus}@0.001", says=("gets none of the 6 windows",), folder=run_folder)


def test_a_hub_without_network(refuses: Any, collect: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'owner/data' on the Hub\nwith a second line")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    outcome = refuses(
        *collect(text="hf:owner/data:default:train:text"),
        folder=run_folder,
        says=("'owner/data' cannot be read", "no network", "ConnectionError"),
    )
    assert "file.txt" in outcome.err


# models


def edit_config(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def edit_weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        parts = load_file(folder / "model.safetensors")
        change(parts)
        save_file(parts, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def remove(pattern: str) -> Callable[[Path], object]:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


KEYS = "model.layers.2.self_attn.k_proj.weight"
MODELS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no-config": (remove("config.json"), ("has no config.json",)),
    "broken-config": (lambda folder: (folder / "config.json").write_text("{"), ("cannot load", "JSON")),
    "empty-config": (lambda folder: (folder / "config.json").write_text("{}"), ("cannot load", "model_type")),
    "no-weights": (remove("*.safetensors"), ("has no weight files",)),
    "truncated-weights": (truncate, ("model.safetensors is cut short",)),
    "no-tokenizer": (remove("tokenizer*"), ("has no tokenizer",)),
    # transformers draws what is absent at random, and says so where nobody looks
    "a-weight-is-absent": (edit_weights(lambda parts: parts.pop(KEYS)), ("no weights for 1 of its parameters", KEYS)),
    "layers-are-absent": (edit_config(num_hidden_layers=5), ("no weights for 9", "model.layers.4.")),
    "an-odd-head-dim": (edit_config(head_dim=15), ("requires an even rotary dimension",)),
    "another-head-dim": (edit_config(head_dim=8), ("k_proj.weight of shape [32, 64]", "asks for [16, 64]")),
    "another-vocabulary": (edit_config(vocab_size=300), ("lm_head.weight of shape [260, 64]", "[300, 64]")),
    "small-vocabulary": (edit_config(vocab_size=100), ("the tokenizer gives token", "embeddings for 100 tokens")),
    "kv-heads-do-not-divide": (edit_config(num_key_value_heads=3), ("heads (4) must be a multiple of kv_heads (3)",)),
    "no-hidden-size": (edit_config(hidden_size=0), ("hidden_size",)),
    "latent-attention": (edit_config(kv_lora_rank=8), ("llama is not supported", "MLA")),
}


@pytest.mark.parametrize("which", MODELS)
def test_models(refuses: Any, collect: Any, tiny_llama: Path, run_folder: Path, tmp_path: Path, which: str) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    change, says = MODELS[which]
    change(folder)
    refuses(*collect(model=folder), says=says, folder=run_folder)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "the model's name is empty"),
        ("nowhere", "nowhere is not a model"),
        ("./nowhere", "./nowhere is not a model"),
        ("a/b/c", "a/b/c is not a model"),
        ("none.gguf", "there is no model file none.gguf"),
        ("owner/absent", "there is no folder owner/absent, and of the hub's model owner/absent"),
        (os.devnull, "/dev/null is not a model"),
    ],
)
def test_models_that_are_not_there(
    refuses: Any, collect: Any, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (collect(model=spec), ["inspect", "--model", spec]):
        refuses(*arguments, says=(says,), folder=run_folder)


def test_a_gguf_file_of_junk(refuses: Any, collect: Any, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(b"GGUFjunk")
    refuses(*collect(model=tmp_path / "junk.gguf"), says=("cannot load junk.gguf",), folder=run_folder)


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        (
            "gpt2",
            {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 260},
            "gpt2 is not supported: it is not among",
        ),
        ("t5", {"num_layers": 1, "d_model": 16, "num_heads": 2}, "t5 is not supported: it is an encoder-decoder"),
        ("deepseek_v3", {"num_hidden_layers": 1}, "deepseek_v3 is not supported: multi-head latent attention"),
    ],
)
def test_models_of_another_kind(
    refuses: Any,
    collect: Any,
    run_folder: Path,
    tiny_llama: Path,
    tmp_path: Path,
    family: str,
    settings: Any,
    says: str,
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(shutil.copytree(tiny_llama, tmp_path / family))
    config = AutoConfig.for_model(family, **settings)
    if family == "gpt2":
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    config.save_pretrained(folder)
    for arguments in (collect(model=folder), ["inspect", "--model", folder]):
        outcome = refuses(*arguments, says=(says,), folder=run_folder)
        assert "supported: decoder-only models" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "weights_fingerprint"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "config_hash"),
    ],
    ids=["weights", "rope"],
)
def test_a_plan_of_another_model(
    refuses: Any, run_folder: Path, tmp_path: Path, new_model: Any, corpus: Path, changes: Any, field: str
) -> None:
    """The same name, another content: eval refuses the plan and collect the statistics, by the field."""
    other = new_model(tmp_path / "tiny-llama", **changes)
    where = ("--run", run_folder, "--model", other, "--text", corpus)
    refuses("eval", *where, "--length", 160, "--budget", 3, says=("the model is not the one", field), folder=run_folder)
    refuses(
        "collect",
        *where,
        "--samples",
        8,
        "--length",
        64,
        "--rows",
        256,
        says=("made with other settings", field),
        folder=run_folder,
    )


# artifacts


@pytest.mark.parametrize("file", [MANIFEST, TENSORS])
@pytest.mark.parametrize(
    ("damaged", "command"),
    [
        ("stats", ("whiten", "--percentile", 98, "--force")),
        ("transforms/whiten", ("allocate", "--budget", 4)),
        ("plans/paper-3", ("inspect", "--budget", 3)),
        ("plans/paper-3", ("eval", "--budget", 3, "--length", 160)),
        ("transforms/whiten", ("eval", "--budget", 3, "--length", 160)),
    ],
    ids=["whiten", "allocate", "inspect", "eval-plan", "eval-transform"],
)
def test_damaged_inputs(
    refuses: Any, run_folder: Path, tiny_llama: Path, corpus: Path, damaged: str, file: str, command: Any
) -> None:
    path = run_folder / damaged / file
    content = bytearray(path.read_bytes())
    if file == TENSORS:
        # every data byte, so that whichever tensor is read first is met
        start = 8 + int.from_bytes(content[:8], "little")
        content[start:] = bytes(byte ^ 1 for byte in content[start:])
    else:
        content[content.index(b"llama")] ^= 1
    path.write_bytes(content)
    more = ("--model", tiny_llama, "--text", corpus) if command[0] == "eval" else ()
    outcome = refuses(
        command[0], "--run", run_folder, *more, *command[1:], says=(damaged, "damaged"), folder=run_folder
    )
    assert "--force" in outcome.err.splitlines()[-1]


def test_missing_inputs_name_the_command(refuses: Any, tmp_path: Path, tiny_llama: Path) -> None:
    run = tmp_path / "run"
    for arguments, says, remedy in (
        (("whiten",), "there is no stats", "aatc collect"),
        (("allocate", "--budget", 2), "there is no transform", "aatc whiten"),
        (("inspect",), "there are no artifacts", "aatc collect"),
        (("inspect", "--budget", 2), "there is no plan", "aatc allocate"),
        (("eval", "--model", tiny_llama, "--budget", 2), "there is no plan", "aatc allocate"),
        (("report",), "nothing to report", "aatc"),
        (("allocate", "--check", run / "x"), "there is no plan", "aatc allocate"),
    ):
        where = () if "--check" in arguments else ("--run", run)
        outcome = refuses(arguments[0], *where, *arguments[1:], says=(says,), folder=tmp_path)
        assert remedy in outcome.err.splitlines()[-1]
        assert not run.exists()


def test_a_run_that_is_a_file_or_cannot_be_written(
    refuses: Any, collect: Any, tiny_llama: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    where = ("--model", tiny_llama, "--text", corpus, "--samples", 6, "--length", LENGTH)
    refuses("collect", "--run", tmp_path / "file", *where, says=("file",), folder=tmp_path)

    def read_only(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "run"))

    monkeypatch.setattr(Path, "mkdir", read_only)
    refuses("collect", "--run", tmp_path / "run", *where, says=("Permission denied",), folder=tmp_path)


def test_two_writers(refuses: Any, collect: Any, run_folder: Path) -> None:
    with Run(run_folder).lock():
        says = (f"is being written by process {os.getpid()}",)
        refuses(*collect(), says=says, folder=run_folder)
        refuses("whiten", "--run", run_folder, "--force", says=says, folder=run_folder)
        refuses("allocate", "--run", run_folder, "--budget", 4, says=says, folder=run_folder)
    assert Plan.open(run_folder / "plans" / "paper-3").name == "paper-3"


def test_the_disk_is_full(refuses: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aatc_cli.artifacts.tensor_file import TensorFile

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFile, "finish", full)
    outcome = refuses(
        "allocate", "--run", run_folder, "--budget", 4, says=("cannot be written", "No space left"), folder=run_folder
    )
    assert "space left on the disk" in outcome.err.splitlines()[-1]


def test_a_full_disk_is_that_of_the_target(refuses: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        # as the system says it: by the name of what is copied
        raise OSError(28, "No space left on device", str(source))

    monkeypatch.setattr(shutil, "copyfile", full)
    target = run_folder / "shipped"
    says = (f"{target} cannot be written: No space left on device",)
    refuses("export", run_folder / "plans" / "paper-3", target, says=says, folder=run_folder)


def test_a_run_for_reading_is_refused_before_it_is_measured(
    refuses: Any, run_folder: Path, tiny_llama: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != run_folder and access(place, mode))
    where = ("eval", "--run", run_folder, "--model", tiny_llama, "--text", corpus, "--length", 256)
    outcome = refuses(*where, says=(f"{run_folder / 'evals'} cannot be written: Permission denied",), folder=run_folder)
    assert "eval kl: " not in outcome.err


@pytest.mark.parametrize(
    ("task", "hint"), [("accumulate", "use --tokens 255 or less"), ("ruler --context 5000", "use --context 512")]
)
def test_the_hint_for_a_long_text_is_one_that_helps(
    refuses: Any, run_folder: Path, tiny_llama: Path, corpus: Path, task: str, hint: str
) -> None:
    outcome = refuses(
        *("eval", *task.split(), "--run", run_folder, "--model", tiny_llama, "--text", corpus),
        says=("are more than the model's context of 512",),
        folder=run_folder,
    )
    assert hint in outcome.err


def test_long_and_odd_arguments(refuses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("ours")
    refuses("inspect", "notes.txt", says=("neither an artifact, nor a run",), folder=tmp_path)
    refuses("inspect", "x" * 5000, says=("File name too long",), folder=tmp_path)
    refuses("inspect", "two\nlines", says=("there are no artifacts in two lines",), folder=tmp_path)
    refuses("inspect", os.fsdecode(b"\xff\xfe"), says=("there are no artifacts in",), folder=tmp_path)
    assert sys.argv[0] == "aatc"
