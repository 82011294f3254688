"""Train W_Q, W_K and kernel parameters of swapped heads, towards the original model or on text (`attnlens heal`)."""
