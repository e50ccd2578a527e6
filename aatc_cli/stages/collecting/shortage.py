"""Running out of memory, as one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from aatc_cli.errors import AatcError

# what torch says where it raises no error of its own kind
_SAYS = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cannot allocate memory")


@contextmanager
def memory_enough(what: str, hint: str) -> Iterator[None]:
    """While the block lasts, a lack of memory of any kind becomes an `AatcError` about ``what``."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise AatcError(f"there is not enough memory for {what}", hint) from error
    except (RuntimeError, OSError) as error:
        if not any(text in str(error) for text in _SAYS):
            raise
        raise AatcError(f"there is not enough memory for {what}", hint) from error
