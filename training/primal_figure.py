"""Train models of `demo`'s size with and without a primal last layer, longer and on more text, and measure their decay.

    python training/primal_figure.py [--steps 2000] [--seeds 3] [--eta 0.1] [--out primal_figure.json]

trains `demo`'s architecture both ways on `demo`'s own training text (the King James Bible without its held-out verses),
and measures both on the held-out text. `attnlens reproduce claims` does the same in 120 steps on shorter windows of the
shipped text. Both models start with the same weights and see the same batches. The script prints the table and writes
the experiment as JSON. It uses one thread and takes about half a second per step of one model on one core: an hour and
three quarters with the defaults.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from train_demo import BATCH, LEARNING_RATE, WINDOW, split_text

from attnlens.lab.experiments.trained import Training, compare_training, demo


def cut_windows(tokenizer, text: str) -> torch.Tensor:
    """Cut the running text into rows of WINDOW tokens, without the last few."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


def main() -> None:
    """Train, read, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eta", type=float, default=Training().eta)
    parser.add_argument("--out", type=Path, default=Path("primal_figure.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded, start = demo(), time.perf_counter()
    config = copy.deepcopy(loaded.model.config)
    train, held_out = (cut_windows(loaded.tokenizer, text) for text in split_text())
    training = Training(steps=options.steps, batch=BATCH, lr=LEARNING_RATE, eta=options.eta)

    def print_progress(_stage: str, done: int, total: int) -> None:
        if done % 100 == 0:
            print(f"{done} of {total} steps, {time.perf_counter() - start:.0f} s", flush=True)

    result = compare_training(config, train, held_out, training, range(options.seeds), print_progress)
    for name, value in result.final.items():
        error = result.errors.get(name)
        print(f"{name:28} {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    print(result.source)
    options.out.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
