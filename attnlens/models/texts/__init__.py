"""Inputs of a model: windows or lines of texts; images and sounds, read from files or generated at random.

sequences.py reads and tokenizes texts, media.py prepares images and sounds, cutting.py builds batches from both, and
targets.py adds the targets of predictions.
"""

from attnlens.models.texts.cutting import Batch, Batches, Cut, batches, passages, placeholder, reads_noise, reads_text
from attnlens.models.texts.media import media_of, placeholder_ids, plain_ids
from attnlens.models.texts.sequences import (
    CHARACTERS,
    MOST_SHARED,
    RUN,
    Content,
    decodes_text,
    first,
    foreign_notes,
    read,
    read_each,
    repeated_share,
    required_inputs,
    sample,
    sequences_in,
    shared_share,
    vocabulary,
    window_length,
)
