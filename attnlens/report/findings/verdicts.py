"""Findings of `doctor`, experiments and studies: agreement with the model and with published results.

A site agrees if the error of its attention is at most the tolerance of `doctor`, or if the model's own rounding
explains the error. A value is reproduced if it lies within the tolerance of its reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attnlens.records import BackendCheck, Curve, Experiment, Finding, MaskCheck, Report, StudyTable
from attnlens.report.findings.heads import model_argument
from attnlens.report.sections.checked import describe_fault, is_close, untested_masks
from attnlens.report.sections.facts import count_origins, state_untested
from attnlens.report.shapes import Names, Shapes
from attnlens.requests.experiments import USES
from attnlens.wording import NO_VALUE, clean, format_count, join_items, short

CORRELATION = "correlation of the head"  # Name of the value for the cosine of a head to its SVM
SOFT, SOFT_SVM = "KL, the head, c = 1", "KL, its SVM at the same norm, c = 1"  # Names of KL values
REACHED = 0.99  # Cosine to the SVM above which gradient descent counts as having reached the SVM
RISING = 1e-3  # Rise of the cosine in the second half of the iterations above which gradient descent has not ended
MOST_TRIALS = 1000  # Offset between seeds with different trials, because trial i uses seed + i
MOST_VALUES = 4  # Maximum number of values of an experiment that are printed
FOLLOWED = ("loss", "tokens.entropy", "weights.symmetry", "weights.effective_rank", "selection.svm_cosine")
"""Measures of a series of checkpoints that a finding states; if none of them changed, the first MOST_SERIES others."""
MOST_SERIES = 4


def doctor_findings(shapes: Shapes) -> Iterator[Finding]:
    """Yield findings on whether the recomputed attention agrees with the model's, and on backends and masks."""
    sites = shapes.report.doctor
    differing = [check for check in sites if check.verdict == "differs"]
    unchecked = [check for check in sites if check.verdict in ("not checked", "partly checked")]
    errors = [error for check in sites for error in (check.tokens_error, check.weights_error) if error is not None]
    largest = f"Largest relative error of the attention weights: {_format_error(max(errors))}." if errors else ""
    total = format_count(len(sites), "site")
    if differing:
        names = join_items([check.site for check in differing], 3)
        verb = "differs" if len(differing) == 1 else "differ"
        answer, severity = f"No: {len(differing)} of {total} {verb} from the model ({names}).", "problem"
    elif unchecked:
        answer, severity = f"Not verified: {len(unchecked)} of {total} could not be checked completely.", "problem"
    else:
        verb = "agrees" if len(sites) == 1 else "agree"
        answer, severity = f"Yes: {len(sites)} of {total} {verb} with the model's own attention.", "none"
        rounded = [check for check in sites if check.rounding is not None]
        if rounded:
            worst = max(rounded, key=lambda check: check.rounding or 0.0)
            answer = f"Yes, up to the model's own rounding at {len(rounded)} of {total}."
            largest, severity = f"{clean(worst.site)}: {clean(worst.reason or '')}.", "notable"
    yield Finding(question="Read correctly?", answer=answer, evidence=largest, severity=severity)
    yield from _backend_findings(shapes.report)


def _format_error(error: float) -> str:
    """Format a relative error with two digits; an exact 0 stays 0."""
    return f"{error:.1e}" if error else "0"


def _backend_findings(report: Report) -> Iterator[Finding]:
    """Yield findings on the agreement of the attention backends with float64, and on their masks."""
    backends, name = report.backends or [], report.model.layer_name
    ran = [each for each in backends if each.verdict != "not run"]
    if not ran:
        return
    wrong = [each for each in ran if not is_close(each)]
    if wrong:
        parts = [f"{each.backend} {_describe_error(each, name)}" for each in wrong]
        answer, severity = f"No: {join_items(parts, 3, '; ')}.", "problem"
    else:
        names = join_items([each.backend for each in ran])
        answer, severity = f"Yes: {names} {'agrees' if len(ran) == 1 else 'agree'} with float64.", "none"
        rounded = [f"{each.backend} {_describe_error(each, name)}" for each in ran if each.verdict == "rounds"]
        if rounded:
            answer, severity = f"Up to rounding: {join_items(rounded, 3, '; ')}.", "notable"
    errors = [each.output_error for each in ran if each.output_error is not None]
    evidence = f"Largest relative error: {_format_error(max(errors))}." if errors and not wrong else ""
    yield Finding(question="Backends agree?", answer=answer, evidence=evidence, severity=severity)
    yield from _mask_findings(ran, untested_masks(report), name)


def _mask_findings(ran: Sequence[BackendCheck], untested: Sequence[MaskCheck], name: Names) -> Iterator[Finding]:
    """Yield a finding on masks that let an output depend on the wrong tokens, and on masks that were not tested."""
    tested = list(dict.fromkeys(mask.mask for each in ran for mask in each.masks if mask.verdict != "not checked"))
    reasons = dict.fromkeys(f"{mask.mask}: {clean(mask.reason or '')}" for mask in untested)
    left_out = f"Not tested: {'; '.join(reasons)}." if reasons else ""
    if not tested:
        if left_out:
            yield Finding(question="Masks right?", answer=left_out, severity="problem")
        return
    named = [fault for each in ran for fault in _describe_faults(each, name)]
    if named:
        answer, severity = f"No: {join_items(named, 2, '; ')}.", "problem"
    else:
        answer, severity = (
            f"Yes: every output depends on exactly the tokens that it may see ({join_items(tested, 8)}).",
            "none",
        )
        if left_out:
            severity = "notable"
    yield Finding(question="Masks right?", answer=f"{answer} {left_out}".rstrip(), severity=severity)


PLAIN = ("causal", "bidirectional", "window")
"""Masks tested on one sequence without padding or cache; their faults can recur under the other masks."""


def _describe_faults(check: BackendCheck, name: Names) -> Iterator[str]:
    """Yield one clause per faulty mask, or a single clause if the first fault can explain the others."""
    wrong = _order_faults(check.masks)
    shown = wrong[:1] if wrong and wrong[0].mask in PLAIN else wrong
    others = [mask.mask for mask in wrong[len(shown) :]]
    for mask in shown:
        explained = f", which can also explain the faults under {join_items(others, 8)}" if others else ""
        yield f"{check.backend}, {mask.mask}: {_describe_mask(mask, name)}{explained}"


def _order_faults(masks: Sequence[MaskCheck]) -> list[MaskCheck]:
    """Return the faulty masks, PLAIN first, led by `window` if the first `causal` fault concerns an earlier token."""
    wrong = [mask for mask in masks if mask.verdict == "differs"]
    causal = next((mask.faults[0] for mask in wrong if mask.mask == "causal" and mask.faults), None)
    is_past = causal is not None and causal.token is not None and causal.token < causal.output
    return sorted(wrong, key=lambda mask: (mask.mask not in PLAIN, is_past and mask.mask != "window"))


def _describe_error(check: BackendCheck, name: Names) -> str:
    """State how far a backend's outputs differ from float64, with the reason or the first site that differs."""
    tolerance = check.tolerance or 0
    first = next((site for site in check.sites if site.error is None or site.error > tolerance), None)
    where = "" if first is None else f", first in layer {name(first.layer)} ({clean(first.site)})"
    if check.output_error is None:
        return "has outputs that are not finite" + (f"{where}: {check.reason}" if check.reason else "")
    cause = f", because {clean(check.reason)}" if check.reason else where
    return f"differs from float64 by {check.output_error:.0e}{cause}"


def _describe_mask(mask: MaskCheck, name: Names) -> str:
    """Describe the first fault of a mask and the number of faults; without faults, state the reason or the error."""
    if not mask.faults:
        error = "not finite" if mask.error is None else f"off by {mask.error:.0e}"
        return mask.reason or f"the outputs are {error}"
    more = f", one of {mask.count} faults" if mask.count > 1 else ""
    reason = f"; {mask.reason}" if mask.reason else ""
    return f"{describe_fault(mask.faults[0], name)}{more}{reason}"


def after_doctor(shapes: Shapes) -> Iterator[str]:
    """Yield the command that inspects the model, if all sites passed."""
    if all(check.passed for check in shapes.report.doctor):
        yield f"attnlens inspect {model_argument(shapes.report)}"


def experiment_findings(shapes: Shapes) -> Iterator[Finding]:
    """Yield a verdict on each experiment or, for a series of checkpoints, the changes in a few measures."""
    for experiment in shapes.report.experiments:
        if experiment.trajectories:
            yield _series_finding(experiment)
            continue
        if CORRELATION in experiment.final:
            yield _head_finding(experiment)
        elif SOFT in experiment.final:
            yield _hardening_finding(experiment)
        else:
            yield _reference_finding(experiment)


def _series_finding(experiment: Experiment) -> Finding:
    """State how the medians of a few measures changed from the first to the last checkpoint, each with its null."""
    medians = {name: curve.median for name, curve in experiment.curves.items() if curve.null_of is None}
    ends = {name: (median[0], median[-1]) for name, median in medians.items() if len(set(median)) > 1}
    moves = {
        name: f"{clean(name)} {short(first)} → {short(last)}{_null_at_end(experiment, name)}"
        for name, (first, last) in ends.items()
        if first is not None and last is not None
    }
    shown = [name for name in FOLLOWED if name in moves] or list(moves)[:MOST_SERIES]
    by_chance = any(experiment.null(name) is not None for name in shown)
    return Finding(
        question=clean(experiment.question),
        answer=f"{'; '.join(moves[name] for name in shown)}." if shown else "No change is known.",
        evidence=f"First → last checkpoint; measures: medians over heads{', chance at the last' if by_chance else ''}.",
        measures=list(medians),
    )


def _null_at_end(experiment: Experiment, name: str) -> str:
    null = experiment.null(name)
    mean = None if null is None else null.median[-1]
    return "" if mean is None else f" (chance {short(mean)})"


def _reference_finding(experiment: Experiment) -> Finding:
    """State whether the values of an experiment agree with their references; without references, state the values."""
    name, question = clean(experiment.name).capitalize(), clean(experiment.question)
    values = [
        f"{clean(experiment.labels.get(name, name.replace('_', ' ')))}: {short(value)}"
        for name, value in experiment.final.items()
        if value is not None
    ]
    measured = join_items(values, MOST_VALUES, "; ")
    if not experiment.published:
        answer = f"{measured}; no published values to compare with."
        return Finding(question=f"{name}:", answer=answer, evidence=question)
    missed = [value for value in experiment.published if experiment.meets(value) is False]
    agreeing, untested = experiment.agreeing, state_untested(len(experiment.untested))
    tested, severity = len(missed) + agreeing.total(), "none"
    if missed:
        names = [
            f"{experiment.labels.get(each, each)} ({experiment.origins.get(each, 'published')})" for each in missed
        ]
        verb, severity = "differs" if len(missed) == 1 else "differ", "problem"
        answer = f"No: {len(missed)} of {format_count(tested, 'value')} {verb}: {join_items(names, 3)}{untested}."
    elif tested:
        verb = "agrees" if tested == 1 else "agree"
        reference = f"{verb} with the reference{count_origins(agreeing)}"
        answer = f"Yes: {tested} of {format_count(tested, 'value')} {reference}{untested}."
    else:
        answer = f"Not tested{untested}."
    evidence = f"The experiment asks: {question} Measured: {measured}."
    return Finding(question=f"{name} reproduced?", answer=answer, severity=severity, evidence=evidence)


def _hardening_finding(experiment: Experiment) -> Finding:
    """State the attention weight e^−KL that a head, and its SVM at the head's norm, give the selected token."""
    kls = [experiment.final.get(name) for name in (SOFT, SOFT_SVM)]
    head, svm = (None if kl is None else f"{100 * math.exp(-kl):.3g} %" for kl in kls)
    scope = "median over the SVM's queries, its most decided ones; 100 %: hard selection"
    answer = f"In the pretrained head, the selected token gets {head} of the weight ({scope})."
    evidence = f"The SVM's solution, scaled to the head's norm, would give it {svm}." if svm else ""
    name = clean(experiment.name).partition(",")[0].capitalize()
    return Finding(
        question=f"{name}: how hard does it select?", answer=answer if head else "Unknown.", evidence=evidence
    )


def _final_cosines(experiment: Experiment) -> dict[str, float | None]:
    """Map each start of gradient descent, `zero` or `the head`, to its final cosine similarity to the SVM, if known."""
    return {name: experiment.final.get(f"correlation, from {name}") for name in ("zero", "the head")}


def _verdict(experiment: Experiment) -> str:
    """Return `Yes` if gradient descent reached the SVM from every start, `Not yet` if it still nears it, else `No`."""
    ends = {name: value for name, value in _final_cosines(experiment).items() if value is not None}
    left = [name for name, value in ends.items() if value <= REACHED]
    if ends and not left:
        return "Yes"
    curves = [experiment.curves.get(f"correlation, from {name}") for name in left]
    return "Not yet" if left and all(curve is not None and _rises(curve) for curve in curves) else "No"


def _rises(curve: Curve) -> bool:
    """Return True if the curve rises by more than RISING over the second half of the steps."""
    before = [value for step, value in zip(curve.steps, curve.median, strict=True) if step <= curve.steps[-1] / 2]
    last, middle = curve.median[-1], before[-1] if before else None
    return last is not None and middle is not None and last - middle > RISING


def _head_finding(experiment: Experiment) -> Finding:
    """State whether gradient descent on a head's selection problem reaches the SVM, and how close the head is."""
    starts = {"zero": "from zero", "the head": "from the head's own weights"}
    reached = [f"{value:.3f} {starts[name]}" for name, value in _final_cosines(experiment).items() if value is not None]
    verdict = _verdict(experiment)
    own = experiment.final[CORRELATION]
    share = experiment.final.get("selection kept, from the head")
    tokens = "" if share is None else f" Training from the head keeps {100 * share:.0f} % of its selected tokens."
    iterations = experiment.settings.get("iterations")
    end = {
        "Yes": "gradient descent ends at a cosine to the SVM of",
        "Not yet": f"the cosine to the SVM still rises. After {iterations} iterations it is",
        "No": f"the cosine to the SVM has stopped rising below {REACHED}. After {iterations} iterations it is",
    }
    answer = f"{verdict}: {end[verdict]} {join_items(reached)}."
    return Finding(
        question=f"{clean(experiment.name).capitalize()}: does descent reach its SVM?",
        answer=answer if reached else "Unknown: the final cosine to the SVM has no value.",
        evidence=f"The pretrained head itself has the cosine {NO_VALUE if own is None else short(own)} (1: its SVM), "
        f"which `inspect` compares with chance.{tokens}",
        severity="none" if verdict == "Yes" else "notable",
        measures=["selection.svm_cosine"],
    )


def after_experiments(shapes: Shapes) -> Iterator[str]:
    """Yield commands to run after experiments on a head, on checkpoints, or on synthetic data."""
    report = shapes.report
    model, experiments = model_argument(report), report.experiments
    heads = [each for each in experiments if CORRELATION in each.final]
    if heads:
        layer, _, number = heads[0].name.split()[-1].rpartition(".")
        if _verdict(heads[0]) != "Yes":
            iterations = 4 * int(str(heads[0].settings["iterations"]))
            yield f"attnlens converge {model} --head {layer}.{number} --iterations {iterations}"
        yield f"attnlens inspect {model} --head {layer}.{number} --analyzer selection --show selection"
        yield f"attnlens swap-kernel {model} --kernel hard --layers {layer} --heads {number}"
        return
    if any(each.trajectories for each in experiments):
        yield f"attnlens inspect {model}"
        return
    missed = [each.name.replace(" ", "-") for each in experiments if each.passed is False]
    for name in missed:
        if name in USES:
            yield f"attnlens converge --experiment {name} --seed {report.settings.seed + MOST_TRIALS}"
    yield "attnlens converge demo --head 3.6"
    if report.command != "reproduce":
        yield "attnlens reproduce claims"


def study_findings(shapes: Shapes) -> Iterator[Finding]:
    """Yield one finding per task: the best cell (attention variant), and how many pairs are ordered as published."""
    for study in shapes.report.studies:
        for task in study.tasks:
            cells = [cell for cell in study.cells if cell.task == task.name and cell.mean is not None]
            if not cells:
                yield Finding(question=f"{clean(task.name)}:", answer="No cell converged.", severity="problem")
                continue
            best = (max if task.higher_is_better else min)(cells, key=lambda cell: cell.mean or 0.0)
            error = "" if best.se is None else f" ± {short(best.se)}"
            answer = f"Best: {clean(best.name)}, {short(best.mean or 0.0)}{error} ({task.metric})."
            yield Finding(question=f"{clean(task.name)}:", answer=answer, evidence=_state_order(study, task.name))


def _state_order(study: StudyTable, task: str) -> str:
    """State how many pairs of cells (attention variants) are ordered as published; "" without published numbers."""
    for order in study.orderings:
        if order.task == task:
            total = order.agree + order.disagree + order.undecided
            return (
                f"Of {format_count(total, 'pair')} of cells: {order.agree} ordered as published, {order.disagree} "
                f"reversed, {order.undecided} undecided (Holm, 5 %)."
            )
    return ""


def after_studies(shapes: Shapes) -> Iterator[str]:
    """Yield the command that extends the first study to twice as many seeds; it reuses finished runs."""
    for study in shapes.report.studies[:1]:
        seeds = 2 * max((len(cell.runs) for cell in study.cells), default=1)
        yield f"attnlens reproduce {clean(study.name)} --scale {clean(study.scale)} --seeds {seeds}"
