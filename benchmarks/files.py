"""Time and memory of `inspect --source weights --device files` beside its floor, two processes, and TransformerLens.

python benchmarks/files.py [--quick] [--layers 12] [--peer PYTHON] [--of 8b|mla|jobs|peer ...]

The checkpoint has the shape of an 8 B model (32 query and 8 key heads of 128, d_model 4096, bfloat16), of which queries
and keys alone are on disk. A layer's time is the difference of two whole processes, of many layers and of two. Its
floor is read and computed in between: plain reads of the same bytes, and the Gram and core products that all spectra
need; `bare` adds the other products and decompositions of the measures, as single calls of torch without anything
around them. `mla` is a layer of latent attention, of Kimi-K2's shape. --peer names a Python that has TransformerLens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import subjects

LAYERS, FEW = 12, 2
PARTS = ["8b", "mla", "jobs", "peer"]
PEER = """
import sys
import torch
from transformer_lens import FactoredMatrix
from transformer_lens.model_bridge import TransformerBridge
torch.set_grad_enabled(False)
model = TransformerBridge.boot_transformers(sys.argv[1], device="cpu")
for query, key in zip(model.W_Q, model.W_K):
    circuit = FactoredMatrix(query.double(), key.double().mT)
    circuit.svd(), circuit.eigenvalues
"""


class Used(NamedTuple):
    """What a process took."""

    wall: float
    """Seconds."""
    processor: float
    """Seconds of all its threads."""
    peak: float
    """GB."""


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one round: does it still run?")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the 8 B shape")
    parser.add_argument("--rounds", type=int, default=3, help="how often each time is taken")
    parser.add_argument("--peer", default=sys.executable, help="the Python that has TransformerLens")
    parser.add_argument("--of", nargs="*", choices=PARTS, default=PARTS)
    wanted = parser.parse_args()
    rounds = 1 if wanted.quick else wanted.rounds
    print(subjects.machine(), flush=True)
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        if {"8b", "jobs"} & set(wanted.of):
            layers = 4 if wanted.quick else wanted.layers
            made(folder / "llama", _llama(layers, quick=wanted.quick), "LlamaForCausalLM", ("q_proj", "k_proj"))
            if "8b" in wanted.of:
                against_floor(folder, layers, rounds)
            if "jobs" in wanted.of:
                jobs(folder, rounds)
        if "mla" in wanted.of:
            latent(folder / "latent", quick=wanted.quick)
        if "peer" in wanted.of:
            shapes = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-xl, 12 of 48 layers": (12, 1600, 25)}
            for name, shape in {"gpt2": (2, 64, 4)}.items() if wanted.quick else shapes.items():
                against_peer(folder, name, shape, wanted.peer, rounds)


def made(folder: Path, config: dict[str, object], model_class: str, real: tuple[str, ...]) -> None:
    """A checkpoint, by another process: this one stays small, so that what it starts can be measured."""
    code = (
        "import sys, torch, transformers, shaped_checkpoints; from pathlib import Path\n"
        f"kind = transformers.{model_class}\n"
        f"config = kind.config_class(**{config!r})\n"
        "shaped_checkpoints.write(Path(sys.argv[1]), kind, config, torch.bfloat16,"
        f" lambda name: any(part in name for part in {real!r}))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code, folder], check=True, env=os.environ | {"PYTHONPATH": path})  # noqa: S603  # ours


def _llama(layers: int, *, quick: bool) -> dict[str, object]:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256}
    rest = {"num_key_value_heads": 2 if quick else 8, "tie_word_embeddings": False}
    return {"num_hidden_layers": layers, **(small if quick else large), **rest}


def against_floor(folder: Path, layers: int, rounds: int) -> None:
    """Seconds a layer and peak memory."""
    config = json.loads((folder / "llama" / "config.json").read_text())
    heads, kv_heads, d_model = (config[f] for f in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    head_dim = config.get("head_dim") or d_model // heads
    sizes = list(map(str, (heads, kv_heads, d_model, head_dim)))
    read, few, many, floor, bare = [], [], [], [], []
    for _ in range(rounds):
        read.append(plain_reads(folder / "llama", range(FEW, layers)) / (layers - FEW))
        few.append(inspected(folder, FEW))
        many.append(inspected(folder, layers))
        for kind, times in (("floor", floor), ("bare", bare)):
            times.append([float(word) for word in finished("-c", ARITHMETIC, kind, *sizes).split()])
    print(
        f"\ninspect --source weights --device files: {heads} query, {kv_heads} key heads of {head_dim}, {d_model} wide"
    )
    for place, clock in enumerate(("wall", "processor")):
        products, every = (min(times[place] for times in taken) for taken in (floor, bare))
        ours = (min(used[place] for used in many) - min(used[place] for used in few)) / (layers - FEW)
        least = max(min(read), products)
        print(f"  {clock} time of a layer: ours {1e3 * ours:.0f} ms, plain reads {1e3 * min(read):.0f} ms")
        print(f"    Gram and core products {1e3 * products:.0f} ms: ratio {ours / least:.1f} (target ≤ 1.5)")
        print(f"    all products and decompositions, bare {1e3 * every:.0f} ms: ratio {ours / every:.2f}")
    peak, bound = max(used.peak for used in many), 2 * 8e-9 * d_model * head_dim * (heads + kv_heads) + 0.6
    print(f"  {layers} layers, the whole process: {min(used.wall for used in many):.1f} s")
    print(
        f"  peak {peak:.2f} GB, two layers' factors in float64 + 0.6 GB {bound:.2f} GB: ratio {peak / bound:.2f}",
        flush=True,
    )


def latent(folder: Path, *, quick: bool) -> None:
    """Seconds a layer and peak memory of latent attention."""
    heads, wide, sizes = (4, 64, (16, 16, 16, 8)) if quick else (64, 7168, (1536, 512, 128, 64))
    names = "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"
    config = {"hidden_size": wide, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 1000}
    config |= {"num_hidden_layers": 3, "first_k_dense_replace": 3, "intermediate_size": 64, "v_head_dim": sizes[2]}
    real = "q_a_", "q_b_", "kv_a_", "kv_b_"  # with the gains
    made(folder / "llama", config | dict(zip(names, sizes, strict=True)), "DeepseekV3ForCausalLM", real)
    one, three = (inspected(folder, layers) for layers in (1, 3))
    wall, processor = ((three[place] - one[place]) / 2 for place in range(2))
    bound = 2 * 8e-9 * wide * (sizes[2] + sizes[3]) * 2 * heads + 0.6
    print(f"\nlatent attention, {heads} heads, {wide} wide: a layer {wall:.1f} s, {processor:.1f} s of processor time")
    print(f"  peak {three.peak:.2f} GB, two layers' factors in float64 + 0.6 GB {bound:.2f} GB", flush=True)


def plain_reads(folder: Path, layers: range) -> float:
    """Seconds to read the queries' and keys' weights of these layers with nothing done to them."""
    names = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in layers for part in "qk"}
    spent = 0.0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for start, end in (header[name]["data_offsets"] for name in names & header.keys()):
                buffer = bytearray(end - start)
                began = time.perf_counter()
                file.seek(8 + length + start)
                assert file.readinto(buffer) == end - start
                spent += time.perf_counter() - began
    return spent


ARITHMETIC = """
import sys, time
import torch
from attnlens.maths.linalg.spectra import over_heads
kind, (heads, kv, d, k) = sys.argv[1], map(int, sys.argv[2:])
draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)
query, key = draw(heads, k, d).mT, draw(kv, k, d).mT
beside = query.mT.reshape(kv, heads // kv * k, d).mT
core, both = draw(heads, k, k), draw(heads, 2 * k, 2 * k)
both = both + both.mT
side, small = draw(d, kv * k), draw(heads, k, k)
inner = lambda left, right: left.mT @ right
def floor():
    over_heads(inner, query, query), over_heads(inner, key, key), over_heads(inner, key, beside)
def bare():
    floor()
    side.mT @ side, side.mT @ side, side.mT @ side
    over_heads(torch.matmul, small, query.mT), over_heads(torch.matmul, small, query.mT)
    over_heads(torch.linalg.svdvals, core), over_heads(torch.linalg.eigvals, core)
    over_heads(torch.linalg.eigvalsh, both)
    over_heads(lambda m: torch.linalg.cholesky_ex(m @ m.mT).L, core)
    over_heads(lambda m: torch.linalg.cholesky_ex(m @ m.mT).L, both)
walls, used = [], []
for _ in range(8):
    began = time.perf_counter(), time.process_time()
    {"floor": floor, "bare": bare}[kind]()
    walls.append(time.perf_counter() - began[0]), used.append(time.process_time() - began[1])
print(min(walls[1:]), min(used[1:]))
"""


def jobs(folder: Path, rounds: int) -> None:
    """Two processes against one."""
    one, alone, two = [], [], []
    for _ in range(rounds):
        one.append(inspected(folder, None).wall)
        if rounds > 1:
            alone.append(inspected(folder, None, threads=1).wall)
        two.append(inspected(folder, None, "--jobs", "2").wall)
    print("\n--jobs 2, the whole command (target ≥ 1.7 on idle cores)")
    peers = {"one process with one thread": alone, "one process with all threads": one}
    for name, peer in ((name, times) for name, times in peers.items() if times):
        print(f"  against {name}: ours {min(two):.1f} s, peer {min(peer):.1f} s, ratio {min(peer) / min(two):.2f}")
    sys.stdout.flush()


def inspected(folder: Path, layers: int | None, *more: str, threads: int | None = None) -> Used:
    """What a whole `inspect` takes."""
    chosen = () if layers is None else ("--layers", ",".join(map(str, range(layers))))
    words = ("--source", "weights", "--device", "files", *chosen, "--work", str(folder / "work"), *more)
    return process(["-m", "attnlens", "inspect", str(folder / "llama"), *words, "--no-progress", "-q"], threads=threads)


def against_peer(folder: Path, name: str, shape: tuple[int, int, int], python: str, rounds: int) -> None:
    """A file of GPT-2's shape: from the start of a process to the spectra of all heads."""
    layers, wide, heads = shape
    place = folder / f"{layers}x{wide}"
    settings = {"n_layer": layers, "n_embd": wide, "n_head": heads}
    code = (
        "import sys, transformers; transformers.GPT2LMHeadModel("
        f"transformers.GPT2Config(**{settings})).save_pretrained(sys.argv[1])"
    )
    finished("-c", code, str(place))
    words = ("--source", "weights", "--device", "files", "--work", str(folder / "work"), "--no-progress", "-q")
    ours = [process(["-m", "attnlens", "inspect", str(place), *words]) for _ in range(rounds)]
    own, memory = min(used.wall for used in ours), max(used.peak for used in ours)
    title = f"spectra of all heads of {name}'s shape, {layers} layers"
    there = subprocess.run([python, "-c", "import transformer_lens.model_bridge"], capture_output=True, check=False)  # noqa: S603
    if there.returncode != 0:
        print(f"\n{title}: ours {own:.1f} s, {memory:.2f} GB; TransformerLens is not installed: no ratio", flush=True)
        return
    theirs = [process(["-c", PEER, str(place)], python=python) for _ in range(rounds)]
    taken, held = min(used.wall for used in theirs), min(used.peak for used in theirs)
    processor = [min(used.processor for used in several) for several in (ours, theirs)]
    print(f"\n{title}, whole processes (target ≥ 5 × less time, ≤ half the memory)")
    print(f"  ours {own:.1f} s, TransformerLens {taken:.1f} s, ratio {taken / own:.1f}")
    print(
        "  processor time: ours {:.1f} s, TransformerLens {:.1f} s, ratio {:.1f}".format(
            *processor, processor[1] / processor[0]
        )
    )
    print(f"  ours {memory:.2f} GB, TransformerLens {held:.2f} GB, ratio {memory / held:.2f}", flush=True)


def process(arguments: list[str], *, python: str = sys.executable, threads: int | None = None) -> Used:
    """What a Python process takes; processes that it starts are not counted beside its wall time."""
    more = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    began = time.perf_counter()
    started = subprocess.Popen(  # noqa: S603  # our own program
        [python, *arguments],
        stdout=subprocess.DEVNULL,
        env=os.environ | more,
        stderr=subprocess.DEVNULL if python != sys.executable else None,
    )
    _, status, used = os.wait4(started.pid, 0)
    seconds = time.perf_counter() - began
    started.returncode = os.waitstatus_to_exitcode(status)
    if started.returncode:
        raise SystemExit(f"{arguments[:4]} ended with {started.returncode}")
    peak = 1e-6 * used.ru_maxrss * (1e-3 if sys.platform == "darwin" else 1)
    return Used(seconds, used.ru_utime + used.ru_stime, peak)


def finished(*arguments: str) -> str:
    """What a Python process prints."""
    done = subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout


if __name__ == "__main__":
    main()
