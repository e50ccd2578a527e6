"""KVzip: tokens stay that are looked at when the prompt is read a second time, as if to repeat it.

Source: KVzip (2505.23416): behind the prompt the model is told to repeat it and given it again, in chunks of 2048
tokens; a token is worth the largest weight that any query of its chunk's second reading, of any query head of its kv
head, pays it. Places are shared out over all heads of all layers.
"""

from __future__ import annotations

from aatc_cli.methods.press import Press


class KvZip(Press):
    """By what a second reading looks at: `runtime.second_pass` makes the choice before the prompt goes in."""

    name = "kvzip"
    meaning = "largest attention of a second reading of the prompt"
    rereads = True
    spread = "model"
