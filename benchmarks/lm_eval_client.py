"""Check that lm-eval's log-likelihoods of a saved swap equal those that attnlens computes.

python benchmarks/lm_eval_client.py [--quick] [--kernel SPELLING] [--json FILE]

`demo` is swapped and saved, loaded by `attnlens.load_swapped`, and passed to lm-eval's HFLM, which scores the choices
of a local multiple-choice task, one by one and in padded batches. Ours are computed independently: one forward pass of
the original model per choice, under `attnlens.replaced`, then log-softmax and its sum in float64. As a control, HFLM
also scores the original model. Needs lm-eval (requirements.txt); nothing is downloaded.
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
"""Contexts and choices; choices differ in length, so that batches are padded. The first is the verse's own."""
SIZES = (1, 4, 16)
"""Choices in a batch."""
TOLERANCE = 1e-4
"""Largest allowed difference in nats: float32 with two ways of batching."""


def main() -> None:
    """Print the largest difference for each batch size, and that of the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="rbf", help="kernel of the swap")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="padded batches only")
    options = parser.parse_args()
    if importlib.util.find_spec("lm_eval") is None:
        print("lm-eval is not installed: no ratio was measured")
        return
    result = compare_likelihoods(options.kernel, SIZES[1:2] if options.quick else SIZES)
    for size, difference in result["apart"].items():
        ratio = f"ratio to {TOLERANCE:g}: {difference / TOLERANCE:.2f}"
        print(f"batches of {size}: HFLM and attnlens differ by {difference:.1e} nats at most, {ratio}")
    print(f"control: without the swap HFLM and attnlens differ by {result['control']:.2f} nats at most")
    if options.json:
        Path(options.json).write_text(json.dumps(result) + "\n", encoding="utf-8")


def compare_likelihoods(kernel: str, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Compute the largest |difference| in nats to lm-eval's log-likelihoods by batch size, and the control's."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_task(folder)
        attnlens.swap_kernel("demo", kernel, windows=4, length=32, save=folder / "swapped")
        expected = compute_likelihoods(kernel)
        swapped = attnlens.load_swapped(folder / "swapped")
        try:
            theirs = {size: score_choices(swapped.model, swapped.tokenizer, folder, size) for size in sizes}
        finally:
            swapped.close()
        demo = attnlens.load("demo")
        control = score_choices(demo.model, demo.tokenizer, folder, SIZES[1])
    return {
        "kernel": kernel,
        "choices": len(expected),
        "apart": {str(size): float((likelihoods - expected).abs().max()) for size, likelihoods in theirs.items()},
        "control": float((control - expected).abs().max()),
    }


def write_task(folder: Path) -> None:
    """Write a multiple-choice task and its data in the format that lm-eval reads from a folder."""
    rows = [{"question": question, "choices": choices, "gold": 0} for question, choices in QUESTIONS]
    data = folder / "verses.json"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    settings = {
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
    (folder / f"{TASK}.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML


def score_choices(model: Any, tokenizer: Any, folder: Path, size: int) -> torch.Tensor:
    """Return lm-eval's log-likelihood of each choice, question by question."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    client = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size)
    known = TaskManager(include_path=str(folder), include_defaults=False)
    cache = {"cache_requests": False, "bootstrap_iters": 0, "log_samples": True}
    results = simple_evaluate(client, tasks=[TASK], task_manager=known, **cache)
    samples = sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"])
    return torch.tensor(
        [float(response[0]) for sample in samples for response in sample["filtered_resps"]], dtype=torch.float64
    )


def compute_likelihoods(kernel: str) -> torch.Tensor:
    """Compute log p(choice | context) under `attnlens.replaced`, with one forward pass per choice and no padding."""
    demo = attnlens.load("demo")
    likelihoods = []
    with attnlens.replaced(demo, kernel), torch.no_grad():
        for question, choices in QUESTIONS:
            context = demo.tokenizer(question)["input_ids"]
            for choice in choices:
                whole = demo.tokenizer(f"{question} {choice}")["input_ids"]
                assert whole[: len(context)] == context, "a context's tokens stay the same before a choice"
                logits = demo.model(input_ids=torch.tensor([whole])).logits[0].double()
                rows = logits.log_softmax(-1)[len(context) - 1 : -1]
                likelihoods.append(rows.gather(1, torch.tensor(whole[len(context) :])[:, None]).sum())
    return torch.stack(likelihoods)


if __name__ == "__main__":
    main()
