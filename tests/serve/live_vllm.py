"""vLLM itself with the backend, in one process: what it generates against the fused cache, and how fast it is.

    python tests/serve/live_vllm.py correct --model FOLDER --plan FOLDER [--graphs] [--dtype float32]
    python tests/serve/live_vllm.py bench ...                what a cache is worth, see live_bench.py

Every line of the output is one JSON document. Needs vLLM; `make test-vllm` runs the first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import types
from dataclasses import dataclass, field

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
STARTED = time.time()
# tokens of a step whose log-probabilities are known
LIKELY = 20


def prepare() -> None:
    """What must stand before vLLM is imported; without a usable numba a stand-in for its n-gram proposer."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import numba  # noqa: F401
    except Exception:
        stand_in = types.ModuleType("numba")

        def plain(*args, **kwargs):
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else (lambda f: f)

        stand_in.jit = stand_in.njit = plain
        stand_in.prange, stand_in.get_num_threads = range, lambda: 1
        stand_in.set_num_threads = lambda n: None
        sys.modules["numba"] = stand_in


def say(**facts) -> None:
    print(json.dumps({"at": round(time.time() - STARTED, 1)} | facts), flush=True)


def engine(model: str, plan: str | None, given: argparse.Namespace, **changes):
    """vLLM's offline engine; with a plan on the backend CUSTOM."""
    from vllm import LLM

    from aatc_cli.serve.vllm_backend.plugin import register

    settings = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": given.dtype,
        "seed": 0,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "async_scheduling": given.overlapped,
        "gpu_memory_utilization": given.memory,
    } | changes
    if given.graphs:
        settings["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} | (
            {"cudagraph_capture_sizes": given.sizes} if given.sizes else {}
        )
    else:
        settings["enforce_eager"] = True
    if plan is not None:
        register()
        settings |= {"attention_backend": "CUSTOM", "block_size": 64, "additional_config": {"aatc": {"plan": plan}}}
    if plan is not None and settings["enable_prefix_caching"]:
        settings["additional_config"]["aatc"]["prefixes"] = True
    started = time.time()
    made = LLM(**settings)
    say(engine=plan or "vllm", seconds=round(time.time() - started, 1))
    return made


@dataclass
class Answer:
    """Tokens of an answer, and of every step the most likely tokens with their log-probabilities.

    shared: tokens of its prompt that were there.
    """

    tokens: list[int] = field(default_factory=list)
    likely: list[dict[int, float]] = field(default_factory=list)
    shared: int = 0

    def __add__(self, other: Answer) -> Answer:
        return Answer(self.tokens + other.tokens, self.likely + other.likely, self.shared)


def answers(llm, prompts: list[list[int]], steps: int) -> list[Answer]:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False, logprobs=LIKELY)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
    found = [(output.outputs[0], output.num_cached_tokens or 0) for output in outputs]
    return [
        Answer(list(each.token_ids), [{k: v.logprob for k, v in step.items()} for step in each.logprobs], cached)
        for each, cached in found
    ]


def random_prompts(count: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Prompts of mixed lengths from one token on, some of them around the edges of tiles and window."""
    import torch

    generator = torch.Generator().manual_seed(0)
    edges = [1, 2, 3, 4, 5, 63, 64, 65, 67, 68, 69, 131, 132, 133, 195, 196, 197, 259, 260, 261]
    spread = torch.randint(1, longest, (count,), generator=generator).tolist()
    lengths = [length for length in edges if length <= longest][: count // 2]
    lengths += spread[: count - len(lengths)]
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def text_prompts(model: str, path: str, lengths: list[int]) -> list[list[int]]:
    """Prompts of these lengths: pieces of a text that follow one another."""
    from pathlib import Path

    from aatc_cli.models.loading import find_model, load_tokenizer

    text = Path(path).read_text(encoding="utf-8")[: 8 * sum(lengths)]
    tokens = load_tokenizer(find_model(model)).raw(text, add_special_tokens=False)["input_ids"]
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    assert ends[-1] <= len(tokens), "the text is too short"
    return [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def prompts_of(given: argparse.Namespace) -> list[list[int]]:
    """Random prompts, or pieces of a text of the same lengths."""
    from transformers import AutoConfig

    prompts = random_prompts(given.prompts, AutoConfig.from_pretrained(given.model).vocab_size, given.longest)
    return text_prompts(given.model, given.text, [len(ids) for ids in prompts]) if given.text else prompts


def opened(model: str, plan: str | None, dtype: str, sinks: int | None = None):
    """The model, and a session of the plan's fused cache, or of the model's own.

    sinks: exact first tokens in place of the plan's.
    """
    from pathlib import Path

    import torch

    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.models.adapter import attention_layers
    from aatc_cli.models.loading import find_model, load_model
    from aatc_cli.runtime.attach import plain
    from aatc_cli.runtime.attach import prepare as prepare_session
    from aatc_cli.runtime.session import Session
    from aatc_cli.runtime.tiles.form import tiles_spec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(find_model(model), device=device, dtype=dtype)
    made = Plan.open(Path(plan)) if plan else None
    if made is None:
        return loaded, plain(loaded)
    if sinks is None:
        return loaded, prepare_session(loaded, made, "fused")
    window = made.recipe.window.model_copy(update={"sinks": sinks})
    layers = attention_layers(loaded)
    spec = tiles_spec(loaded, layers, made.codecs(device), window, None, "fused")
    return loaded, Session.of(made.name, loaded, layers, spec)


def reference(model: str, plan: str | None, dtype: str, sinks: int | None = None):
    """A function: greedy tokens of the fused cache under `generate`, for one prompt alone, as `opened`."""

    loaded, session = opened(model, plan, dtype, sinks)

    def generate(tokens: list[int], steps: int) -> Answer:
        return generated(loaded, session, session.new_cache(), tokens, steps)

    return generate


def generated(loaded, session, cache, tokens: list[int], steps: int) -> Answer:
    """What ``cache``, which may hold the first tokens already, goes on with under `generate`."""
    import torch

    with session.attached(), torch.no_grad():
        ids = torch.tensor([tokens], device=loaded.device)
        options = {session.keyword: cache, "return_dict_in_generate": True, "output_logits": True}
        out = loaded.generate(ids, max_new_tokens=steps, do_sample=False, eos_token_id=None, **options)
    likely = []
    for logits in out.logits:
        values, places = logits[0].float().log_softmax(-1).topk(LIKELY)
        likely.append(dict(zip(places.tolist(), values.tolist(), strict=True)))
    return Answer(out.sequences[0, len(tokens) :].tolist(), likely)


def after_a_hit(given: argparse.Namespace, first: list[int], others: list[tuple[list[int], int]]) -> list[Answer]:
    """What the fused cache generates for prompts whose first tokens it reads packed, as ``first`` left them.

    first: a prompt that is read whole, and answered; others: prompts with how many tokens they share with it.
    """
    import torch

    loaded, session = opened(given.model, given.plan, given.dtype, 64)
    whole = session.new_cache()
    generated(loaded, session, whole, first, given.steps)
    found = []
    for prompt, shared in others:
        cache = session.new_cache()
        with session.attached(), torch.no_grad():
            loaded(torch.tensor([prompt[:shared]], device=loaded.device), use_cache=True, **{session.keyword: cache})
        for mine, theirs in zip(cache.state.groups[0].stores, whole.state.groups[0].stores, strict=True):
            tiles = theirs.pages.joined(theirs.layer.empty_tiles(1))[:, : shared // 64 - 1]
            mine.pages.count = 0
            mine.pages.append(tiles)
        found.append(generated(loaded, session, cache, prompt, given.steps))
    return found


def same(found: list[Answer], wanted: list[Answer]) -> dict[str, object]:
    """How many answers are equal, and where the others part: what either thinks of the two tokens.

    apart: the largest difference of log-probabilities of tokens that both chose, before any parting: what two orders of
    the same sums differ by. A parting is a near tie where either's margin between the two tokens is of that size.
    """
    parted, apart = {}, 0.0
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
        for x, mine, theirs in zip(a.tokens[:at], a.likely, b.likely, strict=False):
            if x in mine and x in theirs:
                apart = max(apart, abs(mine[x] - theirs[x]))
        if at is not None:
            two = a.tokens[at], b.tokens[at]
            rounded = [[round(side[t], 5) if t in side else None for t in two] for side in (a.likely[at], b.likely[at])]
            parted[index] = {"at": at, "of_found": rounded[0], "of_wanted": rounded[1]}
    return {"equal": len(found) - len(parted), "of": len(found), "apart": round(apart, 6), "parted": parted}


def forced(model: str, plan: str | None, dtype: str, sinks: int | None = None):
    """A function: log-probabilities [steps, V] of a cache that is fed a prompt and an engine's answer to it."""
    import torch

    loaded, session = opened(model, plan, dtype, sinks)

    def feed(prompt: list[int], answer: Answer):
        with session.attached(), torch.no_grad():
            kwargs = {session.keyword: session.new_cache(), "use_cache": True, "logits_to_keep": 1}
            parts = [prompt, *([token] for token in answer.tokens[:-1])]
            logits = [loaded(torch.tensor([ids], device=loaded.device), **kwargs).logits[0, -1] for ids in parts]
        return torch.stack(logits).float().log_softmax(-1).cpu()

    return feed


def divergence(first, second) -> list[float]:
    """KL of two caches at every step, of k tokens and all others as one: log-probabilities [n, k] of the former."""
    import torch

    def spread(logs):
        kept = logs.double()
        return torch.cat((kept, (1 - kept.exp().sum(1, keepdim=True)).clamp(min=1e-12).log()), 1)

    p, q = spread(first), spread(second)
    return (p.exp() * (p - q)).sum(1).tolist()


def given_the_same_tokens(
    given: argparse.Namespace, found: list[tuple[list[int], Answer]], sinks: int | None = None, **facts
) -> None:
    """How far the engine is from the fused cache that is fed its answers, and how far caches of other types are.

    Of steps that read tiles and of those that read none. What rounding does to a plan depends on the type of numbers:
    an engine that is right is as far from the plan in float32 as the fused cache is in the engine's type.
    """
    import torch

    caches = {"own": (given.plan, given.dtype), "float32": (given.plan, "float32"), "model": (None, "float32")}
    feeds = {name: forced(given.model, *what, sinks if what[0] else None) for name, what in caches.items()}
    sums: dict[str, dict[str, list[float]]] = {"tiles": {}, "no_tiles": {}}
    count = 0
    for prompt, answer in found:
        if given.seconds and time.time() - STARTED > given.seconds:
            break
        places = torch.tensor([list(step)[:LIKELY] for step in answer.likely])
        logs = {name: feed(prompt, answer).gather(1, places) for name, feed in feeds.items()}
        logs["engine"] = torch.tensor([list(step.values())[:LIKELY] for step in answer.likely])
        count += 1
        values = {
            f"{first}_to_{second}": divergence(logs[first], logs[second])
            for first, second in (("engine", "own"), ("engine", "float32"), ("own", "float32"), ("float32", "model"))
        }
        values["apart"] = (logs["engine"] - logs["own"])[:, :5].abs().amax(1).tolist()
        values["float32_apart"] = (logs["own"] - logs["float32"])[:, :5].abs().amax(1).tolist()
        for name, steps in values.items():
            for step, value in enumerate(steps):
                kind = "tiles" if step and len(prompt) + step > (sinks or 4) + 128 else "no_tiles"
                sums[kind].setdefault(name, []).append(value)
    for kind, named in sums.items():
        if named:
            mean = {name: float(f"{sum(values) / len(values):.3g}") for name, values in named.items()}
            most = {name: float(f"{max(values):.3g}") for name, values in named.items()}
            say(given_the_same_tokens=kind, prompts=count, steps=len(named["apart"]), mean=mean, most=most, **facts)


def preempted_at(llm, count: int) -> dict[int, list[int]]:
    """Cached tokens at which requests of the last call were preempted, by the index of their prompt."""
    from aatc_cli.serve.vllm_backend.served import served_of

    log = served_of(llm.llm_engine.vllm_config).engine.places.lost.latest
    found: dict[int, list[int]] = {}
    base = None
    for request, tokens in log:
        number = int(request.split("-")[0])
        base = number if base is None else base
        found.setdefault(number % count if number >= count else number, []).append(tokens)
    return found


def after_preemption(generate, prompt: list[int], steps: int, cached: list[int]) -> Answer:
    """What the fused cache generates where the prompt is read anew, with its answer so far, at the same places."""
    out = Answer()
    for tokens in [*cached, None]:
        upto = steps if tokens is None else tokens - len(prompt) + 1
        if upto > len(out.tokens):
            out += generate(prompt + out.tokens, upto - len(out.tokens))
    return out


def correct(given: argparse.Namespace) -> None:
    import torch

    prompts = prompts_of(given)
    total = sum(len(ids) // 64 + 2 for ids in prompts)
    changes = {
        "max_model_len": given.longest + given.steps + 64,
        "max_num_seqs": given.prompts,
        "max_num_batched_tokens": max(sum(map(len, prompts)), 2048),
        "num_gpu_blocks_override": int(total * given.room),
        "kv_cache_memory_bytes": 2 << 30,
    }
    llm = engine(given.model, given.plan, given, **changes)
    say(blocks=llm.llm_engine.vllm_config.cache_config.num_gpu_blocks, wanted=total)
    batched = answers(llm, prompts, given.steps)
    preempted = preempted_at(llm, len(prompts))
    say(batched=len(batched), preempted=preempted)
    alone = [answers(llm, [ids], given.steps)[0] for ids in prompts[: given.alone]]
    calm = [i for i in range(len(alone)) if i not in preempted]
    say(alone_against_batched=same([alone[i] for i in calm], [batched[i] for i in calm]))
    if given.forced:
        kept = [i for i in range(len(prompts)) if i not in preempted]
        spread = [kept[-1 - k * len(kept) // given.forced] for k in range(min(given.forced, len(kept)))]
        given_the_same_tokens(given, [(prompts[i], batched[i]) for i in spread])
    generate, wanted = reference(given.model, given.plan, given.dtype), {}
    # those that lost their blocks first, then some of all lengths, as long as there is time
    stripe, stripes = (int(part) for part in given.stripe.split("/"))
    chosen = [i for i in [*sorted(preempted), *range(given.references)] if i % stripes == stripe]
    for i in dict.fromkeys(chosen):
        if given.seconds and time.time() - STARTED > given.seconds:
            break
        wanted[i] = after_preemption(generate, prompts[i], given.steps, preempted.get(i, []))
    asked = {"asked": len(set(chosen)), "preempted": sorted(set(wanted) & set(preempted))}
    say(batched_against_fused=same([batched[i] for i in wanted], list(wanted.values())), **asked)
    plain = [i for i in calm if i in wanted]
    say(alone_against_fused=same([alone[i] for i in plain], [wanted[i] for i in plain]))
    say(memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)


def control(given: argparse.Namespace) -> None:
    """How often two caches part that are both exact: vLLM's own against the model's under `generate`."""
    prompts = prompts_of(given)
    changes = {
        "max_model_len": given.longest + given.steps + 64,
        "max_num_seqs": given.prompts,
        "max_num_batched_tokens": max(sum(map(len, prompts)), 2048),
        "kv_cache_memory_bytes": 4 << 30,
    }
    llm = engine(given.model, None, given, **changes)
    batched = answers(llm, prompts, given.steps)
    alone = [answers(llm, [ids], given.steps)[0] for ids in prompts[: given.alone]]
    say(own_alone_against_batched=same(alone, batched[: len(alone)]))
    generate = reference(given.model, None, given.dtype)
    wanted = [generate(ids, given.steps) for ids in prompts[: given.references]]
    say(own_against_generate=same(batched[: len(wanted)], wanted))


def shared(given: argparse.Namespace) -> None:
    """Prefixes that requests share: hits are counted, and the same request is answered the same way again."""
    from transformers import AutoConfig

    from aatc_cli.serve.vllm_backend.served import served_of

    vocabulary = AutoConfig.from_pretrained(given.model).vocab_size
    heads = [(head * 3)[:640] for head in sorted(random_prompts(40, vocabulary, 400), key=len)[-2:]]
    tails = random_prompts(given.prompts, vocabulary, 100)
    if given.text:
        pieces = text_prompts(given.model, given.text, [640, 640, *map(len, tails)])
        heads, tails = pieces[:2], pieces[2:]
    # the first ones of either prefix are the longest: what others share with them has left their window
    prompts = [heads[i % 2] + tail for i, tail in enumerate(sorted(tails, key=len, reverse=True))]
    changes = {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 1 << 30,
    }
    llm = engine(given.model, given.plan, given, enable_prefix_caching=True, **changes)
    # of either head the first request hits nothing
    cold = [answers(llm, [ids], given.steps)[0] for ids in prompts[:2]]
    joined = [answers(llm, [ids], given.steps)[0] for ids in prompts[2:]]
    some = prompts[:8]
    # a request that comes again finds more full blocks, its own: what it reads packed is the same from then on
    for _ in range(2):
        first = [answers(llm, [ids], given.steps)[0] for ids in some]
    together = answers(llm, some, given.steps)
    again = [answers(llm, [ids], given.steps)[0] for ids in some]
    say(hits=served_of(llm.llm_engine.vllm_config).engine.joined, requests=len(prompts) + 4 * len(some))
    say(again_against_first=same(again, first), together_against_again=same(together, again))
    if given.forced:
        given_the_same_tokens(given, list(zip(prompts, cold, strict=False)), 64, of="cold")
        given_the_same_tokens(given, list(zip(some, again, strict=True)), 64, of="hits")
    generate = reference(given.model, given.plan, given.dtype, 64)
    own = [generate(ids, given.steps) for ids in some]
    # a prompt that hits nothing attends to itself exactly; who goes on from a prefix reads it packed, which is no error
    say(first_against_fused=same(cold, own[: len(cold)]))
    say(hits_against_own_prompts=same(again, own))
    # and so does the fused cache where the same tiles of a prompt before it are put in its place
    wanted = {}
    for head in range(2):
        others = [(i, (prompts[i], joined[i - 2].shared)) for i in range(2 + head, len(prompts), 2)]
        found = after_a_hit(given, prompts[head], [asked for _, asked in others])
        wanted |= {i: each for (i, _), each in zip(others, found, strict=True)}
    say(
        hits_against_fused=same(joined, [wanted[i] for i in range(2, len(prompts))]),
        shared=[each.shared for each in joined],
    )


def compiled(given: argparse.Namespace) -> None:
    """Compile the kernels of a plan, several at once, for whoever comes next."""
    from pathlib import Path

    import torch

    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.models.loading import find_model
    from aatc_cli.serve.vllm_backend import plans, start

    prepared = plans.prepare_plan(Plan.open(Path(given.plan)), find_model(given.model))
    for dtype in (torch.float32, torch.bfloat16):
        config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(dtype=dtype, max_model_len=2048),
            scheduler_config=types.SimpleNamespace(max_num_seqs=1),
            cache_config=types.SimpleNamespace(enable_prefix_caching=False),
        )
        made = start.engine_for(prepared, config, torch.device("cuda", 0))
        made.decoding.prepare(1, made.page_bytes, torch.zeros(1, 32, dtype=torch.int32, device="cuda"))
        say(compiled=str(dtype))


def bench(given: argparse.Namespace) -> None:
    import live_bench

    live_bench.bench(given)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("compiled", "correct", "control", "shared", "bench"))
    parser.add_argument("--model")
    parser.add_argument("--plan")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--overlapped", action="store_true", help="schedule a step while the one before it runs")
    parser.add_argument("--sizes", type=int, nargs="*")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--alone", type=int, default=64)
    parser.add_argument("--references", type=int, default=64)
    parser.add_argument("--forced", type=int, default=0, help="answers that other caches are fed, to compare all steps")
    parser.add_argument("--text", help="a file of text to take prompts from, in place of random tokens")
    parser.add_argument("--stripe", default="0/1", help="which of how many parts of the references to compute")
    parser.add_argument("--seconds", type=float, default=0, help="after which no more references are begun")
    parser.add_argument("--longest", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--room", type=float, default=1.2, help="blocks, as a share of what all prompts take")
    parser.add_argument("--kind", default="plan")
    parser.add_argument("--tokenizer", help="of any model, for vLLM's own benchmarks, whose prompts are text")
    parser.add_argument("--only", nargs="*", default=["first", "latency", "decode", "uneven", "throughput"])
    parser.add_argument("--traced", action="store_true", help="last of all: which kernels take the time")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--bits", type=float, default=2.0)
    parser.add_argument("--folder", default="llama-geometry")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turn", help="a file that processes wait for, so that one is on the GPU at a time")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--memory", type=float, default=0.15, help="share of the GPU that vLLM takes")
    given = parser.parse_args()
    prepare()
    work = {"compiled": compiled, "correct": correct, "control": control, "shared": shared, "bench": bench}
    work[given.what](given)


if __name__ == "__main__":
    # what imports this module by its name is given this one
    sys.modules["live_vllm"] = sys.modules["__main__"]
    main()
