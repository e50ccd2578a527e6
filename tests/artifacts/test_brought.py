"""Many small tensors in one copy: the same numbers in the same containers, and one tensor stays one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from aatc_cli.artifacts import brought as module
from aatc_cli.artifacts.brought import ON_HOST, brought


@dataclass(frozen=True)
class Held:
    rows: Tensor
    names: tuple[Tensor, ...] = field(metadata=ON_HOST)
    more: dict[str, Tensor | None]
    count: int = 3


HELD = Held(
    torch.arange(12.0, dtype=torch.float64).view(3, 4).T,
    (torch.ones(2),),
    {"bits": torch.tensor([True, False, True]), "none": None, "one": torch.tensor(7, dtype=torch.int16)},
)


def test_what_is_there_already_stays_what_it_is() -> None:
    assert brought([HELD, 5, "k"], "cpu")[0].rows is HELD.rows


def test_one_copy_holds_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a stand-in: what it is given is counted, and comes back as it went."""
    copies: list[int] = []

    class Place:
        type = "elsewhere"

    to = Tensor.to

    def counted(tensor: Tensor, *given: object) -> Tensor:
        if given and isinstance(given[0], Place):
            copies.append(tensor.nbytes)
            return tensor.clone()
        return to(tensor, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(module.torch, "device", lambda given: given)
    monkeypatch.setattr(Tensor, "to", counted)
    empty = torch.zeros(0, 4)
    one, other, none = brought([HELD, replace(HELD, count=4), empty], Place())  # type: ignore[arg-type]
    # one of all that holds numbers, and one of nothing
    assert copies == [3 * 512, 0]
    assert torch.equal(one.rows, HELD.rows)
    assert one.rows.is_contiguous()
    assert one.rows is other.rows
    assert one.names is HELD.names
    assert (one.count, other.count) == (3, 4)
    assert one.more["bits"].tolist() == [True, False, True]
    assert one.more["none"] is None
    assert (one.more["one"].dtype, int(one.more["one"])) == (torch.int16, 7)
    assert none.shape == (0, 4)
