"""Tests the Python library: its names, plug-ins, models in memory, and reports."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import os
import re
import sys
from importlib import import_module, metadata
from pathlib import Path

import families
import matplotlib.figure
import numpy as np
import pytest
import stub
import torch
from loaded import BARE
from program import DEMO, captured, environment_with, refused
from reports import planted, timeless
from views import absent

import attnlens
from attnlens.analyzers import registry
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.registry import KERNELS
from attnlens.models import hooks

PACKAGE = Path(attnlens.__file__).parent
REPRODUCED = ("bert", "albert", "gpt2", "gpt_oss", "gemma2", "t5", "bart")
"""Families that return their attention matrices: plain, one module called repeatedly, causal, sinks and groups, softcap
and window, position bias, cross-attention."""


def family(name):
    """Build a tiny model of that family and inputs, one of them padded."""
    model = families.build(name)
    return model, families.inputs(name, model, padded=True)


def run(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


def state(model):
    """Return the state of a model that the library must restore."""
    hooked = [(part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    learning = [(parameter.requires_grad, parameter.grad is None) for parameter in model.parameters()]
    names = {id(config): config._attn_implementation for config in hooks.interface.list_configs(model)}
    return [hooked, learning, list(names.values()), torch.get_rng_state().tolist()]


def test_names_resolve_and_are_listed_once():
    assert all(getattr(attnlens, name) is not None for name in attnlens.__all__)
    assert sorted(attnlens.__all__) == attnlens.__all__ == dir(attnlens)
    assert set(attnlens._HOMES) | set(attnlens._PACKAGES) | {"__version__"} == set(attnlens.__all__)
    assert attnlens.maths.ksvd is import_module("attnlens.maths.ksvd")
    with pytest.raises(AttributeError, match="no attribute 'ksdv'"):
        attnlens.ksdv  # noqa: B018
    nodes = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    names = {alias.asname for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert names - {None} == set(attnlens.__all__) - {"__version__"}
    assert stub.STUB.read_text(encoding="utf-8") == stub.text(), "write it again: python tests/support/stub.py"


@functools.cache
def names_used(path):
    """Return the names that a file imports or reads, also as attributes."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_examples_of_packages_run_and_their_exports_are_used():
    for package in ("maths.attsvm", "maths.ksvd", "maths.linalg", "maths.statistics", "lab.primal"):
        module = import_module(f"attnlens.{package}")
        if package not in ("maths.ksvd", "maths.linalg"):
            with torch.random.fork_rng():
                results = doctest.testmod(module)
            assert (results.attempted >= 5, results.failed) == (True, 0), package
        init = Path(module.__file__)
        used = set().union(*(names_used(path) for path in PACKAGE.rglob("*.py") if path != init))
        shown = "\n".join(re.findall(r"^>>> (.*)$", module.__doc__ or "", re.MULTILINE))
        nodes = [node for node in ast.parse(init.read_text()).body if isinstance(node, ast.ImportFrom)]
        imported = [alias.name for node in nodes if f"attnlens.{package}." in str(node.module) for alias in node.names]
        exported = getattr(module, "__all__", imported)
        assert [name for name in exported if name not in used and not re.search(rf"\b{name}\b", shown)] == [], package


FACTS = {"formula": "z", "source": "me", "positive": True, "symmetric": True, "features": "none", "form": "score"}


@pytest.fixture
def _tables(monkeypatch):
    """Restore the registries after a test that registers plug-ins."""
    registry.list_analyzers()
    parsed("rbf")
    monkeypatch.setattr(registry, "_ANALYZERS", dict(registry._ANALYZERS))
    before = dict(KERNELS)
    yield
    KERNELS.clear()
    KERNELS.update(before)


@pytest.mark.usefixtures("_tables")
def test_a_third_party_registers_a_kernel_and_an_analyzer_by_the_exported_names():
    from attnlens import KernelParameter, MeasureInfo, QueryKey, analyzer, kernel

    @analyzer("scale", "tokens", [MeasureInfo("tokens.scale_used", "The scale.", "s")], by_default=False)
    def scale(query_key: QueryKey) -> dict[str, torch.Tensor]:
        """How large is the scale of the scores?"""
        return {"tokens.scale_used": torch.full(query_key.query.shape[:-2], query_key.scale)}

    assert "scale" in [each.name for each in registry.list_analyzers()]
    report = attnlens.inspect("demo", analyzers=["scale"], windows=2, length=8, layers=[0])
    assert report.heads[0].measures["tokens.scale_used"].value == pytest.approx(16**-0.5)

    @kernel("warm", parameters=(KernelParameter("t", "temperature", float, 1.0, above=0),), **FACTS)
    def warm(score: torch.Tensor, t: float) -> torch.Tensor:
        """The exponential kernel at another temperature."""
        return score / t

    model, batch = family("bert")
    before = run(model, batch)
    with attnlens.replaced(model, "warm:t=1"):
        assert torch.allclose(run(model, batch), before, atol=1e-4)


def register(module, what, name, measure="tokens.mine", **more):
    """Register a function of that module as a kernel or an analyzer."""

    def function(score):
        """Half the score."""
        return score / 2

    function.__module__, function.__code__ = module, function.__code__.replace(co_filename=module)
    if what == "kernel":
        return attnlens.kernel(name, **FACTS, **more)(function)
    enter = registry.analyzer if what == "analyzer" else registry.gathering
    return enter(name, "tokens", [registry.MeasureInfo(measure, "Mine.", "1")], by_default=False, **more)(function)


@pytest.mark.usefixtures("_tables")
def test_a_plug_in_replaces_a_built_in_only_on_request_and_never_other_names():
    analyzers = [("analyzer", "symmetry"), ("analyzer", "selection"), ("gathering", "symmetry")]
    for what, name in (("kernel", "rbf"), *analyzers):
        message = f"mine defines the (kernel|analyzer) '{name}', which is already built in"
        with pytest.raises(UsageError, match=message) as refusal:
            register("mine", what, name)
        assert "replace=True" in refusal.value.remedy
        assert KERNELS["rbf"].function.__module__ != "mine"
    function = register("mine", "kernel", "rbf", replace=True)
    assert KERNELS["rbf"].function is function
    for what, name in analyzers:
        register("mine", what, name, measure := f"tokens.{what}_{name}", replace=True)
        assert [one.name for one in registry.list_analyzers() if one.measures[0].name == measure] == [name]
    for name in ("window", "symmetric", "hybrid"):
        with pytest.raises(UsageError, match="taken by a tie, filter or hybrid"):
            register("mine", "kernel", name, replace=True)
    with pytest.raises(UsageError, match=r"the measure 'tokens\.entropy', which is already built in"):
        register("mine", "analyzer", "mine", "tokens.entropy", replace=True)
    for what in ("kernel", "analyzer"):
        register("mine", what, "own")
        register("mine", what, "own")  # as a notebook's cell that runs again
        with pytest.raises(UsageError, match=f"yours defines the {what} 'own', which is already defined by mine"):
            register("yours", what, "own")


def test_entry_points_are_read_once_and_cannot_take_the_name_of_a_built_in(tmp_path, monkeypatch):
    facts = ", ".join(f"{name}={value!r}" for name, value in FACTS.items())
    for name, text in {
        "greedy.py": f"import attnlens\n@attnlens.kernel('rbf', {facts})\ndef mine(score):\n    return score\n",
        "greedy-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: greedy\nVersion: 1\n",
        "greedy-1.dist-info/entry_points.txt": "[attnlens.kernels]\ngreedy = greedy\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    env = environment_with(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    result = captured([sys.executable, "-m", "attnlens", "list", "kernels"], None, env)
    refused(result, "greedy defines the kernel 'rbf', which is already built in")
    registry.measure_sources()
    parsed("rbf")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: pytest.fail("entry points were read again"))
    assert registry.measure_sources()["weights.symmetry"] == "weights"
    assert parsed("rbf").info.name == "rbf"


def returned_matrices(model, batch):
    """Return the attention matrices that the model returns, in the order of execution."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**batch, output_attentions=True)
    if "attentions" in outputs:
        return list(outputs.attentions)
    pairs = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
    return [*outputs.encoder_attentions, *(matrix for pair in pairs for matrix in pair)]


@pytest.mark.parametrize("name", REPRODUCED)
def test_captured_queries_and_keys_give_the_models_attention_matrices(name):
    model, batch = family(name)
    captured, own = attnlens.capture(model, batch), returned_matrices(model, batch)
    assert [query_key.site.layer for query_key in captured] == list(range(len(own)))
    for query_key, matrix in zip(captured, own, strict=True):
        assert dict(model.named_modules())[query_key.site.path] is not None
        assert query_key.heads == tuple(range(matrix.shape[1]))
        seen = matrix[..., : query_key.attention.shape[-1]].double()
        rows = query_key.attention.sum(-1, keepdim=True) > 0  # padded queries that see nothing
        assert torch.allclose(query_key.attention, seen * rows, atol=2e-5)
        spoiled = query_key.query.roll(1, dims=-3) @ query_key.paired_key.mT  # the control: heads in another order
        assert not torch.allclose((spoiled * query_key.scale).softmax(-1).double(), seen, atol=1e-2)


def test_batches_are_captured_as_analyzers_read_them_and_anything_else_is_refused(demo, monkeypatch):
    demo.tokenizer.pad_token = demo.tokenizer.eos_token
    words = ["A short line.", "And another, which is longer than the first."]
    batch = demo.tokenizer(words, padding=True, return_tensors="pt")
    captured = attnlens.capture(demo, batch)[2]
    assert (captured.source, captured.query.shape[:2]) == ("tokens", (2, 8))
    assert captured.value is not None
    (symmetry,) = registry.select_analyzers(["symmetry"], "tokens")
    assert all(values.shape[:2] == (2, 8) for values in symmetry.function(captured).values())
    for model, inputs, kind, message in (
        (demo.model, demo.tokenizer(words), UsageError, r"'input_ids'.* has type list; a batch maps input names"),
        *((demo.model, nothing, UsageError, "contains no inputs") for nothing in ({}, None, "text")),
        *((other, batch, UsageError, "not a model in memory") for other in ("demo", torch.nn.Linear(2, 2))),
        (demo.model, {"pixels": torch.zeros(1)}, ModelError, "can't run on pixels"),
        (demo.model, {0: batch["input_ids"]}, UsageError, r"batch\[0\] has type Tensor; a batch maps input names"),
        (demo.model, {"input_ids": batch["input_ids"].to("meta")}, UsageError, "meta device"),
    ):
        with pytest.raises(kind, match=message):
            attnlens.capture(model, inputs)
    for name in families.REFUSED:
        model = families.build(name)
        for use, what in ((attnlens.capture, families.inputs(name, model)), (attnlens.replaced, "rbf")):
            with pytest.raises(ModelError, match=type(model).__name__):
                use(model, what)
    model, batch = family("bert")
    monkeypatch.setattr(hooks.Survey, "missed", {"one.self": "it sums", "two.self": "it hashes", "idle": None})
    with pytest.warns(UserWarning, match="Not captured: one.self, because it sums; and 1 more"):
        assert len(attnlens.capture(model, batch)) == 2


@pytest.mark.parametrize("name", ["albert", "llama", "t5", "vit"])
def test_inside_the_block_a_model_computes_with_the_kernel_and_outside_as_before(name):
    model = families.build(name)
    batch = families.inputs(name, model)
    sites = tuple(each.site for each in hooks.survey(model, batch))
    before = run(model, batch)
    for layers, heads in ((None, None), ([1], [0, 2])):
        swap = hooks.Replacement(parsed("rbf:gamma=1"), None if heads is None else tuple(heads))
        with hooks.replace(model, sites, {site: swap for site in sites if site.is_among(layers)}):
            expected = run(model, batch)
        with attnlens.replaced(model, "rbf:gamma=1", layers=layers, heads=heads) as counter:
            assert torch.equal(run(model, batch), expected)
        assert sum(counter.calls.values()) == len(sites)
        assert torch.equal(run(model, batch), before)
        assert not torch.allclose(expected, before, atol=1e-2), "the control"


def test_a_model_is_as_before_after_every_use_and_after_an_exception():
    with torch.inference_mode():
        made_so, batch = family("bert")
        made_so.requires_grad_(True)
    before = state(made_so)
    assert attnlens.capture(made_so, batch)[0].query.isfinite().all()
    assert attnlens.inspect(made_so, layers=[0], analyzers=["symmetry"]).coverage.analysed == 4
    assert state(made_so) == before
    model, batch = family("bert")
    model.train().requires_grad_(True)
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


def test_users_train_and_generate_inside_the_block_and_an_interrupted_pass_shifts_no_layer(demo):
    model, batch = family("llama")
    model.requires_grad_(True)
    with attnlens.replaced(model, "rbf:gamma=1", layers=[0]):
        model(**batch, labels=batch["input_ids"]).loss.backward()
    assert float(model.model.layers[0].self_attn.q_proj.weight.grad.norm()) > 0
    ids = torch.tensor([[7, 8, 9, 10]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with attnlens.replaced(demo, "exponential"):
        same = demo.model.generate(ids, **options)
    with attnlens.replaced(demo, "linear"):
        cached = demo.model.generate(ids, **options)
        assert torch.equal(cached, demo.model.generate(ids, use_cache=False, **options))
    assert torch.equal(demo.model.generate(ids, **options), same)
    assert not torch.equal(cached, same), "the control"

    def stop(_module, _args):
        raise ZeroDivisionError

    model, batch = family("albert")
    with attnlens.replaced(model, "rbf:gamma=1", layers=[0]):
        expected = run(model, batch)
        hook = model.albert.encoder.albert_layer_groups[0].albert_layers[0].ffn.register_forward_pre_hook(stop)
        with pytest.raises(ZeroDivisionError):
            run(model, batch)
        hook.remove()
        assert torch.equal(run(model, batch), expected)


def test_senseless_replacements_are_refused_before_the_block(demo):
    model, batch = family("bert")
    before = state(model)
    for kernel, options, message in (
        ("rfb", {}, "Did you mean 'rbf'"),
        (3, {}, "kernel=3 is not a string"),
        ("rank:4", {}, "rank must be fitted to calibration text"),
        ("polynomial:degree=3", {}, "can be negative"),
        ("rbf", {"layers": [7]}, "lacks layer 7"),
        ("rbf", {"heads": [4]}, "lacks head 4"),
        ("rbf", {"layers": "x"}, "is not a list of numbers"),
        ("rbf", {"part": "decode"}, "Did you mean 'decoder'"),
        ("rbf", {"layer": [0]}, "Did you mean 'layers'"),
        ("rbf", {"part": "decoder"}, "No attention sites selected"),
        ("rbf", {"batch": {"input_ids": [[1, 2]]}}, "has type list; a batch maps input names"),
    ):
        with pytest.raises(UsageError, match=message):
            attnlens.replaced(model, kernel, **options)
        assert state(model) == before, message
    with attnlens.replaced(model, "rbf", layers=[0]):
        run(model, batch)
        for use, *more in ((attnlens.replaced, "linear"), (attnlens.capture, batch), (attnlens.inspect,)):
            with pytest.raises(UsageError, match="already replaces the attention"):
                use(model, *more)
    assert len(attnlens.capture(model, batch)) == 2
    t5 = families.build("t5")
    with pytest.raises(UsageError, match=r"window:4 is undefined in cross-attention .decoder.block.0.layer.1"):
        attnlens.replaced(t5, "window:4")
    assert attnlens.replaced(t5, "window:4", part="encoder")
    with pytest.raises(UsageError, match="needs every pair of tokens"):
        attnlens.replaced(demo, "skewless")


def test_sites_that_are_never_or_unexpectedly_reached_are_refused():
    model, batch = family("bert")
    with pytest.raises(ModelError, match="never reached 2 of 2 swapped sites"), attnlens.replaced(model, "rbf"):
        pass
    with (
        pytest.raises(ModelError, match="never reached 1 of 1 swapped sites"),
        attnlens.replaced(model, "rbf", layers=[1]),
    ):
        model.bert.encoder.layer[0](model.bert.embeddings(batch["input_ids"]))
    model, batch = family("clip")
    text = {name: value for name, value in batch.items() if name != "pixel_values"}
    with attnlens.replaced(model.text_model, "rbf", batch=text):
        run(model.text_model, text)
    sites = tuple(each.site for each in hooks.survey(model, batch) if each.site.path.startswith("text_model"))
    refusal = pytest.raises(ModelError, match=r"vision_model.* runs on this input, but did not")
    with refusal, hooks.watch(model, sites, lambda *_: None):
        run(model, batch)


def test_a_model_in_memory_has_the_report_of_the_loaded_one(demo):
    options = {"layers": [0], "windows": 2, "length": 16}
    options["text"] = str(PACKAGE / "models" / "samples" / "documentation.txt")
    memory = attnlens.inspect(demo.model, tokenizer=demo.tokenizer, **options)
    assert memory.heads == attnlens.inspect("demo", **options).heads
    assert memory.model.id == f"{DEMO} (in memory)"
    assert (memory.model.files, memory.model.revision) == ([], None), "its weights may differ from any file"
    assert memory.coverage.complete
    report = attnlens.inspect(families.build("bert"), analyzers=["symmetry"])
    assert report.model.id == "BertForMaskedLM (in memory)"
    assert {name.split(".")[0] for name in report.measure_names()} == {"weights"}
    assert "no tokenizer was given" in report.coverage.sentence
    with pytest.raises(UsageError, match="device would be ignored"):
        attnlens.inspect(demo.model, device="cpu")
    only = "tokenizer= is only for transformers models in memory"
    other = torch.nn.Sequential(demo.model)
    for model, message in (("demo", only), (demo, only), (other, "A value of type Sequential is not a model name")):
        with pytest.raises(UsageError, match=message):
            attnlens.inspect(model, tokenizer=demo.tokenizer)


@pytest.mark.usefixtures("without_layout")
def test_the_suffix_decides_how_a_report_is_saved(tmp_path):
    report = planted(np.eye(2))
    suffix = "with the suffix"
    for name, message in (("report", suffix), ("report.docx", suffix), ("no/where.json", "where")):
        with pytest.raises(OutputError, match=message):
            report.save(tmp_path / name)
    with pytest.raises(UsageError):
        report.save("")
    assert list(tmp_path.iterdir()) == []
    texts = {".json": b"{", ".csv": b"layer,", ".md": b"#", ".HTML": b"<!doctype"}
    for suffix, start in (texts | {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}).items():
        report.save(tmp_path / f"report{suffix}")
        assert (tmp_path / f"report{suffix}").read_bytes().startswith(start), suffix
    report.save(str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "report.json").read_bytes()


@pytest.mark.usefixtures("without_layout")
def test_a_report_is_compared_drawn_and_shown_in_a_notebook(demo):
    small = {"windows": 2, "length": 8, "layers": [0], "analyzers": ["symmetry"]}
    one, other = (attnlens.inspect(demo, **small, seed=seed) for seed in (0, 1))
    assert one == one.model_copy(deep=True) != other
    assert one.windows != other.windows
    figure, shown = one.plot(), one._repr_html_()
    assert isinstance(figure, matplotlib.figure.Figure)
    assert figure.axes
    assert not absent(shown, "COMPLETE: 8 of 8 heads", 'src="data:image/')
    assert not absent(str(one).replace("\n", " "), "COMPLETE: 8 of 8 heads", "Symmetric?", "Next  attnlens ")
    hostile = one.model_copy(update={"model": one.model.model_copy(update={"id": "<script>"})})
    assert "<script" not in hostile._repr_html_()
    empty = one.model_copy(update={"heads": []})
    assert absent(empty._repr_html_(), "COMPLETE", "<img") == ["<img"], "nothing to draw"
    with pytest.raises(UsageError, match="no measures to draw"):
        empty.plot()


AUTOCAST, DEVICE = torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta")


@contextlib.contextmanager
def all_at_once():
    """Set autocast, the default device, and bfloat16 as the default type."""
    before = torch.get_default_dtype()
    with AUTOCAST, DEVICE:
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "surroundings",
    [all_at_once(), *(pytest.param(one, marks=pytest.mark.full) for one in (AUTOCAST, DEVICE))],
    ids=["all at once", "autocast", "device"],
)
def test_no_number_depends_on_the_callers_settings_of_torch(demo, surroundings):
    def numbers():
        short = {"layers": [1], "heads": [0, 1], "windows": 2, "length": 12, "batch_size": 2}
        primal = attnlens.swap_kernel(demo, "primal:4", **short, **BARE).swap
        healed = attnlens.heal(demo, "rbf", train=1, **short, **BARE).swap
        return primal.loss, primal.perplexity, healed.loss, timeless(healed.healing.model_dump())

    def settings():
        return torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu")

    plain = numbers()
    with surroundings:
        before = settings()
        assert numbers() == plain
        assert settings() == before
