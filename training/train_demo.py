"""Train the `demo` model: a GPT-2 of 0.84 M parameters on the King James Bible, with one thread.

    python training/train_demo.py

writes into `attnlens/models/demo/`: the tokenizer, the final weights, the checkpoints at log-spaced steps, the
held-out text, and `training.json` with the losses that the README quotes. One thread, one seed: the same machine and
torch version give the same weights. It takes about an hour on one core.
"""

import gzip
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HERE = Path(__file__).parent
OUT = HERE.parent / "attnlens" / "models" / "demo"
VOCABULARY, WINDOW, BATCH, STEPS, WARMUP, LEARNING_RATE, SEED = 1024, 256, 16, 6000, 200, 3e-3, 0
CHECKPOINTS = (0, 30, 100, 300, 1000, 3000)
BLOCKS, BLOCK_BYTES = 8, 6400


def split_text() -> tuple[str, str]:
    """Split the book into training text and held-out text: eight runs of whole verses of about 6.4 kB each."""
    text = gzip.decompress((HERE / "kjv.txt.gz").read_bytes()).decode("utf-8")
    verses = [line for line in text.splitlines()[2:] if line and not line.startswith("[")]
    held_out: set[int] = set()
    for block in range(BLOCKS):
        index, size = int(len(verses) * (block + 0.5) / BLOCKS), 0
        while size < BLOCK_BYTES:
            held_out.add(index)
            size += len(verses[index]) + 1
            index += 1
    train = "\n".join(verse for index, verse in enumerate(verses) if index not in held_out) + "\n"
    return train, "\n".join(verses[index] for index in sorted(held_out)) + "\n"


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Train byte-level BPE of 1,024 tokens, the first of which ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end, model_max_length=WINDOW)


def build_model() -> GPT2LMHeadModel:
    """Build four layers of eight heads of 16 dimensions, with a feed-forward part three times as wide as the model."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=WINDOW, n_embd=128, n_layer=4, n_head=8, n_inner=384,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@torch.no_grad()
def compute_loss(model: GPT2LMHeadModel, ids: torch.Tensor) -> float:
    """Compute the mean negative log-likelihood in nats over non-overlapping windows, except their first tokens."""
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return float(model(windows, labels=windows).loss)


def compute_unigram_loss(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Compute the held-out tokens' cross entropy under the training text's token frequencies (add-one smoothed)."""
    counts = torch.bincount(train, minlength=VOCABULARY).double() + 1
    return float(-(counts / counts.sum()).log()[held_out].mean())


def save(model: GPT2LMHeadModel, folder: Path) -> None:
    """Save fp16 weights in ordinary Hugging Face format."""
    half = build_model()
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(folder)


def schedule_rate(step: int) -> float:
    """Return the rate of a step: linear warm-up, then a cosine down to 5 %."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    return LEARNING_RATE * (0.525 + 0.475 * math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def train(model: GPT2LMHeadModel, ids: torch.Tensor, held_out: torch.Tensor) -> list[dict[str, float]]:
    """Train with AdamW on random windows; save the checkpoints and return the held-out loss at each."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    undecayed = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    generator = np.random.default_rng(SEED)
    history, start = [], time.perf_counter()
    for step in range(STEPS + 1):
        if step in CHECKPOINTS or step % 1000 == 0:
            history.append({"step": step, "held_out_loss": round(compute_loss(model, held_out), 4)})
            print(history[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
        if step in CHECKPOINTS:
            save(model, OUT / "checkpoints" / f"step-{step:05d}")
        if step == STEPS:
            return history
        starts = generator.integers(0, len(ids) - WINDOW, BATCH)
        batch = torch.stack([ids[s : s + WINDOW] for s in starts])
        for group in optimizer.param_groups:
            group["lr"] = schedule_rate(step)
        optimizer.zero_grad(set_to_none=True)
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError("unreachable: the loop returns at its last step")


def main() -> None:
    """Train, save, and write the numbers that the README quotes."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    OUT.mkdir(parents=True, exist_ok=True)
    text, held_text = split_text()
    tokenizer = train_tokenizer(text)
    ids, held_out = (torch.tensor(tokenizer(t, verbose=False)["input_ids"]) for t in (text, held_text))
    model = build_model()
    print(
        f"{model.num_parameters():,} parameters, {len(ids):,} training, {len(held_out):,} held-out tokens", flush=True
    )
    history = train(model, ids, held_out)
    save(model, OUT)
    tokenizer.save_pretrained(OUT)
    (OUT / "text.txt").write_text(held_text, encoding="utf-8")
    shipped = GPT2LMHeadModel.from_pretrained(OUT, dtype=torch.float32)
    loss, bytes_per_token = compute_loss(shipped, held_out), len(held_text.encode()) / len(held_out)
    facts = {
        "parameters": model.num_parameters(), "steps": STEPS, "batch": BATCH, "window": WINDOW, "seed": SEED,
        "train_tokens": len(ids), "held_out_tokens": len(held_out), "held_out_bytes": len(held_text.encode()),
        "loss_per_token": round(loss, 4), "loss_per_byte": round(loss / bytes_per_token, 4),
        "unigram_per_token": round(compute_unigram_loss(ids, held_out), 4),
        "unigram_per_byte": round(compute_unigram_loss(ids, held_out) / bytes_per_token, 4), "history": history,
    }  # fmt: skip
    (OUT / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(facts)


if __name__ == "__main__":
    main()
