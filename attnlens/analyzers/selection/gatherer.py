"""Store the sequences that a head reads, pose and solve its selection problem and nulls, and compute the measures."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from attnlens import records
from attnlens.analyzers.registry import Answer, GatheringPlace
from attnlens.analyzers.selection import DECIDED, MEASURES, MOST_QUERIES, OF_SPACE, POSED, SPACES, qualified
from attnlens.choices import Space
from attnlens.lazy import LazyModule
from attnlens.records import QueryKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from attnlens.maths import linalg
    from attnlens.maths.attsvm.head import Chosen, FactoredForm, Nearness, Scene, Softmax
else:
    linalg = LazyModule("attnlens.maths.linalg")
    torch = LazyModule("torch")


@dataclass(frozen=True)
class SelectionReading:
    """The results of one problem, without its tensors."""

    values: dict[str, float]
    """Value by measure, without the space in the name."""
    reason: str | None
    """Reason why further measures are missing."""
    margins: list[float] = field(default_factory=list)
    """Least margin of each query over the best possible, ascending."""
    best: float = 0.0
    """Best possible margin, 1/‖W_mm‖."""
    picks: list[records.Pick] = field(default_factory=list)
    """The posed queries and their selections, if they are to be shown."""


BySpace = dict[Space, SelectionReading]  # results of one form's problems, space by space


def reading_of(chosen: Chosen, found: Nearness | str, numbers: Sequence[int] | None) -> SelectionReading:
    """Summarise a solved problem without its tensors; include its picks if the sequences' `numbers` are given."""
    posed = {"queries": float(len(chosen.sets))}
    if chosen.sets:
        posed["least_decided"] = float(chosen.log_odds.min().sigmoid())
    if isinstance(found, str):
        return SelectionReading(posed, found)
    values = {
        "margin": float(found.margins.min()),
        "efficiency": float(found.shares.min()),
        "efficiency_q05": float(found.shares.quantile(0.05)),
        "svm_cosine": found.svm_cosine,
        "support": float(found.solution.support.double().mean()),
    }
    picks = [] if numbers is None else _picks(found, numbers)
    return SelectionReading(posed | values, None, found.shares.sort().values.tolist(), found.best, picks)


def measured(what: str, own: SelectionReading, draws: Sequence[SelectionReading] = ()) -> records.Measure:
    """Return a problem's measure, with the null from its draws if there are any."""
    if what not in own.values:
        return records.Measure(value=None, reason=own.reason)
    return records.Measure(value=own.values[what], n=round(own.values["queries"]), null=_null(what, draws))


def _null(what: str, draws: Sequence[SelectionReading]) -> records.Null | None:
    """Return mean and sd over the draws that have the measure; None for fewer than two."""
    values = torch.tensor([draw.values[what] for draw in draws if what in draw.values], dtype=torch.float64)
    return records.Null(mean=float(values.mean()), sd=float(values.std())) if len(values) > 1 else None


def _picks(found: Nearness, numbers: Sequence[int]) -> list[records.Pick]:
    """Return every posed query, with the positions of its selected tokens and of its support."""
    problem, solution = found.posed.problem, found.solution
    carrying = solution.support & ~problem.equal
    return [
        records.Pick(
            sequence=numbers[number],
            query=position,
            selected=chosen.nonzero().flatten().tolist(),
            support=sorted(found.posed.token_of[carrying & (problem.query_of == row)].tolist()),
            weight=float(found.chosen.log_odds[row].sigmoid()),
            margin=float(found.shares[row]),
        )
        for row, (number, position, chosen) in enumerate(found.chosen.rows)
    ]


MOST_TOKENS = 4096
"""Most tokens of text a problem draws its queries from: 32 windows of 128; the first sequences fed are used."""
NULL_DRAWS = 8  # random heads in each head's null
BIASED = "a position bias is added to the scores, so that the selection is not the form's alone"


@dataclass(frozen=True)
class Kept:
    """The stored part of one sequence."""

    sequence: int
    """Index of the sequence among those fed."""
    query: Float[Tensor, "heads queries head_dim"]
    """Queries; or the module's inputs with a 1 appended, (1, n, d_model + 1)."""
    key: Float[Tensor, "kv_heads keys head_dim"]
    """Keys; or the same inputs."""
    copies: tuple[Int[Tensor, "queries keys"], ...]
    """Result of first_copies, one per mask and key head."""
    place_of: dict[int, tuple[int, int, int]]
    """Maps a head to the indices of its queries, keys and copies."""

    def scene(self, head: int) -> Scene:
        """Return the sequence as the head sees it, in float64."""
        from attnlens.maths.attsvm.head import Scene

        query, key, copies = self.place_of[head]
        return Scene(self.key[key].double(), self.query[query].double(), self.copies[copies].double().log())


class Selector:
    """Gathers one site's sequences and poses every head's own selection problem on them, in every available space.

    Up to MOST_TOKENS tokens of a site are stored, in float32 at most: the module's inputs if M acts on them, else the
    queries and keys. In each space the null rotates that space's form at random on both sides; each rotated head
    selects its own tokens and has its own most decided queries among the same sequences.
    """

    def __init__(self, place: GatheringPlace) -> None:
        self.place = place
        self.kept: list[Kept] = []
        self.shares: dict[int, dict[int, float]] = defaultdict(dict)
        """Share of each sequence's queries that are decided, by head."""
        self.kv_heads: dict[int, int] = {}
        self.softmax: dict[int, Softmax] = {}
        self.scale = 1.0
        self.biased = False

    @property
    def spaces(self) -> tuple[Space, ...]:
        """Spaces in which the problems are posed; the first is the one shown and trained on."""
        return ("projected",) if isinstance(self.place.form, str) else SPACES

    def update(self, query_key: QueryKey, sequence: int) -> None:
        """Count the decided queries of one sequence, and store the sequence if there is room."""
        from attnlens.maths.attsvm.head import Softmax

        kept = self._read(query_key, sequence)
        for index, head in enumerate(query_key.heads):
            sink = None if query_key.sinks is None else float(query_key.sinks[index])
            self.kv_heads[head] = query_key.key_of[index]
            self.softmax[head] = Softmax(query_key.softcap, sink)
            copies = kept.copies[kept.place_of[head][2]]
            self.shares[head][sequence] = _decided(query_key.select([index]), copies, sink)
        self.scale, self.biased = query_key.scale, self.biased or query_key.bias is not None
        stored_tokens = sum(before.key.shape[-2] for before in self.kept)
        if not self.biased and (not self.kept or stored_tokens + kept.key.shape[-2] <= MOST_TOKENS):
            self.kept.append(kept)

    def solve(self) -> dict[int, Answer]:
        """Pose and solve every head's problem and those of its null, in parallel workers."""
        if self.biased:
            nothing = records.Measure(value=None, reason=BIASED)
            names = [info.name for info in MEASURES if not info.curve and info is not DECIDED]
            windows = {head: {DECIDED.name: self.shares[head]} for head in sorted(self.shares)}
            return {head: Answer(dict.fromkeys(names, nothing), decided) for head, decided in windows.items()}
        heads = [head for head in sorted(self.shares) if any(head in kept.place_of for kept in self.kept)]
        tasks = [(head, draw) for head in heads for draw in (None, *range(NULL_DRAWS))]
        found = linalg.in_pool(self._readings, tasks)
        several = 1 + NULL_DRAWS
        return {
            head: self._answer(head, found[several * index], found[several * index + 1 : several * (index + 1)])
            for index, head in enumerate(heads)
        }

    def scenes(self, head: int) -> list[Scene]:
        """Return the stored sequences as one head sees them, in the first space."""
        return [kept.scene(head) for kept in self.kept if head in kept.place_of]

    def nearness(self, head: int) -> Nearness | str:
        """Solve one head's own problem in the first space, or return the reason why there is none."""
        if head not in self.softmax:
            return "its queries or keys are NaN or Inf in every sequence"
        return next(self._solve_spaces(head, None))[2]

    def _read(self, query_key: QueryKey, sequence: int) -> Kept:
        """Return the parts of the sequence that its heads need."""
        from attnlens.maths.attsvm.head import first_copies

        queries, keys = query_key.query.shape[-2], query_key.key.shape[-2]
        masks = torch.ones(1, queries, keys).bool() if query_key.allowed is None else query_key.allowed[0].cpu()
        of_mask = [index % len(masks) for index in range(len(query_key.heads))]  # one mask for all, or one per head
        if not isinstance(self.place.form, str) and query_key.inputs is not None:
            inputs = torch.nn.functional.pad(_to_storage(query_key.inputs), (0, 1), value=1.0)
            copies = tuple(self._deduplicate(first_copies(inputs[0], mask), at) for at, mask in enumerate(masks))
            places = {head: (0, 0, of_mask[index]) for index, head in enumerate(query_key.heads)}
            return Kept(sequence, inputs, inputs, copies, places)
        query, key = _to_storage(query_key.query)[0], _to_storage(query_key.key)[0]
        pairs = sorted(set(zip(query_key.key_of, of_mask, strict=True)))
        copies = tuple(self._deduplicate(first_copies(key[of], masks[mask]), at) for at, (of, mask) in enumerate(pairs))
        places = {
            head: (index, query_key.key_of[index], pairs.index((query_key.key_of[index], of_mask[index])))
            for index, head in enumerate(query_key.heads)
        }
        return Kept(sequence, query, key, copies, places)

    def _deduplicate(self, copies: Int[Tensor, "queries keys"], at: int) -> Int[Tensor, "queries keys"]:
        """Return the previous sequence's matrix if it is equal, to save memory: most sequences share one."""
        if self.kept and at < len(self.kept[-1].copies) and self.kept[-1].copies[at].equal(copies):
            return self.kept[-1].copies[at]
        return copies

    def _posed_in(self, space: Space, head: int) -> tuple[list[Scene], FactoredForm]:
        """Return the sequences and the head's form in one of its spaces; the scores are the same in all."""
        from attnlens.maths.attsvm.head import FactoredForm

        scenes, form = self.scenes(head), self.place.form
        if isinstance(form, str):
            return scenes, _unit(self.kept[0].key.shape[-1], self.scale)
        index = form.heads.index(head)
        key, query = form.key[form.key_of[index]].double().cpu(), form.query[index].double().cpu()
        if space == "input":
            return scenes, FactoredForm(key, form.scale * query)
        projected = [replace(scene, tokens=scene.tokens @ key, queries=scene.queries @ query) for scene in scenes]
        return projected, _unit(key.shape[-1], form.scale)

    def _solve_spaces(self, head: int, draw: int | None) -> Iterator[tuple[Space, Chosen, Nearness | str]]:
        """Yield each space's choice and solution; the head chooses once for all spaces, a draw of its null in each."""
        from attnlens.maths.attsvm.head import choose, nearness_of

        chosen = None
        for space in self.spaces:
            scenes, form = self._posed_in(space, head)
            if draw is not None:
                form = form.turned(_seed(self.place.seed, self.place.site.layer, head, draw, space))
            if chosen is None or draw is not None:
                chosen = choose(scenes, form, self.softmax[head], MOST_QUERIES, self.place.top_p)
            yield space, chosen, nearness_of(scenes, form, chosen)

    def _readings(self, task: tuple[int, int | None]) -> BySpace:
        """Solve one head's problems, or those of a draw of its null."""
        head, draw = task
        numbers = [kept.sequence for kept in self.kept if head in kept.place_of]
        shown = [self.spaces[0]] if self.place.shown and draw is None else []
        return {
            space: reading_of(chosen, found, numbers if space in shown else None)
            for space, chosen, found in self._solve_spaces(head, draw)
        }

    def _answer(self, head: int, own: BySpace, draws: Sequence[BySpace]) -> Answer:
        first = own[self.spaces[0]]
        measures = {info.name: measured(info.name.partition(".")[2], first) for info in POSED}
        kinds = [info.name for info in OF_SPACE if not info.curve]
        for space in SPACES:
            if space in own:
                nulls = [draw[space] for draw in draws]
                measures |= {qualified(kind, space): measured(kind, own[space], nulls) for kind in kinds}
            else:  # the form is then the reason why there is none
                nothing = records.Measure(value=None, reason=str(self.place.form))
                measures |= dict.fromkeys((qualified(kind, space) for kind in kinds), nothing)
        return Answer(
            measures=measures,
            windows={DECIDED.name: self.shares[head]},
            curves={qualified("margins", space): found.margins for space, found in own.items() if found.margins},
            shown=self._selection(head, first, draws) if first.picks else None,
        )

    def _selection(self, head: int, own: SelectionReading, draws: Sequence[BySpace]) -> records.Selection:
        site, space = self.place.site, self.spaces[0]
        return records.Selection(
            site=site.name,
            layer=site.layer,
            head=head,
            kv_head=self.kv_heads[head],
            part=site.part,
            space=space,
            picks=own.picks,
            best=own.best,
            null_margins=[draw[space].margins for draw in draws if draw[space].margins],
        )


def _to_storage(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Move to main memory, as float32 at most (the models' precision); float64 stays."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _decided(query_key: QueryKey, copies: Int[Tensor, "queries keys"], sink: float | None) -> float:
    """Return the share of a sequence's queries with p_max ≥ ½ in one head's own attention."""
    from attnlens.maths.attsvm.head import Softmax, log_odds, share_decided

    logits, visible = query_key.logits[0, 0].cpu(), copies > 0
    weights = logits + copies.double().log()
    return share_decided(log_odds(logits.masked_fill(~visible, -torch.inf), weights, Softmax(sink=sink)))


def _unit(size: int, scale: float) -> FactoredForm:
    """Return the form s·I between keys and queries."""
    from attnlens.maths.attsvm.head import FactoredForm

    unit = torch.eye(size, dtype=torch.float64)
    return FactoredForm(unit, scale * unit)


def _seed(*parts: int | str) -> int:
    """Return a distinct seed for each seed, layer, head, draw and space, independent of the order of calls."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:7], "big")
