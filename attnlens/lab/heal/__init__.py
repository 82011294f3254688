"""Train W_Q, W_K and the kernel parameters of swapped heads, towards the original model or on text (`attnlens heal`).

`pipeline` has the function `heal` and the step that it adds to a run of `runs.swap`. `descent` trains in two stages
with checks, and `healer` has the trainable parameters and their losses. Imported by `cli`.
"""
