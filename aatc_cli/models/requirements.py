"""Which transformers this package works with, found out before anything of it is imported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from aatc_cli.errors import AatcError

# the oldest release whose caches, attention and mask interfaces are the ones used here, and the first not to be tried
OLDEST, END = (5, 17), (6, 0)
# the releases that the tests of the cache ran with
TESTED = ("5.17", "5.24")
INSTALL = f"pip install 'transformers>={OLDEST[0]}.{OLDEST[1]},<{END[0]}'"


def check_transformers() -> None:
    """Raise `AatcError` with the install command when transformers is absent or outside the supported releases."""
    try:
        found = version("transformers")
    except PackageNotFoundError as error:
        raise AatcError("the package transformers is not installed", INSTALL) from error
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) < END:
        raise AatcError(
            f"transformers {found} is not supported: it has to be {OLDEST[0]}.{OLDEST[1]} or newer, and older than "
            f"{END[0]}.{END[1]}",
            INSTALL,
        )
