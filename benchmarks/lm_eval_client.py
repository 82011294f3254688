"""Whether lm-eval's log-likelihoods of a saved swap are those of attnlens itself.

python benchmarks/lm_eval_client.py [--quick] [--kernel SPELLING] [--json FILE]

`demo` is swapped and saved, loaded by `attnlens.load_swapped`, and handed to lm-eval's HFLM, which scores the choices
of a local multiple-choice task, one by one and in padded batches. Ours are computed apart from both: a forward pass a
choice of the original model under `attnlens.replaced`, log-softmax and its sum in float64. As a control, HFLM scores
the original model too. Needs lm-eval (requirements.txt); nothing is fetched.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import torch

import attnlens

TASK = "attnlens_verses"
QUESTIONS = (
    ("In the beginning God created the", ["heaven and the earth.", "waters, and all that is in them.", "man."]),
    ("And God said, Let there be", ["light: and there was light.", "bread.", "a king over this people for ever."]),
    ("And he said unto them,", ["Go ye into all the world.", "The.", "Whosoever shall ask of the way, let him go."]),
    ("Blessed are the meek: for they", ["shall inherit the earth.", "said.", "went up into the house of the LORD."]),
    ("The LORD is my shepherd; I shall not", ["want.", "be as the men of the city, which were many.", "know."]),
)
"""Contexts, and choices of unlike length, so that a batch is padded; the first is the verse's own."""
SIZES = (1, 4, 16)
"""Choices in a batch."""
TOLERANCE = 1e-4
"""Nats by which both may differ: float32 through two ways of batching."""


def main() -> None:
    """Print the largest difference for each batch size, and that of the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="rbf", help="what the model is swapped to")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="in padded batches alone")
    given = parser.parse_args()
    if importlib.util.find_spec("lm_eval") is None:
        print("lm-eval is not installed: no ratio was measured")
        return
    found = compared(given.kernel, SIZES[1:2] if given.quick else SIZES)
    for size, apart in found["apart"].items():
        ratio = f"ratio to {TOLERANCE:g}: {apart / TOLERANCE:.2f}"
        print(f"batches of {size}: HFLM and attnlens differ by {apart:.1e} nats at most, {ratio}")
    print(f"control: without the swap they differ by {found['control']:.2f} nats at most")
    if given.json:
        Path(given.json).write_text(json.dumps(found) + "\n", encoding="utf-8")


def compared(kernel: str, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """The largest |difference| in nats between lm-eval's log-likelihoods and ours, by batch size; and the control's."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        task(folder)
        attnlens.swap_kernel("demo", kernel, windows=4, length=32, save=folder / "swapped")
        own = ours(kernel)
        swapped = attnlens.load_swapped(folder / "swapped")
        try:
            theirs = {size: scored(swapped.model, swapped.tokenizer, folder, size) for size in sizes}
        finally:
            swapped.close()
        demo = attnlens.load("demo")
        control = scored(demo.model, demo.tokenizer, folder, SIZES[1])
    return {
        "kernel": kernel,
        "choices": len(own),
        "apart": {str(size): float((found - own).abs().max()) for size, found in theirs.items()},
        "control": float((control - own).abs().max()),
    }


def task(folder: Path) -> None:
    """A multiple-choice task and its data, as lm-eval reads them from a folder."""
    rows = [{"question": question, "choices": choices, "gold": 0} for question, choices in QUESTIONS]
    data = folder / "verses.json"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    said = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(said), encoding="utf-8")  # JSON is YAML


def scored(model: Any, tokenizer: Any, folder: Path, size: int) -> torch.Tensor:
    """lm-eval's log-likelihood of each choice, question by question."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    client = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size)
    known = TaskManager(include_path=str(folder), include_defaults=False)
    cache = {"cache_requests": False, "bootstrap_iters": 0, "log_samples": True}
    found = simple_evaluate(client, tasks=[TASK], task_manager=known, **cache)
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return torch.tensor([float(one[0]) for sample in samples for one in sample["filtered_resps"]], dtype=torch.float64)


def ours(kernel: str) -> torch.Tensor:
    """log p(choice | context) under `attnlens.replaced`, one forward pass each, without padding."""
    demo = attnlens.load("demo")
    found = []
    with attnlens.replaced(demo, kernel), torch.no_grad():
        for question, choices in QUESTIONS:
            context = demo.tokenizer(question)["input_ids"]
            for choice in choices:
                whole = demo.tokenizer(f"{question} {choice}")["input_ids"]
                assert whole[: len(context)] == context, "a context's tokens stay the same before a choice"
                logits = demo.model(input_ids=torch.tensor([whole])).logits[0].double()
                rows = logits.log_softmax(-1)[len(context) - 1 : -1]
                found.append(rows.gather(1, torch.tensor(whole[len(context) :])[:, None]).sum())
    return torch.stack(found)


if __name__ == "__main__":
    main()
