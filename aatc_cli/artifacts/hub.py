"""Shipped folders on the hub: where one goes up and comes down, pinned to a commit."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aatc_cli.artifacts.disk import replace_directory
from aatc_cli.errors import AatcError, UsageError

PREFIX = "hub:"
# what a shipped folder is made of, and nothing else that a repository may hold beside it
FILES = ("README.md", "plans/*", "transforms/*", "evals/*")
_NAME = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>\S+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def repository_of(name: str) -> tuple[str, str | None]:
    """Repository and revision of ``hub:owner/name@revision``; raises `UsageError`."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise UsageError(f"{name!r} is not a name on the hub", "write hub:owner/name@COMMIT")
    return found["repository"], found["revision"]


def download(name: str) -> Path:
    """The shipped folder ``hub:owner/name@COMMIT``, fetched once and kept beside the hub's cache; raises `AatcError`.

    Without a whole commit it is refused: a branch or tag may be another plan tomorrow.
    """
    repository, revision = repository_of(name)
    if revision is None or _COMMIT.fullmatch(revision) is None:
        remedy = f"pin it to a commit of 40 digits, as aatc export printed it: hub:{repository}@COMMIT"
        raise UsageError(f"{name} does not say which commit of the repository", remedy)
    client = _hub()
    kept = Path(client.constants.HF_HOME) / "aatc" / repository.replace("/", "--") / revision
    if kept.is_dir():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{revision}.", dir=kept.parent) as place:
        draft = Path(place) / "draft"
        try:
            # files of its own: the hub's cache has symbolic links, which artifacts are not read through
            client.snapshot_download(repository, revision=revision, allow_patterns=list(FILES), local_dir=draft)
        except Exception as error:  # the client has exceptions of its own for every way a download fails
            remedy = "check name, commit and network; a private repository needs a login"
            raise AatcError(f"cannot fetch {name}: {_first(error)}", remedy) from error
        replace_directory(draft, kept)
    return kept


def upload(folder: Path, repository: str, message: str) -> str:
    """Put a shipped folder into ``owner/name``, which is made if absent; the commit's hash. Raises `AatcError`."""
    client = _hub().HfApi()
    try:
        client.create_repo(repository, exist_ok=True)
        commit = client.upload_folder(
            repo_id=repository, folder_path=str(folder), commit_message=message, allow_patterns=list(FILES)
        )
    except Exception as error:  # as above
        remedy = "log in with hf auth login, and check that the repository is yours"
        raise AatcError(f"cannot upload to {repository}: {_first(error)}", remedy) from error
    return str(commit.oid)


def _hub() -> Any:
    import huggingface_hub

    return huggingface_hub


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
