"""LoRA, rsLoRA and DoRA adapters of peft, read and merged into a loaded model (W + s·BA) without peft itself."""
