"""Inputs of a model: windows or lines of texts, and images and sounds, from files or random."""

from attnlens.models.texts.cutting import batches, placeholder, reads_noise, reads_text
from attnlens.models.texts.media import media_of, plain_ids, standing_ids
from attnlens.models.texts.sequences import CHARACTERS, decodes_text, foreign_notes, vocabulary, wanted, window_length
from attnlens.models.texts.sources import Content, read, read_each, sample
from attnlens.models.texts.windows import (
    MOST_SHARED,
    RUN,
    Batch,
    Batches,
    Cut,
    first,
    passages,
    repeated_share,
    sequences_in,
    shared_share,
)
