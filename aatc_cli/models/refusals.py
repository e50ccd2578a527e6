"""What a compressed cache cannot do, found before it would go wrong: one clear error each, nothing changed by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.errors import AatcError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.models.layer_kinds import layer_windows

# the names under which attention functions of compressed caches are registered begin so
PREFIX = "aatc-cache-"


def check_model(model: nn.Module) -> None:
    """Raise `AatcError` for a model that cannot be attached to.

    It may be attached already, compiled, of an architecture that caches other things than keys and values, in training,
    told to use no cache, or spread over devices.
    """
    config: Any = model.config
    if str(config._attn_implementation).startswith(PREFIX):
        raise AatcError("the model is attached to a compressed cache already", "leave that block first")
    # a wrapper of torch.compile carries the model inside it; Module.compile marks the module itself
    if hasattr(model, "_orig_mod") or any(getattr(part, "_compiled_call_impl", None) for part in model.modules()):
        raise AatcError(
            "a compiled model cannot take a compressed cache, whose size changes with every block of tokens",
            "attach to the model as it was before torch.compile",
        )
    # an architecture that is not supported is told before the state the model is in
    layer_windows(model.config)
    if model.training:
        raise AatcError(
            "the model is in training mode, in which checkpointing drops the cache and dropout changes what is in it",
            "call model.eval() first",
        )
    for name in ("config", "generation_config"):
        if getattr(getattr(model, name, None), "use_cache", None) is False:
            raise AatcError(
                f"the model's {name} says use_cache: false, so generate would hand no cache on",
                f"set model.{name}.use_cache = True",
            )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise AatcError(
            f"the model is spread over {', '.join(devices)}; a compressed cache lies on one device",
            "load it without device_map, on one device",
        )


def check_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], implementation: str, layers: int) -> None:
    """Raise `AatcError` for a forward pass that would not go through the compressed cache of all ``layers`` layers.

    ``implementation`` is the name under which the attention function was registered. transformers shortens the
    configuration for an early exit and leaves it so after an error: its length is put right before the refusal.
    """
    config = model.config
    text = config.get_text_config()
    if text.num_hidden_layers != layers:
        asked, text.num_hidden_layers = text.num_hidden_layers, layers
        raise AatcError(
            f"assistant_early_exit={asked} would run {asked} of {layers} layers through one compressed cache",
            "use prompt_lookup_num_tokens or an assistant_model",
        )
    if config._attn_implementation != implementation:
        raise AatcError(
            f"the attention implementation was set to {config._attn_implementation!r} inside the block",
            "set it before the block; inside it the compressed cache does the attention",
        )
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        raise AatcError(
            "under torch.autocast a compressed cache would compute its codes in half precision",
            "leave autocast, and load the model in the dtype it shall compute in",
        )
    if kwargs.get("use_cache") is False and any(isinstance(value, HostedCache) for value in kwargs.values()):
        raise AatcError("use_cache=False leaves a compressed cache without its tokens", "leave use_cache out")
    wanted = kwargs.get("output_attentions")
    if wanted or (wanted is None and getattr(config, "output_attentions", False)):
        raise AatcError(
            "output_attentions is not supported: packed tokens have no attention weights to hand out",
            "read attention weights from the model outside the block",
        )
    given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
    if any(tokens is not None and tokens.shape[1] == 0 for tokens in given):
        raise AatcError(
            "the prompt is empty: there is no token that the cache does not hold already",
            "give one more token at least, or begin a new cache",
        )


class NoBackward(torch.autograd.Function):
    """The output of a compressed cache, through which no gradient goes: backward raises, zeros would be silent."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        """``out`` itself; ``inputs`` are what a gradient would have to reach."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raises `AatcError`."""
        raise AatcError(
            "no gradients go through a compressed cache, which rounds what it stores",
            "call backward outside the block, or put torch.no_grad() around the model",
        )
