"""The errors a user can meet: one sentence on what happened and one on what to do next."""

from __future__ import annotations


class AatcError(Exception):
    """Something the user can act on. Printed as ``Error: message`` and ``Hint: hint``; exit code 1."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(AatcError):
    """The command line itself is wrong. Exit code 2."""

    exit_code = 2


class ArtifactError(AatcError):
    """An artifact is missing, damaged, of an unknown schema, or belongs to another model."""


class SettingsMismatchError(AatcError):
    """An artifact exists with other settings than those asked for."""


class UnsupportedModelError(AatcError):
    """The model has an attention that this tool does not compress."""
