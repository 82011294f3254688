"""What attnlens knows, as sections: tables of all measures and kernels, and a page for each."""
