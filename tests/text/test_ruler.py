"""RULER prompts against those of the original generator, its published templates, and independent readings."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import string
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aatc_cli.errors import AatcError, UsageError
from aatc_cli.text.ruler import chains, counting, needles, questions
from aatc_cli.text.ruler.collections import open_collections
from aatc_cli.text.ruler.prompt import make_samples
from aatc_cli.text.ruler.score import score
from aatc_cli.text.ruler.tasks import TASKS, Material, chosen_tasks, make_task
from aatc_cli.text.ruler.words import draw_distinct

NAMES = [f"{a}{b}ab" for a in string.ascii_lowercase for b in string.ascii_lowercase]
TEXT = " ".join(f"Every {name} has an end. A {name} goes on, does it not?" for name in NAMES)
OFFLINE = [name for name in TASKS if not name.startswith("qa")]
CONTEXT = 1500


def words_of(prompt):
    """A tokenizer for tests: white space parts a text."""
    return (prompt.text + prompt.prefix).split()


def samples_of(name, context=CONTEXT, count=3, seed=0, **material):
    task = make_task(name, context, Material(TEXT, **material), words_of)
    return task, make_samples(task, context, count, seed, words_of)


# the format, from outside


def original_prompts():
    folder = os.environ.get("AATC_DATA")
    path = Path(folder or ".") / "ruler" / "niah_multikey_3_4096_first100.jsonl"
    if folder is None or not path.is_file():
        pytest.skip("the original RULER prompts are not here: AATC_DATA names the folder that holds ruler/")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def in_our_words(text):
    """The needles and the query of a multikey_3 prompt, put into this package's templates again."""
    pairs = re.findall(r"^One of the special magic uuids for (\S+) is: (\S+)\.$", text, re.M)
    lines = [needles.NEEDLE.format(kind="uuids", key=key, value=value) for key, value in pairs]
    query = re.search(r"What is the special magic uuid for (\S+) mentioned", text)[1]
    return (
        needles.ONE.format(kind="uuid", context="\n".join(lines), query=query)
        + needles.ONE_PREFIX.format(kind="uuid", query=query),
        dict(pairs)[query],
        len(pairs),
    )


def test_original_prompts_are_ours_byte_for_byte():
    originals = original_prompts()
    assert len(originals) == 100
    for record in originals:
        rebuilt, answer, count = in_our_words(record["input"])
        assert rebuilt == record["input"]
        assert record["outputs"] == [answer]
        assert count == 51


def test_our_multikey_3_prompts_have_the_original_format():
    for sample in samples_of("niah_multikey_3")[1]:
        text = sample.prompt.text + sample.prompt.prefix
        rebuilt, answer, count = in_our_words(text)
        assert rebuilt == text
        assert sample.prompt.answers == (answer,)
        assert count > 100


def published(name, variable):
    """A constant of the task file ``name`` in lm-eval, read from its source: importing it would load data."""
    found = importlib.util.find_spec("lm_eval")
    if found is None:
        pytest.skip("lm-eval is not installed, whose RULER templates are compared here: pip install 'aatc[bench]'")
    tree = ast.parse((Path(found.origin).parent / "tasks" / "ruler" / name).read_text(encoding="utf-8"))
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == variable
    )


def test_templates_are_those_of_an_independent_implementation():
    template = published("niah_utils.py", "TEMPLATE")
    kinds = {"type_needle_v": "{kind}", "context": "{context}", "query": "{query}"}
    assert template.format(**kinds) == needles.SEVERAL
    assert published("prepare_niah.py", "NEEDLE").format(type_needle_v="{kind}", key="{key}", value="{value}") == (
        needles.NEEDLE
    )
    tracking = published("vt_utils.py", "CONFIG")["variable_tracking"]
    assert tracking["template"].format(context="{context}", query="{value}") == chains.QUESTION
    assert tracking["answer_prefix"].format(num_v="{count}", query="{value}") == chains.PREFIX
    for file, text, prefix in (
        ("cwe_utils.py", counting.COMMON, counting.COMMON_PREFIX),
        ("fwe_utils.py", counting.CODED, counting.CODED_PREFIX),
    ):
        config = published(file, "CONFIG")
        assert (config["template"], config["answer_prefix"]) == (text, prefix)
    asked = published("qa_utils.py", "CONFIG")
    assert (asked["template"], f" {asked['answer_prefix']}") == (questions.QUESTION, questions.PREFIX)
    rooms = {"vt": tracking, "cwe": published("cwe_utils.py", "CONFIG"), "fwe": published("fwe_utils.py", "CONFIG")}
    for name, config in rooms.items():
        assert make_task(name, CONTEXT, Material(TEXT), words_of).room == config["tokens_to_generate"]


# the content, read back independently


@pytest.mark.parametrize("name", OFFLINE)
def test_prompts_fill_the_context_and_no_more(name):
    task, samples = samples_of(name, count=5)
    lengths = [len(sample.tokens) + task.room for sample in samples]
    # a line of needles among needles has ten words, a coded word in the probe may be several
    assert max(lengths) <= CONTEXT
    assert min(lengths) > 0.95 * CONTEXT


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_1", "niah_multikey_3", "vt"])
def test_few_lengths_are_left(name):
    def letters(prompt):
        return list(prompt.text + prompt.prefix)

    task = make_task(name, 6000, Material(TEXT), letters)
    samples = make_samples(task, 6000, 12, 0, letters)
    usual, count = Counter(len(sample.tokens) for sample in samples).most_common(1)[0]
    assert count >= 6
    assert all(abs(len(sample.tokens) - usual) <= 10 for sample in samples)
    assert len({sample.prompt.answers for sample in samples}) == 12


@pytest.mark.parametrize("name", OFFLINE)
def test_the_seed_decides_everything(name):
    first, again, other = (samples_of(name, seed=seed)[1] for seed in (3, 3, 4))
    assert first == again
    assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))
    assert len({sample.prompt for sample in first}) == 3


def test_prompts_are_the_same_on_every_machine():
    texts = [s.prompt.text + s.prompt.prefix for name in OFFLINE for s in samples_of(name, 800, 2)[1]]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    assert digest == "b7913c57456802415058ca73d73f891d7a488fe687ad3138abdaa42bea29b149"


@pytest.mark.parametrize(
    ("name", "haystack", "hidden", "answers"),
    [
        ("niah_single_1", "noise", 1, 1),
        ("niah_single_2", "essay", 1, 1),
        ("niah_single_3", "essay", 1, 1),
        ("niah_multikey_1", "essay", 4, 1),
        ("niah_multikey_2", "needles", None, 1),
        ("niah_multikey_3", "needles", None, 1),
        ("niah_multivalue", "essay", 4, 4),
        ("niah_multiquery", "essay", 4, 4),
    ],
)
def test_every_needle_is_where_it_belongs(name, haystack, hidden, answers):
    for sample in samples_of(name)[1]:
        prompt = sample.prompt
        context = prompt.text.split("\n", 1)[1].rsplit("\n", 1)[0]
        found = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.(?=[ \n]|$)", context)
        kinds, keys, values = zip(*found, strict=True)
        kind = "uuids" if name in ("niah_single_3", "niah_multikey_3") else "numbers"
        assert set(kinds) == {kind}
        shape = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}" if kind == "uuids" else r"\d{7}"
        assert all(re.fullmatch(shape, value) for value in values)
        assert len(set(values)) == len(values)
        query = re.search(r" for (.*) mentioned in the provided text\?$", prompt.text)[1]
        asked = re.split(r", and |, ", query)
        assert sorted(prompt.answers) == sorted(v for _, k, v in found if k in asked)
        assert name != "niah_multiquery" or prompt.answers == tuple(
            dict(zip(keys, values, strict=True))[k] for k in asked
        )
        assert len(prompt.answers) == answers
        assert hidden is None or len(found) == hidden
        rest = re.sub(r"One of the special magic \w+ for \S+ is: \S+\.[ \n]?", "", context + "\n").strip()
        if haystack == "noise":
            assert set(rest.split("\n")) == {needles.NOISE}
        elif haystack == "essay":
            # without its needles the text is the essay's beginning, so needles stand between sentences
            assert " ".join(TEXT.split()).startswith(rest.rstrip())
            # only where the cut essay ends may a needle follow something else than the end of a sentence
            pieces = [piece.strip() for piece in re.split(r"One of the special magic \w+ for \S+ is: \S+\.", context)]
            while pieces and not pieces[-1]:
                pieces.pop()
            assert all(piece == "" or piece[-1] in ".?" for piece in pieces[:-1])
        else:
            assert rest == ""


def test_needles_stand_at_every_depth():
    build = needles.Needles("essay", words=tuple(TEXT.split())).build
    depths = []
    for seed in range(300):
        context = build(Random(seed), 0, 2000).text.split("\n", 1)[1]
        depths.append(context.index("One of the special") / len(context))
    hist = Counter(int(depth * 5) for depth in depths)
    # 40 evenly spaced depths, all alike: 60 in each fifth, with a standard deviation of 7
    assert all(30 < hist[fifth] < 90 for fifth in range(5))
    assert min(depths) < 0.01 < 0.9 < max(depths)


def test_a_chain_leads_to_every_variable_asked_for():
    for sample in samples_of("vt")[1]:
        worked, asked = sample.prompt.text.split("\n\n\n\n")
        for part, letters, shown in ((worked, 3, True), (asked, 5, False)):
            links = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?([A-Z0-9]+)", part))
            value = re.search(r"assigned the value (\d+) in", part)[1]

            def resolve(name, links=links):
                return resolve(links[name]) if name in links else name

            names = [name for name in links if resolve(name) == value]
            assert len(names) == len(links) == 5
            assert all(len(name) == letters for name in names)
            if shown:
                assert part.endswith(f"5 variables are assgined the value {value}, they are:  {' '.join(names)}")
            else:
                assert sample.prompt.answers == tuple(names)
                assert sample.prompt.prefix.endswith(f"5 variables are assgined the value {value}, they are:")
            lines = part.split("following text.\n\n", 1)[1].rsplit("\nQuestion", 1)[0]
            assert re.sub(r"VAR [A-Z]+ = (VAR [A-Z]+ |\d+)", "", lines).split() == needles.NOISE.split() * (
                lines.count("grass")
            )


@pytest.mark.parametrize(("context", "shown", "common", "rare"), [(CONTEXT, (3, 1), 6, 1), (4096, (10, 3), 30, 3)])
def test_common_words_are_counted_right(context, shown, common, rare):
    prompt = samples_of("cwe", context, 1)[1][0].prompt
    worked, asked = re.findall(r"most often\.\n(.*?)\nQuestion", prompt.text, re.S)
    for part, counts in ((worked, shown), (asked, (common, rare))):
        numbers, words = zip(*re.findall(r"(\d+)\. (\w+)", part), strict=True)
        assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
        tally = Counter(words)
        assert set(tally.values()) == set(counts)
        most = {word for word, count in tally.items() if count == counts[0]}
        assert len(most) == 10
        if part is asked:
            assert set(prompt.answers) == most
        else:
            assert set(re.search(r"list are:(.*)\n", prompt.text)[1].split()[1::2]) == most


def test_coded_words_fall_with_the_square_of_their_rank():
    for sample in samples_of("fwe", 4096)[1]:
        body = sample.prompt.text.split("coded words. ", 1)[1].split("\nQuestion")[0]
        tally = Counter(body.split()).most_common()
        assert tally[0][0] == "..."
        assert tuple(word for word, _ in tally[1:4]) == sample.prompt.answers
        counts = [count for _, count in tally[:8]]
        assert counts[3] > counts[4]
        for rank, count in enumerate(counts, start=1):
            assert abs(count - counts[0] / rank**2) <= 1


# questions on documents


@pytest.fixture
def data(tmp_path):
    """The two collections in their published shapes, each with a handful of questions."""
    articles = [
        {
            "title": t,
            "paragraphs": [
                {
                    "context": f"{t} paragraph {i} says {t}{i}.",
                    "qas": [
                        {
                            "question": f"What says {t} {i}?",
                            "is_impossible": False,
                            "answers": [{"text": f"{t}{i}"}, {"text": f"{t} {i}"}],
                        },
                        {"question": "Who knows?", "is_impossible": True, "answers": []},
                    ],
                }
                for i in range(4)
            ],
        }
        for t in "ABC"
    ]
    (tmp_path / questions.SQUAD_FILE).write_text(json.dumps({"version": "v2.0", "data": articles}))
    records = [
        {
            "question": f"Q{n}?",
            "answer": f"A{n}",
            "context": [[f"T{n}{i}", [f"One {n}{i}.", " Two."]] for i in range(2)],
        }
        for n in range(5)
    ]
    (tmp_path / questions.HOTPOT_FILE).write_text(json.dumps(records))
    return tmp_path


def test_questions_come_with_their_own_documents(data):
    squad, hotpot = open_collections(str(data), {"qa_1", "qa_2"})
    assert (len(squad.documents), len(squad.questions), len(hotpot.documents), len(hotpot.questions)) == (12, 12, 10, 5)
    for name, context, material in (("qa_1", 140, {"squad": squad}), ("qa_2", 110, {"hotpot": hotpot})):
        task, samples = samples_of(name, context, 100, **material)
        assert (task.metric, task.room) == ("string_match_part", 32)
        assert len(samples) == task.questions
        for index, sample in enumerate(samples):
            documents = re.findall(r"Document \d+:\n(.*?)(?=\n\n)", sample.prompt.text, re.S)
            assert 2 <= len(documents) < task.most
            if name == "qa_1":
                assert any(sample.prompt.answers[0] in document for document in documents)
                article = sample.prompt.answers[0][0]
                assert [d[0] for d in documents].count(article) == min(4, len(documents))
            else:
                assert {f"T{index}{i}\nOne {index}{i}. Two." for i in range(2)} <= set(documents)
            assert f"Question: {['What says', 'Q'][name == 'qa_2']}" in sample.prompt.text
            assert len(sample.tokens) + 32 <= context


def test_hub_records_say_the_same_as_files(data):
    squad, hotpot = open_collections(str(data), {"qa_1", "qa_2"})
    rows = [
        {
            "title": a["title"],
            "context": p["context"],
            "question": q["question"],
            "answers": {"text": [answer["text"] for answer in q["answers"]]},
        }
        for a in json.loads((data / questions.SQUAD_FILE).read_text())["data"]
        for p in a["paragraphs"]
        for q in p["qas"]
    ]
    assert questions.hub_squad(rows) == squad
    rows = [
        r | {"context": {"title": [t for t, _ in r["context"]], "sentences": [s for _, s in r["context"]]}}
        for r in json.loads((data / questions.HOTPOT_FILE).read_text())
    ]
    assert questions.hub_hotpot(rows) == hotpot


def test_collections_that_cannot_be_read(data):
    assert open_collections(None, {"qa_1"}) == (None, None)
    (data / questions.HOTPOT_FILE).unlink()
    assert open_collections(str(data), {"qa_1"})[1] is None
    with pytest.raises(AatcError, match=r"qa_2 needs the file hotpot_dev_distractor_v1\.json"):
        make_task("qa_2", CONTEXT, Material(TEXT), words_of)
    with pytest.raises(AatcError, match="there is no folder"):
        open_collections(str(data / "absent"), {"qa_1"})
    for content in ("{", "[]", '{"data": []}', '{"data": [{"paragraphs": [{}]}]}'):
        (data / questions.SQUAD_FILE).write_text(content)
        with pytest.raises(AatcError, match="is not a SQuAD file"):
            open_collections(str(data), {"qa_1"})


# scores and choices


def test_scores_of_answers():
    assert score(" It is 123, and\nNOT abc", ("123", "ABC", "7", "8"), "string_match_all") == 0.5
    assert score("abc", ("x", "B"), "string_match_part") == 1.0
    assert score("abc", ("x", "y"), "string_match_part") == 0.0
    assert score("a\x00b", ("ab",), "string_match_all") == 0.0
    assert score("", ("ab",), "string_match_all") == 0.0


@given(st.text(), st.text(), st.lists(st.text("abc123", min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_longer_answer_never_scores_less(text, more, references):
    for metric in ("string_match_all", "string_match_part"):
        assert score(text + more, references, metric) >= score(text, references, metric)


def test_tasks_are_chosen_by_name():
    assert len(chosen_tasks([])) == 13
    assert chosen_tasks(["vt", "niah_single_*"]) == ["niah_single_1", "niah_single_2", "niah_single_3", "vt"]
    with pytest.raises(UsageError, match="'nia'"):
        chosen_tasks(["niah*", "nia"])


def test_what_does_not_fit_is_refused_by_number():
    with pytest.raises(AatcError, match="niah_single_1 with 128 new tokens does not fit into a context of 170"):
        samples_of("niah_single_1", 170)
    with pytest.raises(AatcError, match="cwe cannot fill a context of 8000 tokens: there are only"):
        samples_of("cwe", 8000)


def test_draws_do_not_repeat():
    words = draw_distinct("words", 2000, Random(1), taken={"able-acorn"})
    assert len(set(words)) == 2000
    assert "able-acorn" not in words
