"""Tests that what a swap is measured on is kept apart from what it was fitted on, however texts are cut."""

from itertools import chain

import pytest
import views
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import BARE, family, swap_or_heal
from swap_batches import watched

import attnlens
from attnlens.errors import TextError, UsageError
from attnlens.lab.ranks import search as calibration
from attnlens.models import texts
from attnlens.models.texts import sequences as overlap
from attnlens.runs.swap.pipeline import swap_kernel

READ = {"windows": 8, "length": 64, "batch_size": 4, "placement": "first"} | BARE
CUT = texts.Cut(tokens=64, sequences=8, batch_size=4, placement="first")
OWN = texts.sample("demo")[0].text
FAR = OWN[len(OWN) // 2 :]
"""Text that no evaluation here reaches."""


def of_file(folder, content, name="other.txt"):
    (folder / name).write_text(content)
    return str(folder / name)


def fitted(model, calibration=(), **more):
    return swap_kernel(model, "rbf", fit=True, calibration=calibration, **(READ | more))


# --- the share --------------------------------------------------------------------------------------------------------

passages = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(passages, passages)
def test_the_share_is_that_of_a_search_token_by_token(evaluated, calibrated):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "RUN", 5)
        patch.setattr(overlap, "LEAST", 3)
        found = overlap.shared_share(None, evaluated, calibrated)
    longest, shared, total = min(5, max(map(len, calibrated))), 0, sum(map(len, evaluated))
    for passage in evaluated:
        length = min(longest, len(passage))
        for token in range(len(passage)):
            runs = [
                passage[a : a + length]
                for a in range(len(passage) - length + 1)
                if a <= token < a + length and length > 2
            ]
            shared += any(
                run == other[b : b + length] for run in runs for other in calibrated for b in range(len(other))
            )
    assert found == (pytest.approx(shared / total) if total else 0)


def test_runs_reach_across_windows_of_one_text_and_not_across_texts():
    book = list(range(400))
    rows = [[999, *book[at : at + 20]] for at in range(0, 400, 20)]
    shifted = [[999, *book[at : at + 20]] for at in range(7, 380, 20)]

    class Tokenizer:
        all_special_ids = (999,)

    evaluated, behind, calibrated = (list(chain(*part)) for part in (rows[:4], rows[4:], shifted))
    assert overlap.shared_share(Tokenizer(), [evaluated], [calibrated]) == pytest.approx(73 / 80)
    assert overlap.shared_share(Tokenizer(), rows[:4], [calibrated]) == 60 / 80, "whole windows alone"
    assert overlap.shared_share(Tokenizer(), [evaluated], [behind]) == 0
    assert overlap.shared_share(Tokenizer(), rows[:4], shifted) == 0, "no window stands whole in another"


def test_windows_that_follow_each_other_are_one_passage_and_lines_are_not(demo):
    found = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=8, placement="first"))
    assert [len(passage) for passage in texts.passages([found])] == [8 * 16]
    apart = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=8))
    assert [len(passage) for passage in texts.passages([apart])] == [16] * 8
    lines = texts.batches(demo, texts.sample("demo"), texts.Cut(pack=False, sequences=8, placement="first"))
    assert texts.passages([lines]) == lines.ids


def test_the_beginning_of_a_text_may_be_cut_otherwise_than_its_repetitions():
    held = [list(range(100, 200))]
    assert overlap.shared_share(None, [[7, *range(120, 151)]], held) == 31 / 32
    assert overlap.shared_share(None, [[7, *range(120, 135)]], held) == 15 / 16
    assert overlap.shared_share(None, [[7, 8, *range(120, 150)]], held) == 0, "the control: two other tokens"


def test_nothing_is_no_share():
    assert overlap.shared_share(None, [], []) == 0
    assert overlap.shared_share(None, [[]], [[1] * 40]) == 0
    assert overlap.shared_share(None, [[1] * 40], [[]]) == 0
    assert overlap.shared_share(None, [[1] * 7], [[1] * 40]) == 0, "seven tokens prove nothing"
    assert overlap.shared_share(None, [[1] * 8], [[1] * 40]) == 1


# --- texts that share -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True], ids=["alone", "with another"])
@pytest.mark.parametrize("length", [16, 24, 64, 128])
def test_the_evaluated_text_moved_by_two_words_is_refused(demo, tmp_path, monkeypatch, length, several):
    """The control, a comparison of whole windows, finds not one."""
    cut = watched(monkeypatch)
    names = [of_file(tmp_path, f"Two words {OWN}"), *([of_file(tmp_path, FAR, "far.txt")] * several)]
    with pytest.raises(TextError, match=r"contains (100|9\d|8\d) % of the evaluated tokens") as refusal:
        fitted(demo, names, length=length)
    assert "--calibration" in refusal.value.remedy
    assert len(cut[0].ids) == 8
    assert not set(cut[0].ids) & set(cut[1].ids)


def test_moved_lines_are_refused(demo, tmp_path):
    with pytest.raises(TextError, match="of the evaluated tokens"):
        fitted(demo, of_file(tmp_path, f"Two words {OWN}"), pack=False)


@pytest.mark.parametrize(("share", "refused"), [(0.5, True), (0.2, True), (0.0, False)])
def test_a_partial_copy_is_refused(demo, tmp_path, share, refused):
    evaluated = demo.tokenizer.decode(
        [id_ for row in texts.batches(demo, texts.sample("demo"), CUT).ids for id_ in row]
    )
    assert OWN.startswith(evaluated)
    name = of_file(tmp_path, f"{FAR[:200]}\n{evaluated[: int(share * len(evaluated))]}\n{FAR[200:]}")
    if not refused:
        assert not noted(fitted(demo, name))
        return
    with pytest.raises(TextError, match="of the evaluated tokens") as refusal:
        fitted(demo, name)
    told = float(refusal.value.problem.split(" % ")[0].split()[-1])
    assert told == pytest.approx(100 * share, abs=3)


def noted(report):
    return [note for note in report.swap.notes if "also occur in the calibration text" in note]


def test_a_short_copy_is_accepted_and_told(demo, tmp_path):
    report = fitted(demo, of_file(tmp_path, f"{OWN[40:160]}\n{FAR}"))
    (note,) = noted(report)
    assert 5 < float(note.split(" %")[0]) < 10
    assert not noted(fitted(demo))


def test_texts_with_a_common_formula_are_accepted(demo, tmp_path):
    """The control: at half the length of a run, the formula alone would have them refused."""
    formula = "And it came to pass in those days, that the word was heard."
    assert 12 < len(demo.tokenizer(formula)["input_ids"]) < overlap.RUN
    with_formula = [f"\n{formula} ".join(part.split("\n")) for part in (OWN[:8000], FAR)]
    own, other = (of_file(tmp_path, part, f"{at}.txt") for at, part in enumerate(with_formula))
    assert not noted(fitted(demo, other, text=own))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "RUN", 12)
        with pytest.raises(TextError, match="of the evaluated tokens"):
            fitted(demo, other, text=own)


def test_a_text_that_repeats_itself_is_refused(demo, tmp_path):
    name = of_file(tmp_path, f"{OWN[:800]}\n" * 40)
    with pytest.raises(TextError, match="is repetitive: 100 %") as refusal:
        fitted(demo, text=name)
    assert "--text" in refusal.value.remedy
    assert fitted(demo, of_file(tmp_path, FAR, "far.txt"), text=name).swap.loss is not None


# --- one text for both ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"fit": True}, {"train": 1}])
def test_one_text_for_both_is_refused(tmp_path, more):
    long = of_file(tmp_path, OWN)
    for own, other in ((long, long), (long, of_file(tmp_path, OWN, "copy.txt")), ((), long)):
        with pytest.raises(TextError, match="is the same as the evaluation text") as refusal:
            swap_or_heal("demo", "rbf", text=own, calibration=other, **more)
        assert "windows that are not evaluated" in refusal.value.remedy


def test_other_windows_of_the_same_text_are_calibrated_on_where_none_is_named(demo, tmp_path):
    for placement in ("first", "spread", "random"):
        settings = fitted(demo, text=of_file(tmp_path, OWN), placement=placement).settings
        assert settings.calibration == settings.text
        own, other = settings.texts[0].windows, settings.calibrations[0].windows
        assert (len(own), len(other)) == (8, 32)
        assert not set(own) & set(other)


def test_another_text_of_the_same_name_is_not_called_the_same(demo, tmp_path):
    (tmp_path / "far").mkdir()
    here, there = of_file(tmp_path, OWN[: len(OWN) // 2], "text.txt"), of_file(tmp_path / "far", FAR, "text.txt")
    assert "other windows of" not in views.markdown(fitted(demo, there, text=here))
    assert "other windows of text.txt" in views.markdown(fitted(demo, text=here))


# --- fits that are made anyway ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "told"), [("rank:8", True), ("primal:4", True), ("rbf", False)])
def test_a_fit_that_is_made_anyway_is_told(demo, words, told):
    notes = [note for note in swap_kernel(demo, words, fit=True, **READ).swap.notes if "--fit" in note]
    assert bool(notes) == told
    if told:
        plain = swap_kernel(demo, words, **READ).swap
        assert not any("--fit" in note for note in plain.notes)
        assert plain.loss == swap_kernel(demo, words, fit=True, **READ).swap.loss, "it changes nothing, as told"


def test_the_option_of_a_convention_is_named_as_it_is_typed():
    with pytest.raises(UsageError, match="There is no ksvd_convention 'papr'"):
        attnlens.heal("no/such/model", "primal:4", train=1, ksvd_convention="papr")


def test_models_without_text_are_read_as_before():
    assert not noted(swap_kernel(family("vit"), "rbf", fit=True, windows=4, batch_size=4, **BARE))


# --- several texts, and a budget on each ------------------------------------------------------------------------------


def test_texts_of_one_name_stay_two(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [of_file(tmp_path / folder, content, "t.txt") for folder, content in (("a", "one\n"), ("b", "two\n"))]
    other = of_file(tmp_path, "three\n")
    assert [content.name for content in texts.read_each([*paths, other])] == [*paths, "other.txt"]


def test_a_calibration_text_named_twice_is_refused(demo, tmp_path):
    """Every sequence would count twice, and its interval be too narrow."""
    first, copy = of_file(tmp_path, FAR), of_file(tmp_path, FAR, "copy.txt")
    for again in (first, copy):
        with pytest.raises(TextError, match="have the same content"):
            fitted(demo, [first, again])


def budgeted(folder, *calibrations, **more):
    own = of_file(folder, OWN[: len(OWN) // 2], "own.txt")
    given = {"text": own, "calibration": list(calibrations), **READ, **more}
    return attnlens.find_ranks("demo", budget="loss:5%", **given)


def test_a_text_that_leaves_too_little_to_choose_by_is_refused(tmp_path):
    """Beside a long text, whose windows would hide that there is no promise for the short one."""
    long, short = of_file(tmp_path, FAR), of_file(tmp_path, FAR[:800].upper(), "short.txt")
    with pytest.raises(
        TextError, match=r"short\.txt has 10 windows that are not used for evaluation; a budget needs 12 per text"
    ):
        budgeted(tmp_path, long, short)
    with pytest.raises(TextError, match=r"brief\.txt has 7 windows that"):
        budgeted(tmp_path, of_file(tmp_path, FAR[:1300], "brief.txt"))


def test_a_calibration_text_that_repeats_itself_promises_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "SEQUENCES", 32)
    passage = FAR[:3000]
    with pytest.raises(TextError, match=r"is repetitive: .* also occurs in the text for fitting"):
        budgeted(tmp_path, of_file(tmp_path, passage * 3))
    assert budgeted(tmp_path, of_file(tmp_path, FAR[:9000])).plan.promised.sequences >= 4
