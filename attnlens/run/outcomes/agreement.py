"""For how long a changed model continues prompts as the original does, both greedily and with a key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from attnlens import texts
from attnlens.errors import FAILURES, ModelError, TextError, UsageError, is_memory
from attnlens.models import Loaded, first_line
from attnlens.records import Agreement, Task
from attnlens.run.outcomes.differences import NOT_CAUSAL, Variant
from attnlens.runs.progress import Tell
from attnlens.texts.sequences import position_limit
from attnlens.texts.targets import Fed

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import PreTrainedModel

Name = TypeVar("Name")
MOST = 16
"""Evaluated windows whose first halves are continued, and prompts in a batch."""
TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
"""Inputs of a model that reads text alone."""
FAILED = (*FAILURES, ModelError, UsageError)
"""What running with a cache may raise where a model or a kernel is not made for it."""


@dataclass(frozen=True)
class Prompts:
    """What is continued, as one batch."""

    ids: Int[Tensor, "prompts tokens"]
    mask: Int[Tensor, "prompts tokens"]
    """0 at padding, which stands on the left."""
    source: str
    """`windows`, or the name of a file."""

    def parts(self) -> Iterator[Prompts]:
        """As batches of bounded size, so that many lines need no more memory than few."""
        for ids, mask in zip(torch.split(self.ids, MOST), torch.split(self.mask, MOST), strict=True):
            yield Prompts(ids, mask, self.source)


@dataclass(frozen=True)
class Continued:
    """The prompts with the original's own continuations."""

    prompts: Prompts
    tokens: Int[Tensor, "steps prompts"]
    ends: Int[Tensor, " ids"]
    """The ids that end a text."""


def prompts_of(model: PreTrainedModel, fed: Sequence[Fed], task: Task, given: Prompts | None) -> Prompts | str:
    """The prompts given, else those of the windows; raises UsageError for some that the model can't continue."""
    if given is None:
        return of_windows(model, fed, task)
    if why := _silent(model, fed, task):
        why = "it does not predict the next token alone" if why == NOT_CAUSAL else why
        raise UsageError(f"The model can't continue prompts: {why}.", "Leave out --prompts.")
    return given


def _silent(model: PreTrainedModel, fed: Sequence[Fed], task: Task) -> str:
    """Why the model continues no text; empty where it does."""
    if task != "causal":
        return NOT_CAUSAL
    if set(fed[0].inputs) - TEXT:
        return "the model reads more than text"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "the model keeps no key-value cache"
    return ""


def of_windows(model: PreTrainedModel, fed: Sequence[Fed], task: Task) -> Prompts | str:
    """The first halves of evaluated windows, spread evenly over them, all of one length; or why there are none.

    Of lines, of those that are no shorter than the middle one, half of that one's length.
    """
    if why := _silent(model, fed, task):
        return why
    rows: list[Tensor] = []
    for one in fed:
        ids, mask = one.inputs["input_ids"], one.inputs.get("attention_mask")
        rows += list(ids) if mask is None else [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    middle = sorted(map(len, rows))[len(rows) // 2]
    long = [row[: max(1, middle // 2)] for row in rows if len(row) >= middle]
    count = min(MOST, len(long))
    ids = torch.stack([long[number * len(long) // count] for number in range(count)])
    return Prompts(ids, torch.ones_like(ids), "windows")


def of_file(loaded: Loaded, content: texts.Content) -> Prompts:
    """The lines of a file, padded on the left.

    Raises TextError where there are none, or one leaves no room in the model's context to continue it, and UsageError
    where the model has no tokenizer.
    """
    lines = [line for line in content.text.splitlines() if line.strip()]
    if not lines:
        raise TextError(f"{content.name} holds no prompt.", "Give a file with one prompt a line.")
    if loaded.tokenizer is None:
        raise UsageError("The model can't continue prompts: it has no tokenizer.", "Leave out --prompts.")
    rows = [torch.tensor(loaded.tokenizer(line, verbose=False)["input_ids"]) for line in lines]
    most, limit = max(map(len, rows)), position_limit(loaded.model)
    if limit is not None and most >= limit:
        raise TextError(
            f"A prompt of {content.name} has {most} tokens, and the model reads at most {limit}.",
            f"Give prompts of at most {limit - 1} tokens, which leave room to continue them.",
        )
    pad = torch.nn.functional.pad
    ids = torch.stack([pad(row, (most - len(row), 0), value=int(rows[0][0])) for row in rows])
    mask = torch.stack([pad(torch.ones_like(row), (most - len(row), 0)) for row in rows])
    device = loaded.model.device
    return Prompts(ids.to(device), mask.to(device), content.name)


def own_continuation(model: PreTrainedModel, prompts: Prompts | str, asked: int) -> tuple[Continued | str, list[str]]:
    """How the model continues the prompts itself, or why it does not; and what a reader must know."""
    if isinstance(prompts, str):
        return prompts, []
    tokens = room(model, prompts, asked)
    notes = [f"Greedy continuations are of {tokens} tokens, not {asked}: the model reads no more."]
    return continued(model, prompts, tokens), notes if 0 < tokens < asked else []


def agreements(
    model: PreTrainedModel, own: Continued | str, variants: Mapping[Name, Variant], progress: Tell
) -> dict[Name, dict[str, Any]]:
    """The field of an Outcome for each changed model, against the original's own continuations; or why it has none."""
    found: dict[Name, dict[str, Any]] = {}
    for name, variant in variants.items():
        one = own if isinstance(own, str) else agreement(model, own, variant)
        found[name] = {"reasons": {"agreement": one}} if isinstance(one, str) else {"agreement": one}
        progress(1)
    return found


def room(model: PreTrainedModel, prompts: Prompts, asked: int) -> int:
    """How many tokens fit behind the longest prompt, at most those asked for."""
    limit = position_limit(model)
    return asked if limit is None else max(0, min(asked, limit - prompts.ids.shape[1]))


def continued(model: PreTrainedModel, prompts: Prompts, tokens: int) -> Continued | str:
    """The original's greedy continuations, or why it has none."""
    if tokens < 1:
        return "the prompts fill the model's context"
    try:
        with torch.no_grad():
            parts = [torch.stack(list(_greedy(model, part, tokens))) for part in prompts.parts()]
    except FAILED as error:
        if is_memory(error):
            raise
        return f"the model can't continue a text with a key-value cache ({first_line(error).rstrip('.')})"
    chosen = torch.cat(parts, 1)
    return Continued(prompts, chosen, _ends(model, chosen))


def agreement(model: PreTrainedModel, own: Continued, variant: Variant) -> Agreement | str:
    """For how long the changed model's continuations are the original's, in lockstep; or why it has none.

    Both choose their likeliest token. A prompt whose texts end alike never differs.
    """
    try:
        with torch.no_grad(), variant():
            every = zip(own.prompts.parts(), torch.split(own.tokens, MOST, 1), strict=True)
            parts = [_common(theirs, own.ends, _greedy(model, part, len(theirs))) for part, theirs in every]
            until = torch.cat(parts).tolist()
    except FAILED as error:
        if is_memory(error):
            raise
        what = error.problem if isinstance(error, ModelError | UsageError) else first_line(error)
        return f"the kernel does not run with a key-value cache here ({what.rstrip('.')})"
    total, ordered = len(own.tokens), sorted(until)
    low, middle, high = (ordered[(len(ordered) - 1) * part // 4] for part in (1, 2, 3))
    return Agreement(
        prompts=len(until),
        source=own.prompts.source,
        prompt_tokens=own.prompts.ids.shape[1],
        tokens=total,
        until=until,
        median=middle,
        quartiles=(low, high),
        never=sum(found == total for found in until),
    )


def _common(
    theirs: Int[Tensor, "steps prompts"], ends: Int[Tensor, " ids"], chosen: Iterator[Int[Tensor, " prompts"]]
) -> Int[Tensor, " prompts"]:
    """Of each prompt, how many tokens both have in common from the first on; all where both texts end alike.

    No step is taken once all prompts differ or have ended.
    """
    alive = torch.ones_like(theirs[0], dtype=torch.bool)
    found = torch.zeros_like(theirs[0])
    for own, new in zip(theirs, chosen, strict=False):
        alive &= own == new
        found += alive
        ended = alive & torch.isin(new, ends)
        found[ended], alive = len(theirs), alive & ~ended
        if not bool(alive.any()):
            break
    return found


def _greedy(model: PreTrainedModel, prompts: Prompts, tokens: int) -> Iterator[Int[Tensor, " prompts"]]:
    """Step by step the likeliest next token of each prompt, which is then read too."""
    given, mask = prompts.ids, prompts.mask
    padded = not bool(mask.all())
    placed = padded and "position_ids" in inspect.signature(model.forward).parameters
    cache: Any = None
    for _ in range(tokens):
        more: dict[str, Any] = {}
        if placed:
            more["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -given.shape[1] :]
        result = model(input_ids=given, attention_mask=mask, past_key_values=cache, use_cache=True, **more)
        cache, chosen = result.past_key_values, result.logits[:, -1].argmax(-1)
        if cache is None:
            raise ModelError("it hands out no cache", "Leave out --generate.")
        yield chosen
        given, mask = chosen[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)


def _ends(model: PreTrainedModel, like: Tensor) -> Int[Tensor, " ids"]:
    """The ids that end a text, by the model's generation settings, else by its configuration."""
    settings = getattr(model, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    found = getattr(model.config, "eos_token_id", None) if found is None else found
    numbers = [] if found is None else [found] if isinstance(found, int) else list(found)
    return like.new_tensor(numbers)
