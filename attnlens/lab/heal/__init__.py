"""Train W_Q, W_K and the kernel parameters of swapped heads, towards the original model or on text (`attnlens heal`).

`pipeline` has the function `heal`, the step that it adds to a run of `runs.swap`, and the training in two stages with
checks. `healer` has the trainable parameters, their losses and single training steps. Imported by `cli`.
"""
