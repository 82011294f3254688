"""Find the rank of each key head within a loss budget, or take the ranks of a plan (`attnlens ranks`).

`pipeline` contains `find_ranks` and the step that it adds to a run of `runs.swap`, which applies plans and counts their
savings. `bases` computes the directions of the latents and the sensitivity of the loss to their ranks; `search` finds
the ranks from these. Imported by `lab.heal`, which trains with the ranks of a plan, and by `cli`.
"""
