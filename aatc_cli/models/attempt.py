"""What transformers raises while it loads something, as one sentence and the next command."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from transformers.utils import logging as transformers_logging

from aatc_cli.errors import AatcError

T = TypeVar("T")


def attempt(name: str, load: Callable[[], T]) -> T:
    """What ``load`` gives; whatever it raises becomes an `AatcError` about the model ``name``."""
    quiet_transformers()
    try:
        return load()
    except AatcError:
        raise
    except ImportError as error:
        needed = [error.name] if error.name else [part for part in ("gguf", "accelerate") if find_spec(part) is None]
        if not needed:
            raise AatcError(f"cannot load {name}: {first_line(error)}", "install the package it asks for") from error
        packages = " ".join(needed)
        raise AatcError(f"cannot load {name} without {packages}", f"pip install {packages}") from error
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for the same user mistake
        if isinstance(error, MemoryError) or "llocate memory" in str(error):
            problem = f"there is not enough memory to load {name}"
            raise AatcError(problem, "close other programs; --dtype bfloat16 halves the model") from error
        if "trust_remote_code" in str(error):
            raise AatcError(
                f"cannot load {name}: it needs code that comes with the model, which aatc never runs",
                "use a model whose architecture transformers has itself",
            ) from error
        raise AatcError(
            f"cannot load {name}: {first_line(error)}", "check the model's files, or fetch them again"
        ) from error


def quiet_transformers() -> None:
    """Keep transformers' own advice off stderr, where this tool writes its log, and its bars where no one watches.

    And keep it from asking the hub to convert a model's weights, which it does in a thread of its own.
    """
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\..*")


def first_line(error: Exception) -> str:
    """The first line of what an error says, with the next one where it ends in a colon; without any, its name."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
