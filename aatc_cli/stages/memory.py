"""eval --task memory: what a cache really holds and the most a process needed, of a model or a geometry alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.versions import versions
from aatc_cli.config import Budget, Geometry, HeadGroups, Window
from aatc_cli.console import progress, say, working
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import UsageError
from aatc_cli.evals.memory import MemoryResult, MemoryRow, Peak, random_widths, storage_bytes
from aatc_cli.evals.subjects import EvalOptions, Subject, device_name, origin_of, require_subjects
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.models.limits import check_length
from aatc_cli.models.loading import ModelSource, identify, load_config, load_model, load_tokenizer
from aatc_cli.profiles import ModelProfile
from aatc_cli.runtime.attach import plain, prepare
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.runtime.packed.store import PackedStore
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.sliding import SlidingStore

# random vectors written into a store at once, of all sequences
_ROWS = 4096


@dataclass(frozen=True)
class MemorySettings:
    """Sizes that are measured."""

    contexts: tuple[int, ...] = (2048,)
    batches: tuple[int, ...] = (1,)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Every context with every batch."""
        return [(context, batch) for context in self.contexts for batch in self.batches]


def measure_memory(
    run: Run, source: ModelSource, subjects: Sequence[Subject], settings: MemorySettings, options: EvalOptions
) -> list[MemoryResult]:
    """Fill every plan's cache, and the model's own, with random tokens at every size, and write one file per plan.

    Raises `UsageError` for a subject without a plan, `AatcError` for a plan of another model or a context that the
    model does not have.
    """
    for subject in subjects:
        if subject.plan is None:
            raise UsageError(f"{subject.name} stands beside every plan already", "name a plan by --recipe, --budget")
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
    identity = identify(source, config, tokenizer)
    require_subjects(identity, subjects)
    check_length(max(settings.contexts), config, "--context")
    with working(f"loading {source.name}"):
        model = load_model(source, device=options.device, dtype=options.dtype)
    references = {size: _reference(model, size, options.device) for size in settings.sizes}
    results = []
    for subject in subjects:
        assert subject.plan is not None
        began, rows = time.perf_counter(), []
        session = prepare(model, subject.plan, "packed")
        with progress(f"eval memory of {subject.name}", len(settings.sizes)) as ticker:
            for size in settings.sizes:
                rows.append(_row(session, size, options.device, references[size]))
                ticker.advance()
        result = MemoryResult(
            **origin_of(subject, identity, options), seconds=time.perf_counter() - began, synthetic=False, rows=rows
        )
        say(f"eval: memory of {subject.name} -> {write_evaluation(run.evals, result)}")
        results.append(result)
    return results


@dataclass(frozen=True)
class _Use:
    """Memory of a run of the model: in use before, the most in use over all of it, the most over the last token."""

    base: int | None
    peak: int | None
    peak_decode: int | None


@torch.no_grad()
def _filled(session: Session, size: tuple[int, int], device: str) -> tuple[Any, _Use]:
    """A cache with ``size`` (context, batch) random tokens, the last of them decoded, and what that took."""
    context, batch = size
    model: Any = session.model
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(vocabulary, (batch, context), generator=torch.Generator().manual_seed(0)).to(device)
    peak = Peak(device)
    base = peak.restart()
    cache = session.new_cache()

    def forward(tokens: Tensor) -> int | None:
        keyword = {cache_keyword(model): cache}
        with session.attached():
            model(input_ids=tokens, use_cache=True, logits_to_keep=1, **keyword)
        return peak.read()

    prefill = forward(ids[:, :-1]) if context > 1 else base
    peak.restart()
    decode = forward(ids[:, -1:])
    known = [value for value in (prefill, decode) if value is not None]
    return cache, _Use(base, max(known, default=None), decode)


def _reference(model: Any, size: tuple[int, int], device: str) -> _Use:
    _, use = _filled(plain(model), size, device)
    return use


def _row(session: Session, size: tuple[int, int], device: str, reference: _Use) -> MemoryRow:
    cache, use = _filled(session, size, device)
    live, state = storage_bytes(cache.state.tensors().values()), cache.state
    assert session.layout is not None
    half = session.layout.reference_bytes(*size)
    return MemoryRow(
        context=size[0],
        batch=size[1],
        bytes_live=live,
        bytes_predicted=state.bytes_predicted(),
        bytes_fp16=half,
        ratio=half / live,
        base_bytes=use.base,
        peak_bytes=use.peak,
        peak_decode_bytes=use.peak_decode,
        base_bytes_reference=reference.base,
        peak_bytes_reference=reference.peak,
        peak_decode_bytes_reference=reference.peak_decode,
    )


def synthetic_memory(
    run: Run,
    profile: ModelProfile,
    recipes: Sequence[Recipe],
    budgets: Sequence[Budget],
    settings: MemorySettings,
    options: EvalOptions,
) -> list[MemoryResult]:
    """The same of a geometry alone: random vectors in stores of random widths with the budget's mean, layer by layer.

    Widths are those of `evals.memory.random_widths` from seed 0; quantizer and transform do not change bytes: the plain
    ones are used. Raises `UsageError` for a budget that is no number of bits or that the recipe's widths cannot have.
    """
    results = []
    for recipe in recipes:
        if recipe.choices.allocator.nothing:
            raise UsageError(f"{recipe.name} stands beside every plan already", "name another --recipe")
        for budget in budgets:
            if budget.unit != "bits" or not recipe.min_bits <= budget.value <= recipe.max_bits:
                wanted = f"between {recipe.min_bits} and {recipe.max_bits}"
                raise UsageError(f"{recipe.name} has no widths of {budget.label} bits", f"give a --budget {wanted}")
            result = _synthetic(profile, recipe, budget, settings, options)
            say(f"eval: memory of {result.method}, synthetic -> {write_evaluation(run.evals, result)}")
            results.append(result)
    return results


def _synthetic(
    profile: ModelProfile, recipe: Recipe, budget: Budget, settings: MemorySettings, options: EvalOptions
) -> MemoryResult:
    geometry, window = profile.geometry, recipe.window
    groups = recipe.head_groups(geometry.kv_heads, HeadGroups.both(profile.head_groups))
    generator = torch.Generator().manual_seed(0)
    bits: list[dict[Side, list[int]]] = [
        {
            side: random_widths(geometry.channels, budget.value, recipe.min_bits, recipe.max_bits, generator)
            for side in SIDES
        }
        for _ in range(geometry.layers)
    ]
    layout = CacheLayout.of_bits(geometry, window, groups, bits, recipe.scale_bits)
    began, rows = time.perf_counter(), []
    stores = geometry.layers + geometry.sliding_layers
    with progress(f"eval memory of {profile.name}", stores * len(settings.sizes)) as ticker:
        for context, batch in settings.sizes:
            peak = Peak(options.device)
            base = peak.restart()
            held: list[Tensor] = []
            for store in _stores(geometry, window, groups, bits, recipe.scale_bits, batch, options.device):
                _fill(store, geometry.channels, context, batch, options.device)
                held += store.tensors().values()
                ticker.advance()
            live, half = storage_bytes(held), layout.reference_bytes(context, batch)
            rows.append(
                MemoryRow(
                    context=context,
                    batch=batch,
                    bytes_live=live,
                    bytes_predicted=layout.bytes(context, batch),
                    bytes_fp16=half,
                    ratio=half / live,
                    base_bytes=base,
                    peak_bytes=peak.read(),
                )
            )
    return MemoryResult(
        recipe=recipe.name,
        budget=budget.label,
        model=profile.model,
        bits=sum(sum(layer[side]) for layer in bits for side in SIDES) / (2 * geometry.layers * geometry.channels),
        bits_packed=layout.bits_packed,
        seconds=time.perf_counter() - began,
        device=device_name(options.device),
        dtype="float16",
        versions=versions(),
        synthetic=True,
        rows=rows,
    )


def _stores(
    geometry: Geometry,
    window: Window,
    groups: HeadGroups,
    bits: Sequence[dict[Side, list[int]]],
    scale_bits: int,
    batch: int,
    device: str,
) -> Iterator[PackedStore | SlidingStore]:
    """Empty stores, one at a time: the matrices of one layer are gone when the next one's are made."""
    for layer in bits:
        keys, values = (
            SiteCodec(side, _plain_codec(layer[side], groups.of(side), scale_bits, device), None, window.flush)
            for side in SIDES
        )
        yield PackedStore(keys, values, window, batch, torch.float16)
    for _ in range(geometry.sliding_layers):
        assert geometry.sliding_window is not None
        yield SlidingStore(geometry.sliding_window, geometry.channels, batch, torch.float16, torch.device(device))


def _plain_codec(bits: list[int], groups: int, scale_bits: int, device: str) -> TransformCodec:
    """A codec that transforms nothing and scales nothing, of these widths."""
    unit = torch.eye(len(bits) // groups).expand(groups, -1, -1)
    ones = torch.ones(len(bits))
    return TransformCodec(unit, unit, ones, torch.tensor(bits), ones, scale_bits=scale_bits).to(device)


def _fill(store: PackedStore | SlidingStore, channels: int, context: int, batch: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = max(_ROWS // batch, 1)

    def draw(count: int) -> Tensor:
        return torch.randn(batch, count, channels, generator=generator).to(device, torch.float16)

    for start in range(0, context, rows):
        count = min(rows, context - start)
        store.append(draw(count), draw(count))
