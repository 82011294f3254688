"""Trains with Primal-Attention: a torch module, its loss, and whole transformers that own it.

>>> import torch
>>> from transformers import BertConfig
>>> from attnlens import primal
>>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
>>> config = BertConfig(vocab_size=50, max_position_embeddings=16, architectures=["BertForMaskedLM"], **sizes)
>>> model = primal.build(config, layers="last", scores=8)  # Primal.+: canonical attention but in the last layer
>>> words = torch.arange(10)[None]
>>> loss = model.train()(input_ids=words, labels=words).loss + 0.1 * primal.regulariser(model)
>>> loss.backward()

`PrimalAttention` is the layer alone, for models of your own:

>>> layer = primal.PrimalAttention(d_model=32, heads=2, scores=8)
>>> layer(torch.randn(1, 10, 32)).shape
torch.Size([1, 10, 32])
"""

from attnlens.attention.primal_heads import PrimalAttention, PrimalHeads, regulariser
from attnlens.primal.former import build

__all__ = ["PrimalAttention", "PrimalHeads", "build", "regulariser"]
