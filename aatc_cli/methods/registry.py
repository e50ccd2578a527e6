"""Registry: every choice on every axis, each one line. A method of yours is one file beside these and one line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from aatc_cli.methods.allocators.block_dp import BlockDp
from aatc_cli.methods.allocators.keys_wider import KeysWider
from aatc_cli.methods.allocators.layer_ranks import LayerRanks
from aatc_cli.methods.allocators.nothing import Nothing
from aatc_cli.methods.allocators.one_width import OneWidth
from aatc_cli.methods.allocators.paired import Paired
from aatc_cli.methods.allocators.per_head import PerHead
from aatc_cli.methods.allocators.per_layer import PerLayer
from aatc_cli.methods.allocators.profile import GlobalProfile
from aatc_cli.methods.allocators.rank import Rank
from aatc_cli.methods.allocators.rope_pairs import RopePairs
from aatc_cli.methods.allocators.salience import Salience
from aatc_cli.methods.allocators.spectrum import Spectrum
from aatc_cli.methods.allocators.uniform import Uniform
from aatc_cli.methods.allocators.waterfill import Waterfill
from aatc_cli.methods.axes import Choice, TableMaker, Transform, Weight
from aatc_cli.methods.choices import Allocator, Classes, Quantizer
from aatc_cli.methods.classes.one import OneClass
from aatc_cli.methods.classes.tiles import Tiles
from aatc_cli.methods.prediction import Prediction
from aatc_cli.methods.predictions.decoded import Decoded
from aatc_cli.methods.predictions.none import NoPrediction
from aatc_cli.methods.press import NoPress, Press
from aatc_cli.methods.presses.caote import Caote
from aatc_cli.methods.presses.critical_kv import CriticalKv
from aatc_cli.methods.presses.expected import ExpectedAttention
from aatc_cli.methods.presses.h2o import HeavyHitters
from aatc_cli.methods.presses.kvzip import KvZip
from aatc_cli.methods.presses.priced import Priced
from aatc_cli.methods.presses.priced_own import PricedOwn
from aatc_cli.methods.presses.snapkv import SnapKv
from aatc_cli.methods.presses.streaming_llm import StreamingLlm
from aatc_cli.methods.presses.vatp import Vatp
from aatc_cli.methods.quantizers.balanced import Balanced
from aatc_cli.methods.quantizers.block_max import BlockMax
from aatc_cli.methods.quantizers.commuting import Commuting
from aatc_cli.methods.quantizers.float8 import Float8
from aatc_cli.methods.quantizers.float16 import Float16
from aatc_cli.methods.quantizers.grouped_minmax import Grouped
from aatc_cli.methods.quantizers.hqq import Hqq
from aatc_cli.methods.quantizers.latent import Latents
from aatc_cli.methods.quantizers.lloyd import Lloyd
from aatc_cli.methods.quantizers.lloyd_norm import LloydNorm
from aatc_cli.methods.quantizers.merged import Merged
from aatc_cli.methods.quantizers.mixed import Mixed
from aatc_cli.methods.quantizers.quanto import Quanto
from aatc_cli.methods.quantizers.query_codes import QueryCodes
from aatc_cli.methods.quantizers.rate_groups import RateGrouped
from aatc_cli.methods.quantizers.restored import RestoredLloyd, RestoredUniform
from aatc_cli.methods.quantizers.shrunk import Shrunk
from aatc_cli.methods.quantizers.signposts import Signposts
from aatc_cli.methods.quantizers.squat import Squat
from aatc_cli.methods.quantizers.stepped import Stepped
from aatc_cli.methods.quantizers.token_max import TokenMax
from aatc_cli.methods.quantizers.uniform import UniformLevels
from aatc_cli.methods.transforms.centred import CentredMetric
from aatc_cli.methods.transforms.hadamard import Hadamard
from aatc_cli.methods.transforms.head_eigen import HeadEigen
from aatc_cli.methods.transforms.identity import Identity
from aatc_cli.methods.transforms.metric import Metric
from aatc_cli.methods.transforms.over_layers import Global
from aatc_cli.methods.transforms.paired_layers import PairedLayers
from aatc_cli.methods.transforms.pca import Pca
from aatc_cli.methods.transforms.query import Query
from aatc_cli.methods.transforms.shared_basis import SharedLayers
from aatc_cli.methods.transforms.whiten import Whiten
from aatc_cli.methods.weights.fisher import Fisher
from aatc_cli.methods.weights.none import NoWeight
from aatc_cli.methods.weights.output import OutputNorm
from aatc_cli.methods.weights.query import QueryEnergy

if TYPE_CHECKING:
    from aatc_cli.config import Settings

T = TypeVar("T", bound=Choice)
Axis = Literal[
    "transform", "key_weight", "value_weight", "allocator", "quantizer", "classes", "prediction", "curve", "press"
]

TRANSFORMS: Sequence[Transform] = (
    Whiten(),
    Metric(),
    CentredMetric(),
    Identity(),
    Hadamard(),
    Query(),
    Pca(),
    HeadEigen(),
    Global(),
    SharedLayers(),
    PairedLayers(),
)
WEIGHTS: Sequence[Weight] = (NoWeight(), QueryEnergy(), OutputNorm(), Fisher())
ALLOCATORS: Sequence[Allocator] = (
    Waterfill(),
    PerLayer(),
    GlobalProfile(),
    Uniform(),
    OneWidth(),
    KeysWider(),
    RopePairs(),
    Salience(),
    Rank(),
    Spectrum(),
    LayerRanks(),
    Paired(),
    PerHead(),
    BlockDp(),
    Nothing(),
)
QUANTIZERS: Sequence[Quantizer] = (
    TokenMax(),
    Lloyd(),
    UniformLevels(),
    RestoredLloyd(),
    RestoredUniform(),
    Stepped(),
    Grouped(),
    LloydNorm(),
    Signposts(),
    Squat(),
    Mixed(),
    Balanced(),
    RateGrouped(),
    Shrunk(),
    QueryCodes(),
    Commuting(),
    Latents(),
    Merged(),
    BlockMax(),
    Float8(),
    Quanto(),
    Hqq(),
    Float16(),
)
CLASSES: Sequence[Classes] = (OneClass(), Tiles())
PREDICTIONS: Sequence[Prediction] = (NoPrediction(), Decoded())
PRESSES: Sequence[Press] = (
    NoPress(),
    StreamingLlm(),
    HeavyHitters(),
    Vatp(),
    Caote(),
    SnapKv(),
    CriticalKv(),
    ExpectedAttention(),
    KvZip(),
    Priced(),
    PricedOwn(),
)

AXES: Mapping[Axis, Sequence[Choice]] = {
    "transform": TRANSFORMS,
    "key_weight": [weight for weight in WEIGHTS if "k" in weight.sides],
    "value_weight": [weight for weight in WEIGHTS if "v" in weight.sides],
    "allocator": ALLOCATORS,
    "quantizer": QUANTIZERS,
    "classes": CLASSES,
    "prediction": PREDICTIONS,
    "press": PRESSES,
}


def names(axis: Axis) -> list[str]:
    """Names of the choices on an axis, in the order of the tables. Loads neither torch nor numpy nor pydantic."""
    if axis == "curve":
        return [quantizer.curve for quantizer in QUANTIZERS if quantizer.curve is not None]
    return [choice.name for choice in AXES[axis]]


def transform_of(name: str) -> Transform:
    """The transform of a name; raises `KeyError` for one that there is not."""
    return _named(TRANSFORMS, name)


def weight_of(name: str) -> Weight:
    """The weight of a name; raises `KeyError` for one that there is not."""
    return _named(WEIGHTS, name)


def allocator_of(name: str) -> Allocator:
    """The allocator of a name; raises `KeyError` for one that there is not."""
    return _named(ALLOCATORS, name)


def quantizer_of(name: str) -> Quantizer:
    """The quantizer of a name; raises `KeyError` for one that there is not."""
    return _named(QUANTIZERS, name)


def press_of(name: str) -> Press:
    """The press of a name; raises `KeyError` for one that there is not."""
    return _named(PRESSES, name)


def classes_told_by(table: type[Settings] | None) -> Classes:
    """The classes that a recipe's table ``[tokens]`` of this model tells apart; None: it has no table."""
    return next(choice for choice in CLASSES if choice.told_by() is table)


def prediction_told_by(table: type[Settings] | None) -> Prediction:
    """The prediction that a recipe's table ``[prediction]`` of this model asks for; None: it has no table."""
    return next(choice for choice in PREDICTIONS if choice.told_by() is table)


def curve_of(name: str) -> Quantizer:
    """The quantizer whose distortion curve has this name."""
    return next(quantizer for quantizer in QUANTIZERS if quantizer.curve == name)


def table_makers(transform: str, asked: Sequence[str] = ()) -> list[TableMaker]:
    """Whose tables a Transform of this kind holds: unasked, and of the names that were asked for."""
    makers: list[TableMaker] = [*ALLOCATORS, *QUANTIZERS]
    return [maker for maker in makers if transform in maker.on or maker.name in asked]


def table_names() -> list[str]:
    """Names of the quantizers whose tables a Transform holds on request."""
    return [q.name for q in QUANTIZERS if q.asked]


def _named(choices: Sequence[T], name: str) -> T:
    return {choice.name: choice for choice in choices}[name]
