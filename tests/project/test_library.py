"""Holds what the Python library promises to code that has a model in memory, and to packages that add to attnlens."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import families
import matplotlib.figure
import pytest
import stub
import torch
from program import DEMO, environment_with, refused
from reports import synthetic_report, timeless

import attnlens
from attnlens.analyzers import registry
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.registry import KERNELS
from attnlens.models import hooks
from attnlens.models.hooks import Replacement

PACKAGE = Path(attnlens.__file__).parent
MATHS = ("maths.attsvm", "maths.ksvd", "maths.linalg", "maths.statistics", "lab.primal")
REPRODUCED = ("bert", "albert", "gpt2", "gpt_oss", "gemma2", "t5", "bart")
"""Families that hand out their attention matrices: plain, one module called again and again, causal, sinks and groups,
softcap and window, position bias, cross-attention."""


def family(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny model of that family, with inputs of which one is padded."""
    model = families.build(name)
    return model, families.inputs(name, model, padded=True)


def given(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's first output."""
    with torch.no_grad():
        found: torch.Tensor = model(**batch)[0]
    return found


def state(model: Any) -> list[object]:
    """All that must be the same when the library has let a model go."""
    parts = [
        (module.training, *map(len, (module._forward_hooks, module._forward_pre_hooks))) for module in model.modules()
    ]
    learning = [(parameter.requires_grad, parameter.grad is None) for parameter in model.parameters()]
    names = {id(config): config._attn_implementation for config in hooks.interface.list_configs(model)}
    return [parts, learning, list(names.values()), torch.get_rng_state().tolist()]


# --- names ------------------------------------------------------------------------------------------------------------

AFRESH = """
import sys
import attnlens
assert "torch" not in sys.modules, "importing attnlens loads torch"
of_ours = attnlens.kernel, attnlens.analyzer, attnlens.MeasureInfo, attnlens.KernelParameter
print(*(one.__name__ for one in of_ours))
assert "torch" not in sys.modules, "what a third party registers with loads torch"
print(attnlens.maths.ksvd.dual.__name__, attnlens.lab.primal.build.__name__)
"""


def test_importing_attnlens_loads_no_torch_and_its_submodules_are_there():
    result = subprocess.run([sys.executable, "-c", AFRESH], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["kernel", "analyzer", "MeasureInfo", "KernelParameter", "dual", "build"], (
        result.stderr
    )


@pytest.mark.parametrize("name", attnlens.__all__)
def test_every_promised_name_resolves(name):
    assert getattr(attnlens, name) is not None


def test_names_are_listed_once_and_another_is_refused():
    assert sorted(attnlens.__all__) == attnlens.__all__ == dir(attnlens)
    assert set(attnlens._HOMES) | set(attnlens._PACKAGES) | {"__version__"} == set(attnlens.__all__)
    assert attnlens.maths.ksvd is import_module("attnlens.maths.ksvd")
    with pytest.raises(AttributeError, match="no attribute 'ksdv'"):
        attnlens.ksdv  # noqa: B018


def test_type_checkers_are_told_of_every_lazy_name():
    nodes = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    names = {alias.asname for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert names - {None} == set(attnlens.__all__) - {"__version__"}


@pytest.mark.parametrize("package", ["maths.attsvm", "lab.primal", "maths.statistics"])
def test_the_examples_of_a_package_run_and_show_what_they_say(package):
    with torch.random.fork_rng():
        found = doctest.testmod(import_module(f"attnlens.{package}"))
    assert found.attempted >= 5
    assert found.failed == 0


@functools.cache
def names_used(path: Path) -> set[str]:
    """Names that a file imports or reads, also as attributes."""
    tree = ast.parse(path.read_text())
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return read | imported | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("package", MATHS)
def test_what_a_package_exports_is_used_by_others_or_shown_in_its_examples(package):
    module = import_module(f"attnlens.{package}")
    init = Path(module.__file__)
    used = set().union(*(names_used(path) for path in PACKAGE.rglob("*.py") if path != init))
    shown = "\n".join(re.findall(r"^>>> (.*)$", module.__doc__ or "", re.MULTILINE))
    tree = ast.parse(init.read_text())
    imported = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and f"attnlens.{package}." in str(node.module)
    ]
    exported = getattr(module, "__all__", [alias.name for node in imported for alias in node.names])
    assert [name for name in exported if name not in used and not re.search(rf"\b{name}\b", shown)] == []


# --- plug-ins ---------------------------------------------------------------------------------------------------------


def test_a_third_party_enters_a_kernel_and_an_analyzer_by_the_exported_names(monkeypatch):
    from attnlens import KernelParameter, MeasureInfo, QueryKey, analyzer, kernel

    registry.list_analyzers()
    monkeypatch.setattr(registry, "_ANALYZERS", dict(registry._ANALYZERS))

    @analyzer("scale", "tokens", [MeasureInfo("tokens.scale_used", "The scale.", "s")], by_default=False)
    def scale(query_key: QueryKey) -> dict[str, torch.Tensor]:
        """How large is the scale of the scores?"""
        return {"tokens.scale_used": torch.full(query_key.query.shape[:-2], query_key.scale)}

    assert "scale" in [found.name for found in registry.list_analyzers()]
    report = attnlens.inspect("demo", analyzers=["scale"], windows=2, length=8, layers=[0])
    assert report.heads[0].measures["tokens.scale_used"].value == pytest.approx(16**-0.5)

    facts = {"source": "here", "positive": True, "symmetric": False, "features": "none", "form": "score"}
    try:

        @kernel("warm", formula="z/t", parameters=(KernelParameter("t", "temperature", float, 1.0, above=0),), **facts)
        def warm(score: torch.Tensor, t: float) -> torch.Tensor:
            """The exponential kernel at another temperature."""
            return score / t

        model, batch = family("bert")
        with attnlens.replaced(model, "warm:t=1"):
            assert torch.allclose(given(model, batch), given(family("bert")[0], batch), atol=1e-4)
    finally:
        KERNELS.pop("warm", None)


def entered(module: str, what: str, name: str, measure: str = "tokens.mine", **more: Any) -> Callable[..., Any]:
    """A function of that module, entered as a kernel or an analyzer."""
    facts = {"formula": "z", "source": "me", "positive": True, "symmetric": True, "features": "none", "form": "score"}

    def function(score: torch.Tensor) -> Any:
        """Half the score."""
        return score / 2

    function.__module__, function.__code__ = module, function.__code__.replace(co_filename=module)
    if what == "kernel":
        return attnlens.kernel(name, **facts, **more)(function)
    enter = registry.analyzer if what == "analyzer" else registry.gathering
    return enter(name, "tokens", [registry.MeasureInfo(measure, "Mine.", "1")], by_default=False, **more)(function)


@pytest.fixture
def tables(monkeypatch):
    """The registry, as it was before a test entered anything."""
    registry.list_analyzers()
    parsed("rbf")
    monkeypatch.setattr(registry, "_ANALYZERS", dict(registry._ANALYZERS))
    before = dict(KERNELS)
    yield
    KERNELS.clear()
    KERNELS.update(before)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("what", "name", "measure"),
    [
        ("kernel", "rbf", ""),
        ("analyzer", "symmetry", "tokens.mine"),
        ("analyzer", "selection", "tokens.mine"),
        ("gathering", "symmetry", "tokens.mine"),
    ],
)
def test_a_plug_in_replaces_a_built_in_only_if_it_says_so(what, name, measure):
    with pytest.raises(
        UsageError, match=f"mine defines the (kernel|analyzer) '{name}', which is already built in"
    ) as no:
        entered("mine", what, name, measure)
    assert "replace=True" in no.value.remedy
    assert "mine" not in [getattr(info.function, "__module__", "") for info in KERNELS.values()]
    function = entered("mine", what, name, measure, replace=True)
    if what == "kernel":
        assert KERNELS[name].function is function
    else:
        assert [one.name for one in registry.list_analyzers() if one.measures[0].name == measure] == [name]


@pytest.mark.usefixtures("tables")
def test_a_plug_in_takes_no_name_of_a_tie_filter_or_measure_and_no_other_plug_ins():
    for name in ("window", "symmetric", "hybrid"):
        with pytest.raises(UsageError, match="taken by a tie, filter or hybrid"):
            entered("mine", "kernel", name, replace=True)
    with pytest.raises(UsageError, match=r"the measure 'tokens\.entropy', which is already built in"):
        entered("mine", "analyzer", "mine", "tokens.entropy", replace=True)
    for what in ("kernel", "analyzer"):
        entered("mine", what, "own")
        entered("mine", what, "own")  # as a notebook's cell that runs again
        with pytest.raises(UsageError, match=f"yours defines the {what} 'own', which is already defined by mine"):
            entered("yours", what, "own")


def test_an_entry_point_that_takes_the_name_of_a_built_in_is_refused(tmp_path):
    (tmp_path / "greedy-1.dist-info").mkdir()
    (tmp_path / "greedy.py").write_text(
        "from attnlens import kernel\n@kernel('rbf', formula='z', source='me', positive=True, symmetric=True, "
        "features='none', form='score')\ndef mine(score):\n    return score\n"
    )
    (tmp_path / "greedy-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy\nVersion: 1\n")
    (tmp_path / "greedy-1.dist-info" / "entry_points.txt").write_text("[attnlens.kernels]\ngreedy = greedy\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words, environment = [sys.executable, "-m", "attnlens", "list", "kernels"], environment_with(PYTHONPATH=path)
    found = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    refused(found, "greedy defines the kernel 'rbf', which is already built in")


def test_entry_points_are_read_once_a_process(monkeypatch):
    registry.measure_sources()
    parsed("rbf")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: pytest.fail("entry points were read again"))
    assert registry.measure_sources()["weights.symmetry"] == "weights"
    assert parsed("rbf").info.name == "rbf"


# --- capture ----------------------------------------------------------------------------------------------------------


def handed_out(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The attention matrices that the model itself gives, in the order of execution."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**batch, output_attentions=True)
    if "attentions" in found:
        return list(found.attentions)
    pairs = zip(found.decoder_attentions, found.cross_attentions, strict=True)
    return [*found.encoder_attentions, *(matrix for pair in pairs for matrix in pair)]


@pytest.mark.parametrize("name", REPRODUCED)
def test_captured_queries_and_keys_give_the_models_own_attention_matrices(name):
    model, batch = family(name)
    captured, own = attnlens.capture(model, batch), handed_out(model, batch)
    assert [query_key.site.layer for query_key in captured] == list(range(len(own)))
    for query_key, matrix in zip(captured, own, strict=True):
        assert dict(model.named_modules())[query_key.site.path] is not None
        assert query_key.heads == tuple(range(matrix.shape[1]))
        seen = matrix[..., : query_key.attention.shape[-1]].double()
        rows = query_key.attention.sum(-1, keepdim=True) > 0  # padded queries that see nothing
        assert torch.allclose(query_key.attention, seen * rows, atol=2e-5)
        spoiled = query_key.query.roll(1, dims=-3) @ query_key.paired_key.mT  # the control: heads in another order
        assert not torch.allclose((spoiled * query_key.scale).softmax(-1).double(), seen, atol=1e-2)


def test_a_captured_site_goes_through_the_analyzers_as_in_inspect(demo):
    ids = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    captured = attnlens.capture(demo, {"input_ids": ids})[2]
    (symmetry,) = registry.select_analyzers(["symmetry"], "tokens")
    assert captured.source == "tokens"
    assert captured.value is not None
    for values in symmetry.function(captured).values():
        assert values.shape[:2] == (1, 8)


def test_a_batch_is_what_a_tokenizer_gives_and_anything_else_is_refused(demo):
    words = ["A short line.", "And another, which is longer than the first."]
    demo.tokenizer.pad_token = demo.tokenizer.eos_token
    batch = demo.tokenizer(words, padding=True, return_tensors="pt")
    assert attnlens.capture(demo.model, batch)[0].query.shape[:2] == (2, 8)
    with pytest.raises(UsageError, match=r"'input_ids'.* has type list; a batch maps input names"):
        attnlens.capture(demo.model, demo.tokenizer(words))
    for nothing in ({}, None, "text"):
        with pytest.raises(UsageError, match="contains no inputs"):
            attnlens.capture(demo.model, nothing)
    for other in ("demo", torch.nn.Linear(2, 2)):
        with pytest.raises(UsageError, match="not a model in memory"):
            attnlens.capture(other, batch)
    with pytest.raises(ModelError, match="can't run on pixels"):
        attnlens.capture(demo.model, {"pixels": torch.zeros(1)})
    with pytest.raises(UsageError, match=r"batch\[0\] has type Tensor; a batch maps input names"):
        attnlens.capture(demo.model, {0: batch["input_ids"]})
    with pytest.raises(UsageError, match="meta device"):
        attnlens.capture(demo.model, {"input_ids": batch["input_ids"].to("meta")})


def test_reports_are_compared_by_what_they_hold(demo):
    report, other = (attnlens.inspect(demo, windows=2, length=8, layers=[0], seed=seed) for seed in (0, 1))
    assert report == report.model_copy(deep=True)
    assert report.windows != other.windows
    assert report != other


@pytest.mark.parametrize("name", families.REFUSED)
def test_a_model_without_attention_in_reach_is_refused_by_name(name):
    model = families.build(name)
    for use in (lambda batch: attnlens.capture(model, batch), lambda _: attnlens.replaced(model, "rbf")):
        with pytest.raises(ModelError, match=type(model).__name__):
            use(families.inputs(name, model))


def test_attention_that_cannot_be_read_is_warned_of(monkeypatch):
    model, batch = family("bert")
    missed = {"one.self": "it sums", "two.self": "it hashes", "idle": None}
    monkeypatch.setattr(hooks.Survey, "missed", missed)
    with pytest.warns(UserWarning, match="Not captured: one.self, because it sums; and 1 more"):
        assert len(attnlens.capture(model, batch)) == 2


# --- replaced ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "albert", "llama", "t5", "vit"])
def test_inside_the_block_a_model_gives_what_swap_kernel_measures_and_outside_what_it_gave(name):
    model = families.build(name)
    batch = families.inputs(name, model)
    sites = tuple(found.site for found in hooks.survey(model, batch))
    before = given(model, batch)
    for layers, heads in ((None, None), ([1], [0, 2])):
        swap = Replacement(parsed("rbf:gamma=1"), None if heads is None else tuple(heads))
        with hooks.replace(model, sites, {site: swap for site in sites if layers is None or site.layer in layers}):
            expected = given(model, batch)
        with attnlens.replaced(model, "rbf:gamma=1", layers=layers, heads=heads) as counter:
            assert torch.equal(given(model, batch), expected)
        assert sum(counter.calls.values()) == len(sites)
        assert torch.equal(given(model, batch), before)
        assert not torch.allclose(expected, before, atol=1e-2)  # the control


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_as_before_after_an_exception_and_after_all_that_looks_at_it(training):
    model, batch = family("bert")
    model.train(training).requires_grad_(True)
    model.bert.embeddings.requires_grad_(False)
    model.cls.eval()
    before = state(model)
    attnlens.capture(model, batch)
    assert state(model) == before
    attnlens.inspect(model, layers=[0], analyzers=["symmetry"])
    assert state(model) == before
    changing = attnlens.replaced(model, "linear")
    assert state(model) == before, "the model trains inside the block as it did before"
    with pytest.raises(ZeroDivisionError), changing:
        1 / 0  # noqa: B018
    assert state(model) == before


def test_a_model_that_was_made_in_inference_mode_is_read_as_any_other():
    with torch.inference_mode():
        model, batch = family("bert")
        model.requires_grad_(True)
    before = state(model)
    assert attnlens.capture(model, batch)[0].query.isfinite().all()
    assert attnlens.inspect(model, layers=[0], analyzers=["symmetry"]).coverage.analysed == 4
    assert state(model) == before


def test_users_train_and_generate_inside_the_block(demo):
    model, batch = family("llama")
    model.requires_grad_(True)
    with attnlens.replaced(model, "rbf:gamma=1", layers=[0]):
        model(**batch, labels=batch["input_ids"]).loss.backward()
    assert float(model.model.layers[0].self_attn.q_proj.weight.grad.norm()) > 0
    ids = torch.tensor([[7, 8, 9, 10]])
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with attnlens.replaced(demo, "exponential"):
        same = demo.model.generate(ids, **asked)
    with attnlens.replaced(demo, "linear"):
        cached = demo.model.generate(ids, **asked)
        assert torch.equal(cached, demo.model.generate(ids, use_cache=False, **asked))
    assert torch.equal(demo.model.generate(ids, **asked), same)
    assert not torch.equal(cached, same)  # the control


def test_a_pass_that_broke_off_does_not_shift_the_layers_of_the_next():
    model, batch = family("albert")

    class StoppedError(Exception):
        pass

    def stop(_module: Any, _args: Any) -> None:
        raise StoppedError

    with attnlens.replaced(model, "rbf:gamma=1", layers=[0]):
        expected = given(model, batch)
        hook = model.albert.encoder.albert_layer_groups[0].albert_layers[0].ffn.register_forward_pre_hook(stop)
        with pytest.raises(StoppedError):
            given(model, batch)
        hook.remove()
        assert torch.equal(given(model, batch), expected)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown kernel": ("rfb", {}, "Did you mean 'rbf'"),
    "no string": (3, {}, "kernel=3 is not a string"),
    "a kernel to be fitted": ("rank:4", {}, "rank must be fitted to calibration text"),
    "a signed kernel": ("polynomial:degree=3", {}, "can be negative"),
    "an unknown layer": ("rbf", {"layers": [7]}, "no layer 7"),
    "an unknown head": ("rbf", {"heads": [4]}, "no head 4"),
    "letters for layers": ("rbf", {"layers": "x"}, "is not a list of numbers"),
    "an unknown part": ("rbf", {"part": "decode"}, "Did you mean 'decoder'"),
    "an unknown option": ("rbf", {"layer": [0]}, "Did you mean 'layers'"),
    "a part that is not there": ("rbf", {"part": "decoder"}, "No attention sites selected"),
    "lists for tensors": ("rbf", {"batch": {"input_ids": [[1, 2]]}}, "has type list; a batch maps input names"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replaced_is_refused_before_the_block(case):
    kernel, options, words = REFUSED[case]
    model, _ = family("bert")
    before = state(model)
    with pytest.raises(UsageError, match=words):
        attnlens.replaced(model, kernel, **options)
    assert state(model) == before


def test_what_has_no_meaning_at_a_site_is_refused_by_its_name(demo):
    with pytest.raises(UsageError, match=r"window:4 is undefined in cross-attention .decoder.block.0.layer.1"):
        attnlens.replaced(families.build("t5"), "window:4")
    assert attnlens.replaced(families.build("t5"), "window:4", part="encoder")
    with pytest.raises(UsageError, match="needs every pair of tokens"):
        attnlens.replaced(demo, "skewless")


def test_sites_that_are_never_reached_are_told_at_the_end():
    model, batch = family("bert")
    with pytest.raises(ModelError, match="never reached 2 of 2 sites"), attnlens.replaced(model, "rbf"):
        pass
    with pytest.raises(ModelError, match="never reached 1 of 1 sites"), attnlens.replaced(model, "rbf", layers=[1]):
        model.bert.encoder.layer[0](model.bert.embeddings(batch["input_ids"]))


def test_inputs_of_another_kind_than_the_sites_were_found_on_are_refused():
    model, batch = family("clip")
    text = {name: value for name, value in batch.items() if name != "pixel_values"}
    with attnlens.replaced(model.text_model, "rbf", batch=text):
        given(model.text_model, text)
    sites = tuple(each.site for each in hooks.survey(model, batch) if each.site.path.startswith("text_model"))
    refusal = pytest.raises(ModelError, match=r"vision_model.* runs on this input, but did not")
    with refusal, hooks.watch(model, sites, lambda *_: None):
        given(model, batch)


def test_two_kernels_at_once_and_a_model_with_another_kernel_are_refused():
    model, batch = family("bert")
    with attnlens.replaced(model, "rbf", layers=[0]):
        given(model, batch)
        for use in (
            lambda: attnlens.replaced(model, "linear", layers=[1]),
            lambda: attnlens.capture(model, batch),
            lambda: attnlens.inspect(model),
        ):
            with pytest.raises(UsageError, match="already replaces the attention"):
                use()
    assert len(attnlens.capture(model, batch)) == 2


# --- inspect of a model in memory -------------------------------------------------------------------------------------


def test_a_model_in_memory_reads_as_the_one_that_is_loaded(demo):
    text = PACKAGE / "models" / "samples" / "documentation.txt"
    asked: dict[str, Any] = {"windows": 2, "length": 16, "text": str(text)}
    held, named = attnlens.inspect(demo.model, tokenizer=demo.tokenizer, **asked), attnlens.inspect("demo", **asked)
    assert held.heads == named.heads
    assert held.model.id == f"{DEMO} (in memory)"
    assert (held.model.files, held.model.revision) == ([], None), "nobody knows whether they are still a file's weights"
    assert held.coverage.complete


def test_without_a_tokenizer_the_weights_alone_are_read():
    report = attnlens.inspect(families.build("bert"), analyzers=["symmetry"])
    assert report.model.id == "BertForMaskedLM (in memory)"
    assert {name.split(".")[0] for name in report.measure_names()} == {"weights"}
    assert "no tokenizer was given" in report.coverage.sentence


def test_options_that_a_model_in_memory_would_ignore_are_refused(demo):
    with pytest.raises(UsageError, match="device would be ignored"):
        attnlens.inspect(demo.model, device="cpu")
    for other in ("demo", demo):
        with pytest.raises(UsageError, match="tokenizer= is only for transformers models in memory"):
            attnlens.inspect(other, tokenizer=demo.tokenizer)


# --- reports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "begins"),
    [
        (".json", b"{"),
        (".csv", b"site,"),
        (".md", b"#"),
        (".HTML", b"<!doctype html>"),
        (".png", b"\x89PNG"),
        (".svg", b"<?xml"),
        (".pdf", b"%PDF"),
    ],
)
def test_a_report_is_saved_as_what_the_path_ends_in(ending, begins, tmp_path):
    report = synthetic_report(2, 3)
    report.save(tmp_path / f"report{ending}")
    assert (tmp_path / f"report{ending}").read_bytes().startswith(begins)
    report.save(str(tmp_path / f"again{ending}"))
    assert (tmp_path / f"again{ending}").read_bytes() == (tmp_path / f"report{ending}").read_bytes()


def test_an_ending_that_means_nothing_and_a_path_that_cannot_be_written_are_refused(tmp_path):
    report = synthetic_report(2, 3)
    for name in ("report", "report.docx"):
        with pytest.raises(OutputError, match="Cannot write a report with the suffix"):
            report.save(tmp_path / name)
    with pytest.raises(OutputError):
        report.save(tmp_path / "nowhere" / "report.json")
    with pytest.raises(UsageError):
        report.save("")
    assert list(tmp_path.iterdir()) == []


def test_a_report_plots_itself_and_shows_itself_in_a_notebook(tmp_path):
    report = synthetic_report(2, 3)
    figure = report.plot()
    assert isinstance(figure, matplotlib.figure.Figure)
    assert figure.axes
    shown = report._repr_html_()
    assert shown.startswith('<iframe sandbox srcdoc="&lt;!doctype html&gt;')
    assert "<script" not in shown
    assert shown.count('"') == 4, "what a report holds can't end the attribute"
    empty = report.model_copy(update={"heads": []})
    assert empty._repr_html_() is None
    with pytest.raises(UsageError, match="no measures to draw"):
        empty.plot()


# --- converge ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "foreign"),
    [("converge_synthetic", "head"), ("converge_head", "trials"), ("converge_checkpoints", "iterations")],
)
def test_each_job_of_converge_takes_its_own_options_alone(job, foreign):
    with pytest.raises(UsageError, match=f"no option '{foreign}'"):
        getattr(attnlens, job)(**{"head": (0, 0)} if job == "converge_head" else {}, **{foreign: 3})


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors are of that type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def numbers(demo: Any) -> object:
    """What a swap by a learned kernel and a healing come to."""
    short = {"layers": [1], "windows": 4, "length": 16, "batch_size": 2}
    primal = attnlens.swap_kernel(demo, "primal:4", **short).swap
    healed = attnlens.heal(demo, "rbf", train=2, **short).swap
    return primal.loss, primal.perplexity, healed.loss, timeless(healed.healing.model_dump())


@pytest.fixture(scope="module")
def plain(demo: Any) -> object:
    """The same where the caller has set nothing."""
    return numbers(demo)


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: by_default(torch.bfloat16),
    ],
    ids=["autocast", "device", "dtype"],
)
def test_no_number_depends_on_what_the_caller_has_set_in_torch(demo: Any, plain: object, surroundings: Any):
    with surroundings():
        default = torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu")
        assert numbers(demo) == plain
        assert default == (torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"))


def test_what_is_no_model_is_told_so_beside_a_tokenizer_too(demo: Any):
    wrapped = torch.nn.Sequential(demo.model)
    with pytest.raises(UsageError, match="A value of type Sequential is not a model name"):
        attnlens.inspect(wrapped, tokenizer=demo.tokenizer)
    with pytest.raises(UsageError, match="tokenizer= is only for transformers models in memory"):
        attnlens.inspect("demo", tokenizer=demo.tokenizer)


def test_the_stub_file_has_every_keyword_of_every_function():
    assert stub.STUB.read_text(encoding="utf-8") == stub.text(), "write it again: python tests/support/stub.py"
