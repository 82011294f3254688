"""Fetches a hub model into a local folder, without waiting for a network that is not there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from attnlens.errors import ModelError
from attnlens.files import shortened

if TYPE_CHECKING:
    pass

PATIENCE = 2.0
"""Seconds within which the hub must accept a connection."""
ANSWER = 8.0
"""Seconds within which it must answer the first question."""
OFFLINE = "--offline forbids the network"


@dataclass(frozen=True)
class Hub:
    """One model of the hub at one revision."""

    id: str
    """`name` or `org/name`."""
    revision: str | None
    """Branch, tag or commit; None means the default branch."""

    def fetched(self, wanted: Callable[[Collection[str]], list[str]]) -> Path:
        """The folder that holds `wanted(names of all files)`, downloaded if need be; its name is the commit.

        Without a connection the local cache answers. Raises ModelError if the model is unknown, gated or not
        reachable, the revision does not exist, or what answers is no hub, such as a log-in page.
        """
        from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        # httpx's or httpx2's, whichever the hub's client is built on
        from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]

        if is_offline_mode():
            return self.cached("HF_HUB_OFFLINE is set")
        if not reachable(constants.ENDPOINT):
            return self.cached("the hub can't be reached")
        try:
            found = HfApi().model_info(self.id, revision=self.revision, timeout=ANSWER)
            if not found.sha:
                raise ValueError("it names no commit")  # noqa: TRY301  # one refusal for all that is no answer of a hub
            names = [sibling.rfilename for sibling in found.siblings or []]
            return Path(snapshot_download(self.id, revision=self.revision, allow_patterns=wanted(names)))
        except (HfHubHTTPError, HFValidationError) as error:
            raise self._refusal(error) from error
        except ConnectionFailure:
            return self.cached("the hub can't be reached")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelError(
                f"What answers at {constants.ENDPOINT} is no model hub: {first_line(error)}",
                "Log in to the network, or mend HF_ENDPOINT; with --offline the local cache is asked.",
            ) from None

    def cached(self, why: str) -> Path:
        """The folder in the local cache, which alone is asked because of `why`; its name is the commit.

        Raises ModelError where the cache does not have it.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            # only the config is asked for: other programs cache only the files that they need
            folder = snapshot_download(
                self.id, revision=self.revision, allow_patterns="config.json", local_files_only=True
            )
        except HFValidationError as error:
            raise self._refusal(error) from error
        except LocalEntryNotFoundError:
            at, option = (f"@{self.revision}", f" --revision {self.revision}") if self.revision else ("", "")
            raise ModelError(
                f"{self.id}{at} is no folder here and not in the local cache, and {why}.",
                f"Where there is a network, run `hf download {self.id}{option}`, or give the path of a folder.",
            ) from None
        return Path(folder)

    def _refusal(self, error: Exception) -> ModelError:
        """The hub's answer in two lines."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):  # a child of RepositoryNotFoundError, so it comes first
            return ModelError(
                f"{self.id} is gated: its owner gives access on request.",
                f"Ask on the page of {self.id} on the hub, then run `hf auth login`.",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelError(f"{self.id} has no revision {self.revision!r}.", "See its branches and tags on the hub.")
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return ModelError(
                f"{self.id} is neither a folder here nor a model of the hub that you may see.",
                "Check the spelling; for a private model run `hf auth login`.",
            )
        return ModelError(f"The hub does not hand out {self.id}: {first_line(error)}", "Try again later.")


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something (and what a colon at its end announces), or its type.

    Shortened, since it may repeat a file's content.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):  # whose text is the key alone
        return shortened(" ".join([type(error).__name__, *lines[:1]]))
    return shortened(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0])


def check_endpoint() -> None:
    """Raise ModelError where HF_ENDPOINT is no address: importing the hub's library would fail on it."""
    _address(os.environ.get("HF_ENDPOINT") or "", "HF_ENDPOINT")


def reachable(endpoint: str) -> bool:
    """Whether `endpoint`, or the proxy that leads there, accepts a connection within PATIENCE seconds.

    Raises ModelError where one of them is no address.
    """
    parts, _ = _address(endpoint, "HF_ENDPOINT")
    proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    target, port = _address(proxy or endpoint, f"{parts.scheme}_proxy" if proxy else "HF_ENDPOINT")
    answers: list[bool] = []

    def knock() -> None:
        try:
            socket.create_connection((target.hostname or "", port), timeout=PATIENCE).close()
            answers.append(True)
        except OSError:
            answers.append(False)

    # a name that does not resolve may block for longer than any socket timeout, hence the thread
    thread = Thread(target=knock, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answers == [True]


def _address(written: str, variable: str) -> tuple[SplitResult, int]:
    """An address and its port. Raises ModelError, which does not repeat it: a proxy's may hold a password."""
    try:
        found = urlsplit(written if "://" in written else f"//{written}")
        port = found.port
    except ValueError as error:
        raise ModelError(f"{variable} is no address: {error}", f"Mend the variable {variable}, or unset it.") from None
    return found, port or (443 if found.scheme == "https" else 80)
