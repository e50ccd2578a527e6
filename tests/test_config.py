from __future__ import annotations

import json
import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from aatc_cli.artifacts.evaluation import DistortionRow, Evaluation, Measurement, Task, TokenTrace
from aatc_cli.artifacts.manifest import Manifest, ModelIdentity, TensorEntry, TextRecord
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.artifacts.study import StudyCell, StudyResult, StudyRow
from aatc_cli.artifacts.transform import WhitenSettings
from aatc_cli.cli.asked import AllocateAsked, CalibrationAsked, InspectAsked, WhitenAsked
from aatc_cli.config import Budget, Geometry, HeadGroups, Settings, Window, make_budget, parse_size
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals import TASKS, find_task
from aatc_cli.evals.accumulate.result import AccumulateRow
from aatc_cli.evals.accumulate.result import Result as AccumulateResult
from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.answers.settings import AnswerSettings
from aatc_cli.evals.memory.result import MemoryRow
from aatc_cli.evals.memory.result import Result as MemoryResult
from aatc_cli.evals.needles.result import NeedleCell
from aatc_cli.evals.needles.result import Result as NeedlesResult
from aatc_cli.evals.recall.result import RecallRow, RecallToken
from aatc_cli.evals.recall.result import Result as RecallResult
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.speed.result import SpeedCheck, SpeedMemory, SpeedRates, SpeedRow
from aatc_cli.evals.stability.result import Result as StabilityResult
from aatc_cli.evals.stability.result import StabilityRow
from aatc_cli.evals.stored.result import Result as StoredResult
from aatc_cli.evals.windows.settings import WindowSettings
from aatc_cli.methods.fields import Coding, Protection, RecipeFields
from aatc_cli.methods.prediction_fields import PredictedCoding, PredictionFields
from aatc_cli.methods.recipe import Recipe
from aatc_cli.methods.tile_quotas import TileQuotas
from aatc_cli.profiles import Calibration, ModelProfile, TextMixture
from aatc_cli.report.data.published import Published, PublishedRow
from aatc_cli.serve.opening import PluginSettings
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.studies.definition import Study, StudyChoices, StudyMethod, StudyTask

GEOMETRY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=4, hidden_size=16)
MIXTURE = TextMixture(sources=["builtin:python-docs", "a.txt@0.5"], samples=3, length=64)
IDENTITY = ModelIdentity(
    name="m",
    revision="abc",
    architecture="llama",
    config_hash="c",
    weights_fingerprint="w",
    tokenizer_hash="t",
    geometry=GEOMETRY,
)
ENTRY = TensorEntry(dtype="float32", shape=(2, 0), sha256="0" * 64)
TEXT = TextRecord(name="a.txt", weight=1 / 3, sha256="a", tokens=100, windows=3)
ROW = DistortionRow(layer=0, side="v", bits=2.5, plan=True, predicted=0.1, predicted_diagonal=1e-9, measured=0.2)
STABILITY_ROW = StabilityRow(
    stats="a",
    stats_digest="d",
    calibration=["t"],
    text="t",
    text_sha256="s",
    bits=2.0,
    kl_mean=0.1,
    kl_stderr=None,
    predicted=0.05,
    predicted_elsewhere=None,
)
WHERE = {
    "recipe": "paper",
    "budget": "2",
    "model": "m",
    "bits": 2.0,
    "seconds": 1.5,
    "device": "cpu",
    "dtype": "float32",
    "versions": {"a": "1"},
}
SCORE = BenchmarkRow(
    subtask="niah_single_1",
    context=1024,
    metric="string_match_all",
    score=0.5,
    stderr=None,
    samples=2,
    prompts_sha256="s",
    seconds=1.5,
)
MEMORY_ROW = MemoryRow(
    context=64, batch=1, bytes_live=10, bytes_predicted=10, bytes_fp16=60, ratio=6.0, base_bytes=None, peak_bytes=None
)
SPEED_ROW = SpeedRow(
    part="decode",
    context=64,
    batch=1,
    backend="torch",
    milliseconds=1.5,
    milliseconds_low=1.0,
    milliseconds_high=2.0,
    ratio=2.5,
    ratio_low=2.0,
    ratio_high=3.0,
)
SPEED_RATES = SpeedRates(read_bytes=4e12, integer_instructions=1.5e13, float8_multiply_adds=7e14)
SPEED_MEMORY = SpeedMemory(
    context=64,
    batch=1,
    backend="fused",
    peak_bytes=31,
    weight_bytes=20,
    law_bytes=10,
    live_bytes=10,
    static_bytes=1,
    buffer_bytes=0,
    ratio=31 / 30,
)
STUDY_ROW = StudyRow(name="paper@2", label="paper", recipe="paper", stats=None, asked=2.0, matched=True)
STUDY_CELL = StudyCell(row="paper@2", task="kl", text="t", length=64, reason="no file")
METHOD = StudyMethod(recipe="paper", budgets=(1, 2), packed=(2.5,), label="ours")
TASK = StudyTask(task="ruler", contexts=(1024,), subtasks=("vt",), limit=2)
PUBLISHED_ROW = PublishedRow(recipe="paper", budget="2", ratio=6.9, source="Table 1", scores={"gsm8k": 50.5})
CHECK = SpeedCheck(context=64, batch=1, backend="torch", error=1e-6, bound=0.05)
NEEDLES = NeedleCell(context=9, depth=50, samples=1, score=1.0, low=0.2, high=1.0, wanted=["7"], answers=["7."])
RECALL_TOKEN = RecallToken(
    window=0,
    first=9,
    again=700,
    kind="name",
    unread=-9.5,
    reference=-0.25,
    logprob=-0.5,
    first_of_reference=True,
    first_of_all=False,
    agree=False,
    classes=[0.5, 0.25, 0.25],
)
RECALL_ROW = RecallRow(
    part="all",
    tokens=1,
    windows=1,
    loss=0.25,
    loss_stderr=None,
    loss_p90=0.25,
    loss_p99=0.25,
    agree=0.0,
    agree_stderr=None,
    probability=0.5,
    probability_reference=0.75,
)
ACCUMULATE_ROW = AccumulateRow(
    way="text",
    tokens=2,
    kl_mean=0.25,
    kl_stderr=None,
    kl_windows=[0.25],
    kl_p50=0.25,
    kl_p90=0.5,
    kl_p99=0.5,
    kl_p999=0.5,
    kl_max=0.5,
    stretches=[0.0, 0.5],
    top1=0.5,
    nll=2.5,
    nll_uncompressed=2.25,
    nll_change=0.25,
    nll_change_stderr=None,
)
TRACE = TokenTrace(window=0, first=9, tokens=["a"], kl=[0.5])
PREDICTION = PredictionFields(rank=8)
EXAMPLES: list[BaseModel] = [
    *(task.part("settings", "Settings")() for task in TASKS if task.folder != "lm_eval"),
    find_task("gsm8k").part("settings", "Settings")(),
    PREDICTION,
    PredictedCoding(
        form=PREDICTION, quantizer="lloyd", quotas=(32, 16, 16), order="head", floor=0.0, max_bits=8, scale_bits=8
    ),
    WindowSettings(first=3),
    AnswerSettings(subtask=("a",)),
    NEEDLES,
    NeedlesResult(**WHERE, cells=[NEEDLES]),
    RECALL_TOKEN,
    RECALL_ROW,
    RecallResult(
        text="t",
        text_sha256="s",
        windows=1,
        length=2048,
        gap=512,
        places=1,
        rows=[RECALL_ROW],
        tokens=[RECALL_TOKEN],
        **WHERE,
    ),
    ACCUMULATE_ROW,
    AccumulateResult(text="t", text_sha256="s", windows=1, prompt=256, decoded=2, rows=[ACCUMULATE_ROW], **WHERE),
    PluginSettings(plan="run/plans/paper-3", model="m"),
    StoredResult(
        text="t",
        text_sha256="s",
        windows=1,
        prefix=1536,
        continuation=512,
        chunk=256,
        ranked="key-norm",
        bytes_stored=10.5,
        bytes_raw=80,
        **WHERE,
    ),
    Coding(key_axis="channel", group=32, outliers=0.01),
    Measurement(task="any", **WHERE),
    SCORE,
    MEMORY_ROW,
    SPEED_ROW,
    CHECK,
    TRACE,
    BenchmarkResult(benchmark="ruler", rows=[SCORE], left_out={"qa_1": "no file"}, **WHERE),
    MemoryResult(synthetic=True, rows=[MEMORY_ROW], **WHERE),
    SpeedResult(absolute=False, threads=1, repeats=3, steps=16, rows=[SPEED_ROW], checks=[CHECK], **WHERE),
    SPEED_RATES,
    SPEED_MEMORY,
    SpeedResult(
        absolute=True,
        threads=1,
        repeats=3,
        steps=1,
        rows=[SPEED_ROW],
        checks=[CHECK],
        groups=1,
        rates=SPEED_RATES,
        memory=[SPEED_MEMORY],
        configurations={"a": "b"},
        left_out={"c": "d"},
        **WHERE,
    ),
    Window(),
    Window(sinks=0, recent=16, flush=16),
    GEOMETRY,
    MIXTURE,
    Protection(layers=3, key_extra=0.5),
    Budget(unit="bits", value=0.1),
    Budget(unit="ratio", value=5.82, context=8192),
    Budget(unit="bytes", value=184e6, context=1),
    Calibration(rates=MIXTURE),
    Calibration(transform=MIXTURE, rates=MIXTURE),
    ModelProfile(
        name="m", model="o/m", geometry=GEOMETRY, context=512, head_groups=2, calibration=Calibration(rates=MIXTURE)
    ),
    Recipe(name="mine", summary="s", normalize_percentile=None, window=Window(sinks=1), protect=Protection(layers=1)),
    Recipe(name="rates", summary="s", quantizer="lloyd", window=Window(value_bits=8)),
    CollectSettings(samples=8, length=64),
    HeadGroups(k=8, v=1),
    TileQuotas(quotas=(48, 16)),
    CollectOptions(),
    StudyChoices(),
    CalibrationAsked(),
    WhitenAsked(),
    AllocateAsked(),
    InspectAsked(),
    WhitenSettings(transform="identity", head_groups=HeadGroups(k=2, v=1), percentile=99.9),
    IDENTITY,
    ENTRY,
    TEXT,
    ROW,
    STABILITY_ROW,
    STUDY_ROW,
    STUDY_CELL,
    METHOD,
    TASK,
    PUBLISHED_ROW,
    StudyResult(study="mine", summary="s", model="m", model_fingerprint="f", rows=(STUDY_ROW,), cells=(STUDY_CELL,)),
    Study(name="mine", summary="s", methods=(METHOD,), tasks=(TASK,)),
    Published(model="o/m", source="the paper", rows=(PUBLISHED_ROW,)),
    StabilityResult(
        recipe="loss-aware",
        budget="2",
        model="m",
        bits=2.0,
        seconds=1.5,
        device="cpu",
        dtype="float32",
        versions={"a": "1"},
        length=64,
        first_position=0,
        windows=[1],
        rows=[STABILITY_ROW],
        kl_spread={"t": 1.0},
    ),
    Manifest(
        schema_version=1,
        kind="stats",
        settings={"x": [0.1, None]},
        model=IDENTITY,
        inputs={"a": "b"},
        texts=[TEXT],
        tensors={"t": ENTRY},
        results={"tokens": 3},
        digest="d",
        provenance={},
    ),
    Evaluation(
        task="kl",
        recipe="paper",
        budget="2",
        model="m",
        bits=2.0,
        bits_at_context=2.7,
        ratio=5.9,
        context=64,
        text="t",
        text_sha256="s",
        windows=1,
        length=64,
        stride=64,
        first_position=0,
        tokens_scored=63,
        sinks=4,
        recent=8,
        flush=4,
        kl_mean=0.125,
        traces=[TRACE],
        distortion=[ROW],
        seconds=1.5,
        device="cpu",
        dtype="float32",
        versions={"a": "1"},
    ),
]
finite = st.floats(allow_nan=False, allow_infinity=False)


def subclasses(base: type[BaseModel]) -> set[type[BaseModel]]:
    found = {sub for sub in base.__subclasses__() if sub.__module__.startswith("aatc_cli")}
    return found | {deep for sub in found for deep in subclasses(sub)}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_json_round_trip(example: BaseModel) -> None:
    kind = type(example)
    assert kind.model_validate_json(example.model_dump_json()) == example
    text = json.dumps(example.model_dump(mode="json"), allow_nan=False)
    assert kind.model_validate_json(text) == example
    assert kind.model_validate_json(text).model_dump(mode="json") == json.loads(text)


def test_every_settings_model_has_an_example() -> None:
    """Of `RecipeFields` the example is `Recipe`, which checks its fields."""
    assert subclasses(Settings) - {RecipeFields} <= {type(example) for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_frozen_and_closed(example: BaseModel) -> None:
    field = next(iter(type(example).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(example, field, None)
    with pytest.raises(ValidationError, match="surprise"):
        type(example).model_validate(example.model_dump() | {"surprise": 1})


@given(value=st.floats(min_value=1e-300, max_value=16), context=st.integers(1, 10**9))
def test_budgets_round_trip_through_json(value: float, context: int) -> None:
    for budget in (
        Budget(unit="bits", value=value),
        Budget(unit="ratio", value=value * 1e5, context=context),
        Budget(unit="bytes", value=float(round(value * 1e12) + 1), context=context),
    ):
        assert Budget.model_validate(json.loads(json.dumps(budget.model_dump(mode="json")))) == budget


@given(a=st.floats(min_value=1e-300, max_value=16), b=st.floats(min_value=1e-300, max_value=16))
def test_labels_differ_where_budgets_differ(a: float, b: float) -> None:
    near = math.nextafter(a, 17) if a < 16 else a
    for left, right in ((a, b), (a, near)):
        one, other = Budget(unit="bits", value=left), Budget(unit="bits", value=right)
        assert (one.label == other.label) == (left == right)
        assert float(one.label) == left


@pytest.mark.parametrize(
    ("budget", "label"),
    [
        (Budget(unit="bits", value=2.0), "2"),
        (Budget(unit="bits", value=2.5), "2.5"),
        (Budget(unit="bits", value=16), "16"),
        (Budget(unit="bits", value=2.0000001), "2.0000001"),
        (Budget(unit="ratio", value=5.82, context=8192), "5.82x-8192"),
        (Budget(unit="bytes", value=184e6, context=8192), "184000000B-8192"),
    ],
)
def test_labels(budget: Budget, label: str) -> None:
    assert budget.label == label
    assert "/" not in label


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (Window, {"flush": 129}, "flush (129) must not exceed the recent window (128)"),
        (Window, {"flush": 0}, "greater than or equal to 1"),
        (Window, {"recent": 0}, "greater than or equal to 1"),
        (Window, {"sinks": -1}, "greater than or equal to 0"),
        (Window, {"sinks": 1.0}, "valid integer"),
        (Window, {"sinks": "4"}, "valid integer"),
        (Window, {"sinks": True}, "valid integer"),
        (Geometry, {"kv_heads": 3}, "heads (4) must be a multiple of kv_heads (3)"),
        (Geometry, {"layers": 0}, "greater than or equal to 1"),
        (Budget, {"unit": "bits", "value": 16.5, "context": None}, "16.5 bits is above the 16"),
        (Budget, {"unit": "bits", "value": 0.0, "context": None}, "greater than 0"),
        (Budget, {"unit": "ratio", "value": 2.0, "context": None}, "needs --context"),
        (Budget, {"unit": "bytes", "value": math.inf, "context": 1}, "finite number"),
        (Budget, {"unit": "bits", "value": math.nan, "context": None}, "finite number"),
        (Budget, {"unit": "bits", "value": "2", "context": None}, "valid number"),
        (Budget, {"unit": "nibbles", "value": 2.0, "context": None}, "'bits', 'ratio' or 'bytes'"),
        (Recipe, {"min_bits": 9, "max_bits": 8}, "min_bits (9) exceeds max_bits (8)"),
        (Recipe, {"max_bits": 17}, "less than or equal to 16"),
        (Recipe, {"quantizer": "float16"}, 'quantizer "float16" goes with allocator "one-width" or "none"'),
        (Recipe, {"allocator": "none"}, 'goes with allocator "waterfill" or "per-layer"'),
        (Recipe, {"normalize_percentile": 0.0}, "greater than 0"),
        (Recipe, {"name": "../x"}, "match pattern"),
        (Recipe, {"name": ""}, "match pattern"),
        (Recipe, {"name": ".hidden"}, "match pattern"),
        (Recipe, {"name": "a b"}, "match pattern"),
        (Recipe, {"name": "a\n"}, "match pattern"),
        (ModelProfile, {"head_groups": 3}, "head_groups (3) must divide kv_heads (2)"),
        (TextMixture, {"sources": []}, "at least 1 item"),
        (TextMixture, {"length": 1}, "greater than or equal to 2"),
        (CollectSettings, {"seed": 2**31}, "less than"),
        (CollectSettings, {"skip_first": -1}, "equal to 0"),
        (WhitenSettings, {"percentile": 0.0}, "greater than 0"),
        (WhitenSettings, {"percentile": 100.1}, "equal to 100"),
    ],
)
def test_values_that_cannot_be(kind: type[BaseModel], changes: dict[str, Any], says: str) -> None:
    example = next(e for e in EXAMPLES if type(e) is kind)
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(example.model_dump() | changes)
    assert says in str(caught.value)


def test_channels() -> None:
    assert GEOMETRY.channels == 8


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("184MB", 184_000_000),
        ("184 MB", 184_000_000),
        (" 1.5GiB ", 3 * 2**29),
        ("2kib", 2048),
        ("3KB", 3000),
        ("7b", 7),
        (".5MiB", 2**19),
        ("1GB", 10**9),
        ("0", 0),
        ("0.4", 0),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MB", "1 TB", "1.2.3MB", "-1MB", "+1", "1e6", "inf", "nan", "1MBit", "1,5MB", "٣MB", "9" * 400 + "GB", "0x10"],
)
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.exit_code == 2
    assert len(caught.value.message) < 200
    assert "MB" in str(caught.value.hint)


@given(value=finite | st.sampled_from([math.nan, math.inf, -math.inf]))
def test_make_budget_takes_bits_from_above_zero_to_sixteen_and_nothing_else(value: float) -> None:
    if 0 < value <= 16:
        assert make_budget(bits=value, context=64) == Budget(unit="bits", value=value)
        return
    with pytest.raises(UsageError) as caught:
        make_budget(bits=value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({}, "got none"),
        ({"bits": 2.0, "ratio": 3.0}, "--budget and --ratio"),
        ({"bits": 2.0, "size": "1MB"}, "--budget and --bytes"),
        ({"ratio": 2.0, "size": "1MB"}, "--ratio and --bytes"),
        ({"ratio": 3.0}, "--ratio needs --context"),
        ({"size": "1MB"}, "--bytes needs --context"),
        ({"ratio": 0.0, "context": 9}, "--ratio must be a positive number, got 0"),
        ({"ratio": -3.0, "context": 9}, "got -3"),
        ({"ratio": math.nan, "context": 9}, "got nan"),
        ({"ratio": math.inf, "context": 9}, "got inf"),
        ({"size": "0", "context": 9}, "--bytes must be a positive number"),
        ({"size": "0.4", "context": 9}, "got 0"),
        ({"bits": 16.1}, "16.1 bits is above the 16"),
    ],
)
def test_make_budget_names_the_option(given_: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_budget(**given_)
    assert says in caught.value.message
    assert caught.value.hint


def test_make_budget_units() -> None:
    assert make_budget(ratio=5.82, context=8192) == Budget(unit="ratio", value=5.82, context=8192)
    assert make_budget(size="184MB", context=8192) == Budget(unit="bytes", value=184e6, context=8192)
    assert make_budget(bits=2.0, context=8192).context is None


def test_exit_codes() -> None:
    assert (AatcError("a").exit_code, UsageError("a").exit_code) == (1, 2)
    assert set(get_args(Task)) == {"kl", "perplexity", "distortion"}
