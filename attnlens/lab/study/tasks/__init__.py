"""Tasks that the study's small models are trained and evaluated on: batches of examples, and scores."""

from attnlens.lab.study.tasks.classification import Labelled, labelled, series
from attnlens.lab.study.tasks.language import (
    NextTokens,
    Reversal,
    SentencePairs,
    bag_bound,
    iwslt,
    language,
    translation,
    wikitext,
)
from attnlens.lab.study.tasks.scores import (
    StudyTask,
    TranslationTask,
    beam_search,
    bleu_and_chrf,
    cross_entropy,
    mean_loss,
    score,
)
from attnlens.lab.study.tasks.task import NOTHING, Examples, Split, TaskForm
