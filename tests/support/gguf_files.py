"""GGUF files of tiny models."""

import torch


def write(path, architecture, sizes, tokens, fields, tensors):
    """Write a GGUF file with a tokenizer, more fields and tensors."""
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
