"""What a model is fed with: windows or lines of texts, or noise for one that reads pixels or sound."""

from attnlens.texts.batches import Batch, Batches, Cut, passages
from attnlens.texts.cutting import NOISE, batches, placeholder, reads_text
from attnlens.texts.foreign import foreign_notes
from attnlens.texts.inputs import CHARACTERS, decodes_text, vocabulary, wanted
from attnlens.texts.overlap import MOST_SHARED, RUN, repeated_share, shared_share
from attnlens.texts.sequences import window_length
from attnlens.texts.sources import Content, read_each, sample

__all__ = [
    "CHARACTERS",
    "MOST_SHARED",
    "NOISE",
    "RUN",
    "Batch",
    "Batches",
    "Content",
    "Cut",
    "batches",
    "decodes_text",
    "foreign_notes",
    "passages",
    "placeholder",
    "read_each",
    "reads_text",
    "repeated_share",
    "sample",
    "shared_share",
    "vocabulary",
    "wanted",
    "window_length",
]
