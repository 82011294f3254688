"""Synthetic experiments on token selection of Tarzanagh et al. 2023 and follow-up papers, on random instances."""
