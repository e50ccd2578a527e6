"""Card of an exported plan: what it is, what it takes, how good it is, and how it was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.artifacts.manifest import TextRecord
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import Transform
from aatc_cli.artifacts.versions import versions

# tokens at which a card states bytes
_CONTEXTS = (8192, 32768)


def card(run: Run, plan: Plan, transform: Transform, evaluations: Sequence[dict[str, Any]]) -> str:
    """The card as Markdown, with the fields that a hub reads in front. ``run`` is where the plan was made."""
    model, recipe = plan.model, plan.recipe
    stats = [stats for stats in _stats(run) if stats.digest in transform.manifest.inputs.values()]
    base = [f"base_model: {model.name}"] if model.name.count("/") == 1 else []
    parts = [
        "\n".join(["---", "library_name: aatc", "tags: [kv-cache, quantization]", *base, "---"]),
        f"# {plan.name} for {model.name}\n\nA plan for a key-value cache of {plan.mean_bits:.3f} bits per channel, "
        f"made by [aatc](#how-it-was-made) with recipe `{recipe.name}`. {recipe.summary}.",
        _use(plan),
        _size(plan),
        _quality(evaluations),
        _calibration(transform.texts or [text for each in stats for text in each.texts]),
        _making(plan, transform, stats),
    ]
    return "\n\n".join(parts) + "\n"


def _stats(run: Run) -> list[Stats]:
    return [Stats.open(path) for path in run.all_stats()]


def _use(plan: Plan) -> str:
    model = plan.model
    revision = f", revision {model.revision}" if model.revision else ""
    return (
        "## Use\n\nThis folder is all that is needed beside the model; `--plan` of every aatc command takes it.\n\n"
        "```console\n"
        "$ aatc inspect .\n"
        "$ aatc allocate --check .\n"
        f"$ aatc eval kl --plan . --model {model.name}\n"
        "```\n\n"
        f"Made for exactly these weights: {model.name}{revision}, fingerprint `{model.weights_fingerprint}`. "
        "Another model is refused."
    )


def _size(plan: Plan) -> str:
    rows = ["| tokens | float16 | this plan | smaller by | bits a number |", "|---:|---:|---:|---:|---:|"]
    layout = plan.layout
    for tokens in _CONTEXTS:
        reference, total = layout.reference_bytes(tokens), layout.bytes(tokens)
        rows.append(
            f"| {tokens:,} | {reference / 1e6:,.1f} MB | {total / 1e6:,.1f} MB | {reference / total:.2f} x "
            f"| {layout.bits_at(tokens):.3f} |"
        )
    return "## Size of the cache\n\n" + "\n".join(rows)


def _quality(evaluations: Sequence[dict[str, Any]]) -> str:
    rows = []
    for data in evaluations:
        where = data.get("text") or data.get("benchmark") or ""
        for name, key in (("KL, nats per token", "kl"), ("perplexity", "perplexity"), ("top-1 agreement", "top1")):
            mean = data.get(f"{key}_mean", data.get(key))
            if isinstance(mean, float):
                error = data.get(f"{key}_stderr")
                figure = f"{mean:.4g}" + (f" ± {error:.2g}" if isinstance(error, float) else "")
                rows.append(f"| {name} | {where} | {data.get('tokens_scored', '')} | {figure} |")
    if not rows:
        return "## Quality\n\nNothing was measured of this plan in the run that it comes from."
    head = ["| measured | on | tokens | |", "|---|---|---:|---:|"]
    return "## Quality\n\nAgainst the same model with its uncompressed cache; files in `evals/`.\n\n" + "\n".join(
        head + rows
    )


def _calibration(texts: Sequence[TextRecord]) -> str:
    if not texts:
        return "## Calibration\n\nIts texts are not recorded in what this plan was made from."
    rows = ["| text | weight | windows | sha256 |", "|---|---:|---:|---|"]
    rows += [f"| {text.name} | {text.weight:g} | {text.windows} | `{text.sha256[:16]}` |" for text in texts]
    return "## Calibration\n\n" + "\n".join(rows)


def _making(plan: Plan, transform: Transform, stats: Sequence[Stats]) -> str:
    lines = [_collect_line(plan, each) for each in stats]
    lines.append(_whiten_line(plan, transform))
    lines.append(f"aatc allocate --recipe {plan.recipe.name} {_budget(plan)}")
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    return (
        "## How it was made\n\n```sh\n" + "\n".join(lines) + "\n```\n\n"
        f"Plan `{plan.digest}`, transform `{transform.digest}`; exported with {packages}."
    )


def _whiten_line(plan: Plan, transform: Transform) -> str:
    settings, usual = transform.settings, type(transform.settings).model_fields
    parts = [f"aatc whiten --recipe {plan.recipe.name}"]
    # head groups of a profile or an option: the collect line names no profile, which leaves one
    chosen = {plan.recipe.key_groups: plan.groups.k, plan.recipe.value_groups: plan.groups.v}
    parts += [f"--head-groups {chosen['profile']}"] if chosen.get("profile", 1) != 1 else []
    for name in ("percentile", "shrinkage"):
        value = getattr(settings, name)
        parts += [f"--{name} {value:g}"] if value != usual[name].default else []
    return " ".join(parts)


def _collect_line(plan: Plan, stats: Stats) -> str:
    settings = stats.settings
    texts = " ".join(f"--text {text.name}@{text.weight:g}" for text in stats.texts)
    parts = ["aatc collect", f"--model {plan.model.name}", texts, f"--samples {settings.samples}"]
    parts += [f"--first {settings.first}"] if settings.first else []
    parts += [f"--length {settings.length}", f"--seed {settings.seed}"]
    for name in ("rows", "skip_first", "fisher"):
        value = getattr(settings, name)
        parts += [f"--{name.replace('_', '-')} {value}"] if value != type(settings).model_fields[name].default else []
    parts += [f"--name {stats.path.name}"] if stats.path.name != "stats" else []
    return " ".join(parts)


def _budget(plan: Plan) -> str:
    value = plan.budget.value
    if plan.budget.unit == "bits":
        return f"--budget {value:g}"
    option = {"ratio": f"--ratio {value:g}", "bytes": f"--bytes {value:.0f}"}[plan.budget.unit]
    return f"{option} --context {plan.budget.context}"
