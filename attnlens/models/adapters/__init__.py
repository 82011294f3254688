"""Reads LoRA, rsLoRA and DoRA adapters of peft and merges them into a loaded model: W + s·BA, without peft itself."""

from attnlens.models.adapters.files import AdapterFiles, find_adapter
from attnlens.models.adapters.merging import Adapted, merge

__all__ = ["Adapted", "AdapterFiles", "find_adapter", "merge"]
