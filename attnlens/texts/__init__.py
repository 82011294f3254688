"""What a model is fed with: windows or lines of texts, or noise for one that reads pixels or sound."""

from attnlens.texts.batches import Batch, Batches, Cut, first, passages, sequences_in
from attnlens.texts.cutting import batches, placeholder, reads_noise, reads_text
from attnlens.texts.foreign import foreign_notes
from attnlens.texts.inputs import CHARACTERS, decodes_text, vocabulary, wanted
from attnlens.texts.overlap import MOST_SHARED, RUN, repeated_share, shared_share
from attnlens.texts.sequences import window_length
from attnlens.texts.sources import Content, read, read_each, sample
from attnlens.texts.towers import plain_ids, standing_ids, towers

__all__ = [
    "CHARACTERS",
    "MOST_SHARED",
    "RUN",
    "Batch",
    "Batches",
    "Content",
    "Cut",
    "batches",
    "decodes_text",
    "first",
    "foreign_notes",
    "passages",
    "placeholder",
    "plain_ids",
    "read",
    "read_each",
    "reads_noise",
    "reads_text",
    "repeated_share",
    "sample",
    "sequences_in",
    "shared_share",
    "standing_ids",
    "towers",
    "vocabulary",
    "wanted",
    "window_length",
]
