"""Test the causes that `compare` names, on planted damage in models of 14 layouts and on unrelated changes.

python benchmarks/diagnosis.py [--quick] [--models demo,t5] [--damage REGEX] [--pairs 240] [--first 0]
    [--json benchmarks/results/diagnosis.json]

Each damage (tests/support/planted_causes.py) is planted in one layer. The layers of a copy are damaged at once, each in
a different way, and each is judged separately. ✓: the diagnosis of the layer names the hypotheses of its damage and no
others; ✗: it does not; –: the model can't have this damage. The models are trained (demo, MiniLM, 4 layers of SmolLM2),
or tiny and random.

Each pair is a model of two layers and a copy with a change that no hypothesis describes: every cause that is named is
false. The bound on their share is the upper end of Clopper and Pearson's 95 % interval.

--json adds the rows to those in the file, so that both can be run in parts.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from scipy.stats import binomtest
from subjects import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import families
import loaded
from loaded import changed
from planted_causes import ALLOWED, DAMAGES, FROM_BFLOAT16, POSSIBLE, SETTINGS, UNRELATED, Damage, find_layers

from attnlens.models import loading
from attnlens.records import DiagnosedCause
from attnlens.records.comparison import UNEXPLAINED
from attnlens.requests import InspectRequest
from attnlens.runs.compare.diagnosis import describe_models, match_sites
from attnlens.runs.inspect.inspection import Inspection
from attnlens.runs.inspect.pipeline import prepare, survey
from attnlens.runs.progress import silent

BLOCKS = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 160}
GROUPED = BLOCKS | {"num_key_value_heads": 2, "head_dim": 16}
GEMMA = GROUPED | {"query_pre_attn_scalar": 24}
TINY: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"attention_bias": True},
    "qwen3": GROUPED,
    "gemma2": GEMMA | {"num_key_value_heads": 4},
    "gemma3": GEMMA | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mistral": GROUPED | {"sliding_window": 8},
    "bert": BLOCKS,
    "gpt_neox": BLOCKS,
    "bloom": {"hidden_size": 128, "n_layer": 4, "n_head": 8},
    "falcon": BLOCKS | {"multi_query": False, "alibi": False, "bias": True, "new_decoder_architecture": False},
    "t5": {"d_model": 128, "d_kv": 16, "d_ff": 160, "num_layers": 4, "num_heads": 8},
    "whisper": {
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
        **{"d_model": 128, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160},
    },
}
"""Settings of the tiny models of tests/support/families.py: more layers, and widths that groups of values divide."""
MODELS = ("demo", "minilm", "smollm2", *TINY)


def main() -> None:
    """Print both tables, and add them to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="four kinds of damage in demo, one pair: does it still run?"
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--damage", default="", help="regular expression for the names of damages; 'none' for no table")
    parser.add_argument("--pairs", type=int, default=240)
    parser.add_argument("--first", type=int, default=0, help="number of the first pair")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    torch.set_num_threads(1)
    names = ["demo"] if options.quick else options.models.split(",")
    wanted = "^rows of q and k|^norm's gain" if options.quick else options.damage
    pairs = 1 if options.quick else options.pairs
    table, rows = dict[str, dict[str, str]](), list[dict[str, Any]]()
    for name in names:
        table[name] = fill_column(name, [each for each in DAMAGES if re.search(wanted, each)], wanted)
        save(options.json, table, rows)
    print_table(table)
    for number in range(options.first, options.first + pairs):
        rows.append(judge_pair(number, names))
        if rows[-1]["causes"]:
            print("false:", rows[-1], flush=True)
        save(options.json, {}, rows)
    print_pairs(rows)


def save(file: str | None, table: dict[str, dict[str, str]], pairs: Sequence[dict[str, Any]]) -> None:
    """Add columns, rows and pairs to those in the file, if one is named."""
    if file is None:
        return
    path = Path(file)
    content = json.loads(path.read_text()) if path.exists() else {"table": {}, "pairs": []}
    for name, column in table.items():
        content["table"][name] = content["table"].get(name, {}) | column
    known = {row["number"]: row for row in [*content["pairs"], *pairs]}
    content |= {"machine": describe_machine(), "pairs": [known[number] for number in sorted(known)]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


@functools.cache
def load(name: str) -> loading.Loaded:
    """Load a model in float32, or build a tiny one."""
    if name in ("demo", "minilm"):
        return loaded.trained(name)
    if name == "smollm2":
        return loaded.cut(loaded.smollm2(), 4)
    kind, config, settings = families.FAMILIES[name]
    with patch.dict(families.FAMILIES, {name: (kind, config, settings | TINY[name])}):
        return loaded.family(name)


def read_side(own: loading.Loaded) -> Inspection:
    """Survey a model as `compare --source weights` does."""
    return survey(prepare(own, InspectRequest(source="weights", analyzers=["symmetry"]), None, silent))


@functools.cache
def read_first(name: str) -> Inspection:
    """Survey an undamaged model once."""
    return read_side(load(name))


def diagnose(first: Inspection, second: loading.Loaded) -> list[DiagnosedCause]:
    """Return the causes that `compare` names."""
    sides = first, read_side(second)
    found: list[DiagnosedCause] = describe_models(sides, match_sites(sides), {})["diagnosis"]
    return found


# --- planted damage ---------------------------------------------------------------------------------------------------


def fill_column(name: str, wanted: Sequence[str], pattern: str) -> dict[str, str]:
    """Plant each damage in a model; return ✓, – or the causes that were found instead, by damage."""
    own, column = load(name), {}
    for group in pack(own.model, wanted):
        placed = {place: DAMAGES[each] for place, each in group.items()}
        second = changed(own, functools.partial(plant, damages=placed))
        causes = diagnose(read_first(name), second)
        for place, each in group.items():
            if is_changed(own.model, second.model, place):
                column[each] = judge(DAMAGES[each], select(causes, own.model, read_first(name), place))
    for each, setting in SETTINGS.items():
        if re.search(pattern, each) and (values := setting.change(own.model.config)):
            column[each] = judge(setting, diagnose(read_first(name), changed(own, **values)))
    print(name, {each: found for each, found in column.items() if found != "✓"}, flush=True)
    return {each: column.get(each, "–") for each in [*wanted, *SETTINGS] if re.search(pattern, each)}


def pack(model: Any, names: Sequence[str]) -> list[dict[int | None, str]]:
    """Distribute damages over copies of the model: one in each layer, or one in the whole model (None)."""
    layers, groups = find_layers(model), list[dict[int | None, str]]()
    for name in names:
        damage = DAMAGES[name]
        possible = [place for place, layer in enumerate(layers) if POSSIBLE[damage.possible](model, layer)]
        if damage.whole and possible:
            groups.insert(0, {None: name})
        elif possible:
            group = next((each for each in groups if None not in each and set(possible) - each.keys()), None)
            if group is None:
                groups.append(group := {})
            group[min(set(possible) - group.keys())] = name
    return groups


@torch.no_grad()
def plant(model: Any, damages: dict[int | None, Damage]) -> None:
    """Damage layers of a model."""
    layers = find_layers(model)
    for place, damage in damages.items():
        damage.change(model if place is None else layers[place])


def is_changed(first: Any, second: Any, place: int | None) -> bool:
    """Return False if the tensors of a layer, or all, are the same (float16 weights rounded to float16)."""
    sides = [side if place is None else find_layers(side)[place].block for side in (first, second)]
    pairs = zip(*(side.parameters() for side in sides), strict=True)
    return not all(torch.equal(one, other) for one, other in pairs)


def select(
    causes: Sequence[DiagnosedCause], model: Any, inspection: Inspection, place: int | None
) -> list[DiagnosedCause]:
    """Return the causes in a layer, or all causes if `place` is None."""
    if place is None:
        return [*causes]
    block = find_layers(model)[place].block
    path = next(path for path, module in model.named_modules() if module is block)
    numbers = {each.site.layer for each in inspection.site_calls if each.site.path.startswith(f"{path}.")}
    return [cause for cause in causes if numbers & set(cause.layers)]


def judge(damage: Damage, causes: Sequence[DiagnosedCause]) -> str:
    """Return ✓ if all expected causes and no others are named, else the named causes."""
    shown = [f"{each.hypothesis}{' (harmless)' * each.harmless}" for each in causes]
    expected = damage.expected.split(" & ")
    complete = all(any(re.search(pattern, each) for each in shown) for pattern in expected)
    only = all(any(re.search(pattern, each) for pattern in expected) for each in shown)
    if complete and only:
        return "✓"
    return "; ".join(f"{each}: {cause.text}"[:150] for each, cause in zip(shown, causes, strict=True)) or "no cause"


def print_table(table: dict[str, dict[str, str]]) -> None:
    """Print damages as rows and models as columns."""
    print("| damage |", " | ".join(table), "|\n|---", *["|---"] * len(table), "|", sep="")
    for damage in next(iter(table.values())):
        cells = [found if (found := column[damage]) in "✓–" else "✗" for column in table.values()]
        print(f"| {damage} |", " | ".join(cells), "|")
    found = [each for column in table.values() for each in column.values() if each != "–"]
    if found:
        print(f"named: {found.count('✓')} of {len(found)}, ratio {found.count('✓') / len(found):.3f}", flush=True)


# --- unrelated changes ------------------------------------------------------------------------------------------------


@functools.cache
def load_short(name: str, *, rounded: bool) -> tuple[loading.Loaded, Inspection]:
    """Load a model of two layers (demo and Falcon: four), and survey it; `rounded`: with weights that fit bfloat16."""
    if name in ("demo", "falcon"):  # the family's Falcon shares one key head, in another layout
        own = load(name)
    else:
        own = loaded.cut(load(name), 2) if name in MODELS[:3] else loaded.family(name)
    own = changed(own, round_weights) if rounded else own
    return own, read_side(own)


def judge_pair(number: int, names: Sequence[str]) -> dict[str, Any]:
    """Change a model in a way that no hypothesis describes, and return the causes that are named."""
    kinds = [*UNRELATED]
    kind, name = kinds[number % len(kinds)], names[number // len(kinds) % len(names)]
    own, first = load_short(name, rounded=kind in FROM_BFLOAT16)
    generator = torch.Generator().manual_seed(number)
    causes = diagnose(first, changed(own, lambda model: UNRELATED[kind](model, generator)))
    false = [
        f"{each.hypothesis}: {each.text}" for each in causes if each.hypothesis not in (UNEXPLAINED, ALLOWED.get(kind))
    ]
    return {"number": number, "model": name, "change": kind, "causes": false}


def round_weights(model: Any) -> None:
    """Round all weights to bfloat16."""
    for part in model.parameters():
        part.copy_(part.bfloat16())


def print_pairs(rows: Sequence[dict[str, Any]]) -> None:
    """Print the number of false diagnoses, by change and in all, with a bound for their share."""
    if not rows:
        return
    for kind in UNRELATED:
        of_kind = [row for row in rows if row["change"] == kind]
        print(f"{kind}: {sum(bool(row['causes']) for row in of_kind)} of {len(of_kind)}")
    count = sum(bool(row["causes"]) for row in rows)
    bound = binomtest(count, len(rows)).proportion_ci(0.95, method="exact").high
    print(f"false diagnoses: {count} of {len(rows)}, ratio {count / len(rows):.4f}, at most {bound:.4f} (95 %)")


if __name__ == "__main__":
    main()
