"""A tiny random Llama with a tokenizer of single bytes, written to a folder in a second: for the selftest."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from aatc_cli.models.loading import quiet_transformers

_CONTEXT = 512


def write_tiny_llama(folder: Path) -> None:
    """Save a Llama of 4 layers, 4 query and 2 kv heads of 16 and a context of 512 bytes into ``folder``.

    Its weights are larger than a model starts with, so that attention is far from uniform.
    """
    quiet_transformers()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<end>"])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(vocabulary),
        max_position_embeddings=_CONTEXT,
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.15, generator=generator)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(folder)
