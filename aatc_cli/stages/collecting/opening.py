"""Model and text of a collection, once both are known to serve."""

from __future__ import annotations

from aatc_cli.artifacts.manifest import ModelIdentity
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.console import working
from aatc_cli.models.limits import check_length, check_tokens
from aatc_cli.models.loading import ModelSource, identify, load_config, load_tokenizer
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile, TextMixture
from aatc_cli.stages.collecting.checks import check_rank
from aatc_cli.text.windows import Windows, draw_windows


def opened(
    source: ModelSource, mixture: TextMixture, settings: CollectSettings, profile: ModelProfile | None
) -> tuple[ModelIdentity, Windows, int | None]:
    """Which model it is, and the windows of text, once both are known to serve."""
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
        identity = identify(source, config, tokenizer)
    check_profile(profile, identity.geometry)
    check_length(settings.length, config)
    check_rank(settings, identity.geometry)
    with working("reading and tokenizing the text"):
        drawn = draw_windows(
            mixture.sources,
            tokenizer.encode,
            samples=settings.samples,
            length=settings.length,
            seed=settings.seed,
            bos=tokenizer.bos,
        )
    check_tokens(drawn.tokens, config)
    return identity, drawn, tokenizer.bos
