"""Compare `inspect --source weights --device files` with its floor, with two processes, and with TransformerLens.

python benchmarks/files.py [--quick] [--layers 12] [--peer PYTHON] [--of 8b|mla|jobs|peer ...]

The checkpoint has the shape of an 8 B model (32 query and 8 key heads of 128, d_model 4096, bfloat16); only its queries
and keys are on disk. The time per layer comes from the difference between two whole processes, with many layers and
with two. The floor is measured between these: plain reads of the same bytes, and the Gram and core products that all
spectra need. `bare` adds the other products and decompositions of the measures as single torch calls. `mla` is a layer
of latent attention of Kimi-K2's shape. --peer is a Python that has TransformerLens.
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


class Usage(NamedTuple):
    """Time and memory that a process used."""

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
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each time")
    parser.add_argument("--peer", default=sys.executable, help="the Python that has TransformerLens")
    parser.add_argument("--of", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    print(subjects.describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if {"8b", "jobs"} & set(options.of):
            layers = 4 if options.quick else options.layers
            write_checkpoint(
                folder / "llama",
                _build_llama_config(layers, quick=options.quick),
                "LlamaForCausalLM",
                ("q_proj", "k_proj"),
            )
            if "8b" in options.of:
                compare_with_floor(folder, layers, rounds)
            if "jobs" in options.of:
                compare_jobs(folder, rounds)
        if "mla" in options.of:
            measure_latent(folder / "latent", quick=options.quick)
        if "peer" in options.of:
            shapes = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-xl, 12 of 48 layers": (12, 1600, 25)}
            for name, shape in {"gpt2": (2, 64, 4)}.items() if options.quick else shapes.items():
                compare_with_peer(folder, name, shape, options.peer, rounds)


def write_checkpoint(folder: Path, config: dict[str, object], model_class: str, real: tuple[str, ...]) -> None:
    """Write a checkpoint in another process, so that this one stays small and can measure its children."""
    code = (
        "import sys, torch, transformers, shaped_checkpoints; from pathlib import Path\n"
        f"kind = transformers.{model_class}\n"
        f"config = kind.config_class(**{config!r})\n"
        "shaped_checkpoints.write_checkpoint(Path(sys.argv[1]), kind, config, torch.bfloat16,"
        f" lambda name: any(part in name for part in {real!r}))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subjects.run_python("-c", code, str(folder), PYTHONPATH=path)


def _build_llama_config(layers: int, *, quick: bool) -> dict[str, object]:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256}
    common = {"num_key_value_heads": 2 if quick else 8, "tie_word_embeddings": False}
    return {"num_hidden_layers": layers, **(small if quick else large), **common}


def compare_with_floor(folder: Path, layers: int, rounds: int) -> None:
    """Print the seconds per layer and the peak memory, compared with the floor."""
    config = json.loads((folder / "llama" / "config.json").read_text())
    heads, kv_heads, d_model = (config[f] for f in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    head_dim = config.get("head_dim") or d_model // heads
    sizes = list(map(str, (heads, kv_heads, d_model, head_dim)))
    reads, few, many, floor, bare = [], [], [], [], []
    for _ in range(rounds):
        reads.append(time_reads(folder / "llama", range(FEW, layers)) / (layers - FEW))
        few.append(measure_inspect(folder, FEW))
        many.append(measure_inspect(folder, layers))
        for kind, times in (("floor", floor), ("bare", bare)):
            times.append([float(word) for word in subjects.run_python("-c", ARITHMETIC, kind, *sizes).split()])
    print(
        f"\ninspect --source weights --device files: {heads} query, {kv_heads} key heads of {head_dim}, {d_model} wide"
    )
    for field, clock in enumerate(("wall", "processor")):
        products, all_products = (min(times[field] for times in samples) for samples in (floor, bare))
        ours = (min(usage[field] for usage in many) - min(usage[field] for usage in few)) / (layers - FEW)
        least = max(min(reads), products)
        print(f"  {clock} time of a layer: ours {1e3 * ours:.0f} ms, plain reads {1e3 * min(reads):.0f} ms")
        print(f"    Gram and core products {1e3 * products:.0f} ms: ratio {ours / least:.1f} (target ≤ 1.5)")
        print(f"    all products and decompositions, bare {1e3 * all_products:.0f} ms: ratio {ours / all_products:.2f}")
    peak, bound = max(usage.peak for usage in many), 2 * 8e-9 * d_model * head_dim * (heads + kv_heads) + 0.6
    print(f"  {layers} layers, the whole process: {min(usage.wall for usage in many):.1f} s")
    print(
        f"  peak {peak:.2f} GB, two layers' factors in float64 + 0.6 GB {bound:.2f} GB: ratio {peak / bound:.2f}",
        flush=True,
    )


def measure_latent(folder: Path, *, quick: bool) -> None:
    """Print the seconds per layer and the peak memory of latent attention."""
    heads, d_model, sizes = (4, 64, (16, 16, 16, 8)) if quick else (64, 7168, (1536, 512, 128, 64))
    names = "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"
    config = {"hidden_size": d_model, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 1000}
    config |= {"num_hidden_layers": 3, "first_k_dense_replace": 3, "intermediate_size": 64, "v_head_dim": sizes[2]}
    real = "q_a_", "q_b_", "kv_a_", "kv_b_"  # with the gains
    write_checkpoint(folder / "llama", config | dict(zip(names, sizes, strict=True)), "DeepseekV3ForCausalLM", real)
    short, long = (measure_inspect(folder, layers) for layers in (1, 3))
    wall, processor = ((long[field] - short[field]) / 2 for field in range(2))
    bound = 2 * 8e-9 * d_model * (sizes[2] + sizes[3]) * 2 * heads + 0.6
    print(f"\nlatent attention, {heads} heads, {d_model} wide: ", end="")
    print(f"a layer {wall:.1f} s, {processor:.1f} s of processor time")
    print(f"  peak {long.peak:.2f} GB, two layers' factors in float64 + 0.6 GB {bound:.2f} GB", flush=True)


def time_reads(folder: Path, layers: range) -> float:
    """Return the seconds to read the query and key weights of these layers without processing them."""
    names = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in layers for part in "qk"}
    seconds = 0.0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for start, end in (header[name]["data_offsets"] for name in names & header.keys()):
                buffer = bytearray(end - start)
                begun = time.perf_counter()
                file.seek(8 + length + start)
                assert file.readinto(buffer) == end - start
                seconds += time.perf_counter() - begun
    return seconds


ARITHMETIC = """
import sys, time
import torch
from attnlens.maths.linalg.spectra import over_heads
kind, (heads, kv, d, k) = sys.argv[1], map(int, sys.argv[2:])
draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)
query, key = draw(heads, k, d).mT, draw(kv, k, d).mT
stacked = query.mT.reshape(kv, heads // kv * k, d).mT
core, both = draw(heads, k, k), draw(heads, 2 * k, 2 * k)
both = both + both.mT
side, small = draw(d, kv * k), draw(heads, k, k)
inner = lambda left, right: left.mT @ right
def floor():
    over_heads(inner, query, query), over_heads(inner, key, key), over_heads(inner, key, stacked)
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


def compare_jobs(folder: Path, rounds: int) -> None:
    """Compare two processes with one."""
    all_threads, single_thread, two = [], [], []
    for _ in range(rounds):
        all_threads.append(measure_inspect(folder, None).wall)
        if rounds > 1:
            single_thread.append(measure_inspect(folder, None, threads=1).wall)
        two.append(measure_inspect(folder, None, "--jobs", "2").wall)
    print("\n--jobs 2, the whole command (target ≥ 1.7 on idle cores)")
    peers = {"one process with one thread": single_thread, "one process with all threads": all_threads}
    for name, peer in ((name, times) for name, times in peers.items() if times):
        print(f"  against {name}: ours {min(two):.1f} s, peer {min(peer):.1f} s, ratio {min(peer) / min(two):.2f}")
    sys.stdout.flush()


def measure_inspect(folder: Path, layers: int | None, *extra: str, threads: int | None = None) -> Usage:
    """Measure a whole `inspect`."""
    selection = () if layers is None else ("--layers", ",".join(map(str, range(layers))))
    words = ("--source", "weights", "--device", "files", *selection, "--work", str(folder / "work"), *extra)
    return measure_process(
        ["-m", "attnlens", "inspect", str(folder / "llama"), *words, "--no-progress", "-q"], threads=threads
    )


def compare_with_peer(folder: Path, name: str, shape: tuple[int, int, int], python: str, rounds: int) -> None:
    """Compare files of GPT-2's shape: from the start of a process to the spectra of all heads."""
    layers, d_model, heads = shape
    path = folder / f"{layers}x{d_model}"
    settings = {"n_layer": layers, "n_embd": d_model, "n_head": heads}
    code = (
        "import sys, transformers; transformers.GPT2LMHeadModel("
        f"transformers.GPT2Config(**{settings})).save_pretrained(sys.argv[1])"
    )
    subjects.run_python("-c", code, str(path))
    words = ("--source", "weights", "--device", "files", "--work", str(folder / "work"), "--no-progress", "-q")
    ours = [measure_process(["-m", "attnlens", "inspect", str(path), *words]) for _ in range(rounds)]
    wall, memory = min(usage.wall for usage in ours), max(usage.peak for usage in ours)
    title = f"spectra of all heads of {name}'s shape, {layers} layers"
    check = subprocess.run([python, "-c", "import transformer_lens.model_bridge"], capture_output=True, check=False)  # noqa: S603
    if check.returncode != 0:
        print(f"\n{title}: ours {wall:.1f} s, {memory:.2f} GB; TransformerLens is not installed: no ratio", flush=True)
        return
    theirs = [measure_process(["-c", PEER, str(path)], python=python) for _ in range(rounds)]
    peer_wall, peer_memory = min(usage.wall for usage in theirs), min(usage.peak for usage in theirs)
    processor = [min(usage.processor for usage in usages) for usages in (ours, theirs)]
    print(f"\n{title}, whole processes (target ≥ 5 × less time, ≤ half the memory)")
    print(f"  ours {wall:.1f} s, TransformerLens {peer_wall:.1f} s, ratio {peer_wall / wall:.1f}")
    print(
        "  processor time: ours {:.1f} s, TransformerLens {:.1f} s, ratio {:.1f}".format(
            *processor, processor[1] / processor[0]
        )
    )
    print(f"  ours {memory:.2f} GB, TransformerLens {peer_memory:.2f} GB, ratio {memory / peer_memory:.2f}", flush=True)


def measure_process(arguments: list[str], *, python: str = sys.executable, threads: int | None = None) -> Usage:
    """Measure a Python process; its processor time includes that of the processes for which it waits."""
    variables = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    child = subprocess.Popen(  # noqa: S603  # our own program
        [python, *arguments],
        stdout=subprocess.DEVNULL,
        env=os.environ | variables,
        stderr=subprocess.DEVNULL if python != sys.executable else None,
    )
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{arguments[:4]} ended with {child.returncode}")
    peak = 1e-6 * used.ru_maxrss * (1e-3 if sys.platform == "darwin" else 1)
    return Usage(seconds, used.ru_utime + used.ru_stime, peak)


if __name__ == "__main__":
    main()
