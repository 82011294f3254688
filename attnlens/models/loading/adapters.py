"""Find LoRA, rsLoRA and DoRA adapters, check them, and merge them into a loaded model with peft."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import regex  # unlike re it has a timeout, which matters because the expressions come from an untrusted file

from attnlens.errors import ModelError
from attnlens.files import format_value, sha256, shorten_text, with_home
from attnlens.models.loading import locate
from attnlens.models.loading.building import names_in_model
from attnlens.models.loading.configs import text_config
from attnlens.models.loading.locate import ADAPTER_CONFIG, CONFIG, Json, Location, foreign, names_in, weight_file
from attnlens.models.loading.stored import LocalFile, Stored, format_names, read_header
from attnlens.records import AdapterInfo, File

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from torch import Tensor, nn
    from transformers import PreTrainedModel

TENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # Start of the name of every tensor that peft writes
PART = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?")
"""Pattern of the name of a LoRA or DoRA tensor; the groups are the module's path and the tensor's kind."""
LONGEST, SECONDS = 4096, 10.0
"""Maximum length in characters of a regular expression for module names, and time limit in seconds for all matches."""
LARGEST = 2**20  # Maximum size of adapter_config.json in bytes, since each of its names is compared with every module
NAMING = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern")
APPLIED = {"r", "lora_alpha", "use_rslora", "use_dora"}
WITHOUT_EFFECT = {  # Settings that do not change how the stored tensors are merged
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "revision", "lora_dropout", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
    *("peft_type", "base_model_name_or_path", "init_lora_weights"),
    *("bias", "modules_to_save"),  # these train whole tensors, and every stored tensor is applied
    "fan_in_fan_out",  # peft derives this from the layer's class
}
SAY_FOLDER = f"Give a folder with {ADAPTER_CONFIG} and {TENSORS}, or an adapter's hub id."
SAY_MERGE = "Merge the adapter with peft's merge_and_unload, save the merged model, and give that folder as MODEL."
SAY_AGAIN = "Download the adapter again."


def find_adapter(name: str, *, offline: bool) -> Location:
    """Find the adapter `name`: a folder or a hub id. Raises ModelError if it does not exist, or if peft is missing."""
    if find_spec("peft") is None:
        raise ModelError("--adapter needs peft, which is not installed.", "Run: pip install 'attnlens[adapters]'")
    path = with_home(name)
    if locate.is_there(path):
        if not path.is_dir():
            raise ModelError(f"{shorten_text(name)} is a file, not an adapter's folder.", SAY_FOLDER)
        _select_files(names_in(path), name)
        return Location(name, path, "safetensors", TENSORS)
    hub = locate.parse_hub_id(name, remedy=SAY_FOLDER)
    folder = hub.fetch(lambda names: _select_files(names, hub.id), offline=offline)
    _select_files(names_in(folder), hub.id)
    return Location(hub.id, folder, "safetensors", TENSORS, folder.name)


def _select_files(names: Collection[str], where: str) -> list[str]:
    """Return the names of an adapter's two files. Raises ModelError if either is missing."""
    if ADAPTER_CONFIG not in names and CONFIG in names:
        raise ModelError(f"{shorten_text(where)} is a model, not an adapter.", "Give it as MODEL, without --adapter.")
    if ADAPTER_CONFIG not in names and (folders := locate.folders_below(names, where)):
        problem = f"{shorten_text(where)} has no {ADAPTER_CONFIG}, but at least one folder inside it contains an "
        raise ModelError(f"{problem}adapter.", f"Name such a folder, e.g. {shorten_text(f'{where}/{folders[-1]}')}.")
    if missing := [name for name in (ADAPTER_CONFIG, TENSORS) if name not in names]:
        pickled = " (a pickled adapter, which can run code when opened, is not read)" * (PICKLE in names)
        raise ModelError(f"{shorten_text(where)} has no {missing[0]}{pickled}.", SAY_FOLDER)
    return [ADAPTER_CONFIG, TENSORS]


@dataclass(frozen=True)
class Adapted:
    """An adapter that has been merged into a model."""

    info: AdapterInfo
    layers: Mapping[str, LoraLayer]
    """peft's merged layers, removed from the model, keyed by module path; their base weights are on `meta`."""
    originals: Mapping[str, Tensor]
    """Values, in the base model, of the parameters that the adapter replaces entirely, keyed by parameter name."""
    unplaced: tuple[str, ...]  # The adapter's full (not low-rank) tensors that match no parameter of the model

    @contextmanager
    def remove_adapter(self, model: PreTrainedModel, path: str) -> Iterator[bool]:
        """Inside the context, undo the merge in the module at `path` in float64; yield True if any weight is restored.

        peft computes the base weight W = W'/D − s·BA from the rounded merged weight W', the adapter's update s·BA and
        DoRA's factors D (1 without DoRA), so that W'/D − W has exactly the adapter's rank.
        """
        import torch
        from torch import nn

        bases = {name: tensor.double() for name, tensor in self.originals.items() if name.startswith(f"{path}.")}
        for module in (module for module in self.layers if module.startswith(f"{path}.")):
            layer = deepcopy(self.layers[module])
            merged_weight = model.get_parameter(f"{module}.weight").detach()
            layer.base_layer.weight = nn.Parameter(merged_weight.to("cpu", torch.float64, copy=True))
            layer.unmerge()
            bases[f"{module}.weight"] = layer.base_layer.weight.data
        with ExitStack() as undo:
            for name, base in bases.items():
                parameter = model.get_parameter(name)
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data = base.to(parameter.device)
            yield bool(bases)


def merge_adapter(place: Location, model: PreTrainedModel) -> Adapted:
    """Merge the adapter into the model's weights in float64, and round the result to the weights' type.

    Raises ModelError if the adapter is of an unsupported kind, does not match the model, or has broken files. The model
    must not be used after an error.
    """
    import torch
    from safetensors import safe_open

    with foreign(f"The adapter in {place.folder} can't be merged", SAY_AGAIN), _limit_matching():
        from peft import LoraModel

        settings_file, tensors_file = weight_file(place.folder, ADAPTER_CONFIG), place.weights[0]
        settings, header = _read_settings(settings_file), read_header(LocalFile(tensors_file))[0]
        names, unplaced = _match_names(tensors_file, header, model)
        low_rank = {name: stored for name, stored in names.items() if ".lora_" in name}
        whole, modules = names.keys() - low_rank, sorted({name.rpartition(".lora_")[0] for name in low_rank})
        if not modules:
            raise ModelError(f"{tensors_file} contains no pair of LoRA matrices A and B.", SAY_AGAIN)
        base = settings.get("base_model_name_or_path")
        say_base = f"Give the adapter's base model as MODEL: {shorten_text(base or 'the model it was trained on')}."
        config = _build_config(settings, settings_file, model, modules, say_base)
        _check_shared(model, {*whole, *(f"{path}.weight" for path in modules)})
        if settings.get("bias", "none") != "none":
            biases = {
                f"{path}.bias" for path in modules if getattr(model.get_submodule(path), "bias", None) is not None
            }
            if lost := sorted(biases - whole):
                problem = f"{settings_file} declares trained biases, but the adapter lacks {format_names(lost)}."
                raise ModelError(problem, SAY_AGAIN)
        parameters = {name: model.get_parameter(name) for name in whole}
        originals = {name: parameter.data for name, parameter in parameters.items()}

        # state_dict's keys name the modules to wrap; on `meta`, peft allocates no memory and draws no random numbers
        with torch.device("meta"):
            keys = cast("dict[str, Tensor]", low_rank)  # only its keys are read
            tuner = LoraModel(model, config, "default", low_cpu_mem_usage=True, state_dict=keys)
        expected = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
        vocabulary = getattr(text_config(model.config), "vocab_size", None)
        _check_tensors(header, names, expected | parameters, vocabulary, say_base)
        with safe_open(tensors_file, framework="pt") as file:
            tensors = {name: file.get_tensor(stored) for name, stored in names.items()}
        # peft's function for this would round the tensors to the weights' type
        model.load_state_dict({name: tensors[name] for name in low_rank}, strict=False, assign=True)
        for name, parameter in parameters.items():
            parameter.data = tensors[name].to(parameter)
        layers = {path: cast("LoraLayer", model.get_submodule(path)) for path in modules}
        for path, layer in layers.items():
            _merge_layer(path, layer)
        tuner.unload()
        for layer in layers.values():
            layer.base_layer = deepcopy(layer.base_layer).to("meta")
        info = AdapterInfo(
            id=place.id,
            revision=place.revision,
            base=base,
            kind=("rs" if config.use_rslora else "") + ("DoRA" if config.use_dora else "LoRA"),
            rank=config.r,
            alpha=config.lora_alpha,
            modules=len(modules),
            replaced=sorted(whole),
            files=[File(name=file.name, sha256=sha256(file)) for file in (settings_file, tensors_file)],
        )
        return Adapted(info, layers, originals, unplaced)


def _check_shared(model: PreTrainedModel, changed: Collection[str]) -> None:
    """Raise ModelError if the adapter changes a parameter that the model also uses under a second name."""
    shared: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared[parameter].append(name)
    for names in shared.values():
        first, *others = sorted(names, key=lambda name: name not in changed)
        if others and first in changed:
            problem = f"The adapter changes {first}, which is the same parameter as {others[0]}: both would change."
            raise ModelError(problem, SAY_MERGE)


def _merge_layer(path: str, layer: LoraLayer) -> None:
    """Merge an update in float64, then round. Raises ModelError if a DoRA magnitude or norm is 0 or not finite."""
    base_layer, magnitudes = cast("nn.Linear", layer.get_base_layer()), list(layer.lora_magnitude_vector.parameters())
    dtype = base_layer.weight.dtype
    cast("nn.Module", layer).double()
    layer.merge()
    if magnitudes and not (magnitudes[0].all() and base_layer.weight.isfinite().all()):
        raise ModelError(f"Some DoRA magnitudes or row norms of {path} are 0 or not finite.", SAY_AGAIN)
    base_layer.to(dtype)


def _read_settings(file: Path) -> Json:
    """Return the non-null settings in adapter_config.json. Raises ModelError if a setting is not supported."""
    if file.stat().st_size > LARGEST:
        raise ModelError(f"{file} is larger than {LARGEST // 2**20} MiB.", SAY_AGAIN)
    settings = {name: value for name, value in locate.read_json(file).items() if value is not None}
    others = [name for name, value in settings.items() if value and name not in {*NAMING, *APPLIED, *WITHOUT_EFFECT}]
    others += [name for name in ("r", "lora_alpha") if not isinstance(settings.get(name, 8), int | float)]
    # all other initialisations (PiSSA, OLoRA, LoftQ …) change the base model's weights as well
    if settings.get("init_lora_weights") not in (True, False, None, "gaussian", "orthogonal", "eva"):
        others = ["init_lora_weights"]
    if settings.get("peft_type") != "LORA":
        others = ["peft_type"]
    if others:
        problem = f"{file} sets {shorten_text(others[0])} = {format_value(settings.get(others[0]))}"
        raise ModelError(f"{problem}, but attnlens merges only LoRA, rsLoRA and DoRA.", SAY_MERGE)
    return settings


def _match_names(
    file: Path, header: Mapping[str, Stored], model: PreTrainedModel
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return {parameter name: stored name}, and the stored names that match no parameter of peft or the model."""
    names, unplaced = dict[str, str](), list[str]()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    present = parameters | {path for path, _ in model.named_modules()}
    for stored in header:
        name = stored.removeprefix(PREFIX).replace(".base_layer.", ".")
        part = PART.fullmatch(name)
        stem = part[1] if part else name
        target = next((alias for alias in names_in_model(stem, model.base_model_prefix) if alias in present), stem)
        key = f"{target}.{part[2]}.default{'' if 'embedding' in part[2] else '.weight'}" if part else target
        if not stored.startswith(PREFIX) or (part is None and "lora_" in name) or key in names:
            problem = f"{file} contains {shorten_text(stored)}, which is not a LoRA parameter or is stored twice."
            raise ModelError(problem, SAY_MERGE)
        if part or target in parameters:
            names[key] = stored
        else:
            unplaced.append(stored)
    return names, tuple(unplaced)


@contextmanager
def _limit_matching() -> Iterator[None]:
    """Inside the `with`, raise TimeoutError if a module pattern is too long or if matching takes SECONDS in total."""
    compiled, spent = cache(regex.compile), 0.0  # peft matches thousands of expressions, too many for regex's own cache

    def match(method: str, expression: str, path: str) -> object:
        nonlocal spent
        if len(expression) > LONGEST or spent >= SECONDS:
            raise TimeoutError(f"its module patterns are too long, or matching them takes more than {SECONDS:.0f} s")
        begin = time.monotonic()
        try:
            return getattr(compiled(expression), method)(path, timeout=SECONDS - spent)
        finally:
            spent += time.monotonic() - begin

    matchers = {name: partial(match, name) for name in ("match", "fullmatch")}
    limited = SimpleNamespace(**vars(re) | matchers)
    with patch("peft.tuners.tuners_utils.re", limited), patch("peft.utils.other.re", limited):
        yield


def _build_config(settings: Json, file: Path, model: PreTrainedModel, modules: list[str], say_base: str) -> LoraConfig:
    """Build peft's config. Raises ModelError if settings, model and tensors disagree on which modules are adapted."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists  # peft's own rule, which is undocumented
    from peft.utils.other import get_pattern_key  # also undocumented
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    paths = [path for path, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D | nn.Embedding)]
    if lacking := sorted(set(modules) - set(paths)):
        problem = f"The adapter in {file.parent} was trained on a different base model: this model has no linear layer "
        raise ModelError(f"{problem}or embedding called {format_names(lacking)}.", say_base)
    values = {name: value for name, value in settings.items() if name in {*NAMING, *APPLIED, "modules_to_save"}}
    if values.get("target_modules", "all-linear") == "all-linear":
        values["target_modules"] = modules
    config = LoraConfig(**values, init_lora_weights=False)
    if differing := sorted({path for path in paths if check_target_module_exists(config, path)} ^ set(modules)):
        problem = f"{file} and the adapter's tensors disagree on whether to adapt {format_names(differing)}."
        raise ModelError(problem, SAY_AGAIN)
    config.modules_to_save = None  # needed only above, where it excludes modules from target_modules
    for name in ("rank_pattern", "alpha_pattern"):
        for key in set(values.get(name, ())) - set(modules):
            if all(get_pattern_key([key], path) == path for path in modules):  # without a match, peft returns the path
                problem = f"{file} has {format_value(key)} in {name}, which matches none of the adapted modules."
                remedy = "If the adapter was trained with this setting, remove that key from the file."
                raise ModelError(problem, remedy)
    return config


def _check_tensors(
    header: Mapping[str, Stored],
    names: Mapping[str, str],
    expected: Mapping[str, Tensor],
    vocabulary: int | None,
    say_base: str,
) -> None:
    """Raise ModelError, before any tensor is read, if names or shapes are not as expected, or a type is unsupported."""
    if different := sorted(expected.keys() ^ names.keys()):
        verb = "lacks" if different[0] in expected else "contains"
        raise ModelError(f"The adapter {verb} {format_names(different)}, contrary to its settings.", SAY_AGAIN)
    for name, stored in names.items():
        entry, shape = header[stored], tuple(expected[name].shape)
        if entry.shape != shape:
            stored_size, size = (" × ".join(map(str, sizes)) for sizes in (entry.shape, shape))
            problem = f"The adapter contains {shorten_text(stored)} of shape {stored_size} instead of {size}"
            differing = {pair for pair in zip(entry.shape, shape, strict=False) if pair[0] != pair[1]}
            rank_axis = int(re.search(r"lora_(embedding_)?B", name) is not None)
            is_low_rank = ".lora_" in name and len(entry.shape) == len(shape) == 2
            if is_low_rank and entry.shape[1 - rank_axis] == shape[1 - rank_axis]:
                cause = f"its rank is {entry.shape[rank_axis]}, but {ADAPTER_CONFIG} declares a different rank"
                remedy = f"Correct r or rank_pattern in {ADAPTER_CONFIG}, or get the adapter again."
            elif {size for _, size in differing} == {vocabulary}:
                cause = "the adapter was trained with a resized vocabulary"
                length = max(length for length, _ in differing)
                call = f"resize_token_embeddings({length})"
                remedy = f"Call {call} on MODEL, save it, and give that folder. Or: {SAY_MERGE}"
            else:
                cause = "the adapter was trained on a different base model"
                remedy = f"{say_base} If MODEL already is that model, download the adapter again."
            raise ModelError(f"{problem}: {cause}.", remedy)
        if entry.encoded:
            problem = f"The adapter stores {shorten_text(stored)} in the type {entry.type}, which is not supported."
            raise ModelError(problem, SAY_MERGE)
