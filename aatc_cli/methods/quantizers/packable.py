"""What quantizers have in common whose codes the packed cache holds: latents over a scale of their token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer

if TYPE_CHECKING:
    from aatc_cli.core.codec import TransformCodec
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Site

_WIDEST_IN_TILES = 8


class Packable(Quantizer):
    """Latents over a token scale for every head group; the layout counts scales and matrices itself.

    levels: whose levels they are, where not its own; restored: share of the lost size that reading gives back.
    """

    levels: ClassVar[str | None] = None
    restored: ClassVar[float] = 0.0
    packed = True
    kinds: ClassVar[tuple[str, ...]] = ("packed", "tiled")
    goes_with = together(transform=("linear", "about a mean"), allocator=("channels",))

    def check(self, recipe: RecipeFields) -> None:
        """Widths that tiles have planes for."""
        if getattr(recipe.tokens, "quotas", None) is not None and recipe.max_bits > _WIDEST_IN_TILES:
            raise ValueError(f"tiles hold widths up to {_WIDEST_IN_TILES} bits")

    def site_codec(self, choices: Choices, site: Site) -> TransformCodec:
        """Matrices and quantizer in one, in float32; raises `ArtifactError` on a scale that is not positive."""
        import torch

        from aatc_cli.core.codec import TransformCodec
        from aatc_cli.core.transform import encode as transformed

        encode, decode = site.matrices()
        parts = {name: site.read(name, (site.geometry.channels,)) for name in ("scale", "variance", "weight", "fisher")}
        if bool((parts["scale"] <= 0).any()):
            raise site.tensors.damaged(f"layer {site.layer} {site.side} has a scale that is not positive")
        chosen = choices.weight(site.side).tensor
        mean = choices.transform.mean(site)
        return TransformCodec(
            encode,
            decode,
            parts["scale"],
            torch.tensor(site.widths),
            parts["variance"],
            quantizer=cast(Literal["uniform-token-max", "lloyd", "uniform"], self.levels or self.name),
            weight=parts[chosen] if chosen is not None else None,
            scale_bits=choices.recipe.scale_bits,
            restored=self.restored,
            centre=None if mean is None else transformed(mean, encode),
        )

    def read_back(self) -> tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]:
        """A latent x is read as g (1 - D) x with noise of g^2 D (1 - D), of levels with error D moved by g."""
        from aatc_cli.core.curves import DISTORTION, DISTORTION_UNIFORM, restoring_gain

        errors = DISTORTION_UNIFORM if (self.levels or self.name) == "uniform" else DISTORTION
        gains = [0.0, *(restoring_gain(error, self.restored) for error in errors[1:])]
        share = [gain * (1.0 - error) for gain, error in zip(gains, errors, strict=True)]
        noise = [gain**2 * error * (1.0 - error) for gain, error in zip(gains, errors, strict=True)]
        return self.distortion(), [float(bits) for bits in range(len(errors))], share, noise

    def codec(self, choices: Choices, site: Site) -> Any:
        """Never apart from its matrices."""
        raise NotImplementedError
