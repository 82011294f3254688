"""Tests that controls have the size of their kernel and are measured like it, and of losses by place and distance."""

from dataclasses import replace

import families
import pytest
import torch
from loaded import BARE, family, loaded
from program import DEMO
from swap_reports import with_swaps
from views import summary

from attnlens.errors import UsageError
from attnlens.kernels import parsed
from attnlens.kernels.lowrank import MapsFit
from attnlens.kernels.spelling import HeadShape, cached_numbers, kept_keys, sink_window, state_numbers
from attnlens.maths.statistics import Design
from attnlens.models.hooks import Replacement
from attnlens.models.texts.targets import NOTHING
from attnlens.records import Agreement, Call, Site
from attnlens.runs import differences
from attnlens.runs.outputs import TokenLosses, repetition_distances
from attnlens.runs.swap.kernel_run import build_controls, choose_window, format_kernels
from attnlens.runs.swap.pipeline import swap_kernel

READ = {"windows": 8, "length": 64, "generate": 0}
CAUSAL = HeadShape(heads=2, head_dim=16, value_dim=16, tokens=128, causal=True)


@pytest.fixture(scope="module")
def report(demo):
    return swap_kernel(demo, ["elu", "rbf+window:16", "hard"], **READ)


def printed(report):
    return " ".join(summary(report).split())


def by_role(swap):
    return {control.role: control for control in swap.controls}


def ranked(*ranks):
    """Return a kernel of these ranks in as many heads: columns beyond a head's own are zero, as in a plan."""
    fit, draw = MapsFit(max(ranks)), torch.Generator().manual_seed(1)
    query, key = torch.randn((2, 2, len(ranks), 30, 16), generator=draw, dtype=torch.float64)
    fit.update(Call(query, key, torch.zeros_like(key), 0.25))
    maps = fit.solve()
    for head, rank in enumerate(ranks):
        for part in maps.values():
            part[head, :, rank:] = 0
    return parsed(f"rank:{max(ranks)}").with_fitted(maps)


def test_the_state_of_a_kernel_is_what_a_head_keeps():
    states = {"elu": 16 * 17, "linear": 16 * 17, "random-features:count=7": 7 * 17, "uniform": 17, "window:10": 10 * 32}
    states |= {"rbf+sink-window:2,5": 7 * 32, "strided:8": 23 * 32, "exponential": None, "rbf": None, "hard": None}
    assert {words: state_numbers(parsed(words), CAUSAL) for words in states} == states
    assert (parsed("uniform").has_gradient, parsed("elu").has_gradient) == (False, True)
    assert (cached_numbers(ranked(4, 4)), cached_numbers(parsed("rbf"))) == (4, None)
    assert cached_numbers(ranked(4, 8)) == 6, "the mean over heads"
    assert state_numbers(ranked(4, 8), CAUSAL) == 128 * (6 + 16)
    assert sink_window(128 * (6 + 16), CAUSAL).spelling == f"sink-window:4,{128 * 22 // 32 - 4}"


def test_a_control_that_differs_by_layer_is_spelled_as_a_range():
    sites = [Site(f"layer.{layer}", 0, layer, "decoder") for layer in range(3)]
    for ranks, expected in {(4, 4, 4): "76", (4, 4, 6): "76–84 by layer", (4, 6, 16): "76–all by layer"}.items():
        swaps = {site: Replacement(ranked(rank)) for site, rank in zip(sites, ranks, strict=True)}
        shapes = dict.fromkeys(sites, CAUSAL)
        controls = build_controls(swaps, shapes)
        kernels = [swap.kernel for swap in controls[0].model.swaps.values()]
        assert (controls[0].role, format_kernels(kernels)) == ("same size", f"sink-window:4,{expected}")
        assert ranks[-1] != 6 or choose_window(swaps, controls, shapes) == 84, "the widest"
    small = {sites[0]: HeadShape(heads=2, head_dim=1, value_dim=16, tokens=128, causal=True)}
    (control, *_) = build_controls({sites[0]: Replacement(parsed("uniform"))}, small)
    assert control.model.swaps[sites[0]].kernel.spelling == "window:1", "a state of one key and its value"
    kernels = map(parsed, ("window:2", "sink-window:1,2", "window:3"))
    assert format_kernels(kernels) == "window:2–3/sink-window:1,2 by layer"


def test_a_sink_window_keeps_as_many_keys_as_fit_and_is_no_control_if_that_is_all():
    for shape in (CAUSAL, replace(CAUSAL, causal=False)):
        for keys in (1, 2, 3, 4, 5, 8, 9, 31, 32, 100, 127):
            window = sink_window(keys * shape.token + shape.token - 1.0, shape).filter
            assert kept_keys(window, shape) == keys
            assert window.parameters.get("sinks", 0) <= min(4, keys / 2)
        for words in ("window:9", "sink-window:3,4", "strided:5"):
            window, rows, columns = parsed(words).filter, torch.tensor([0, 5, 64, 126, 127]), torch.arange(128)
            seen = window.keeps(rows, columns) & ((columns <= rows[:, None]) | (not shape.causal))
            assert kept_keys(window, shape) == int(seen.sum(1).max()), words
    assert sink_window(128.0 * 32, CAUSAL) is None
    assert sink_window(128.0 * 32 - 1, CAUSAL) is not None
    assert sink_window(None, replace(CAUSAL, tokens=68)) is None
    assert sink_window(None, replace(CAUSAL, tokens=69)) is not None
    assert sink_window(63.0, CAUSAL).spelling == "window:1"


def test_controls_are_measured_like_the_same_kernel_as_a_swap(report, demo):
    elu, filtered, hard = report.swaps
    assert [swap.state for swap in report.swaps] == [16 * 17, 16 * 32, 64 * 32]
    common = {"one key": "hard", "floor": "uniform"}
    alone = {"filter alone": "window:16", "without filter": "rbf:gamma=0.5"}
    kernels = [{role: control.kernel for role, control in by_role(swap).items()} for swap in report.swaps]
    assert kernels[0] == {"same size": "sink-window:4,4"} | common
    assert kernels[1] == {"same size": "sink-window:4,12"} | common | alone
    assert set(kernels[2]) == {"same size", "floor"}, "the kernel itself is not repeated"
    swaps = swap_kernel(demo, ["sink-window:4,4", "uniform", "window:16", "rbf"], controls=False, **READ).swaps
    controls = by_role(elu)["same size"], by_role(elu)["floor"], *list(by_role(filtered).values())[3:]
    for control, swap in zip(controls, swaps, strict=True):
        assert (control.loss, control.perplexity, control.kl) == (swap.loss, swap.perplexity, swap.kl)
        assert not swap.controls
    assert by_role(elu)["floor"].loss == by_role(filtered)["floor"].loss
    assert hard.loss == by_role(elu)["one key"].loss
    read = READ | {"windows": 2, "heads": [1]}
    one_head, window = (swap_kernel(demo, words, **read).swap for words in ("elu", "sink-window:4,4"))
    assert by_role(one_head)["same size"].loss == window.loss


def test_a_kernel_and_its_controls_are_compared_in_the_same_windows(report):
    pairs = [(swap.loss, control) for swap in report.swaps for control in swap.controls if control.kernel is not None]
    assert len(pairs) >= 8
    for loss, control in pairs:
        difference, (low, high) = control.difference, control.difference.ci95
        assert (difference.before, difference.after) == pytest.approx((control.loss.after, loss.after), rel=1e-6)
        assert low <= difference.delta <= high
        unpaired = loss.ci95[1] - loss.ci95[0] + control.loss.ci95[1] - control.loss.ci95[0]
        assert high - low < unpaired, "windows that are hard for one model are hard for the other"


def test_reasons_are_given_for_missing_controls_and_windows(demo):
    read = READ | {"windows": 1}
    uniform, fits, all_keys = (
        swap_kernel(demo, words, **read).swap for words in ("uniform", "random-features:64", "random-features:256")
    )
    control = by_role(uniform)["same size"]
    reason = "a state of 17 numbers is too small for a key and its value (32 numbers)"
    assert (uniform.state, control.kernel, control.reasons["kernel"]) == (17, None, reason)
    assert f"No same size control: {reason}." in uniform.notes
    assert by_role(fits)["same size"].kernel == "sink-window:4,30", "the control"
    assert not any("can store all" in note for note in fits.notes)
    control = by_role(all_keys)["same size"]
    assert (control.kernel, control.loss) == (None, None)
    assert any("a state of 4,352 numbers can store all 64 keys" in note for note in all_keys.notes)
    for swap in (uniform, all_keys):
        assert swap.reasons["beyond_window"] == "the sequences have 64 tokens, so no key lies beyond a window of 64"
    long = swap_kernel(demo, "random-features:400", **READ | {"windows": 4, "length": 160, "path": "fused"}).swap
    assert by_role(long)["same size"].kernel is None
    assert long.beyond_window.window == 64, "the default"


def test_controls_of_cross_attention_and_of_models_of_both_directions():
    read = {"windows": 2, "batch_size": 2}
    swap = swap_kernel(family("bart"), "rbf", length=8, part="cross", **read).swap
    same_size, one_key, floor = (by_role(swap)[role] for role in ("same size", "one key", "floor"))
    assert same_size.kernel is None
    assert "cross-attention" in same_size.reasons["kernel"]
    assert min(floor.kl, one_key.kl) > 0
    for model, words in ((family("bert"), "elu"), (loaded(families.build("bert").bert), "rbf")):
        swap = swap_kernel(model, words, length=48, **read).swap
        assert (swap.loss is None) == (words == "rbf")
        for name in ("beyond_window", "agreement"):
            assert "only defined for models that predict the next token" in swap.reasons[name]
        assert by_role(swap)["floor"].hidden_cosine < 1
        assert not swap.loss_by_position
        if words == "elu":
            control = by_role(swap)["same size"]
            shape = HeadShape(1, head_dim=10, value_dim=10, tokens=48, causal=False)
            assert control.state <= swap.state == 10 * 11
            assert kept_keys(parsed(control.kernel).filter, shape) == swap.state // 20, "on both sides"


def test_a_forced_path_is_that_of_the_kernel_alone(demo):
    """Controls and generated texts use any path; with a cache, hybrids have no fused one."""
    read = {"windows": 1, "length": 48, "generate": 4}
    fused, free = (swap_kernel(demo, "elu+hybrid:8", **read, path=path) for path in ("fused", "auto"))
    assert [control.kernel for control in fused.swap.controls] == [control.kernel for control in free.swap.controls]
    assert by_role(fused.swap)["one key"].loss == by_role(free.swap)["one key"].loss
    assert fused.swap.agreement == free.swap.agreement is not None
    with pytest.raises(UsageError, match="No fused implementation"):
        swap_kernel(demo, "hard", **read, path="fused")
    text = printed(free)
    assert text.count("no errors: only one window was read") == 1, "below the table"
    assert text.count("one window has no spread") == 1, "of all intervals"
    assert "a hybrid's window alone and far part alone" in text


def test_a_kl_of_rounding_errors_is_zero(demo, monkeypatch):
    honest = differences.outputs.divergence
    monkeypatch.setattr(differences.outputs, "divergence", lambda own, new: honest(own, new) - 1e-6)
    swap = swap_kernel(demo, "exponential", **READ | BARE | {"windows": 2}).swap
    assert (swap.kl, swap.kl_ci95[0]) == (0, 0)


def test_each_text_has_a_perplexity(demo, tmp_path):
    text, paths = (DEMO / "text.txt").read_text(encoding="utf-8"), [tmp_path / "a.txt", tmp_path / "b.txt"]
    paths[0].write_text(text[:9000], encoding="utf-8")
    paths[1].write_text(" ".join(reversed(text[9000:18000].split())), encoding="utf-8")
    swap = swap_kernel(demo, "rbf", text=paths, **READ | BARE).swap
    assert [part.name for part in swap.loss_by_text] == ["a.txt", "b.txt"]
    for part in swap.loss_by_text:
        losses = torch.tensor([part.change.before, part.change.after])
        assert [part.perplexity.before, part.perplexity.after] == pytest.approx(losses.exp().tolist())
        assert part.perplexity.ci95[0] < part.perplexity.delta < part.perplexity.ci95[1]


def test_evidence_is_the_nearest_earlier_pair():
    ids = torch.randint(4, (6, 50), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([ids[:, 1:], torch.full((6, 1), NOTHING)], 1)
    targets[3, 20:] = NOTHING
    pairs = torch.stack([ids, targets], -1)
    equal = (pairs[:, :, None] == pairs[:, None]).all(-1) & (targets != NOTHING)[:, :, None]
    distances = torch.arange(50)[:, None] - torch.arange(50)
    naive = torch.where(equal & (distances > 0), distances, 99).amin(-1)
    assert torch.equal(repetition_distances(ids, targets), naive.where(naive < 99, 0))
    assert int(repetition_distances(ids, targets).max()) > 20, "the control: some are far"


def test_losses_by_place_and_beyond_a_window_are_those_of_the_tokens_there():
    """Losses of tokens whose evidence is more than 9 tokens back rise by 2, and all others by 0.25."""
    losses, generator, parts = TokenLosses(), torch.Generator().manual_seed(3), []
    for rows, length in ((5, 40), (4, 33)):
        ids = torch.randint(5, (rows, length), generator=generator)
        targets = torch.cat([ids[:, 1:], torch.full((rows, 1), NOTHING)], 1)
        before = torch.rand(rows, length - 1, generator=generator, dtype=torch.float64)
        far = repetition_distances(ids, targets)[:, :-1] > 9
        parts.append((before, before + torch.where(far, 2.0, 0.25), far))
        losses.add([part.flatten() for part in parts[-1][:2]], targets, ids)
    before, after, far = (torch.cat([part.flatten() for part in each]) for each in zip(*parts, strict=True))
    beyond = losses.beyond(9, Design.plain(9), 0)
    assert beyond.tokens == int(far.sum())
    assert beyond.change.delta == pytest.approx(2.0)
    means = float(before[far].mean()), float(after[far].mean())
    assert (beyond.change.before, beyond.change.after) == pytest.approx(means)
    assert losses.beyond(5, Design.plain(9), 0).change.delta < 1.9, "the control: another window, other tokens"
    assert "fewer than 8" in losses.beyond(39, Design.plain(9), 0)
    places = losses.by_position(Design.plain(9), 0)
    assert [(part.first, part.last) for part in places][::7] == [(1, 4), (35, 39)]
    assert [a.last + 1 for a in places[:-1]] == [b.first for b in places[1:]]
    assert sum(part.tokens for part in places) == len(before)
    mean = sum(part.change.delta * part.tokens for part in places) / len(before)
    assert mean == pytest.approx(float((after - before).mean()))


def test_losses_by_place_average_to_the_loss_and_all_kernels_have_the_same_far_tokens(report, demo):
    swap = report.swaps[1]
    assert sum(part.tokens for part in swap.loss_by_position) == 8 * 63
    total = sum(part.change.delta * part.tokens for part in swap.loss_by_position)
    assert total / (8 * 63) == pytest.approx(swap.loss.delta, rel=1e-6)
    assert swap.beyond_window.window == 16, "its own window"
    assert by_role(swap)["without filter"].beyond_window.change.delta < swap.beyond_window.change.delta
    rows = [*report.swaps, *(control for each in report.swaps for control in each.controls if control.kernel)]
    assert len({row.beyond_window.tokens for row in rows}) == 1
    alone = swap_kernel(demo, "elu", **READ | {"controls": False}).swap
    assert alone.beyond_window.window == 4, "the control: alone it has its own sink-window's"


def test_a_legend_is_printed_if_any_row_has_its_column_and_windows_that_differ_in_each_row(report):
    missing, first = {"agreement": None, "beyond_window": None}, report.swaps[0]
    fields = {"prompts": 1, "source": "windows", "prompt_tokens": 8, "tokens": 4, "until": [4], "median": 4, "never": 1}
    agreement = Agreement(**fields, quartiles=(4, 4))
    controls = [control.model_copy(update={"agreement": agreement}) for control in first.controls]
    stages = [stage.model_copy(update=missing) for stage in first.stages]
    bare = first.model_copy(update=missing | {"stages": stages, "controls": controls})
    beyond = "Δ beyond: on tokens that repeat a bigram last seen more than 16 tokens back."
    for more in ([], [bare.model_copy(update={"kernel": "relu"})]):
        text = printed(with_swaps(report, bare, *more))
        assert "greedy: median number of generated tokens before" in text
        assert beyond in text
        assert "the filter alone and the kernel alone" not in text, "there is no such control"
    assert "the filter alone and the kernel alone" in printed(report)
    assert beyond in printed(report)

    def moved(row, window):
        beyond = row.beyond_window and row.beyond_window.model_copy(update={"window": window})
        return row.model_copy(update={"beyond_window": beyond})

    swaps = [
        moved(swap, window).model_copy(update={"controls": [moved(control, window) for control in swap.controls]})
        for window, swap in zip((4, 16, 16), report.swaps, strict=True)
    ]
    text = printed(with_swaps(report, *swaps))  # as in reports made before all kernels had the same window
    assert text.count("(> 4)") == 4
    assert "further back than the number in brackets" in text
    assert text.count("vs uniform") == 3 * printed(report).count("vs uniform"), "not shared"
