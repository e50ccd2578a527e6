"""A package that is absent or of another release is one sentence with the command that installs it."""

from __future__ import annotations

import builtins
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from aatc_cli.errors import AatcError
from aatc_cli.models import attempt, loading, requirements, tokenizer
from aatc_cli.models.loading import find_model, load_config

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("found", ["5.17.0", "5.24.0", "5.31", "5.20.0.dev0", "5.99.1"])
def test_supported_releases_pass(monkeypatch, found):
    monkeypatch.setattr(requirements, "version", lambda name: found)
    requirements.check_transformers()


@pytest.mark.parametrize("found", ["5.16.3", "4.57.0", "6.0.0", "6.1", "unknown"])
def test_other_releases_are_refused(monkeypatch, found):
    monkeypatch.setattr(requirements, "version", lambda name: found)
    with pytest.raises(AatcError, match=rf"transformers {found} .* 5\.17 or newer, and older than 6\.0") as caught:
        requirements.check_transformers()
    assert caught.value.hint == "pip install 'transformers>=5.17,<6'"


def test_the_range_is_that_of_the_package_itself():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"transformers>=5.17,<6"' in text
    assert "transformers>=5.17,<6" in requirements.INSTALL
    assert f"{requirements.TESTED[0]} to {requirements.TESTED[1]}" in (ROOT / "docs" / "cache.md").read_text("utf-8")


def test_the_command_line_says_it_before_anything_is_imported():
    """In a process of its own, in which transformers looks absent and its import would fail."""
    code = (
        "import sys, importlib.metadata as metadata\n"
        "found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'transformers': raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
        "sys.modules['transformers'] = None\n"
        "sys.argv = ['aatc', 'inspect', '--model', '.']\n"
        "from aatc_cli.__main__ import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "Error: the package transformers is not installed",
        "Hint: pip install 'transformers>=5.17,<6'",
    ]


def test_an_absent_transformers_is_named(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "version", absent)
    with pytest.raises(AatcError, match="transformers is not installed"):
        requirements.check_transformers()


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_an_absent_package_of_the_loader_is_named(monkeypatch, tmp_path, package):
    """transformers does not say which package in a way a program could read: what is absent is looked for."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")

    def fail(*args, **kwargs):
        raise ImportError("Loading this needs a package.\nSee https://example.org")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", fail)
    monkeypatch.setattr(attempt, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(AatcError, match=rf"cannot load m\.gguf without {package}$") as caught:
        load_config(find_model(str(file)))
    assert caught.value.hint == f"pip install {package}"
    monkeypatch.setattr(attempt, "find_spec", lambda name: object())
    with pytest.raises(AatcError, match=r"cannot load m\.gguf: Loading this needs a package\.$"):
        load_config(find_model(str(file)))


def test_a_failed_import_below_the_loader_is_named(monkeypatch, tiny_llama):
    real = builtins.__import__

    def fail(name, *args, **kwargs):
        if name == "sentencepiece":
            raise ModuleNotFoundError("No module named 'sentencepiece'", name="sentencepiece")
        return real(name, *args, **kwargs)

    def load(*args, **kwargs):
        import sentencepiece  # noqa: F401

    monkeypatch.setattr(builtins, "__import__", fail)
    monkeypatch.setattr(tokenizer.AutoTokenizer, "from_pretrained", load)
    with pytest.raises(AatcError, match=r"without sentencepiece$"):
        loading.load_tokenizer(find_model(str(tiny_llama)))
