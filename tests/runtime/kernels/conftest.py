"""What the tests of the fused cache share, on a CPU and on a GPU: small models, and logits token by token."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.models.adapter import attention_layers
from aatc_cli.runtime.fused_tiles import shared
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.tiles.form import tiles_spec


def make_llama(**shape: int) -> Any:
    """A random Llama of two kv heads of 64 channels and a vocabulary of 97; the rest of its shape is given."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **shape,
    )
    return LlamaForCausalLM(config).eval()


def logits_of(model: Any, cache: Any, keyword: str, ids: Tensor, prompt: int) -> Tensor:
    """Logits behind the prompt and behind every later token, fed one at a time. -> [T - prompt + 1, B, V]."""
    kwargs = {keyword: cache, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        found = [model(input_ids=ids[:, :prompt], **kwargs).logits[:, -1]]
        found += [model(input_ids=ids[:, t : t + 1], **kwargs).logits[:, -1] for t in range(prompt, ids.shape[1])]
    return torch.stack(found)


def codecs_of(
    layers: int = 2, heads: int = 2, size: int = 64, order: str = "head", most: int = 4, **given: Any
) -> list[dict[Side, TileCodec]]:
    """Codecs of tiles with random turns, energies and widths from 0 to ``most`` + 1; layers and sides of their own.

    given: what else a `TransformCodec` has; even levels, scales of 8 bits and half of the size restored if nothing is.
    """
    facts = {"quantizer": "uniform", "scale_bits": 8, "restored": 0.5} | given
    rule, found = TileRule((32, 16, 16), cast("Any", order)), list[dict[Side, TileCodec]]()
    for layer in range(layers):
        sides: dict[Side, TileCodec] = {}
        for place, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(10 * layer + place)
            matrix = torch.linalg.qr(torch.randn(heads, size, size, generator=generator, dtype=torch.float64))[0]
            variance = 0.5 + torch.rand(heads * size, generator=generator, dtype=torch.float64)
            widths = torch.randint(0, most, (3, heads * size), generator=generator) + torch.arange(3)[:, None]
            codec = TransformCodec(matrix, matrix.mT.contiguous(), variance, widths[0], variance, **facts)
            sides[side] = TileCodec(codec, widths, rule)
        found.append(sides)
    return found


def session_of(model: Any, codecs: Any, window: Window, kind: Any, *, by_kernel: bool = False) -> Session:
    """``model`` with caches of tiles; by_kernel: single queries of fused ones go to the kernel on a CPU too."""
    layers = attention_layers(model)
    spec = tiles_spec(model, layers, codecs, window, None, kind)
    return Session.of("tiles", model, layers, with_tables(spec) if by_kernel and kind == "fused" else spec)


def with_tables(spec: Any) -> Any:
    """What a GPU has: tables of every layer, by which single queries go to the kernel."""
    made = [
        replace(fused, tables=TileTables.of(fused.layer.codecs, fused.layer.held, fused.layer.biases, fused.order))
        for fused in spec.form.layers
    ]
    return replace(spec, form=replace(spec.form, layers=tuple(made)))


_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 97,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}


def with_biases() -> Any:
    """Seven queries of a kv head, and projections with biases that are not small."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**(_SHAPE | {"hidden_size": 448, "num_attention_heads": 7}))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.normal_()
    return model


def half_turned() -> Any:
    """Half of the dimensions of a head turn."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return Phi3ForCausalLM(Phi3Config(**_SHAPE, rope_parameters=rope)).eval()


def turned_side_by_side() -> Any:
    """Dimensions that turn together lie side by side."""
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**_SHAPE)).eval()


# models whose keys are not those of a Llama, by what they have
MODELS = {"biases": with_biases, "half turned": half_turned, "turned side by side": turned_side_by_side}


@pytest.fixture(params=list(MODELS))
def unlike_llama(request: pytest.FixtureRequest) -> Any:
    """A model of one layer with one kv head of 64 dimensions."""
    return MODELS[request.param]()


@pytest.fixture(scope="session")
def tile_codecs() -> Callable[..., Any]:
    return codecs_of


@pytest.fixture(scope="session")
def tile_session() -> Callable[..., Session]:
    return session_of


@pytest.fixture(scope="session")
def decodable() -> Callable[[Any], Any]:
    """The spec of fused caches of tiles with what only a GPU has."""
    return with_tables


@pytest.fixture
def kernel(emulated: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Single queries of fused caches of tiles go by the emulated kernel."""

    class Emulated:
        def __init__(self, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
            self.shape = shape

        def __call__(self, call: Any, out: Tensor) -> Tensor:
            return out.copy_(emulated(self.shape, 8, call))

    monkeypatch.setattr(shared, "TileDecoder", Emulated)


@pytest.fixture(scope="session")
def llama_of() -> Callable[..., Any]:
    return make_llama


@pytest.fixture(scope="session")
def token_logits() -> Callable[..., Tensor]:
    return logits_of


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensor]:
    """The kernel of tiles with classes under emulation, compiled once for every shape (`emulator.attend`)."""
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler of C++")
    spec = spec_from_file_location("emulator", Path(__file__).parent / "emulator.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    attend: Callable[..., Tensor] = partial(module.attend, tmp_path_factory.mktemp("kernels"))
    return attend
