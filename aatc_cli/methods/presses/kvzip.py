"""KVzip: tokens stay that are looked at when the prompt is read a second time, as if to repeat it.

Source: KVzip (2505.23416): behind the prompt the model is told to repeat it and given it again, in chunks of 2048
tokens; a token is worth the largest weight that any query of its chunk's second reading, of any query head of its kv
head, pays it. Places are shared out over all heads of all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.press import Press

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.press.seen import Seen


class KvZip(Press):
    """By what a second reading looks at."""

    name = "kvzip"
    meaning = "largest attention of a second reading of the prompt"
    rereads = True
    spread = "model"

    def score(self, seen: Seen) -> Tensor:
        """What the second pass found."""
        assert seen.repeated is not None
        return seen.repeated
