"""What the study's small models are trained and judged on: batches of examples, and scores."""

from attnlens.studies.tasks.classification import Labelled, labelled, series
from attnlens.studies.tasks.language import (
    NextTokens,
    Reversal,
    SentencePairs,
    bag_bound,
    iwslt,
    language,
    translation,
    wikitext,
)
from attnlens.studies.tasks.scores import (
    StudyTask,
    TranslationTask,
    beam_search,
    bleu_and_chrf,
    cross_entropy,
    mean_loss,
    score,
)
from attnlens.studies.tasks.task import NOTHING, Examples, Split, TaskForm
