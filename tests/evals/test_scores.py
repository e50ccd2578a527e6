"""Scores against direct computation, and the evaluation files they end in."""

from __future__ import annotations

import json
import math

import pytest
import torch

from aatc_cli.artifacts.evaluation import Evaluation, read_evaluation, write_evaluation
from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import CastCodec
from aatc_cli.core.press.state import Pressed
from aatc_cli.errors import ArtifactError
from aatc_cli.evals.forced.scores import Scores, score_windows
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.evals.reading import read_evaluations
from aatc_cli.methods.registry import press_of
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.second_pass import Reader


def test_scores_equal_the_definitions(tiny_llama):
    model = load_model(find_model(str(tiny_llama)))
    sites, first = attention_sites(model), 7
    windows = torch.randint(0, 256, (3, 300), generator=torch.Generator().manual_seed(0))
    rough = Method(
        "rough",
        [dict.fromkeys(SIDES, CastCodec(torch.float8_e4m3fn))] * 4,
        Window(sinks=1, recent=4, flush=2),
        "pre-rope",
    )
    told = []
    (scores,) = score_windows(model, sites, [rough], windows, first, told.append)
    assert told == ["reference", "rough"] * 3
    kls, nlls, references, agreements = [], [], [], []
    for window in windows:
        with torch.no_grad():
            p = model(input_ids=window[None]).logits[0, first:-1].double().log_softmax(-1)
        q = method_logits(model, sites, rough, window[None], first).double().log_softmax(-1)
        kls.append((p.exp() * (p - q)).sum(-1))
        targets = window[first + 1 :, None]
        nlls.append(-q.gather(1, targets).mean())
        references.append(-p.gather(1, targets).mean())
        agreements.append((p.argmax(-1) == q.argmax(-1)).double())
    means = torch.stack([kl.mean() for kl in kls])
    summary, nll = scores.kl_summary(), scores.nll_summary()
    assert summary["kl_mean"] == pytest.approx(float(means.mean()), rel=1e-4)
    assert summary["kl_stderr"] == pytest.approx(float(means.std() / math.sqrt(3)), rel=1e-3)
    assert summary["top1"] == pytest.approx(float(torch.cat(agreements).mean()))
    shares = torch.stack([agree.mean() for agree in agreements])
    assert summary["top1_stderr"] == pytest.approx(float(shares.std() / math.sqrt(3)))
    quantile = float(torch.quantile(torch.cat(kls), 0.99))
    assert summary["kl_p99"] == pytest.approx(quantile, rel=0.1)
    assert nll["nll"] == pytest.approx(float(torch.stack(nlls).mean()), rel=1e-5)
    assert nll["nll_reference"] == pytest.approx(float(torch.stack(references).mean()), rel=1e-5)
    assert summary["kl_mean"] > 1e-5  # an fp8 cache is visibly not exact


def test_windows_in_one_pass_score_as_alone(tiny_llama):
    """Five windows, two at a time: of a plain method, and of a press, whose shares are those of every window."""
    model = load_model(find_model(str(tiny_llama))).double()
    sites, window = attention_sites(model), Window(sinks=1, recent=16, flush=8)
    windows = torch.randint(0, 256, (5, 120), generator=torch.Generator().manual_seed(2))
    codecs = [dict.fromkeys(SIDES, CastCodec(torch.float8_e4m3fn))] * 4
    reader = Reader(lambda text: list(text.encode()))
    plain = Method("plain", codecs, window, "pre-rope")
    pressed = Method("pressed", codecs, window, "pre-rope", Pressed(press_of("kvzip"), 0.3), reader)
    for methods, prompt in (([plain], 0), ([plain, pressed], 80)):
        told: list[str] = []
        alone = score_windows(model, sites, methods, windows, 80, lambda name: None, prompt)
        together = score_windows(model, sites, methods, windows, 80, told.append, prompt, 2)
        assert told == ["reference", *(method.name for method in methods)] * 3
        for one, other in zip(alone, together, strict=True):
            for name in ("kl", "nll", "nll_reference", "agree"):
                torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=1e-6, atol=1e-9)
            assert [shares.tolist() for shares in other.kept] == [shares.tolist() for shares in one.kept]


def test_one_window_has_no_standard_error():
    one = torch.ones(4)
    scores = Scores(kl=[one], nll=[one], nll_reference=[one], agree=[one])
    assert scores.kl_summary()["kl_stderr"] is None


def evaluation(**changes) -> Evaluation:
    facts = {
        "task": "kl",
        "recipe": "paper",
        "budget": "2",
        "model": "m",
        "plan": "p",
        "bits": 2.0,
        "bits_at_context": 3.0,
        "ratio": 5.3,
        "context": 64,
        "text": "a b:c",
        "text_sha256": "0",
        "windows": 1,
        "length": 64,
        "stride": 64,
        "first_position": 8,
        "tokens_scored": 55,
        "sinks": 4,
        "recent": 128,
        "flush": 16,
        "kl_mean": 0.1,
        "seconds": 1.0,
        "device": "cpu",
        "dtype": "float32",
        "versions": {},
    }
    return Evaluation.model_validate(facts | changes)


def test_evaluations_survive_a_round_trip_and_refuse_damage(tmp_path):
    path = write_evaluation(tmp_path, evaluation())
    assert path.name == "kl.paper-2.a-b-c.64-8.json"
    assert read_evaluation(path) == evaluation()
    write_evaluation(tmp_path, evaluation(recipe="fp16", budget=None))
    assert [found.recipe for found in read_evaluations(tmp_path)] == ["fp16", "paper"]
    text = path.read_text()
    for broken in (text[:-20], text.replace('"ratio": 5.3', '"ratio": NaN'), text.replace('"flush"', '"fluhs"'), "[]"):
        path.write_text(broken)
        with pytest.raises(ArtifactError, match=r"evaluation|cannot be read"):
            read_evaluation(path)


def test_older_files_called_the_bits_at_a_context_otherwise(tmp_path):
    path = tmp_path / "kl.paper-2.a-b-c.64-8.json"
    old = evaluation().model_dump(mode="json", exclude={"bits_at_context", "bits_packed"})
    old |= {"schema_version": 1, "bits_effective": 3.25}
    path.write_text(json.dumps(old))
    found = read_evaluation(path)
    assert (found.bits_at_context, found.bits_packed) == (3.25, None)
    # the name of today's version is not that of the older ones, and the other way round
    path.write_text(json.dumps(old | {"schema_version": 3}))
    with pytest.raises(ArtifactError):
        read_evaluation(path)
