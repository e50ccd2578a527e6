"""Where the questions of qa_1 and qa_2 come from: a folder with the original files, or the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from aatc_cli.errors import AatcError
from aatc_cli.text.ruler.questions import (
    HOTPOT_FILE,
    SQUAD_FILE,
    Questions,
    hub_hotpot,
    hub_squad,
    read_hotpot,
    read_squad,
)

HUB = "hub"
_HUB_SETS = {"qa_1": ("rajpurkar/squad_v2", None), "qa_2": ("hotpotqa/hotpot_qa", "distractor")}


def open_collections(data: str | None, wanted: set[str]) -> tuple[Questions | None, Questions | None]:
    """Questions of qa_1 and qa_2, as far as they are ``wanted`` and ``data`` has them; without ``data`` there are none.

    Raises `AatcError` for a folder that is not there, a file that is none of its kind, and a hub out of reach.
    """
    if data is None:
        return None, None
    if data == HUB:
        squad = hub_squad(_hub_records("qa_1")) if "qa_1" in wanted else None
        return squad, hub_hotpot(_hub_records("qa_2")) if "qa_2" in wanted else None
    folder = Path(data)
    if not folder.is_dir():
        raise AatcError(f"there is no folder {data}", "give the folder with the files of the benchmark, or --data hub")
    return _in(folder, SQUAD_FILE, read_squad), _in(folder, HOTPOT_FILE, read_hotpot)


def _in(folder: Path, name: str, read: Callable[[Path], Questions]) -> Questions | None:
    return read(folder / name) if (folder / name).is_file() else None


def _hub_records(task: str) -> Iterable[Mapping[str, Any]]:
    name, config = _HUB_SETS[task]
    try:
        # imported here: it takes seconds, and only the hub needs it
        from datasets import load_dataset

        records: list[Mapping[str, Any]] = list(load_dataset(name, config, split="validation"))
    except Exception as error:
        # the hub client fails with errors of many libraries; the user needs one sentence and the first line of theirs
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise AatcError(
            f"the dataset {name} cannot be read from the hub ({reason})",
            "give a folder with the original files by --data",
        ) from error
    return records
