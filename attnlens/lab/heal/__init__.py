"""Train W_Q, W_K and the kernel parameters of swapped heads, towards the original model or on text (`attnlens heal`).

`pipeline` has the function `heal` and the step that it adds to a run of `runs.swap`. `descent` trains in two stages
with checks, `course` has single steps, their losses and rates, and `healer` the trainable parameters. Imported by
`cli`.
"""
