"""Att-SVM measures: comparison of a head's token selection with its max-margin SVM."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import product
from typing import TYPE_CHECKING

from attnlens import records
from attnlens.analyzers.registry import NULL_DRAWS, Answer, GatheringPlace, MeasureInfo, gathering, linalg
from attnlens.choices import WHERE_POSED, Space
from attnlens.lazy import LazyModule
from attnlens.records import QueryKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from attnlens.maths.attsvm import head as head_svm
    from attnlens.maths.attsvm.head import FactoredForm, Nearness, Scene, Selections, Softmax
else:
    head_svm = LazyModule("attnlens.maths.attsvm.head")
    torch = LazyModule("torch")

MOST_QUERIES = 64  # most queries in a head's SVM problem
WORDS: dict[Space, dict[str, str]] = {  # text for each placeholder in SPACE_MEASURES
    "input": {"where": WHERE_POSED["input"], "x": "x", "z": "z", "M": "M"},
    "projected": {"where": WHERE_POSED["projected"], "x": "k", "z": "q", "M": "s·I"},
}
SPACES: tuple[Space, ...] = tuple(WORDS)  # module inputs with the head's M; keys k and queries q with s·I
PAPER = "Tarzanagh et al. 2023"
selection_measure = partial(MeasureInfo, self_only=False)
selection_share = partial(selection_measure, low=0, high=1)
posed_measure = partial(selection_measure, low=0, sized_by="the number of windows")
DECIDED = selection_share(
    "selection.decided",
    "share of queries whose largest attention weight is at least ½",
    "share of queries with p_max ≥ ½",
    scale=("no query clearly prefers one key", "every query clearly prefers one key"),
    missing="no query sees a key",
    ends="largest",
    series=1,
    use="Read this measure first: if it is small, an SVM of the selections says little about the head.",
)
PROBLEM_MEASURES = (  # measures of the queries in the problem, which are the same in all spaces
    posed_measure(
        "selection.queries",
        "number of queries in the SVM problem: those with the largest attention weights, from the first sequences",
        "|{i: p_max largest}|",
        high=MOST_QUERIES,
        use="The sample size of the head's other selection measures; compare heads with similar counts.",
    ),
    posed_measure(
        "selection.least_decided",
        "largest attention weight of a query: minimum over the queries in the SVM problem",
        "min over queries of p_max",
        high=1,
        use="Below ½, some queries in the SVM problem do not clearly select a token.",
    ),
)
SPACE_MEASURES = (  # measures that compare a head with the SVM of one space
    selection_measure(
        "margin",
        "least margin of selected tokens over the others {where}, at unit norm of M − W_fin; negative only for top-p",
        "min ({x}_α − {x}_t)ᵀM′{z}/‖ΠM′‖, M′ = {M} − W_fin, Π onto span(U) ⊗ span(Z); W_fin = 0 for sets of one token",
        use="It depends on the tokens' norms: compare it only with its null; to compare heads, use the efficiency.",
        paper=f"{PAPER}, Eq. Att-SVM",
    ),
    selection_measure(
        "efficiency",
        "ratio of the margin to the best possible margin {where}; 1 only if the head has the SVM's direction",
        "min ({x}_α − {x}_t)ᵀM′{z}·‖W_mm‖/‖ΠM′‖, M′ = {M} − W_fin; W_mm: the SVM",
        high=1,
        series=4,
        use="A single query with two almost equal scores can reduce it to 0: read selection.efficiency_q05 too.",
    ),
    selection_measure(
        "efficiency_q05",
        "efficiency {where}, ignoring the 5 % of queries nearest to a tie between tokens",
        "5 % quantile over queries of their least margin, times the norm ‖W_mm‖ of the SVM",
        scale=("choices are hardly separated from other tokens", "choices are separated as well as by the SVM"),
        headline=True,
        ends="largest",
        series=3,
        use="Above its null, the head separates its choices from other tokens by more than expected by chance.",
    ),
    selection_measure(
        "svm_cosine",
        "cosine between the head and the SVM that selects the same tokens, {where}",
        "⟨M′, W_mm⟩/(‖ΠM′‖‖W_mm‖), M′ = {M} − W_fin; W_mm: the SVM",
        scale=("the head has little in common with the SVM of its choices", "the head is that SVM, up to its scale"),
        low=-1,
        high=1,
        headline=True,
        ends="both",
        series=2,
        use="Compare it only with its null of the same space: above it, the head is closer to its SVM than the same "
        "head under random rotations. converge --checkpoints follows it during training.",
        paper=f"{PAPER}, Eq. Att-SVM",
    ),
    selection_share(
        "support",
        "share of active constraints {where}, those with λ > 0 (not unique if constraints are redundant)",
        "share of constraints with λ > 0",
        use="If it is small, few tokens determine the solution; --show selection marks them in the text.",
    ),
    selection_measure(
        "margins",
        "least margin of each query in the SVM problem, divided by the best possible margin {where}; "
        "ascending; can exceed 1",
        "sorted min ({x}_α − {x}_t)ᵀM′{z}·‖W_mm‖/‖ΠM′‖, M′ = {M} − W_fin; W_mm: the SVM",
        curve=True,
        steps="queries, sorted by margin",
        use="A curve that starts near 0 and soon rises has few queries with almost equal scores; an SVM's curve is "
        "flat near 1.",
    ),
)


def qualify_name(what: str, space: Space) -> str:
    """Return the qualified name of a measure in a space: `selection.margin` or `selection.projected_margin`."""
    return f"selection.{'projected_' if space == 'projected' else ''}{what}"


def _in_space(info: MeasureInfo, space: Space) -> MeasureInfo:
    """Build the MeasureInfo of a measure in one space; its texts contain the space's symbols."""
    texts = {name: getattr(info, name).format(**WORDS[space]) for name in ("meaning", "formula")}
    behind = sum(other.series > 0 for other in SPACE_MEASURES) * SPACES.index(space)
    name, series = qualify_name(info.name, space), info.series and info.series + behind
    sized_by = "d_model and the number of queries in the problem"
    return replace(info, name=name, series=series, space=space, null="rotations", sized_by=sized_by, **texts)


MEASURES = (DECIDED, *PROBLEM_MEASURES, *(_in_space(info, space) for space in SPACES for info in SPACE_MEASURES))

MOST_TOKENS = 4096  # most tokens stored per site; queries are chosen from the stored sequences
BIASED = "a position bias is added to the scores, so the selection does not depend on the form alone"


@dataclass(frozen=True)
class Solved:
    """Results of one selection problem, without tensors."""

    values: dict[str, float]  # values by measure, without the prefix `selection.` or `selection.projected_`
    reason: str | None  # reason why other measures are missing; None if all have values
    margins: list[float] = field(default_factory=list)  # each query's least margin / best possible margin, ascending
    best: float = 0.0  # best possible margin, 1/‖W_mm‖
    picks: list[records.Pick] = field(default_factory=list)  # queries and their selections, if the report shows them


SolvedBySpace = dict[Space, Solved]  # results by space, for a head or for one draw of its null


@dataclass(frozen=True)
class StoredSequence:
    """Queries, keys and counts of equal tokens of one sequence, as stored by a Selector."""

    sequence: int  # index of the sequence among all sequences read
    query: Float[Tensor, "heads queries head_dim"]  # queries, or inputs extended by a 1, (1, n, d_model + 1)
    key: Float[Tensor, "kv_heads keys head_dim"]  # keys, or the same extended inputs
    copies: tuple[Int[Tensor, "queries keys"], ...]  # results of count_copies, one per mask and key head
    place_of: dict[int, tuple[int, int, int]]  # indices in `query`, `key` and `copies`, by head number

    def scene(self, head: int) -> Scene:
        """Build a head's Scene in float64: its tokens, its queries and the logarithms of its `copies`."""
        query, key, copies = self.place_of[head]
        return head_svm.Scene(self.key[key].double(), self.query[query].double(), self.copies[copies].double().log())


class Selector:
    """Gatherer that stores sequences of one site and solves each head's selection problem in all available spaces.

    A selector stores the first sequence, and each further sequence with which the total is at most MOST_TOKENS tokens.
    It stores the module's inputs if M on these inputs is known, otherwise queries and keys. With a position bias,
    nothing is solved. For the null, each form is rotated randomly on both sides, and the selection is repeated.
    """

    def __init__(self, place: GatheringPlace) -> None:
        self.place = place
        self.stored: list[StoredSequence] = []
        self.shares: dict[int, dict[int, float]] = defaultdict(dict)  # shares of decided queries, by head and sequence
        self.kv_heads: dict[int, int] = {}
        self.softmax: dict[int, Softmax] = {}
        self.scale, self.biased = 1.0, False
        # spaces in which the problems are solved; reports show the first one
        self.spaces: tuple[Space, ...] = ("projected",) if isinstance(place.form, str) else SPACES

    def update(self, query_key: QueryKey, sequence: int) -> None:
        """Record each head's share of decided queries (p_max ≥ ½); store the sequence if MOST_TOKENS allows it."""
        parts = self._read_parts(query_key, sequence)
        for index, head in enumerate(query_key.heads):
            sink = None if query_key.sinks is None else float(query_key.sinks[index])
            self.kv_heads[head] = query_key.key_of[index]
            self.softmax[head] = head_svm.Softmax(query_key.softcap, sink)
            copies, logits = parts.copies[parts.place_of[head][2]], query_key.select([index]).logits[0, 0].cpu()
            visible, weights = logits.masked_fill(copies == 0, -torch.inf), logits + copies.double().log()
            log_odds = head_svm.log_odds(visible, weights, head_svm.Softmax(sink=sink))
            self.shares[head][sequence] = head_svm.share_decided(log_odds)
        self.scale, self.biased = query_key.scale, self.biased or query_key.bias is not None
        tokens = sum(stored.key.shape[-2] for stored in self.stored)
        if not self.biased and (not self.stored or tokens + parts.key.shape[-2] <= MOST_TOKENS):
            self.stored.append(parts)

    def solve(self) -> dict[int, Answer]:
        """Solve each stored head's problem and those of its null in parallel threads; return answers by head number.

        With a position bias, only the share of decided queries has a value.
        """
        if self.biased:
            nothing = records.Measure(value=None, reason=BIASED)
            measures = {info.name: nothing for info in MEASURES if not info.curve and info is not DECIDED}
            return {head: Answer(dict(measures), {DECIDED.name: self.shares[head]}) for head in sorted(self.shares)}
        heads = [head for head in sorted(self.shares) if any(head in stored.place_of for stored in self.stored)]
        draws = (None, *range(NULL_DRAWS["rotations"]))  # None: the head itself
        solved = linalg.map_in_pool(self._solve_task, list(product(heads, draws)))
        by_head = [solved[start : start + len(draws)] for start in range(0, len(solved), len(draws))]
        return {head: self._answer(head, *solutions) for head, solutions in zip(heads, by_head, strict=True)}

    def scenes(self, head: int) -> list[Scene]:
        """Return the stored sequences as scenes of one head, in the space `spaces[0]`."""
        return [stored.scene(head) for stored in self.stored if head in stored.place_of]

    def nearness(self, head: int) -> Nearness | str:
        """Compare one head with its SVM in the space `spaces[0]`, or return the reason why this is impossible."""
        if head not in self.softmax:
            return "its queries or keys contain NaN or Inf in every sequence"
        if self.biased:
            return BIASED
        return next(self._solve_spaces(head, None))[2]

    def _read_parts(self, query_key: QueryKey, sequence: int) -> StoredSequence:
        count, keys = len(query_key.heads), query_key.key.shape[-2]
        masks = query_key.allowed
        masks = torch.ones(1, query_key.query.shape[-2], keys).bool() if masks is None else masks[0].cpu()
        if isinstance(self.place.form, str) or query_key.inputs is None:
            query, key = _to_storage(query_key.query)[0], _to_storage(query_key.key)[0]
            query_of, key_of = list(range(count)), list(query_key.key_of)
        else:
            query = key = torch.nn.functional.pad(_to_storage(query_key.inputs), (0, 1), value=1.0)
            query_of = key_of = [0] * count
        pair_of = [(key_of[index], index % len(masks)) for index in range(count)]  # one mask for all, or one per head
        pairs = sorted(set(pair_of))
        copies = tuple(self._count_copies(key[at], masks[mask], number) for number, (at, mask) in enumerate(pairs))
        places = [(at, pair[0], pairs.index(pair)) for at, pair in zip(query_of, pair_of, strict=True)]
        return StoredSequence(sequence, query, key, copies, dict(zip(query_key.heads, places, strict=True)))

    def _count_copies(self, tokens: Tensor, mask: Tensor, at: int) -> Int[Tensor, "queries keys"]:
        """Count the copies of each token that each query sees; share the previous sequence's tensor if it is equal."""
        copies = head_svm.count_copies(tokens, mask)
        before = self.stored[-1].copies[at : at + 1] if self.stored else ()
        return before[0] if before and before[0].equal(copies) else copies

    def _get_problem(self, space: Space, head: int) -> tuple[list[Scene], FactoredForm]:
        """Return a head's scenes and form in one space; the scores do not depend on the space."""
        scenes, form = self.scenes(head), self.place.form
        if isinstance(form, str):
            return scenes, _scaled_identity(self.stored[0].key.shape[-1], self.scale)
        index = form.heads.index(head)
        key, query = form.key[form.key_of[index]].double().cpu(), form.query[index].double().cpu()
        if space == "input":
            return scenes, head_svm.FactoredForm(key, form.scale * query)
        projected = [replace(scene, tokens=scene.tokens @ key, queries=scene.queries @ query) for scene in scenes]
        return projected, _scaled_identity(key.shape[-1], form.scale)

    def _solve_spaces(self, head: int, draw: int | None) -> Iterator[tuple[Space, Selections, Nearness | str]]:
        """Yield each space, its selections, and the comparison with the SVM or the reason why it is missing.

        `draw` is the index of a random head of the null, or None for the head itself. The head selects once for all
        spaces; a random head selects separately in each space.
        """
        chosen = None
        for space in self.spaces:
            scenes, form = self._get_problem(space, head)
            if draw is not None:
                # one seed per head, draw and space, so that no result depends on the order of calls
                parts = (self.place.seed, self.place.site.layer, head, draw, space)
                # 7 bytes, because torch's seeds have less than 64 bits
                form = form.rotate_randomly(int.from_bytes(sha256(repr(parts).encode()).digest()[:7], "big"))
            if chosen is None or draw is not None:
                chosen = head_svm.choose(scenes, form, self.softmax[head], MOST_QUERIES, self.place.top_p)
            yield space, chosen, head_svm.compare_with_svm(scenes, form, chosen)

    def _solve_task(self, task: tuple[int, int | None]) -> SolvedBySpace:
        """Solve a task's problems, for one head and one draw, in all spaces; return their summaries keyed by space."""
        head, draw = task
        shown = self.spaces[0] if self.place.shown and draw is None else None
        numbers = [stored.sequence for stored in self.stored if head in stored.place_of]
        return {
            space: _summarise(chosen, nearness, numbers if space == shown else ())
            for space, chosen, nearness in self._solve_spaces(head, draw)
        }

    def _answer(self, head: int, solutions: SolvedBySpace, *draws: SolvedBySpace) -> Answer:
        """Build a head's answer from its own solutions and those of the random heads of its null, `draws`."""
        site, first = self.place.site, self.spaces[0]
        measures = {info.name: _measure(info.name.partition(".")[2], solutions[first]) for info in PROBLEM_MEASURES}
        kinds = [info.name for info in SPACE_MEASURES if not info.curve]
        missing = Solved({}, str(self.place.form))  # the form is the reason why a space is not available
        for space in SPACES:
            solved, nulls = solutions.get(space, missing), [draw[space] for draw in draws if space in draw]
            measures |= {qualify_name(kind, space): _measure(kind, solved, nulls) for kind in kinds}
        selection = records.Selection(
            site=site.name,
            layer=site.layer,
            head=head,
            kv_head=self.kv_heads[head],
            part=site.part,
            space=first,
            picks=solutions[first].picks,
            best=solutions[first].best,
            null_margins=[draw[first].margins for draw in draws if draw[first].margins],
        )
        return Answer(
            measures=measures,
            windows={DECIDED.name: self.shares[head]},
            curves={qualify_name("margins", space): each.margins for space, each in solutions.items() if each.margins},
            shown=selection if solutions[first].picks else None,
        )


def _summarise(chosen: Selections, nearness: Nearness | str, numbers: Sequence[int]) -> Solved:
    """Summarise a problem's solution; include its queries if `numbers`, the sequences' indices, is not empty."""
    values = {"queries": float(len(chosen.sets))}
    if chosen.sets:
        values["least_decided"] = float(chosen.log_odds.min().sigmoid())
    if isinstance(nearness, str):
        return Solved(values, nearness)
    values |= {
        "margin": float(nearness.margins.min()),
        "efficiency": float(nearness.shares.min()),
        "efficiency_q05": float(nearness.shares.quantile(0.05)),
        "svm_cosine": nearness.svm_cosine,
        "support": float(nearness.solution.support.double().mean()),
    }
    problem, carrying = nearness.posed.problem, nearness.solution.support & ~nearness.posed.problem.equal
    picks = [
        records.Pick(
            sequence=numbers[number],
            query=position,
            selected=selected.nonzero().flatten().tolist(),
            support=sorted(nearness.posed.token_of[carrying & (problem.query_of == row)].tolist()),
            weight=float(nearness.chosen.log_odds[row].sigmoid()),
            margin=float(nearness.shares[row]),
        )
        for row, (number, position, selected) in enumerate(nearness.chosen.rows if numbers else ())
    ]
    return Solved(values, None, nearness.shares.sort().values.tolist(), nearness.best, picks)


def _measure(name: str, solution: Solved, draws: Sequence[Solved] = ()) -> records.Measure:
    """Return one measure of a problem; its null is the mean and sd over `draws`, if two or more draws have a value."""
    if name not in solution.values:
        return records.Measure(value=None, reason=solution.reason)
    values = torch.tensor([draw.values[name] for draw in draws if name in draw.values], dtype=torch.float64)
    null = records.Null(mean=float(values.mean()), sd=float(values.std())) if len(values) > 1 else None
    return records.Measure(value=solution.values[name], n=round(solution.values["queries"]), null=null)


def _to_storage(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return tensor.detach().cpu().to(torch.promote_types(tensor.dtype, torch.float32))


def _scaled_identity(size: int, scale: float) -> FactoredForm:
    unit = torch.eye(size, dtype=torch.float64)
    return head_svm.FactoredForm(unit, scale * unit)


@gathering("selection", source="tokens", measures=MEASURES, by_default=False, needs_inputs=True)
def selector(place: GatheringPlace) -> Selector:
    """Does a head select tokens like its max-margin SVM, and with what margin?

    Margins and cosine use M′ = M − W_fin. W_fin is the form of least norm with M's score differences inside the
    selected sets. If each set contains one token, W_fin is 0, and margins are positive because M scores this token
    above all others; for sets of several tokens (`top-p`), margins can be negative.

    If the logits are bilinear in the module's inputs, the problem is posed on these inputs and, in the measures named
    `projected_…`, on queries and keys with M = s·I. Otherwise (RoPE, QK-norm, cross-attention) the problem is posed
    only on queries and keys. Each space has its own null; compare numbers only within one space.
    """
    return Selector(place)
