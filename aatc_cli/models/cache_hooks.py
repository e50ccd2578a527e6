"""The hooks that bring a model's attention to a hosted cache, for the length of a block.

Works with transformers 5.17 to 5.24: attention modules get the cache as ``past_key_values`` in the older ones, as
``cache`` in the newer. Nothing is changed outside the block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite
from aatc_cli.models.attention import attention_function
from aatc_cli.models.compressed import CacheState, HostedCache, cache_keyword
from aatc_cli.models.refusals import PREFIX, NoBackward, check_call

_NUMBERS = itertools.count()
# what attention modules of different architectures and versions call the cache they are given
_CACHE_NAMES = ("cache", "past_key_values", "layer_past")


@dataclass(frozen=True)
class CacheCall:
    """One layer's attention in one forward pass. query [B, Hq, q, D], key, value [B, H, q, D] are the model's.

    k_rows, v_rows [B, q, C] are the outputs of the projections (or the key norm), bias included; of an exact layer,
    whose keys are kept rotated, they are ``key`` and ``value``. mask [B, columns + q] marks real tokens, None for all
    of them; positions [B or 1, q]. rotation(positions [n]) gives cos, sin [n, R] as the model makes them. prompt:
    leading queries that belong to a prompt, the rest being tried as single steps.
    """

    site: AttentionLayer
    query: Tensor
    key: Tensor
    value: Tensor
    k_rows: Tensor
    v_rows: Tensor
    mask: Tensor | None
    positions: Tensor
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]]
    scaling: float
    prompt: int

    @property
    def sliding_window(self) -> int | None:
        """Tokens the layer can look back, or None for all of them."""
        return self.site.sliding_window


CallFunction = Callable[[CacheState, CacheCall], Tensor]
Admission = Callable[[HostedCache], None]


@contextmanager
def hosted(
    model: nn.Module, layers: list[AttentionLayer], function: CallFunction, admit: Admission | None = None
) -> Iterator[Hooks]:
    """Let ``function`` (-> [B, Hq, q, D]) do the attention of every layer over the state of the hosted cache given.

    Raises `AatcError` for a call without such a cache, or with one that ``admit`` raises for. The model's configuration
    and hooks, and the interfaces, are as before when the block ends, whatever happened in it.
    """
    # a name of its own, so that two attached models (a compressed assistant, for one) do not share a function
    name = f"{PREFIX}{next(_NUMBERS)}"
    hooks = Hooks(layers, function, name, admit)
    config: Any = model.config
    try:
        hooks.attach(model)
        with attention_function(config, name, hooks.attend, _plain_mask):
            yield hooks
    finally:
        hooks.detach()


def _plain_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The caller's own two-dimensional mask: the attention function works out the rest from it."""
    return attention_mask


class Hooks:
    """What the hooks of one forward pass have seen, and the attention function that reads it.

    ``begin`` is called before every forward pass of the model.
    """

    def __init__(
        self, layers: list[AttentionLayer], function: CallFunction, name: str, admit: Admission | None = None
    ) -> None:
        self.admit = admit
        self.begin: Callable[[], None] = lambda: None
        self.begun = False
        self.layers = layers
        self.function = function
        self.name = name
        self.by_module = {id(layer.module): layer for layer in layers}
        self.seen: dict[str, Any] = {}
        self.rotations: dict[int, tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]], Tensor]] = {}
        self.keep: int | None = None
        self.attached: HostedCache | None = None
        self.handles: list[Any] = []
        self.keyword = "cache"

    def attach(self, model: nn.Module) -> None:
        """Register every hook."""
        self.keyword = cache_keyword(model)
        self.handles.append(model.register_forward_pre_hook(self._start, with_kwargs=True))
        self.handles.append(model.register_forward_hook(self._end, always_call=True))
        for name, module in model.named_modules():
            if name.rsplit(".", 1)[-1].startswith("rotary_emb"):
                self.handles.append(module.register_forward_hook(self._rotated, with_kwargs=True))
        for layer in self.layers:
            if isinstance(layer, AttentionSite):
                self.handles.append(layer.k.watch(self._keep("k")))
                self.handles.append(layer.v.watch(self._keep("v")))
            self.handles.append(layer.module.register_forward_pre_hook(self._before, with_kwargs=True))

    def detach(self) -> None:
        """Remove every hook and forget what was seen."""
        for handle in self.handles:
            handle.remove()
        self._forget()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention function that transformers calls."""
        if attention_mask is not None and attention_mask.dim() != 2:
            raise AatcError(
                f"a mask of {attention_mask.dim()} dimensions cannot be read through a compressed cache",
                "give the attention_mask of tokens, [batch, tokens]",
            )
        _, rotation, positions = self.seen["rotation"]
        count, layer = query.shape[2], self.by_module[id(module)]
        if isinstance(layer, AttentionSite):
            k_rows, v_rows = self.seen.pop("k"), self.seen.pop("v")
        else:
            k_rows, v_rows = (x.transpose(1, 2).flatten(2) for x in (key, value))
        call = CacheCall(
            site=layer,
            query=query,
            key=key,
            value=value,
            k_rows=k_rows,
            v_rows=v_rows,
            mask=attention_mask,
            positions=positions,
            rotation=rotation,
            scaling=scaling,
            prompt=count if self.keep is None else max(count - self.keep + 1, 1),
        )
        assert self.attached is not None
        out = self.function(self.attached.state, call)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            out = NoBackward.apply(out, query, key, value)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2).contiguous(), None

    def _start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._forget()
        self.begin()
        self.begun = True
        check_call(module, args, kwargs, self.name, len(self.layers))
        # with the logits of k + 1 positions asked for, the last k tokens are candidates: see CacheCall.prompt
        keep = kwargs.get("logits_to_keep")
        self.keep = keep if isinstance(keep, int) and keep > 0 else None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        if self.attached is not None:
            self.attached.attached = False
        self.attached, self.keep, self.begun = None, None, False
        self.seen.clear()
        self.rotations.clear()

    def _rotated(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Remember how these tables were made, so that other positions' are made the same way."""
        names = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        positions, cos = names.pop("position_ids"), output[0]
        like = cos.new_empty(0)
        names.pop("x", None)
        forward: Any = module.forward
        # some rotations choose their frequencies by the last position there is: it goes along with those wanted
        last = positions.max().reshape(1)

        def rotation(wanted: Tensor) -> tuple[Tensor, Tensor]:
            tables = forward(like, position_ids=torch.cat((wanted.to(last.device), last))[None], **names)
            return tables[0][0, :-1], tables[1][0, :-1]

        self.rotations[id(cos)] = (cos, rotation, positions)

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        def take(rows: Tensor) -> None:
            self.seen[name] = rows

        return take

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cache = next((kwargs[name] for name in _CACHE_NAMES if name in kwargs), None)
        if not isinstance(cache, HostedCache):
            found = "none" if cache is None else f"a {type(cache).__name__}"
            raise AatcError(
                f"inside its block the model needs a compressed cache, got {found}",
                f"pass {self.keyword}=session.new_cache() to generate or to the model",
            )
        tables = kwargs.get("position_embeddings")
        if tables is None or id(tables[0]) not in self.rotations:
            raise AatcError("this model does not pass rotary tables to its attention", "it is not supported yet")
        if not self.begun:
            raise AatcError(
                "a part of the attached model was called by itself, or its forward without its hooks",
                "call the model, or generate",
            )
        if self.admit is not None and self.attached is not cache:
            self.admit(cache)
        self.seen["rotation"] = self.rotations[id(tables[0])]
        self.attached = cache
        cache.attached = True
