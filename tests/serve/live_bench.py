"""What a cache is worth inside of vLLM: capacity, first tokens, decode steps, and vLLM's own benchmarks.

    python tests/serve/live_vllm.py bench --kind plan|auto|fp8|turboquant_4bit_nc [--layers 32] [--tokenizer FOLDER]

The geometry of Llama 3.1 8B with random weights; there is no plan of those, so a plan of random transforms stands in.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from functools import partial

from live_vllm import engine, say


def geometry_folder(folder: str, layers: int) -> str:
    """A folder with the configuration of Llama 3.1 8B, of fewer layers if wanted, and no weights."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        data = json.load(file)
    data["architectures"], data["dtype"], data["torch_dtype"] = ["LlamaForCausalLM"], "bfloat16", "bfloat16"
    with open(path, "w") as file:
        json.dump(data, file)
    return folder


def synthetic_plan(folder: str, bits: float) -> None:
    """Let the backend open codecs of random transforms in place of a plan: there is none of random weights.

    Cached tokens that a connector says are there are taken for random tiles, which blocks are filled with.
    """
    import torch

    from aatc_cli.config import Window
    from aatc_cli.core.layout import packed_tokens
    from aatc_cli.evals.bench.tile_plan import synthetic_codecs, synthetic_tiles
    from aatc_cli.models.adapter import geometry_of
    from aatc_cli.models.loading import empty_model, find_model, load_config
    from aatc_cli.serve.vllm_backend import plans, served, sound, start
    from aatc_cli.serve.vllm_backend.engine import TileEngine
    from aatc_cli.serve.vllm_backend.places import Places

    window = Window(sinks=4, recent=128, flush=64)

    def opened(config, device):
        source = find_model(folder)
        model = empty_model(source, load_config(source))
        geometry = geometry_of(model.config)
        one = synthetic_codecs(geometry, bits, torch.device("cpu"))
        none = [{"k": None, "v": None}] * geometry.layers
        prepared = plans.Prepared(f"synthetic-{bits:g}", [one] * geometry.layers, window, none, model)
        return start.engine_for(prepared, config, device)

    def recognise(self, request, cached, *, shared):
        held = self.held[request]
        if held.tokens != cached:
            held.tokens, held.tiles = cached, packed_tokens(cached, window) // 64

    @torch.inference_mode()
    def fill(engine):
        layer = engine.form.layers[0].layer
        generator = torch.Generator(engine.rows.device).manual_seed(0)
        tiles = synthetic_tiles(layer.codecs, layer.held, 256, generator)
        for cache in engine.caches:
            for start_at in range(0, cache.shape[0], 256):
                part = cache[start_at : start_at + 256]
                part[:, : tiles.shape[1]] = tiles[: part.shape[0]]

    served.open_engine, Places.recognise, TileEngine.fill = opened, recognise, fill
    # rows that are no numbers are counted, see `bench`, and end nothing
    sound.Soundness.check = lambda self: None


def with_flash_attention_3() -> None:
    """Let TurboQuant have FlashAttention 3: vLLM 0.23 asks for 2, which not every build has.

    Its reason, layers of two kinds in one check, is gone in 0.23.0: that check passes TurboQuant's layers over.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config

    def create_engine_config(self, *args, **kwargs):
        config = original(self, *args, **kwargs)
        config.attention_config.flash_attn_version = None
        return config

    EngineArgs.create_engine_config = create_engine_config


def bench(given: argparse.Namespace) -> None:
    """Capacity, then what ``--only`` names: first tokens, vLLM's own benchmarks, decode steps."""
    folder = geometry_folder(given.folder, given.layers)
    ours = given.kind == "plan"
    if ours:
        synthetic_plan(folder, given.bits)
    pretend = pretended_contexts(by_bytes=ours or given.kind.startswith("turboquant"))
    longest = given.context + given.steps + 64
    changes = {
        "load_format": "dummy",
        "max_model_len": longest,
        "max_num_seqs": given.slots,
        "max_num_batched_tokens": longest,
        "kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
    }
    # the plan's prompts are read whole, as `aatc serve` asks for; the others as vLLM does
    changes |= {"enable_chunked_prefill": False} if ours else {"kv_cache_dtype": given.kind}
    if given.tokenizer:
        changes |= {"tokenizer": given.tokenizer, "skip_tokenizer_init": False}
    if given.kind.startswith("turboquant"):
        with_flash_attention_3()
    if given.turn:
        # one after another on the GPU, while those that come next import what they need
        fcntl.flock(os.open(given.turn, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
        time.sleep(2)
    llm = engine(folder, "synthetic" if ours else None, given, **changes)
    cache = llm.llm_engine.vllm_config.cache_config
    capacity = cache.num_gpu_blocks * cache.block_size
    say(kind=given.kind, layers=given.layers, capacity_tokens=capacity, blocks=cache.num_gpu_blocks)
    largest = min(given.slots, capacity // longest)
    first_token(llm, 256)
    if ours:
        from aatc_cli.serve.vllm_backend.served import served_of

        found = served_of(llm.llm_engine.vllm_config)
        found.bind()
        found.engine.fill()
    if "first" in given.only:
        first_tokens(llm, given)
    if "latency" in given.only:
        bench_latency(llm, given)
    if "decode" in given.only:
        decode(llm, given, largest, pretend)
    if "throughput" in given.only and given.tokenizer:
        bench_throughput(llm, given)
    if ours:
        say(kind=given.kind, rows_of_no_numbers=int(found.engine.decoding.sound.broken))
    if given.traced:
        traced(llm, given, largest, pretend)


def pretended_contexts(*, by_bytes: bool) -> list[bool]:
    """A switch: where it is on, vLLM's own connector for such benches says that a request's context is there.

    by_bytes: blocks are bytes, which are filled by `decode`, or stay zeros.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as connector

    pretend = [False]
    if by_bytes:
        connector.DecodeBenchConnectorWorker.start_fill_kv = lambda self, metadata: None
    matched = connector.DecodeBenchConnectorScheduler.get_num_new_matched_tokens
    connector.DecodeBenchConnectorScheduler.get_num_new_matched_tokens = lambda self, request, done: (
        matched(self, request, done) if pretend[0] else (0, False)
    )
    return pretend


def prompts(count: int, length: int, apart: int = 0):
    """Prompts of up to ``length`` tokens, the last of them shorter by ``apart``."""
    lengths = [length - row * apart // count for row in range(count)]
    return [{"prompt_token_ids": [(7 * i + 13 * row) % 100000 + 3 for i in range(n)]} for row, n in enumerate(lengths)]


def first_token(llm, length: int) -> float:
    """Seconds of a prompt and one token."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    [prompt], started = prompts(1, length), time.time()
    llm.generate([prompt], wanted, use_tqdm=False)
    return time.time() - started


def first_tokens(llm, given: argparse.Namespace) -> None:
    """Of a short prompt and of a long one, and of short ones whose length nobody asked for before."""
    for length in (2048, given.context):
        first_token(llm, length)
        found = sorted(first_token(llm, length) for _ in range(3))
        say(kind=given.kind, prompt=length, first_token_ms=[round(1000 * seconds, 1) for seconds in found])
    new = [first_token(llm, length) for length in range(1900, 2000, 20)]
    say(
        kind=given.kind,
        prompt="1,900 to 1,980, each once",
        first_token_ms=[round(1000 * seconds, 1) for seconds in new],
    )


def decode(llm, given: argparse.Namespace, largest: int, pretend: list[bool]) -> None:
    """Decode steps at equal batch, at the largest one, and of a plan at lengths that are not all the same.

    Contexts are not computed; a plan's blocks are filled with random tiles.
    """
    pretend[0] = True
    for count in dict.fromkeys((min(given.batch, largest), largest)):
        rate = decode_rate(llm, prompts(count, given.context), given.steps)
        say(kind=given.kind, batch=count, context=given.context, **rate)
    if given.kind == "plan" and "uneven" in given.only:
        # of different lengths, so that some request has a tile to pack in most steps
        rate = decode_rate(llm, prompts(min(given.batch, largest), given.context, 64), given.steps)
        say(kind=given.kind, batch=min(given.batch, largest), context="up to 63 less", **rate)
    pretend[0] = False


def traced(llm, given: argparse.Namespace, largest: int, pretend: list[bool]) -> None:
    """Which kernels a first token and a few decode steps take their time with, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    def kernels(steps: int, run) -> dict[str, object]:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            started = time.time()
            run()
            seconds = time.time() - started
        rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
        on_gpu = [row for row in rows if row.self_device_time_total > 0 and row.self_cpu_time_total == 0]
        busy = sum(row.self_device_time_total for row in on_gpu)
        named = [[row.key[:60], row.count, round(row.self_device_time_total / 1000, 3)] for row in on_gpu[:25]]
        hosts = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)[:25]
        host = [[row.key[:40], row.count, round(row.self_cpu_time_total / 1000, 3)] for row in hosts]
        return {
            "steps": steps,
            "ms": round(1000 * seconds, 1),
            "busy_ms": round(busy / 1000, 1),
            "gpu": named,
            "host": host,
        }

    first_token(llm, 2048)
    say(kind=given.kind, traced="first token of 2048", **kernels(1, lambda: first_token(llm, 2048)))
    pretend[0] = True
    for count in (min(given.batch, largest), largest):
        found = prompts(count, given.context)
        say(kind=given.kind, traced=f"decode {count}", **kernels(8, partial(decode_rate, llm, found, 8)))
    pretend[0] = False


def bench_latency(llm, given: argparse.Namespace) -> None:
    """`vllm bench latency` on the engine that is there: the time of one token, and of 128 tokens of 16 requests."""
    from vllm.benchmarks import latency

    for batch, length, steps in ((1, 2048, 1), (16, 1024, 128)):
        asked = [f"--batch-size={batch}", f"--input-len={length}", f"--output-len={steps}", "--disable-detokenize"]
        found = own_benchmark(llm, given, latency, [*asked, "--num-iters-warmup=1", "--num-iters=3"])
        say(kind=given.kind, vllm_bench_latency=asked[:3], seconds=round(found["avg_latency"], 4))


def bench_throughput(llm, given: argparse.Namespace) -> None:
    """`vllm bench throughput` on the engine that is there: random prompts, all at once."""
    from vllm.benchmarks import throughput

    for count, length, steps in ((32, 4096, 256),):
        asked = ["--dataset-name=random", f"--num-prompts={count}", f"--random-input-len={length}"]
        asked += [f"--random-output-len={steps}"]
        more = ["--disable-detokenize", "--num-warmups=2", "--tokenizer", given.tokenizer]
        found = own_benchmark(llm, given, throughput, [*asked, *more])
        say(kind=given.kind, vllm_bench_throughput=asked, seconds=found["elapsed_time"], **found)


def own_benchmark(llm, given: argparse.Namespace, module, asked: list[str]) -> dict[str, float]:
    """What one of vLLM's benchmarks writes, of the engine that is there in place of one that it makes."""
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, output = FlexibleArgumentParser(), f"{given.folder}-bench.json"
    module.add_cli_args(parser)
    original = vllm.LLM.from_engine_args
    vllm.LLM.from_engine_args = classmethod(lambda cls, arguments: llm)
    try:
        module.main(parser.parse_args([*asked, f"--output-json={output}", "--model", given.folder]))
    finally:
        vllm.LLM.from_engine_args = original
    with open(output) as file:
        found = json.load(file)
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def decode_rate(llm, prompts, steps: int) -> dict[str, float]:
    """Steps of the engine in which all requests decode, timed one by one; the first ones warm up."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"bench-{time.time_ns()}-{number}", prompt, wanted)
    times, started = [], time.time()
    while llm.llm_engine.has_unfinished_requests():
        before = time.time()
        llm.llm_engine.step()
        times.append(time.time() - before)
    decoding = sorted(times[4:-1])
    mean = sum(decoding) / len(decoding)
    return {
        "steps": len(decoding),
        "mean_ms": round(1000 * mean, 2),
        "median_ms": round(1000 * decoding[len(decoding) // 2], 2),
        "most_ms": round(1000 * decoding[-1], 2),
        "tokens_per_second": round(len(prompts) / mean, 1),
        "whole_seconds": round(time.time() - started, 1),
    }
