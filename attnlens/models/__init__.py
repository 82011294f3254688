"""Access to models: loading, inputs, hooks, attention traced from a softmax, W_Q and W_K of each head."""
