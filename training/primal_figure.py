"""Trains models of `demo`'s size with and without a primal last layer, longer and on more text, and reads their decay.

    python training/primal_figure.py [--steps 2000] [--seeds 3] [--eta 0.1] [--out primal_figure.json]

trains `demo`'s architecture both ways on `demo`'s own training text (the King James Bible without its held-out verses),
and reads both on the held-out text: what `attnlens reproduce claims` does in 120 steps on shorter windows of the text
that ships.
Both ways begin with the same weights and see the same batches. Prints the table and writes the experiment as JSON. One
thread, about half a second a step of one model on one core, so that the defaults take an hour and three quarters.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from train_demo import BATCH, LEARNING_RATE, WINDOW, split_text

from attnlens.lab.experiments.trained import Training, compare_training, demo


def windows(tokenizer, text: str) -> torch.Tensor:
    """The running text as rows of WINDOW tokens, without its last few."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


def main() -> None:
    """Train, read, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eta", type=float, default=Training().eta)
    parser.add_argument("--out", type=Path, default=Path("primal_figure.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loaded, start = demo(), time.perf_counter()
    config = copy.deepcopy(loaded.model.config)
    train, held = (windows(loaded.tokenizer, text) for text in split_text())
    training = Training(steps=asked.steps, batch=BATCH, lr=LEARNING_RATE, eta=asked.eta)

    def tell(_stage: str, done: int, total: int) -> None:
        if done % 100 == 0:
            print(f"{done} of {total} steps, {time.perf_counter() - start:.0f} s", flush=True)

    found = compare_training(config, train, held, training, range(asked.seeds), tell)
    for name, value in found.final.items():
        error = found.errors.get(name)
        print(f"{name:28} {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    print(found.source)
    asked.out.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
