"""Reads byte ranges of a file on a hub, once more where the connection drops, and never the whole file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from attnlens.errors import ModelError
from attnlens.models.hub import first_line

ATTEMPTS = 5
"""How often a range is asked for; each time what has arrived already is not asked for again."""
WAIT = 0.5
"""Seconds before the second attempt, doubled before each later one."""
BUSY = (429, 500, 502, 503, 504)
"""Answers after which the same question may be asked again."""
PATIENCE = 30.0
"""Seconds without a byte after which a connection counts as dropped."""
SAY_LATER = "Run it again: what is finished is kept."


@dataclass
class RemoteFile:
    """A file of a hub's repository at one commit."""

    name: str
    url: str
    size: int = field(init=False)
    stamp: str = field(init=False)
    """The hub's name of its content."""
    is_hashed = True

    def __post_init__(self) -> None:
        from huggingface_hub import get_hf_file_metadata
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]

        try:
            found = get_hf_file_metadata(self.url)
        except (HfHubHTTPError, ConnectionFailure) as error:
            raise ModelError(f"{self.name} can't be read from the hub: {first_line(error)}", SAY_LATER) from error
        if found.size is None:
            raise ModelError(f"The hub does not say how large {self.name} is.", "Download the model.")
        self.size, self.stamp = found.size, found.etag or ""

    def read(self, start: int, count: int) -> bytearray:
        """So many bytes from there on. Raises ModelError where they can't be had in ATTEMPTS attempts."""
        from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]

        data, problem = bytearray(), ""
        for attempt in range(ATTEMPTS):
            time.sleep(WAIT * 2**attempt * (attempt > 0))
            try:
                self._ask(start, count, data)
            except ConnectionFailure as error:
                problem = first_line(error)
            if len(data) == count:
                return data
        said = problem or f"{len(data)} of {count} bytes came"
        raise ModelError(f"{self.name} can't be read from the hub: {said}.", SAY_LATER)

    def _ask(self, start: int, count: int, data: bytearray) -> None:
        """Add to `data` what arrives of the range behind it."""
        hub: Any = import_module("huggingface_hub.utils")
        session = hub.get_session()
        first = start + len(data)
        headers = hub.build_hf_headers() | {
            "Range": f"bytes={first}-{start + count - 1}",
            "Accept-Encoding": "identity",
        }
        with session.stream("GET", self.url, headers=headers, timeout=PATIENCE, follow_redirects=True) as answer:
            if answer.status_code in BUSY:
                return
            span = answer.headers.get("Content-Range", "")
            if answer.status_code != 206 or not span.startswith(f"bytes {first}-"):
                raise ModelError(
                    f"The hub answers {answer.status_code} {span} where a part of {self.name} was asked for.", SAY_LATER
                )
            for part in answer.iter_raw():
                data += part[: count - len(data)]
