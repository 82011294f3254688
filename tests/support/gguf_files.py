"""GGUF files of tiny models."""

import torch


def write(path, architecture, sizes, tokens, fields, tensors):
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([f"{tokens[0][0]} {tokens[1][-1]}"])
    kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for name, value in fields.items():
        kinds[type(value)](f"{architecture}.{name}", value)
    for name, value in tensors.items():
        writer.add_tensor(name, torch.as_tensor(value, dtype=torch.float32).contiguous().numpy())
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


def write_random(path, architecture, layers, sizes, fields, shapes, more=()):
    """Write a model with random weights, whose settings alone matter; `shapes` are those of tensors of a layer."""
    sizes = {"block_count": layers, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32} | sizes
    sizes |= {"head_count": 2, "layer_norm_rms_eps": 1e-5, "vocab_size": 8}
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (32, 32)) | {"attn_norm": 32, "ffn_norm": 32}
    shapes = {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    shapes |= {"token_embd": (8, 32), "output_norm": 32} | dict(more)
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    write(path, architecture, sizes, [*"abcdefg", "ab"], fields, tensors)
