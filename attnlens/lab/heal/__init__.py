"""Train W_Q, W_K and the kernel of swapped heads, towards the original model or on text (`attnlens heal`)."""
