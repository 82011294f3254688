"""Tests that what a swap is measured on is kept apart from what it was fitted on, however texts are cut."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import BARE, family, swap_or_heal
from swap_batches import watched
from views import markdown

import attnlens
from attnlens.errors import TextError, UsageError
from attnlens.lab.ranks import search
from attnlens.models import texts
from attnlens.models.texts import sequences as overlap
from attnlens.runs.swap.pipeline import swap_kernel

READ = {"windows": 8, "length": 64, "batch_size": 4, "placement": "first", "layers": [0]} | BARE
OWN = texts.sample("demo")[0].text
FAR = OWN[len(OWN) // 2 :]
"""Text that no evaluation here reaches."""


def write(folder, content, name="other.txt"):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    return str(folder / name)


def fitted(model, calibration=(), **more):
    return swap_kernel(model, "rbf", fit=True, calibration=calibration, **(READ | more))


def shared_notes(report):
    return [note for note in report.swap.notes if "also occur in the calibration text" in note]


passages = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(passages, passages)
def test_the_share_is_that_of_a_search_token_by_token(evaluated, calibrated):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "RUN", 5)
        patch.setattr(overlap, "LEAST", 3)
        share = overlap.shared_share(None, evaluated, calibrated)
    longest, shared, total = min(5, max(map(len, calibrated))), 0, sum(map(len, evaluated))
    for passage in evaluated:
        length, tokens = min(longest, len(passage)), set()
        for start in range(len(passage) - length + 1) if length > 2 else ():
            run = passage[start : start + length]
            if any(run == other[b : b + length] for other in calibrated for b in range(len(other))):
                tokens |= set(range(start, start + length))
        shared += len(tokens)
    assert share == (pytest.approx(shared / total) if total else 0)


def test_runs_reach_across_windows_of_one_text_and_not_across_texts_or_lines(demo):
    class Tokenizer:
        all_special_ids = (999,)

    rows, shifted = (
        [[999, *range(at, at + 20)] for at in range(start, end, 20)] for start, end in ((0, 400), (7, 380))
    )
    evaluated, after, calibrated = (list(chain(*part)) for part in (rows[:4], rows[4:], shifted))
    text = list(range(100, 200))
    for expected, own, others in (
        (73 / 80, [evaluated], [calibrated]),
        (60 / 80, rows[:4], [calibrated]),  # whole windows alone
        (0, [evaluated], [after]),
        (0, rows[:4], shifted),  # no window is contained in another
        (31 / 32, [[7, *range(120, 151)]], [text]),  # the first word can be cut differently
        (15 / 16, [[7, *range(120, 135)]], [text]),
        (0, [[7, 8, *range(120, 150)]], [text]),  # the control: two other tokens
        *((0, [], []), (0, [[]], [[1] * 40]), (0, [[1] * 40], [[]])),
        (0, [[1] * 7], [[1] * 40]),  # seven tokens prove nothing
        (1, [[1] * 8], [[1] * 40]),
    ):
        assert overlap.shared_share(Tokenizer(), own, others) == pytest.approx(expected), (own, others)
    for more, lengths in (({"placement": "first"}, [128]), ({}, [16] * 8)):
        cut = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=8, **more))
        assert [len(passage) for passage in texts.passages([cut])] == lengths
    lines = texts.batches(demo, texts.sample("demo"), texts.Cut(pack=False, sequences=8, placement="first"))
    assert texts.passages([lines]) == lines.ids


@pytest.mark.parametrize(
    ("length", "several"),
    [(24, False), (128, True), *(pytest.param(n, n > 20, marks=pytest.mark.full) for n in (16, 64))],
)
def test_the_evaluated_text_moved_by_two_words_is_refused(demo, tmp_path, monkeypatch, length, several):
    """The control: no whole window is equal."""
    cut = watched(monkeypatch)
    names = [write(tmp_path, f"Two words {OWN}"), *([write(tmp_path, FAR, "far.txt")] * several)]
    with pytest.raises(TextError, match=r"contains (100|9\d|8\d) % of the evaluated tokens") as refusal:
        fitted(demo, names, length=length)
    assert "--calibration" in refusal.value.remedy
    assert len(cut[0].ids) == 8
    assert not set(cut[0].ids) & set(cut[1].ids)


def test_copies_of_parts_are_refused_by_their_share_and_short_ones_noted(demo, tmp_path):
    cut = texts.Cut(tokens=64, sequences=8, batch_size=4, placement="first")
    evaluated = demo.tokenizer.decode(list(chain(*texts.batches(demo, texts.sample("demo"), cut).ids)))
    assert OWN.startswith(evaluated)
    for share in (0.5, 0.2):
        with pytest.raises(TextError, match="of the evaluated tokens") as refusal:
            fitted(demo, write(tmp_path, f"{FAR[:200]}\n{evaluated[: int(share * len(evaluated))]}\n{FAR[200:]}"))
        assert float(refusal.value.problem.split(" % ")[0].split()[-1]) == pytest.approx(100 * share, abs=3)
    with pytest.raises(TextError, match="of the evaluated tokens"):
        fitted(demo, write(tmp_path, f"Two words {OWN}"), pack=False)
    (note,) = shared_notes(fitted(demo, write(tmp_path, f"{OWN[40:160]}\n{FAR}")))
    assert 5 < float(note.split(" %")[0]) < 10
    assert not shared_notes(fitted(demo, write(tmp_path, FAR), length=24))
    assert not shared_notes(fitted(family("vit"), windows=4, length=None, placement="spread"))


def test_texts_with_a_common_formula_are_accepted_and_repetitive_ones_need_another_for_calibration(
    demo, tmp_path, monkeypatch
):
    text = write(tmp_path, f"{OWN[:800]}\n" * 40)
    with pytest.raises(TextError, match=r"is repetitive: 100 %(.|\n)*--text"):
        fitted(demo, text=text)
    assert fitted(demo, write(tmp_path, FAR, "far.txt"), text=text, length=24).swap.loss is not None
    formula = "And it came to pass in those days, that the word was heard."
    assert 12 < len(demo.tokenizer(formula)["input_ids"]) < overlap.RUN
    parts = [f"\n{formula} ".join(part.split("\n")) for part in (OWN[:8000], FAR)]
    own, other = (write(tmp_path, part, f"{number}.txt") for number, part in enumerate(parts))
    assert not shared_notes(fitted(demo, other, text=own))
    monkeypatch.setattr(overlap, "RUN", 12)  # the control: the formula alone would have them refused
    with pytest.raises(TextError, match="of the evaluated tokens"):
        fitted(demo, other, text=own)


def test_the_evaluated_text_its_copies_and_two_texts_of_one_content_are_refused(demo, tmp_path):
    own, copy = write(tmp_path, OWN), write(tmp_path, OWN, "copy.txt")
    for text, other in ((own, own), (own, copy), ((), own)):
        for more in ({"fit": True}, {"train": 1}):
            with pytest.raises(TextError, match="is the same as the evaluation text") as refusal:
                swap_or_heal("demo", "rbf", text=text, calibration=other, **more)
            assert "windows that are not evaluated" in refusal.value.remedy
    first, copy = write(tmp_path, FAR), write(tmp_path, FAR, "copy.txt")
    for again in (first, copy):
        with pytest.raises(TextError, match="have the same content"):
            fitted(demo, [first, again])
    paths = [write(tmp_path, content, name) for name, content in (("a/t.txt", "one\n"), ("b/t.txt", "two\n"))]
    assert [part.name for part in texts.read_each([*paths, write(tmp_path, "three\n")])] == [*paths, "other.txt"]


def test_without_a_named_text_other_windows_are_read(demo, tmp_path):
    here, there = write(tmp_path, OWN, "text.txt"), write(tmp_path, FAR, "far/text.txt")
    for placement in ("first", "spread", "random"):
        report = fitted(demo, text=here, placement=placement, length=16)
        assert report.settings.calibration == report.settings.text
        own, other = report.settings.texts[0].windows, report.settings.calibrations[0].windows
        assert (len(own), len(other)) == (8, 32)
        assert not set(own) & set(other)
        assert not shared_notes(report)
    assert "other windows of text.txt" in markdown(report)
    other = markdown(fitted(demo, there, text=here, length=16))
    assert "other windows of" not in other, "another text of the same name"


def test_a_budget_needs_enough_text_without_repetition(tmp_path, monkeypatch):
    """A long text does not compensate for a short text without an estimate."""
    monkeypatch.setattr(search, "SEQUENCES", 32)
    monkeypatch.setattr(search, "DEFAULT_WINDOWS", 1)
    contents = {"far": FAR, "short": FAR[:800].upper(), "brief": FAR[:1300], "again": FAR[:3000] * 3, "own": OWN[:9000]}
    paths = {name: write(tmp_path, text, f"{name}.txt") for name, text in contents.items()}
    few = r"short\.txt has 10 windows not used for evaluation; a budget needs 12 per text"
    options = READ | {"budget": "loss:5%", "text": paths["own"]}
    for names, match in (
        (["far", "short"], few),
        (["brief"], r"brief\.txt has 7 windows not used"),
        (["again"], r"is repetitive: .* also occurs in the text for fitting"),
    ):
        with pytest.raises(TextError, match=match):
            attnlens.find_ranks("demo", calibration=[paths[name] for name in names], **options)
    plan = attnlens.find_ranks("demo", calibration=write(tmp_path, FAR[:9000]), **options).plan
    assert plan.promised.sequences >= 4


def test_a_note_says_that_fit_has_no_effect_on_kernels_that_are_always_fitted():
    model, read = family("gpt2"), READ | {"windows": 2, "length": 16}
    for words, noted in (("rank:8", True), ("primal:4", True), ("rbf", False)):
        fit, plain = (swap_kernel(model, words, fit=fit, **read).swap for fit in (True, False))
        assert any("--fit" in note for note in fit.notes) == noted
        assert not any("--fit" in note for note in plain.notes)
        assert not noted or plain.loss == fit.loss, words
    with pytest.raises(UsageError, match="Unknown ksvd_convention 'papr'"):
        attnlens.heal("no/such/model", "primal:4", train=1, ksvd_convention="papr")
