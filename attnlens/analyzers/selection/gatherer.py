"""How is a head's own selection problem posed? Sequences are kept as its site is met, and solved with their nulls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

from attnlens.analyzers.selection.measures import MEASURES, MOST_QUERIES, SPACES
from attnlens.records import Measure, Null, Pick, QueryKey, Selection, Space
from attnlens.registry import Answer, MeasureInfo, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnlens.attsvm.head import Chosen, Form, Scene, Softmax
    from attnlens.attsvm.nearness import Nearness

MOST_TOKENS = 4096
"""Tokens of text that a problem may draw its queries from: 32 windows of 128; the first sequences fed are taken."""
NULL_DRAWS = 8
"""Random heads behind each head's null."""
BIASED = "a position bias is added to the scores, so that the selection is not the form's alone"


@dataclass(frozen=True)
class Kept:
    """What is kept of one sequence."""

    sequence: int
    """Its number among those fed."""
    query: Tensor
    """(heads, n, head_dim), or the module's inputs with a 1 behind, (1, n, d_model + 1)."""
    key: Tensor
    """(kv_heads, n, head_dim), or the same inputs."""
    copies: tuple[Tensor, ...]
    """What first_copies says, one for every mask and key head."""
    place_of: dict[int, tuple[int, int, int]]
    """Head → where its queries, keys and copies are."""

    def scene(self, head: int) -> Scene:
        """The sequence as that head meets it, in float64."""
        from attnlens.attsvm.head import Scene

        query, key, copies = self.place_of[head]
        return Scene(self.key[key].double(), self.query[query].double(), self.copies[copies].double().log())


@dataclass(frozen=True)
class Reading:
    """What one problem read, without its tensors."""

    values: dict[str, float]
    """By measure."""
    reason: str | None
    """Why there are no more of them."""
    margins: list[float] = field(default_factory=list)
    """Least margin of each query over the best possible, ascending."""
    best: float = 0.0
    """1/‖W_mm‖."""
    picks: list[Pick] = field(default_factory=list)
    """What was posed, where that is to be shown."""


class Selector:
    """Gathers one site's sequences and poses every head's own selection problem on them.

    Up to MOST_TOKENS tokens of a site are kept, float32 at most: the module's inputs where M lives on them, else the
    queries and keys. The null turns M by random rotations on both sides; each turned head selects its own tokens and
    has its own most decided queries among the same sequences.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.kept: list[Kept] = []
        self.shares: dict[int, list[float]] = defaultdict(list)
        self.kv_heads: dict[int, int] = {}
        self.softmax: dict[int, Softmax] = {}
        self.scale = 1.0
        self.biased = False

    @property
    def space(self) -> Space:
        """Where the problems are posed."""
        return "projected" if self.place.form is None else "input"

    def update(self, query_key: QueryKey, sequence: int) -> None:
        """Count the decided queries of one sequence, and keep it where there is room."""
        from attnlens.attsvm.head import Softmax

        kept = self._read(query_key, sequence)
        for index, head in enumerate(query_key.heads):
            sink = None if query_key.sinks is None else float(query_key.sinks[index])
            self.kv_heads[head] = query_key.key_of[index]
            self.softmax[head] = Softmax(query_key.softcap, sink)
            self.shares[head].append(_decided(query_key.select([index]), kept.copies[kept.place_of[head][2]], sink))
        self.scale, self.biased = query_key.scale, self.biased or query_key.bias is not None
        held = sum(before.key.shape[-2] for before in self.kept)
        if not self.biased and (not self.kept or held + kept.key.shape[-2] <= MOST_TOKENS):
            self.kept.append(kept)

    def solve(self) -> dict[int, Answer]:
        """Pose and solve every head's problem and its nulls', a worker each."""
        from attnlens import linalg

        if self.biased:
            return {head: self._unposed(head) for head in sorted(self.shares)}
        heads = [head for head in sorted(self.shares) if any(head in kept.place_of for kept in self.kept)]
        tasks = [(head, draw) for head in heads for draw in (None, *range(NULL_DRAWS))]
        found = linalg.in_pool(self._reading, tasks)
        several = 1 + NULL_DRAWS
        return {
            head: self._answer(head, found[several * index], found[several * index + 1 : several * (index + 1)])
            for index, head in enumerate(heads)
        }

    def scenes(self, head: int) -> list[Scene]:
        """The kept sequences as one head meets them."""
        return [kept.scene(head) for kept in self.kept if head in kept.place_of]

    def nearness(self, head: int, draw: int | None = None) -> Nearness | str:
        """One head's own problem, solved, or that of one of its null's draws; or the reason why there is none."""
        return self._judged(head, draw)[1]

    def _read(self, query_key: QueryKey, sequence: int) -> Kept:
        """The sequence with what its heads need of it."""
        import torch

        from attnlens.attsvm.head import first_copies

        queries, keys = query_key.query.shape[-2], query_key.key.shape[-2]
        masks = torch.ones(1, queries, keys).bool() if query_key.allowed is None else query_key.allowed[0].cpu()
        of_mask = [index % len(masks) for index in range(len(query_key.heads))]  # one mask for all, or one a head
        if self.place.form is not None and query_key.inputs is not None:
            inputs = torch.nn.functional.pad(_small(query_key.inputs), (0, 1), value=1.0)
            copies = tuple(self._known(first_copies(inputs[0], mask), at) for at, mask in enumerate(masks))
            places = {head: (0, 0, of_mask[index]) for index, head in enumerate(query_key.heads)}
            return Kept(sequence, inputs, inputs, copies, places)
        query, key = _small(query_key.query)[0], _small(query_key.key)[0]
        pairs = sorted(set(zip(query_key.key_of, of_mask, strict=True)))
        copies = tuple(self._known(first_copies(key[of], masks[mask]), at) for at, (of, mask) in enumerate(pairs))
        places = {
            head: (index, query_key.key_of[index], pairs.index((query_key.key_of[index], of_mask[index])))
            for index, head in enumerate(query_key.heads)
        }
        return Kept(sequence, query, key, copies, places)

    def _known(self, copies: Tensor, at: int) -> Tensor:
        """The same matrix of the last sequence, where that is equal: most sequences share one."""
        if self.kept and at < len(self.kept[-1].copies) and self.kept[-1].copies[at].equal(copies):
            return self.kept[-1].copies[at]
        return copies

    def _form(self, head: int) -> Form:
        """M of one head: from its weights on (x, 1), or s·I between queries and keys."""
        import torch

        from attnlens.attsvm.head import Form

        form = self.place.form
        if form is None:
            unit = torch.eye(self.kept[0].key.shape[-1], dtype=torch.float64)
            return Form(unit, self.scale * unit)
        index = form.heads.index(head)
        return Form(form.key[form.key_of[index]].double().cpu(), form.scale * form.query[index].double().cpu())

    def _judged(self, head: int, draw: int | None) -> tuple[Chosen, Nearness | str]:
        from attnlens.attsvm.nearness import nearness

        form = self._form(head)
        if draw is not None:
            form = form.turned(_seed(self.place.seed, self.place.site.layer, head, draw))
        return nearness(self.scenes(head), form, self.softmax[head], MOST_QUERIES, self.place.top_p)

    def _reading(self, task: tuple[int, int | None]) -> Reading:
        """One head's problem, or that of its null's draw."""
        head, draw = task
        chosen, found = self._judged(head, draw)
        values = {"selection.decided": chosen.decided, "selection.queries": float(len(chosen.sets))}
        if isinstance(found, str):
            return Reading(values, found)
        values |= {
            "selection.least_decided": float(chosen.log_odds.min().sigmoid()),
            "selection.margin": float(found.margins.min()),
            "selection.efficiency": float(found.shares.min()),
            "selection.efficiency_q05": float(found.shares.quantile(0.05)),
            "selection.svm_cosine": found.svm_cosine,
            "selection.support": float(found.solution.support.double().mean()),
        }
        numbers = [kept.sequence for kept in self.kept if head in kept.place_of]
        picks = _picks(found, numbers) if self.place.shown and draw is None else []
        return Reading(values, None, found.shares.sort().values.tolist(), found.best, picks)

    def _answer(self, head: int, own: Reading, draws: Sequence[Reading]) -> Answer:
        measures = {
            info.name: self._measure(info, own, draws)
            for info in MEASURES
            if not info.curve and info.name not in ("selection.decided", "selection.space")
        }
        return Answer(
            measures=self._always(head, _null("selection.decided", draws)) | measures,
            curves={"selection.margins": own.margins} if own.margins else {},
            shown=self._selection(head, own, draws) if self.place.shown and own.picks else None,
        )

    def _measure(self, info: MeasureInfo, own: Reading, draws: Sequence[Reading]) -> Measure:
        if info.name not in own.values:
            return Measure(value=None, reason=own.reason)
        posed = round(own.values["selection.queries"])
        null = _null(info.name, draws) if info.name != "selection.queries" else None
        return Measure(value=own.values[info.name], n=posed, null=null)

    def _always(self, head: int, null: Null | None) -> dict[str, Measure]:
        """What every head has: its decided queries, with their error over sequences, and the problem's space."""
        import torch

        found = torch.tensor([share for share in self.shares[head] if share == share], dtype=torch.float64)
        space = Measure(value=SPACES.index(self.space), label=self.space, n=1)
        if not len(found):
            return {"selection.decided": Measure(value=None, reason=MEASURES[0].missing), "selection.space": space}
        error = float(found.std() / len(found) ** 0.5) if len(found) > 1 else None
        decided = Measure(value=float(found.mean()), se=error, n=len(found), null=null)
        return {"selection.decided": decided, "selection.space": space}

    def _unposed(self, head: int) -> Answer:
        """What stands where a position bias forbids the problem."""
        decided = self._always(head, None)["selection.decided"]
        nothing = Measure(value=None, reason=BIASED)
        return Answer({info.name: nothing for info in MEASURES if not info.curve} | {"selection.decided": decided})

    def _selection(self, head: int, own: Reading, draws: Sequence[Reading]) -> Selection:
        site = self.place.site
        return Selection(
            site=site.name,
            layer=site.layer,
            head=head,
            kv_head=self.kv_heads[head],
            part=site.part,
            space=self.space,
            picks=own.picks,
            best=own.best,
            null_margins=[draw.margins for draw in draws if draw.margins],
        )


def _small(tensor: Tensor) -> Tensor:
    """In main memory and at most float32, which is what models compute in; float64 stays."""
    import torch

    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _decided(query_key: QueryKey, copies: Tensor, sink: float | None) -> float:
    """The share of a sequence's queries with p_max ≥ ½ in one head's own attention."""
    import torch

    from attnlens.attsvm.head import Softmax, log_odds, share_decided

    logits, visible = query_key.logits[0, 0].cpu(), copies > 0
    weights = logits + copies.double().log()
    return share_decided(log_odds(logits.masked_fill(~visible, -torch.inf), weights, Softmax(sink=sink)))


def _null(name: str, draws: Sequence[Reading]) -> Null | None:
    """Mean and sd over the draws that have the measure; None for fewer than two."""
    import torch

    values = torch.tensor([draw.values[name] for draw in draws if name in draw.values], dtype=torch.float64)
    return Null(mean=float(values.mean()), sd=float(values.std())) if len(values) > 1 else None


def _picks(found: Nearness, numbers: Sequence[int]) -> list[Pick]:
    """Every posed query, with the places of what it selects and of its support."""
    problem, solution = found.posed.problem, found.solution
    carrying = solution.support & ~problem.equal
    return [
        Pick(
            sequence=numbers[number],
            query=position,
            selected=chosen.nonzero().flatten().tolist(),
            support=sorted(found.posed.token_of[carrying & (problem.query_of == row)].tolist()),
            weight=float(found.chosen.log_odds[row].sigmoid()),
            margin=float(found.shares[row]),
        )
        for row, (number, position, chosen) in enumerate(found.chosen.rows)
    ]


def _seed(*parts: int) -> int:
    """A seed of its own for every seed, layer, head and draw, whatever their order."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:7], "big")
