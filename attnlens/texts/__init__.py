"""What a model is fed with: windows or lines of texts, and images and sounds, from files or random."""

from attnlens.texts.batches import Batch, Batches, Cut, first, passages, sequences_in
from attnlens.texts.cutting import batches, placeholder, reads_noise, reads_text
from attnlens.texts.foreign import foreign_notes
from attnlens.texts.inputs import CHARACTERS, decodes_text, vocabulary, wanted
from attnlens.texts.media import media_of, plain_ids, standing_ids
from attnlens.texts.overlap import MOST_SHARED, RUN, repeated_share, shared_share
from attnlens.texts.sequences import window_length
from attnlens.texts.sources import Content, read, read_each, sample

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
    "media_of",
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
    "vocabulary",
    "wanted",
    "window_length",
]
