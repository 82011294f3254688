"""Random instances of token selection: the synthetic experiments of Tarzanagh et al. 2023 and of their followers."""
