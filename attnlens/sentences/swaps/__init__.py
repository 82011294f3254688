"""What a swap and its plan of ranks found, in words."""
