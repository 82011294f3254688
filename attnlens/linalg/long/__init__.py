"""Matrices of long sequences, read a tile of rows at a time: the tiles, ranks with proven bounds, fits under masks."""

from attnlens.linalg.long.intervals import IntervalMask, interval_mask
from attnlens.linalg.long.leading import TiledMatrix, least_rank
from attnlens.linalg.long.row_tiles import LONG, each_head, is_long, tiles

__all__ = ["LONG", "IntervalMask", "TiledMatrix", "each_head", "interval_mask", "is_long", "least_rank", "tiles"]
