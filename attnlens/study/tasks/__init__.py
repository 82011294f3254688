"""What the study's small models are trained and judged on: batches of examples, and scores."""

from attnlens.study.tasks.beam import Translator, beam_search
from attnlens.study.tasks.classification import Labelled
from attnlens.study.tasks.labelled import labelled
from attnlens.study.tasks.language import NextTokens, language
from attnlens.study.tasks.planted import Reversal, angles, bag_bound, before, least_leak, majority
from attnlens.study.tasks.scores import bleu_and_chrf, cross_entropy, mean_loss, score, translations
from attnlens.study.tasks.series import series
from attnlens.study.tasks.task import NOTHING, Examples, LanguageTask, Split, StudyTask, TaskForm, TranslationTask
from attnlens.study.tasks.translation import SentencePairs, translation

__all__ = [
    "NOTHING",
    "Examples",
    "Labelled",
    "LanguageTask",
    "NextTokens",
    "Reversal",
    "SentencePairs",
    "Split",
    "StudyTask",
    "TaskForm",
    "TranslationTask",
    "Translator",
    "angles",
    "bag_bound",
    "beam_search",
    "before",
    "bleu_and_chrf",
    "cross_entropy",
    "labelled",
    "language",
    "least_leak",
    "majority",
    "mean_loss",
    "score",
    "series",
    "translation",
    "translations",
]
