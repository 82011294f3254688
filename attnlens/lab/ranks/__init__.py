"""Find the rank of each key head within a budget of loss, or take the ranks of a plan (`attnlens ranks`).

`pipeline` has the function `find_ranks` and the step that it adds to a run of `runs.swap`, which applies plans and
counts what they save. `search` finds the ranks from `bases`, the directions of the latents and the sensitivity of the
loss to each. Imported by `lab.heal`, which trains with the ranks of a plan, and by `cli`.
"""
