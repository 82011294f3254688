"""Tests that `attnlens explain` has a page for every measure and kernel, and refuses other names."""

import re

import heads
import pytest
import torch
from program import invoke
from views import absent

from attnlens.analyzers import registry
from attnlens.analyzers.registry import DISTANCES, GatheringPlace, MeasureInfo
from attnlens.errors import UsageError
from attnlens.kernels import FILTERS, HYBRIDS, TIES, kernels, parsed
from attnlens.maths import linalg
from attnlens.report.sections.reference import demo_heads, explanation, kernel_pages, measure_list, measure_pages

INFOS = registry.measure_infos() | {info.name: info for info in DISTANCES}
ITEMS = ("formula", "range", "read from", "identified", "no value", "error", "null", "what to do")


def test_every_measure_and_every_kernel_has_its_page():
    pages = measure_pages()
    assert set(pages) == set(INFOS)
    for name, page in pages.items():
        facts = dict(page.items)
        assert (page.title, page.lines) == (name, (INFOS[name].meaning,))
        assert [word for word in ITEMS if not facts.get(word)] == [], name
        assert facts["formula"] == INFOS[name].formula
        assert ("--analyzer" in facts["runs"]) == name.startswith(("ksvd", "selec", "ext", "adapter", "features"))
    pages = kernel_pages()
    assert set(pages) == {*kernels(), *TIES, *FILTERS, *HYBRIDS}
    for name, page in pages.items():
        assert (page.title, bool(page.lines[0]), "source" in dict(page.items)) == (name, True, True)
    assert set(measure_pages()).isdisjoint(pages)
    ends = {name.partition(".")[2] for name in INFOS}
    assert ends & set(pages) == {"rank"}, "the kernel takes precedence over features.rank"
    assert explanation("rank") == pages["rank"] != explanation("features.rank")


def test_the_negative_share_is_the_negative_part_of_the_symmetric_kernel():
    """Numbers: a symmetric negative semidefinite kernel has it all, an indefinite one is split between two shares."""
    for name in ("tokens.share_negative", "extended.share_negative"):
        assert "the negative part of the symmetric kernel" in INFOS[name].meaning
    assert "the negative part of the symmetric kernel" in kernel_pages()["negativeless"].lines[0]
    assert not [name for name, info in INFOS.items() if "indefinite" in info.meaning]
    u = torch.tensor([[1.0, -1.0, 2.0, -2.0], [1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    for signs, share in (((-1.0, -1.0), 1.0), ((1.0, -1.0), 16 / (16 + 100)), ((1.0, 1.0), 0.0)):
        parts = linalg.anatomy(heads.query_key((torch.tensor(signs)[:, None] * u).mT[None], u.mT[None], "tokens"))
        assert float(parts.negative) == pytest.approx(share)


def test_a_page_has_the_facts_of_the_registry_and_what_to_do_can_be_typed():
    for name, item, fact in (
        ("weights.symmetry", "null", "the value expected by chance (random W_Q, W_K of the same shape)"),
        ("selection.margin", "null", "the value expected by chance (the head randomly rotated)"),
        ("tokens.entropy", "null", "none"),
        ("tokens.entropy", "error", "standard error of the mean over windows"),
        ("weights.norm", "error", "none"),
        ("ksvd.cosine_spectrum", "error", "none: a curve is the mean over windows"),
        ("ksvd.cosine_spectrum", "range", "curve over index; each 0 to 1"),
        ("ksvd.rank90", "identified", "Not identified"),
        ("tokens.share_negative", "formula", "Σμ₋²/‖LJ‖², μ₋ the negative eigenvalues of JSJ"),
        ("tokens.share_positive", "formula", "Σμ₊²/‖LJ‖², μ₊ the positive eigenvalues of JSJ"),
        ("tokens.share_skew", "identified", "Identified for heads that see all pairs"),
        ("tokens.share_first", "compare with", "tokens.first_if_even"),
        ("tokens.share_position", "sums to 1", "with tokens.share_key, tokens.share_content"),
        ("compare.query_angle", "read from", "the weights alone"),
        ("compare.row_kl", "read from", "queries and keys"),
        ("adapter.change", "runs", "if the model has an adapter, or with --analyzer adaptation"),
        ("rbf", "parameters", "gamma: the inverse width γ (> 0)"),
        ("window", "keys kept", "|i − j| < w"),
    ):
        assert dict(explanation(name).items)[item].startswith(fact), name
    advised = {word for info in INFOS.values() for word in re.findall(r"--kernel (\S+[^\s).,])", info.use)}
    assert len(advised) > 5
    assert all(parsed(word) for word in advised - {"rank"})  # whose rank a budget chooses
    names = {word for info in INFOS.values() for word in re.findall(r"(?:weights|tokens|ksvd|compare)\.\w+", info.use)}
    assert names <= set(INFOS)


def test_measures_of_others_need_no_more_than_meaning_and_formula(monkeypatch):
    monkeypatch.setattr("attnlens.analyzers.registry._ANALYZERS", dict(registry._ANALYZERS))
    registry.analyzer("mine", "tokens", [MeasureInfo("mine.bare", "a meaning", "a formula")])(lambda _query_key: {})
    facts = dict(explanation("mine.bare").items)
    assert {"what to do", "source", "definitions", "compare with"}.isdisjoint(facts)
    assert facts["formula"] == "a formula"

    def begin(_place: GatheringPlace):
        """Is it so?

        x is the unknown
        of the formula.
        """

    registry.gathering("mine", "tokens", [MeasureInfo("mine.posed", "a meaning", "x")])(begin)
    facts = dict(explanation("mine.posed").items)
    assert (facts["analyzer"], facts["definitions"]) == ("mine: Is it so?", "x is the unknown of the formula.")
    assert facts["error"].startswith("none: the problem is posed once")


def test_the_program_explains_a_measure_whose_name_is_unique():
    shown = invoke("explain", "tokens.share_skew")
    assert shown.returncode == 0, shown.stderr
    assert not absent(shown.stdout, "‖JAJ‖²/‖LJ‖²", "what to do", "definitions", "0 to 1")
    written = invoke("explain", "tokens.share_skew", "--markdown").stdout
    assert written.startswith("### tokens.share_skew\n")
    assert "- formula: " in written
    assert invoke("explain").returncode == 2
    assert explanation("definite") == explanation("tokens.definite")
    assert explanation("sink-window:4,64") == explanation("sink-window"), "with the parameters that a screen prints"
    assert explanation("form").title == "form M"
    with pytest.raises(UsageError, match="'rank90' is the name of several measures") as refusal:
        explanation("rank90")
    assert not absent(refusal.value.remedy, "weights.rank90", "tokens.rank90", "ksvd.rank90")
    with pytest.raises(UsageError, match="'selection' is an analyzer") as refusal:
        explanation("selection")
    assert not absent(refusal.value.remedy, "Name one of its measures: ", "selection.svm_cosine", "selection.support")
    with pytest.raises(UsageError) as refusal:
        explanation("symetry")
    assert "Did you mean symmetry" in refusal.value.remedy
    for name in (
        "",
        "entropy:junk",
        "rbf:gamma=0.5+window:64",
        "share_skw",
        "\x1b[31mred\x1b[0m",
        "=cmd|'/c calc'!A1",
        "\u202eevil",
        "a" * 5000,
        ".",
    ):
        with pytest.raises(UsageError, match="Unknown measure, kernel or term") as refusal:
            explanation(name)
        assert len(refusal.value.problem) < 120


def test_explanations_say_first_in_plain_words_what_values_mean_and_give_example_heads(inspected):
    """Each measure of a plain inspect says what a low and a high value mean, before any formula."""
    for analyzer in registry.list_analyzers():
        for info in analyzer.measures:
            if analyzer.by_default and info.headline:
                facts = [word for word, _ in explanation(info.name).items]
                assert facts[:4] == ["low", "high", "in demo", "what to do"] or "in demo" not in facts, info.name
                assert facts.index("high") < facts.index("what to do") < facts.index("formula")
    for name, (low, high) in demo_heads().items():
        if name.startswith("weights.") and name != "weights.layer_symmetry":
            values = {(head.layer, head.head): head.measures[name].value for head in inspected.heads}
            assert values[tuple(low[:2])] == pytest.approx(min(values.values()), rel=1e-3)
            assert values[tuple(high[:2])] == pytest.approx(max(values.values()), rel=1e-3)


@pytest.mark.parametrize(
    ("word", "title"),
    [
        ("sink", "tokens.share_first"),
        ("share_key", "tokens.share_key"),
        ("Peaked", "tokens.entropy"),
        ("rbf", "rbf"),
        ("KV cache", "cache"),
    ],
)
def test_words_that_users_search_for_lead_to_their_measure(word, title):
    assert explanation(word).title == title


def test_the_list_of_measures_begins_with_those_of_a_plain_inspect():
    names = [cell.split("\n")[0] for cell in measure_list(registry.measure_infos().values()).table.names[0].cells]
    default = [info.name for each in registry.list_analyzers() if each.by_default for info in each.measures]
    assert set(names[: len(default)]) == set(default)
    assert registry.find_measure(names[0]).headline
