"""Find the smallest rank of each key head within a loss budget, or take the ranks from a plan (`attnlens ranks`).

`pipeline` contains `find_ranks` and the step that `find_ranks` adds to a run of `runs.swap`. This step searches for
ranks or takes them from a plan, and computes the savings. `bases` computes the directions of the latents and the
sensitivity of the loss to the latents' ranks; `search` finds the ranks from the directions and sensitivities. Imported
by `lab.heal`, which trains with the ranks of a plan, and by `cli`.
"""
