"""Trains swapped heads towards the original model, or on text: W_Q, W_K and the kernel's own parameters."""
