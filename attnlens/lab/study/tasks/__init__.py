"""Tasks that the study's small models are trained and evaluated on: batches of examples, and scores.

`task`: reading, splitting and batching, and the classification of texts and series; `language`: next tokens and
translation; `scores`: loss, accuracy, BLEU. Inputs: the user's files, the papers' data, or none (built-in tasks).
Outputs: a `StudyTask`, whose `training` and `held_out` give `Examples`. Imported by `lab/` only.
"""

from attnlens.lab.study.tasks.language import Reversal, bag_bound, iwslt, language, translation, wikitext
from attnlens.lab.study.tasks.scores import StudyTask, beam_search, bleu_and_chrf, cross_entropy, mean_loss, score
from attnlens.lab.study.tasks.task import BEGIN, END, NOTHING, PADDING, Examples, TaskForm, load_labelled, series
