"""Inputs of a model: windows or lines of texts, and images and sounds, from files or random.

Contents: sequences.py reads and tokenizes texts, and places windows in them; media.py prepares images and sounds;
cutting.py defines `Cut` (the options) and `batches`, which builds batches from these; targets.py adds what the model
should predict.
Inputs: a `Loaded` model, paths and a `Cut`. Output: `Batches`, whose inputs are keyword arguments of the model.
Imported by: runs and lab.
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
