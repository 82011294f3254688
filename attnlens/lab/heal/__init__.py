"""Train W_Q, W_K and the kernel parameters of swapped heads, towards the original model or on text (`attnlens heal`).

`pipeline` contains `heal`, the training step that `heal` adds to a run of `runs.swap`, and the two training stages with
their checks. `healer` contains the trainable parameters, losses, learning rates and single steps. Imported by `cli`.
"""
