"""Inputs of a model: windows or lines of texts, and images and sounds, from files or random.

Contents: sources.py reads texts; sequences.py tokenizes and cuts them; media.py prepares images and sounds; cutting.py
builds batches; windows.py holds the records of batches; targets.py adds what the model should predict.
Inputs: a `Loaded` model, paths and a `Cut`. Output: `Batches`, whose inputs are keyword arguments of the model.
Imported by: hooks/, runs and lab.
"""

from attnlens.models.texts.cutting import batches, placeholder, reads_noise, reads_text
from attnlens.models.texts.media import media_of, placeholder_ids, plain_ids
from attnlens.models.texts.sequences import (
    CHARACTERS,
    decodes_text,
    foreign_notes,
    required_inputs,
    vocabulary,
    window_length,
)
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
