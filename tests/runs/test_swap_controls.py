"""Tests that controls are what they say: of the kernel's size, measured on the same windows, none of them the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import families
import pytest
import torch
from loaded import BARE, family, loaded
from program import DEMO
from swap_reports import with_swaps
from torch import Tensor
from views import summary

from attnlens.errors import UsageError
from attnlens.kernels import Kernel, parsed
from attnlens.kernels.attention import attend
from attnlens.kernels.lowrank import MapsFit
from attnlens.kernels.spelling import HeadShape, cached_numbers, kept_keys, sink_window, state_numbers
from attnlens.maths.statistics import Design
from attnlens.models import loading
from attnlens.models.hooks import Replacement
from attnlens.models.texts.targets import NOTHING
from attnlens.records import Agreement, BeyondWindow, Call, Control, Outcome, Site, Swap
from attnlens.report.report import Report
from attnlens.runs import differences
from attnlens.runs.outputs import TokenLosses, evidence
from attnlens.runs.swap.kernel_run import build_controls, format_kernels
from attnlens.runs.swap.pipeline import swap_kernel

READ = {"windows": 16, "length": 64, "generate": 0}
CAUSAL = HeadShape(heads=2, head_dim=16, value_dim=16, tokens=128, causal=True)
BOTH = replace(CAUSAL, causal=False)


@pytest.fixture(scope="module")
def demo() -> loading.Loaded:
    return loading.load("demo")


@pytest.fixture(scope="module")
def report(demo: loading.Loaded) -> Report:
    return swap_kernel(demo, ["elu", "rbf+window:16", "hard"], **READ)


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_role(swap: Swap) -> dict[str, Control]:
    return {control.role: control for control in swap.controls}


def padded(kind: str) -> tuple[Tensor | None, Tensor]:
    """What each of two sequences of 12 tokens may see, and the same written out."""
    every, before = torch.ones(2, 1, 12, 12, dtype=torch.bool), torch.ones(12, 12, dtype=torch.bool).tril()
    every[1, ..., 9:] = False
    seen = {"all": every | True, "causal": (every | True) & before, "padded": every}[kind]
    return (None if kind == "all" else seen), seen


@pytest.mark.parametrize("kind", ["all", "causal", "padded"])
@pytest.mark.parametrize("path", ["auto", "eager"])
def test_uniform_is_the_mean_of_the_values_seen(kind: str, path: str) -> None:
    allowed, seen = padded(kind)
    query, key, value = (drawn((2, 3, 12, 8), seed) for seed in range(3))
    found = attend(Call(query, key, value, 0.3, allowed), parsed("uniform"), path).transpose(1, 2)
    expected = torch.stack(
        [torch.stack([value[batch, :, seen[batch, 0, row]].mean(1) for row in range(12)], 1) for batch in range(2)]
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    other = attend(Call(query, key, value, 0.3, allowed), parsed("exponential"), path).transpose(1, 2)
    assert (other - expected).abs().max() > 0.1, "the control"


def test_uniform_has_nothing_to_train() -> None:
    assert not parsed("uniform").has_gradient
    assert parsed("elu").has_gradient


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("elu", 16 * 17),
        ("random-features:count=7", 7 * 17),
        ("uniform", 17),
        ("window:10", 10 * 32),
        ("rbf+sink-window:2,5", 7 * 32),
        ("strided:8", (8 + 15) * 32),
        ("exponential", None),
        ("rbf", None),
        ("hard", None),
    ],
)
def test_a_state_is_what_a_head_keeps(words: str, numbers: int | None) -> None:
    assert state_numbers(parsed(words), CAUSAL) == numbers


def test_a_quadratic_kernel_keeps_a_sum_for_every_pair_of_entries() -> None:
    kernel = parsed("linear")
    assert state_numbers(kernel, CAUSAL) == 16 * 17


def ranked(*ranks: int) -> Kernel:
    """A kernel of these ranks in as many heads: the columns beyond a head's own are zero, as in a plan."""
    fit = MapsFit(max(ranks))
    query, key = drawn((2, len(ranks), 30, 16), 1), drawn((2, len(ranks), 30, 16), 2)
    fit.update(Call(query, key, torch.zeros_like(key), 0.25))
    maps = fit.solve()
    for head, rank in enumerate(ranks):
        for part in maps.values():
            part[head, :, rank:] = 0
    return parsed(f"rank:{max(ranks)}").with_fitted(maps)


def test_a_rank_keeps_shorter_keys_of_all_tokens() -> None:
    assert cached_numbers(ranked(4, 4)) == 4
    assert cached_numbers(ranked(4, 8)) == 6, "the mean over heads"
    assert cached_numbers(parsed("rbf")) is None
    assert state_numbers(ranked(4, 8), CAUSAL) == 128 * (6 + 16)
    found = sink_window(128 * (6 + 16), CAUSAL)
    assert found is not None
    assert found.spelling == f"sink-window:4,{128 * 22 // 32 - 4}"


def test_a_control_that_differs_by_layer_is_spelled_with_its_range() -> None:
    sites = [Site(f"layer.{layer}", 0, layer, "decoder") for layer in range(3)]
    shapes = dict.fromkeys(sites, CAUSAL)

    def same_size(*ranks: int) -> str:
        swaps = {site: Replacement(ranked(rank)) for site, rank in zip(sites, ranks, strict=True)}
        found = next(one for one in build_controls(swaps, shapes) if one.role == "same size")
        assert found.model is not None
        return format_kernels(swap.kernel for swap in found.model.swaps.values())

    assert same_size(4, 4, 4) == "sink-window:4,76", "the control"
    assert same_size(4, 4, 6) == "sink-window:4,76–84 by layer"
    assert same_size(4, 6, 16) == "sink-window:4,76–all by layer"
    assert (
        format_kernels(map(parsed, ("window:2", "sink-window:1,2", "window:3")))
        == "window:2–3/sink-window:1,2 by layer"
    )


@pytest.mark.parametrize("shape", [CAUSAL, BOTH])
@pytest.mark.parametrize("keys", [1, 2, 3, 4, 5, 8, 9, 31, 32, 100, 127])
def test_a_sink_window_keeps_as_many_keys_as_fit(shape: HeadShape, keys: int) -> None:
    found = sink_window(keys * shape.token + shape.token - 1.0, shape)
    assert found is not None
    assert found.filter is not None
    assert kept_keys(found.filter, shape) == keys
    assert found.filter.parameters.get("sinks", 0) <= min(4, keys / 2)


def test_what_holds_all_keys_is_no_control() -> None:
    assert sink_window(128.0 * 32, CAUSAL) is None
    assert sink_window(128.0 * 32 - 1, CAUSAL) is not None
    assert sink_window(None, replace(CAUSAL, tokens=68)) is None
    assert sink_window(None, replace(CAUSAL, tokens=69)) is not None
    few = sink_window(63.0, CAUSAL)
    assert few is not None
    assert few.spelling == "window:1"


def test_no_control_is_larger_than_its_kernel(demo: loading.Loaded) -> None:
    swap = swap_kernel(demo, "uniform", **READ | {"windows": 2}).swap
    control = by_role(swap)["same size"]
    assert (swap.state, control.kernel) == (17, None)
    assert control.reasons["kernel"] == "a state of 17 numbers is too small for a key and its value (32 numbers)"
    assert (
        "No same size control: a state of 17 numbers is too small for a key and its value (32 numbers)." in swap.notes
    )
    assert "no key is beyond a window of 64" in swap.reasons["beyond_window"]


def test_kept_keys_are_counted_row_by_row() -> None:
    for words in ("window:9", "sink-window:3,4", "strided:5"):
        for shape in (CAUSAL, BOTH):
            found = parsed(words).filter
            assert found is not None
            places = range(shape.tokens)
            naive = max(
                sum(
                    bool(found.keeps(torch.tensor([i]), torch.tensor([j]))) and (j <= i or not shape.causal)
                    for j in places
                )
                for i in (0, 5, 64, 126, 127)
            )
            assert kept_keys(found, shape) == naive


def test_controls_stand_beside_each_kernel_on_the_same_windows(report: Report, demo: loading.Loaded) -> None:
    """A control's outcome is that of the same kernel asked for."""
    elu, filtered, hard = report.swaps
    assert elu.state == 16 * 17
    assert filtered.state == 16 * 32
    assert hard.state == 64 * 32, "all keys and values"
    assert {role: control.kernel for role, control in by_role(elu).items()} == {
        "same size": "sink-window:4,4",
        "one key": "hard",
        "floor": "uniform",
    }
    assert {role: control.kernel for role, control in by_role(filtered).items()} == {
        "same size": "sink-window:4,12",
        "one key": "hard",
        "floor": "uniform",
        "filter alone": "window:16",
        "without filter": "rbf:gamma=0.5",
    }
    assert set(by_role(hard)) == {"same size", "floor"}, "what was asked for is not repeated"
    asked = swap_kernel(demo, ["sink-window:4,4", "uniform", "window:16", "rbf"], controls=False, **READ).swaps
    controls = by_role(elu)["same size"], by_role(elu)["floor"], *list(by_role(filtered).values())[3:]
    for control, swap in zip(controls, asked, strict=True):
        assert control.loss == swap.loss
        assert control.perplexity == swap.perplexity
        assert control.kl == swap.kl
    assert by_role(elu)["floor"].loss == by_role(filtered)["floor"].loss
    assert hard.loss == by_role(elu)["one key"].loss
    assert not asked[0].controls


def test_a_control_that_is_the_model_itself_is_said_to_be(demo: loading.Loaded) -> None:
    swap = swap_kernel(demo, "random-features:64", **READ | {"windows": 2}).swap
    assert by_role(swap)["same size"].kernel == "sink-window:4,30", "the control"
    assert not any("can store all" in note for note in swap.notes)
    swap = swap_kernel(demo, "random-features:256", **READ | {"windows": 2}).swap
    control = by_role(swap)["same size"]
    assert control.kernel is None
    assert control.loss is None
    assert any("a state of 4,352 numbers can store all 64 keys" in note for note in swap.notes)
    assert swap.reasons["beyond_window"] == "the sequences have 64 tokens, and no key is beyond a window of 64"
    swap = swap_kernel(demo, "random-features:400", **READ | {"length": 160, "path": "fused"}).swap
    assert by_role(swap)["same size"].kernel is None
    assert swap.beyond_window.window == 64, "as of a kernel without a state"


def test_cross_attention_has_no_window() -> None:
    swap = swap_kernel(family("bart"), "rbf", windows=2, length=8, batch_size=2, part="cross").swap
    controls = by_role(swap)
    assert controls["same size"].kernel is None
    assert "cross-attention" in controls["same size"].reasons["kernel"]
    assert controls["floor"].kl > 0
    assert controls["one key"].kl > 0


@pytest.mark.parametrize("headless", [False, True])
def test_a_model_of_both_directions_has_controls_and_no_places(headless: bool) -> None:
    model = family("bert") if not headless else loaded(families.build("bert").bert)
    swap = swap_kernel(model, "rbf", windows=2, length=24, batch_size=2).swap
    assert (swap.loss is None) == headless
    assert "only defined for models that predict the next token" in swap.reasons["beyond_window"]
    assert "only defined for models that predict the next token" in swap.reasons["agreement"]
    assert by_role(swap)["floor"].hidden_cosine < 1
    assert not swap.loss_by_position


def test_bidirectional_heads_keep_as_many_keys_on_both_sides() -> None:
    swap = swap_kernel(family("bert"), "elu", windows=2, length=48, batch_size=2, **BARE | {"controls": True}).swap
    control = by_role(swap)["same size"]
    assert control.state <= swap.state
    kernel = parsed(control.kernel or "")
    assert kernel.filter is not None
    head_dim = 10
    shape = HeadShape(heads=1, head_dim=head_dim, value_dim=head_dim, tokens=48, causal=False)
    assert swap.state == head_dim * (head_dim + 1)
    assert kept_keys(kernel.filter, shape) == swap.state // (2 * head_dim)


def naive_evidence(ids: list[int], targets: list[int]) -> list[int]:
    """Brute force: the nearest earlier place with the same pair."""
    found = []
    for place, pair in enumerate(zip(ids, targets, strict=True)):
        before = [place - other for other in range(place) if (ids[other], targets[other]) == pair]
        found.append(min(before) if before and pair[1] != NOTHING else 0)
    return found


def test_evidence_is_the_nearest_earlier_pair() -> None:
    ids = torch.randint(4, (6, 50), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([ids[:, 1:], torch.full((6, 1), NOTHING)], 1)
    targets[3, 20:] = NOTHING
    found = evidence(ids, targets)
    assert found.tolist() == [naive_evidence(*pair) for pair in zip(ids.tolist(), targets.tolist(), strict=True)]
    assert int(found.max()) > 20, "the control: some are far"


def planted() -> tuple[TokenLosses, Tensor, Tensor, Tensor]:
    """Two batches of losses of which those beyond 9 tokens back rise by 2, and all others by 0.25."""
    losses, generator, every = TokenLosses(), torch.Generator().manual_seed(3), []
    for rows, length in ((5, 40), (4, 33)):
        ids = torch.randint(5, (rows, length), generator=generator)
        targets = torch.cat([ids[:, 1:], torch.full((rows, 1), NOTHING)], 1)
        before = torch.rand(rows, length - 1, generator=generator, dtype=torch.float64)
        far = evidence(ids, targets)[:, :-1] > 9
        after = before + torch.where(far, 2.0, 0.25)
        losses.add((before.flatten(), after.flatten()), targets, ids)
        every.append((before, after, far))
    return losses, *(torch.cat([part.flatten() for part in parts]) for parts in zip(*every, strict=True))


def test_the_loss_beyond_a_window_is_that_of_the_tokens_there() -> None:
    losses, before, after, far = planted()
    found = losses.beyond(9, Design.plain(9), 0)
    assert not isinstance(found, str)
    assert found.tokens == int(far.sum())
    assert found.change.delta == pytest.approx(2.0)
    assert found.change.before == pytest.approx(float(before[far].mean()))
    assert found.change.after == pytest.approx(float(after[far].mean()))
    near = losses.beyond(5, Design.plain(9), 0)
    assert not isinstance(near, str)
    assert near.change.delta < 1.9, "the control: another window, other tokens"
    assert "fewer than 8" in str(losses.beyond(39, Design.plain(9), 0))


def test_losses_by_place_cover_every_token_once() -> None:
    losses, before, after, _ = planted()
    found = losses.by_position(Design.plain(9), 0)
    assert [(part.first, part.last) for part in found][::7] == [(1, 4), (35, 39)]
    assert [a.last + 1 for a in found[:-1]] == [b.first for b in found[1:]]
    assert sum(part.tokens for part in found) == len(before)
    mean = sum(part.change.delta * part.tokens for part in found) / len(before)
    assert mean == pytest.approx(float((after - before).mean()))


def test_all_kernels_of_a_table_are_judged_on_the_same_tokens(report: Report, demo: loading.Loaded) -> None:
    found = {swap.beyond_window.tokens for swap in report.swaps}
    found |= {one.beyond_window.tokens for swap in report.swaps for one in swap.controls if one.kernel}
    assert len(found) == 1
    told = summary(report)
    assert "Δ beyond: on tokens that repeat a bigram last seen more than 16 tokens back." in " ".join(told.split())
    alone = swap_kernel(demo, "elu", **READ | {"controls": False}).swap
    assert alone.beyond_window.window == 4, "the control: alone it has its own sink-window's"


def test_a_legend_stands_where_any_row_has_its_column(report: Report) -> None:
    none = {"agreement": None, "beyond_window": None}
    first = report.swaps[0]
    greedy = Agreement(
        prompts=1, source="windows", prompt_tokens=8, tokens=4, until=[4], median=4, quartiles=(4, 4), never=1
    )
    controls = [one.model_copy(update={"agreement": greedy}) for one in first.controls]
    stages = [stage.model_copy(update=none) for stage in first.stages]
    bare = first.model_copy(update=none | {"stages": stages, "controls": controls})
    for more in ([], [bare.model_copy(update={"kernel": "relu"})]):
        told = " ".join(summary(with_swaps(report, bare, *more)).split())
        assert "greedy: median number of generated tokens before" in told
        assert "Δ beyond: on tokens that repeat a bigram last seen more than 16 tokens back." in told
        assert "a filter and its kernel alone" not in told, "no such control is there"
    assert "a filter and its kernel alone" in " ".join(summary(report).split())


def test_a_comparison_says_of_each_kernel_whether_its_size_costs_less(report: Report) -> None:
    told = " ".join(summary(report).split())
    assert "Lower loss than elu, with disjoint intervals: sink-window:4,4" in told
    named = {line.split()[1] for line in summary(report).splitlines() if line.startswith("vs sink-window:")}
    assert named == {"sink-window:4,4", "sink-window:4,12"}, "hard has no such control"


def test_windows_that_differ_are_named_row_by_row(report: Report) -> None:
    """As in reports made before all kernels had the same."""
    swaps = []
    for window, swap in zip((4, 16, 16), report.swaps, strict=True):
        controls = [one.model_copy(update={"beyond_window": beyond_of(one, window)}) for one in swap.controls]
        swaps.append(swap.model_copy(update={"beyond_window": beyond_of(swap, window), "controls": controls}))
    told = summary(with_swaps(report, *swaps))
    assert told.count("(> 4)") == 4
    assert "further back than the number in brackets" in " ".join(told.split())
    assert told.count("vs uniform") == 3 * summary(report).count("vs uniform"), "not shared"


def beyond_of(row: Outcome, window: int) -> BeyondWindow | None:
    return row.beyond_window and row.beyond_window.model_copy(update={"window": window})


def test_a_kl_of_rounding_errors_is_no_less_than_zero(demo: loading.Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = differences.outputs.divergence
    monkeypatch.setattr(differences.outputs, "divergence", lambda own, new: honest(own, new) - 1e-6)
    swap = swap_kernel(demo, "exponential", **READ | {"windows": 2, "controls": False}).swap
    assert swap.kl == 0
    assert swap.kl_ci95[0] == 0


def test_one_window_gives_a_reason_once(demo: loading.Loaded) -> None:
    told = summary(swap_kernel(demo, "elu+hybrid:8", **READ | {"windows": 1}))
    text = " ".join(told.split())
    assert text.count("no errors: only one window was read") == 1, "below the table"
    assert text.count("one window has no spread") == 1, "of all intervals"
    assert "a hybrid's window and far part alone" in " ".join(told.split())


def test_a_path_asked_for_is_that_of_the_kernel_alone(demo: loading.Loaded) -> None:
    """Controls and generated texts have the paths that there are."""
    words = {"windows": 2, "length": 48, "generate": 4}
    fused, free = (swap_kernel(demo, "elu", **words, path=path).swap for path in ("fused", "auto"))
    assert [one.kernel for one in fused.controls] == [one.kernel for one in free.controls]
    assert by_role(fused)["one key"].loss == by_role(free)["one key"].loss
    assert fused.agreement == free.agreement
    with pytest.raises(UsageError, match="No fused implementation"):
        swap_kernel(demo, "hard", **words, path="fused")


def test_places_and_windows_agree_with_the_whole(report: Report) -> None:
    swap = report.swaps[1]
    placed = swap.loss_by_position
    assert sum(part.tokens for part in placed) == 16 * 63
    mean = sum(part.change.delta * part.tokens for part in placed) / (16 * 63)
    assert mean == pytest.approx(swap.loss.delta, rel=1e-6)
    assert swap.beyond_window.window == 16, "its own window"
    assert by_role(swap)["floor"].beyond_window.tokens == swap.beyond_window.tokens
    assert by_role(swap)["without filter"].beyond_window.change.delta < swap.beyond_window.change.delta


def test_texts_have_perplexities_of_their_own(demo: loading.Loaded, tmp_path: Path) -> None:
    text, paths = (DEMO / "text.txt").read_text(encoding="utf-8"), []
    for name, part in (("a.txt", text[:9000]), ("b.txt", " ".join(reversed(text[9000:18000].split())))):
        path = tmp_path / name
        path.write_text(part, encoding="utf-8")
        paths.append(str(path))
    swap = swap_kernel(demo, "rbf", text=paths, **READ | BARE | {"windows": 8}).swap
    for found in swap.loss_by_text:
        assert found.perplexity is not None
        loss, powers = found.change, found.perplexity
        expected = [float(torch.tensor(number).exp()) for number in (loss.before, loss.after)]
        assert [powers.before, powers.after] == pytest.approx(expected)
        assert powers.ci95[0] < powers.delta < powers.ci95[1]
