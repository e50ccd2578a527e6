"""One commit of a model of the hub, as a folder: asked for once, and the same for all that is read of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from aatc_cli.errors import AatcError

T = TypeVar("T")
# files that say what a model is; weights are fetched by name
_SMALL = (".json", ".jinja", ".model", ".tiktoken", ".txt")
# a name server or a hub that does not answer at once will not answer a program that asks five times more
_SECONDS = 10.0


@dataclass(frozen=True)
class Snapshot:
    """The commit ``commit`` of the repository ``repository``, whose files are in ``folder`` once they are fetched.

    ``files`` are the names the hub lists, or None where it was not asked.
    """

    repository: str
    commit: str
    folder: Path
    files: tuple[str, ...] | None

    def fetch(self, name: str) -> Path:
        """The path of the file ``name``, fetched if the hub lists it and it is not there; raises `AatcError`."""
        path = self.folder / name
        if path.exists() or name not in (self.files or ()):
            return path
        _of_hub(self.repository, lambda: hf_hub_download(self.repository, name, revision=self.commit))
        return path


def open_snapshot(repository: str, revision: str | None) -> Snapshot:
    """The commit that ``revision`` (or main) names, with its small files; raises `AatcError`.

    Without a network it is the commit that the local cache has for that name.
    """
    try:
        info = HfApi().model_info(repository, revision=revision, timeout=_SECONDS)
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError, HFValidationError) as error:
        raise _refused(repository, revision, error) from error
    except Exception as error:  # of the network, in as many classes as there are libraries below
        cached = try_to_load_from_cache(repository, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise AatcError(
                f"there is no folder {repository}, and of the hub's model {repository} nothing is in the cache and the "
                f"hub cannot be asked ({_first(error)})",
                "check the path; a hub id needs network access or a filled cache, a folder or .gguf file needs neither",
            ) from error
        folder = Path(cached).parent
        return Snapshot(repository, folder.name, folder, None)
    names = tuple(sorted(file.rfilename for file in info.siblings or ()))
    if "config.json" not in names:
        raise AatcError(f"the hub's model {repository} has no config.json", "give a model in transformers' format")
    commit = str(info.sha)
    first = _of_hub(repository, lambda: hf_hub_download(repository, "config.json", revision=commit))
    snapshot = Snapshot(repository, commit, Path(first).parent, names)
    for name in names:
        if "/" not in name and name.endswith(_SMALL):
            snapshot.fetch(name)
    return snapshot


def _of_hub(repository: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except Exception as error:  # the same: of the network, the disk or the hub's rules
        raise _refused(repository, None, error) from error


def _refused(repository: str, revision: str | None, error: Exception) -> AatcError:
    if isinstance(error, GatedRepoError):
        problem = f"the hub gives {repository} only to those who have agreed to its terms"
        return AatcError(problem, "agree on its page, then log in: hf auth login")
    if isinstance(error, RevisionNotFoundError):
        return AatcError(f"the hub's model {repository} has no revision {revision}", "name another, or none")
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        problem = f"there is no folder {repository}, and the hub has no model of that name, or only for its owner"
        return AatcError(problem, "check the path or the name; for a private model log in: hf auth login")
    return AatcError(f"cannot fetch {repository}: {_first(error)}", "run the same command again, or give a folder")


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
