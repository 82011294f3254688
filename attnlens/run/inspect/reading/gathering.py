"""Feeds analyzers that gather, sequence by sequence, with the modules' inputs where M lives on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from attnlens import hooks
from attnlens.errors import UnreadableError
from attnlens.hooks import Reached
from attnlens.records import Call, QueryKey, Selection, Site
from attnlens.registry import Gatherer, Gathering, GatheringPlace
from attnlens.run.inspect.chunks import finite_heads, sequences
from attnlens.run.inspect.sink import Sink
from attnlens.weights import Factors


def form_on_inputs(factors: Factors | UnreadableError) -> QueryKey | str:
    """M on (x, 1), or why the logits are not bilinear in one input x."""
    if isinstance(factors, UnreadableError):
        return factors.problem
    if factors.on_inputs is not None:
        return factors.on_inputs
    if factors.site.part == "cross":
        return "queries and keys come from different inputs (cross-attention)"
    placed = "turn with their position (RoPE)" if factors.rotation is not None else "have their position added to them"
    why = "are normalised per token (QK-norm)" if factors.qk_norm else placed
    return f"the scores are not bilinear in the module's inputs: queries and keys {why}"


@dataclass
class Gathered:
    """The gatherers of a run: one for each site and each analyzer that gathers."""

    gatherings: Sequence[Gathering]
    """Which analyzers."""
    collector: Sink
    """Where their answers go."""
    place: Callable[[Site, QueryKey | str], GatheringPlace]
    """The terms on which they work, by site and form."""
    forms: dict[Site, QueryKey | str] = field(default_factory=dict)
    """M on (x, 1), or why the logits are not bilinear in the module's inputs x; filled before the first sequence."""
    shown: list[Selection] = field(default_factory=list)
    """What was posed, where that is to be shown."""
    _gatherers: dict[Site, list[tuple[Gathering, Gatherer]]] = field(default_factory=dict)

    @property
    def needs_inputs(self) -> bool:
        """Whether any of them wants the modules' inputs."""
        return any(gathering.needs_inputs for gathering in self.gatherings)

    @contextmanager
    def watching(self, reached: Sequence[Reached]) -> Iterator[Callable[[Site, Call, Sequence[int]], None]]:
        """Inside, a function that takes in a site's call: (site, call, its rows' numbers of sequences) → None."""
        wanted = [found for found in reached if isinstance(self.forms.get(found.site), QueryKey)]
        with hooks.inputs_of(wanted) as latest:

            def visit(site: Site, call: Call, numbers: Sequence[int]) -> None:
                self._update(site, self._with_inputs(site, call, latest), numbers)

            yield visit

    def close(self, progress: Callable[[str, int, int], None]) -> None:
        """Let every gatherer answer, site by site; what is answered is kept where the user interrupts."""
        for done, (site, gatherers) in enumerate(self._gatherers.items()):
            for gathering, gatherer in gatherers:
                progress(gathering.name, done, len(self._gatherers))
                answers = gatherer.solve()
                self.collector.add_answers(site, gathering, answers)
                self.shown += [answer.shown for answer in answers.values() if answer.shown is not None]
        for gathering in self.gatherings:
            progress(gathering.name, len(self._gatherers), len(self._gatherers))

    def _with_inputs(self, site: Site, call: Call, latest: Mapping[nn.Module, Tensor]) -> QueryKey:
        query_key = call.query_key(site)
        if not isinstance(self.forms.get(site), QueryKey) or call.module is None:
            return query_key
        return replace(query_key, inputs=latest[call.module])

    def _update(self, site: Site, query_key: QueryKey, numbers: Sequence[int]) -> None:
        if site not in self._gatherers:
            place = self.place(site, self.forms.get(site, "no analyzer asks for M on the module's inputs"))
            self._gatherers[site] = [(gathering, gathering.begin(place)) for gathering in self.gatherings]
        for row, one in sequences(query_key):
            # heads that are not asked for cost nothing
            heads = [head for head in finite_heads(one) if self.collector.asks(head)]
            for _, gatherer in self._gatherers[site] if heads else ():
                gatherer.update(one.select(heads), numbers[row])
