"""Build inputs that each test one property of attention masks, and list the tokens that outputs may depend on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.models.hooks import SiteCall
from attnlens.models.texts.sequences import position_limit
from attnlens.models.texts.targets import tasks_of
from attnlens.records import Site

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

TEXT_INPUTS = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}
PROBED = 6  # Number of tokens in a test; in each row of the batch, one token is perturbed
ORDERED = 16  # Largest number of tokens in the tests `causal` and `bidirectional`, whose faults can depend on position
PADS = 2  # Number of padding tokens
DOCUMENTS = (2, 2, 2)  # Number of tokens in each packed document
STEPS = 3  # Number of tokens decoded one by one with the cache
LONGEST_WINDOW = 128  # Longest window that is tested if the test `window` is not requested by name


@dataclass(frozen=True)
class Rule:
    """Rule for the tokens that a query at a site should see."""

    causal: bool  # True if the query sees no later tokens
    window: int | None = None  # Width of the window as declared in the configuration; None without a window
    chunk: int | None = None  # Number of tokens in a chunk, beyond which queries see nothing (Llama 4); None: no chunks

    @property
    def reach(self) -> int | None:
        """Distance from the query to the furthest token in the window; None without a window."""
        # transformers: causal i − w < j, bidirectional |i − j| ≤ w
        return self.window if self.window is None or not self.causal else self.window - 1


def explain_no_masks(inputs: Mapping[str, Tensor]) -> str | None:
    """Return the reason why masks can't be tested; None if the model or its decoder (Whisper) reads only text."""
    ids = inputs.get(main_input(inputs))
    if ids is None or ids.dim() != 2 or ("input_ids" in inputs and not inputs.keys() <= TEXT_INPUTS):
        return "masks are tested only if the model, or its decoder, reads only text"
    return None


def find_rule(model: PreTrainedModel, target: SiteCall) -> Rule:
    """Return the rule that the configuration declares for a site; by default, the usual rule for its part."""
    module, part = target.module, target.site.part
    config = getattr(module, "config", model.config)
    causal = part == "decoder"
    if part == "encoder" and tasks_of(model)[0] == "causal":
        flagged = getattr(module, "is_causal", False) is True
        bidirectional = not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False)
        causal = flagged and not bidirectional
    if part == "cross":
        return Rule(causal)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    chunked = kinds is not None and layer is not None and kinds[layer : layer + 1] == ["chunked_attention"]
    return Rule(
        causal, _find_window(module, config), getattr(config, "attention_chunk_size", None) if chunked else None
    )


def _find_window(module: nn.Module, config: object) -> int | None:
    """Return the width of the window that the configuration declares for a module; None without a window."""
    if getattr(module, "attention_type", None) == "local":  # GPT-Neo
        return getattr(config, "window_size", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is not None and (layer is None or not layer < len(kinds) or kinds[layer] != "sliding_attention"):
        return None
    width = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    return width if isinstance(width, int) and width > 0 and used else None


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs that test one property of attention masks; in row r, token `probes[r]` is perturbed."""

    name: str
    inputs: dict[str, Tensor]
    perturbed: str  # Name of the input whose tokens are perturbed
    probes: list[int]  # Index of the perturbed token in each row
    documents: Int[Tensor, "rows tokens"]  # Index of each token's document; −1 for padding
    pieces: list[tuple[int, int, int, dict[str, Tensor]]]
    """(row, start, end, inputs): a pass over these inputs alone must give the row's outputs start … end − 1."""
    prefix: int = 0  # Number of tokens at the start that all outputs see
    same_positions: bool = True  # False if tokens have other positions in `pieces` than in `inputs`

    def to(self, device: torch.device) -> Case:
        """Move the test's inputs to a device."""
        pieces = [
            (row, start, end, {name: tensor.to(device) for name, tensor in alone.items()})
            for row, start, end, alone in self.pieces
        ]
        return replace(self, inputs={name: tensor.to(device) for name, tensor in self.inputs.items()}, pieces=pieces)

    def visible_tokens(self, rule: Rule, queries: int) -> Bool[Tensor, "rows queries tokens"]:
        """Return True for the tokens that each output may depend on (cross-attention: all tokens except padding)."""
        real = self.documents >= 0
        rows, tokens = self.documents.shape
        if queries != tokens:
            return real[:, None, :].expand(rows, queries, tokens)
        same = (self.documents[:, :, None] == self.documents[:, None, :]) & real[:, None, :]
        place = torch.arange(tokens)
        distance = place[:, None] - place
        seen = torch.ones(tokens, tokens, dtype=torch.bool)
        if rule.causal:
            seen = (distance >= 0) | (place < self.prefix)
        if rule.reach is not None:
            seen &= distance.abs() <= rule.reach
        if rule.chunk is not None:
            seen &= place[:, None] // rule.chunk == place // rule.chunk
        return same & seen


def main_input(inputs: Mapping[str, Tensor]) -> str:
    """Return the name of the input whose tokens the model's outputs correspond to."""
    return "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"


def key_input(site: Site, inputs: Mapping[str, Tensor]) -> str:
    """Return the name of the input whose tokens a site's keys are computed from."""
    return main_input(inputs) if site.part == "decoder" else "input_ids"


class Cases:
    """The requested mask tests; by default, all that apply to the model except tests of prefixes and long windows."""

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, Tensor],
        site_calls: Sequence[SiteCall],
        named: Sequence[str] | None,
    ) -> None:
        self.model, self.named = model, named
        self.rules = {target.site: find_rule(model, target) for target in site_calls}
        self.parameters = inspect.signature(model.forward).parameters
        self.main_input = main_input(inputs)
        self.most = min(ORDERED, position_limit(model) or ORDERED)
        self.ids = {name: inputs[name][:1] for name in ("input_ids", "decoder_input_ids") if name in inputs}
        self.media = {name: tensor[:1] for name, tensor in inputs.items() if name not in TEXT_INPUTS}
        self.causal = any(self.rules[target.site].causal for target in site_calls)
        self.bidirectional = any(
            target.site.part == "encoder" and not self.rules[target.site].causal for target in site_calls
        )
        self.windows = sorted({rule.window for rule in self.rules.values() if rule.window is not None})

    def build(self) -> Iterator[Case | tuple[str, str]]:
        """Yield each test, or (name, reason) if a requested test or the test of a declared window can't be built."""
        builders: dict[str, Callable[[], Case | str | None]] = {
            "causal": self._causal,
            "bidirectional": self._bidirectional,
            "padding-left": lambda: self._padded(left=True),
            "padding-right": lambda: self._padded(left=False),
            "packed": self._packed,
            "window": self._window,
            "prefix": self._prefix,
        }
        for name, make in builders.items():
            if self.named is not None and name not in self.named:
                continue
            case = make()
            if isinstance(case, str):
                if self.named is not None or (name == "window" and self.windows):
                    yield name, case
            elif case is not None:
                yield case

    def row(self, name: str, tokens: int) -> Tensor:
        """Return one row with `tokens` ids of the input `name`; repeat the ids if there are too few."""
        ids = self.ids[name]
        return ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]

    def cache_inputs(self) -> dict[str, Tensor]:
        """Return one sequence for the cache test, if possible longer than the shortest window (if ≤ LONGEST_WINDOW)."""
        short = [width for width in self.windows if width <= LONGEST_WINDOW]
        tokens = max(PROBED, short[0] + STEPS + 1) if short else PROBED
        limit = position_limit(self.model) or tokens
        return {self.main_input: self.row(self.main_input, min(tokens, limit)), **self._others(self.main_input, 1)}

    def _others(self, perturbed: str, rows: int) -> dict[str, Tensor]:
        """Return `rows` copies of an encoder–decoder's inputs other than `perturbed`; {} for other models."""
        others = {name: self.row(name, PROBED) for name in self.ids if name != perturbed} | self.media
        return {name: tensor.expand(rows, *tensor.shape[1:]) for name, tensor in others.items()}

    def _build_unmasked(self, name: str, perturbed: str, tokens: int, probes: list[int]) -> Case:
        """Build a test without padding or an attention_mask, with one row for each perturbed token."""
        ids, rows = self.row(perturbed, tokens), len(probes)
        inputs = {perturbed: ids.expand(rows, -1), **self._others(perturbed, rows)}
        alone = {perturbed: ids, **self._others(perturbed, 1)}
        documents = torch.zeros(rows, tokens, dtype=torch.long)
        length = alone[self.main_input].shape[1]
        return Case(name, inputs, perturbed, probes, documents, [(0, 0, length, alone)])

    def _causal(self) -> Case | str:
        if not self.causal:
            return "the model has no causal attention"
        return self._build_unmasked("causal", self.main_input, self.most, list(range(self.most)))

    def _bidirectional(self) -> Case | str:
        if not self.bidirectional:
            return "the model has no bidirectional attention"
        if "input_ids" not in self.ids:
            return "the model's bidirectional attention reads no text"
        return self._build_unmasked("bidirectional", "input_ids", self.most, list(range(self.most)))

    def _window(self) -> Case | str:
        if not self.windows:
            return "the configuration declares no window"
        width = self.windows[0]
        limit = position_limit(self.model)
        if self.named is None and width > LONGEST_WINDOW:
            return f"the window of {width} tokens is long: it is tested only with --masks window"
        tokens = width + 2 + width * (not self.causal)
        if limit is not None and tokens > limit:
            return f"the test of a window of {width} tokens needs {tokens} positions, but the model has {limit}"
        return self._build_unmasked("window", self.main_input, tokens, [0, 1])

    def _prefix(self) -> Case | str | None:
        if self.named is None:
            return None  # no configuration declares a prefix
        if not self.causal or self.main_input != "input_ids":
            return "only causal models without an encoder can read a prefix"
        case, first = self._build_unmasked("prefix", "input_ids", PROBED, list(range(PROBED))), PROBED // 2
        place = torch.arange(PROBED)
        seen = (place[:, None] >= place) | (place < first)
        added = torch.zeros(PROBED, PROBED, dtype=self.model.dtype).masked_fill(
            ~seen, torch.finfo(self.model.dtype).min
        )
        mask = added.expand(PROBED, 1, -1, -1)
        alone = {**case.pieces[0][3], "attention_mask": mask[:1]}
        pieces = [(0, 0, PROBED, alone)]
        inputs = {**case.inputs, "attention_mask": mask}
        return Case("prefix", inputs, "input_ids", case.probes, case.documents, pieces, prefix=first)

    def _padded(self, *, left: bool) -> Case | str:
        padded = "input_ids" if "input_ids" in self.ids else self.main_input
        mask_input, position_input = (padded.replace("input_ids", kind) for kind in ("attention_mask", "position_ids"))
        if mask_input not in self.parameters:
            return f"the model takes no {mask_input}"
        total = PROBED + PADS
        padding = range(PADS) if left else range(PROBED, total)
        ends = (PADS, total - 1) if left else (0, PROBED - 1)
        # perturb the padding, the first and the last token; the last two rows have less padding
        rows = [(PADS, place) for place in (*padding, *ends)] + [(1, 0), (1, total - 1)]
        pad = getattr(self.model.config, "pad_token_id", None)
        ids = torch.full((len(rows), total), pad if isinstance(pad, int) and pad >= 0 else 0)
        documents, pieces = torch.full_like(ids, -1), []
        for row, (pads, _) in enumerate(rows):
            real = total - pads
            start = pads if left else 0
            ids[row, start : start + real] = self.row(padded, real)[0]
            documents[row, start : start + real] = 0
            if row in (0, len(rows) - 1):
                alone = {padded: self.row(padded, real), **self._others(padded, 1)}
                whole = (0, PROBED) if self.main_input != padded else (start, start + real)
                pieces.append((row, *whole, alone))
        mask = (documents >= 0).long()
        inputs = {padded: ids, mask_input: mask, **self._others(padded, len(rows))}
        counted = self.main_input == padded and self.causal and position_input in self.parameters
        if left and counted:  # `generate` sets these positions, too
            inputs[position_input] = (mask.cumsum(-1) - 1).clamp_min(0)
        name = "padding-left" if left else "padding-right"
        probes = [place for _, place in rows]
        return Case(name, inputs, padded, probes, documents, pieces, same_positions=counted or not left)

    def _packed(self) -> Case | str:
        if not self.causal or self.main_input != "input_ids" or "position_ids" not in self.parameters:
            return "the model is not a decoder that takes position_ids"
        ids, total = self.row("input_ids", PROBED), sum(DOCUMENTS)
        numbers = torch.tensor([number for number, length in enumerate(DOCUMENTS) for _ in range(length)])
        places = torch.tensor([place for length in DOCUMENTS for place in range(length)])
        rows = torch.zeros(total, 1, dtype=torch.long)
        inputs = {"input_ids": ids.expand(total, -1), "position_ids": (places + rows)}
        starts = [sum(DOCUMENTS[:number]) for number in range(len(DOCUMENTS))]
        pieces = [
            (0, start, start + length, {"input_ids": ids[:, start : start + length]})
            for start, length in zip(starts, DOCUMENTS, strict=True)
        ]
        return Case("packed", inputs, "input_ids", list(range(total)), numbers + rows, pieces)
