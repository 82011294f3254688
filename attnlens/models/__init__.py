"""Access to models of the library `transformers`: loading, inputs, attention and weights.

Contents: loading/ (files → model), texts/ (texts and media → inputs), hooks/ (attention through transformers'
interface), trace/ (attention traced from a softmax), weights/ (W_Q and W_K of each head), kernel_transformers.py (the
models that `reproduce` trains). The table of supported model types is in `records.architectures`.
Inputs: names of models, texts and files. Outputs: `Loaded` models, `Batches`, queries, keys and weights as tensors.
Imports `records`, `kernels` and `requests`. Importers: `runs`, `lab` and, inside functions, `cli`.
"""
