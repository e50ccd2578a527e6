"""The hooks that bring a model's attention to a hosted cache, for the length of a block.

Works with transformers 5.17 to 5.24: attention modules get the cache as ``past_key_values`` in the older ones, as
``cache`` in the newer. Nothing is changed outside the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aatc_cli.errors import AatcError, UnsupportedModelError
from aatc_cli.models.adapter import AttentionSite, flatten_heads
from aatc_cli.models.attention import attention_function
from aatc_cli.models.compressed import CacheState, HostedCache, cache_keyword

_NAME = "aatc-cache"
# these rotations change their frequencies as the context grows: what was cached before would no longer fit
_MOVING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class CacheCall:
    """One layer's attention in one forward pass. query [B, Hq, q, D], key, value [B, H, q, D] are the model's.

    k_rows, v_rows [B, q, C] are the outputs of the projections (or the key norm), bias included. mask [B, columns + q]
    marks real tokens, None for all of them; positions [B or 1, q]. rotation(positions [n]) gives cos, sin [n, R]
    as the model makes them. prompt: leading queries that belong to a prompt, the rest being tried as single steps.
    """

    site: AttentionSite
    query: Tensor
    key: Tensor
    value: Tensor
    k_rows: Tensor
    v_rows: Tensor
    mask: Tensor | None
    positions: Tensor
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]]
    scaling: float
    sliding_window: int | None
    prompt: int


CallFunction = Callable[[CacheState, CacheCall], Tensor]


@contextmanager
def hosted(model: nn.Module, sites: list[AttentionSite], function: CallFunction) -> Iterator[None]:
    """Let ``function`` (-> [B, Hq, q, D]) do the attention of every layer over the state of the hosted cache given.

    Raises `AatcError` for a call without such a cache, `UnsupportedModelError` for a rotation that cannot be cached.
    The model's configuration and hooks, and the interfaces, are as before when the block ends, whatever happened in it.
    """
    check_rope(model)
    hooks = _Hooks(sites, function)
    config: Any = model.config
    try:
        hooks.attach(model)
        with attention_function(config, _NAME, hooks.attend, _plain_mask):
            yield
    finally:
        hooks.detach()


def check_rope(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` when the model's rotary frequencies depend on the length of the context."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        for name in kinds:
            if name in _MOVING_ROPE:
                raise UnsupportedModelError(
                    f"the rotary embedding of type {name!r} changes its frequencies with the context",
                    "keys cached before RoPE need fixed frequencies: default, linear, llama3 or yarn",
                )


def _plain_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The caller's own two-dimensional mask: the attention function works out the rest from it."""
    return attention_mask


class _Hooks:
    """What the hooks of one forward pass have seen, and the attention function that reads it."""

    def __init__(self, sites: list[AttentionSite], function: CallFunction) -> None:
        self.sites = sites
        self.function = function
        self.by_module = {id(site.module): site for site in sites}
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
        for site in self.sites:
            self.handles.append(site.k.register_forward_hook(self._keep("k")))
            self.handles.append(site.v.register_forward_hook(self._keep("v")))
            self.handles.append(site.module.register_forward_pre_hook(self._before, with_kwargs=True))

    def detach(self) -> None:
        """Remove every hook and forget what was seen."""
        for handle in self.handles:
            handle.remove()
        self._forget()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """The attention function that transformers calls."""
        if attention_mask is not None and attention_mask.dim() != 2:
            raise AatcError(
                f"a mask of {attention_mask.dim()} dimensions cannot be read through a compressed cache",
                "give the attention_mask of tokens, [batch, tokens]",
            )
        _, rotation, positions = self.seen["rotation"]
        count = query.shape[2]
        call = CacheCall(
            site=self.by_module[id(module)], query=query, key=key, value=value, k_rows=self.seen.pop("k"),
            v_rows=self.seen.pop("v"), mask=attention_mask, positions=positions, rotation=rotation, scaling=scaling,
            sliding_window=kwargs.get("sliding_window"),
            prompt=count if self.keep is None else max(count - self.keep + 1, 1),
        )  # fmt: skip
        assert self.attached is not None
        return self.function(self.attached.state, call).transpose(1, 2).contiguous(), None

    def _start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._forget()
        # with the logits of k + 1 positions asked for, the last k tokens are candidates: see CacheCall.prompt
        keep = kwargs.get("logits_to_keep")
        self.keep = keep if isinstance(keep, int) and keep > 0 else None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        if self.attached is not None:
            self.attached.attached = False
        self.attached, self.keep = None, None
        self.seen.clear()
        self.rotations.clear()

    def _rotated(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Remember how these tables were made, so that other positions' are made the same way."""
        names = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        positions, cos = names.pop("position_ids"), output[0]
        like = cos.new_empty(0)
        names.pop("x", None)
        forward: Any = module.forward

        def rotation(wanted: Tensor) -> tuple[Tensor, Tensor]:
            tables = forward(like, position_ids=wanted[None].to(positions.device), **names)
            return tables[0][0], tables[1][0]

        self.rotations[id(cos)] = (cos, rotation, positions)

    def _keep(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.seen[name] = flatten_heads(output)

        return hook

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if not isinstance(cache, HostedCache):
            found = "none" if cache is None else f"a {type(cache).__name__}"
            raise AatcError(
                f"inside `compressed` the model needs a compressed cache, got {found}",
                f"pass {self.keyword}=session.new_cache() to generate or to the model",
            )
        tables = kwargs.get("position_embeddings")
        if tables is None or id(tables[0]) not in self.rotations:
            raise AatcError("this model does not pass rotary tables to its attention", "it is not supported yet")
        self.seen["rotation"] = self.rotations[id(tables[0])]
        self.attached = cache
        cache.attached = True
