"""Fetch a hub model into a local folder, without waiting long for an unreachable network."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from attnlens.errors import ModelError
from attnlens.files import shortened

PATIENCE = 2.0
"""Seconds within which the hub must accept a connection."""
ANSWER = 8.0
"""Seconds within which the hub must answer the first request."""
OFFLINE = "--offline forbids the network"


@dataclass(frozen=True)
class Hub:
    """A model on the hub at one revision."""

    id: str
    """`name` or `org/name`."""
    revision: str | None
    """Branch, tag or commit; None means the default branch."""

    def fetched(self, wanted: Callable[[Collection[str]], list[str]]) -> Path:
        """Download the files `wanted(names of all files)` unless cached; return their folder, named by the commit.

        Without a connection the local cache is used. Raises ModelError if the model is unknown, gated or not
        reachable, the revision does not exist, or the server is not a hub, such as a log-in page.
        """
        from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        # the class of httpx or httpx2, depending on the version of huggingface_hub
        from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]

        if is_offline_mode():
            return self.cached("HF_HUB_OFFLINE is set")
        if not reachable(constants.ENDPOINT):
            return self.cached("the hub can't be reached")
        try:
            info = HfApi().model_info(self.id, revision=self.revision, timeout=ANSWER)
            if not info.sha:
                raise ValueError("it names no commit")  # noqa: TRY301  # handled below with all other invalid answers
            names = [sibling.rfilename for sibling in info.siblings or []]
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
        """Return the model's folder in the local cache, named by the commit; `why` the hub is not used.

        Raises ModelError, which contains `why`, if the model is not cached.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            # request only the config, because other programs cache only the files that they need
            folder = snapshot_download(
                self.id, revision=self.revision, allow_patterns="config.json", local_files_only=True
            )
        except HFValidationError as error:
            raise self._refusal(error) from error
        except LocalEntryNotFoundError:
            at, option = (f"@{self.revision}", f"@{self.revision}") if self.revision else ("", "")
            raise ModelError(
                f"{self.id}{at} is no folder here and not in the local cache, and {why}.",
                f"Where there is a network, run `hf download {self.id}{option}`, or give the path of a folder.",
            ) from None
        return Path(folder)

    def _refusal(self, error: Exception) -> ModelError:
        """Build the ModelError for an error answer of the hub."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError, so it comes first
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
    """Return the first non-empty line of an error's text, with the next line if it ends with a colon, or its type.

    The result is shortened, since it may repeat a file's content.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):  # the text of a KeyError is only the key
        return shortened(" ".join([type(error).__name__, *lines[:1]]))
    return shortened(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0])


def check_endpoint() -> None:
    """Raise ModelError if HF_ENDPOINT is not a valid address: importing huggingface_hub would fail."""
    _address(os.environ.get("HF_ENDPOINT") or "", "HF_ENDPOINT")


def reachable(endpoint: str) -> bool:
    """Return whether `endpoint`, or the proxy to it, accepts a connection within PATIENCE seconds.

    Raises ModelError if one of them is not a valid address.
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

    # resolving an unknown name can block for longer than any socket timeout, hence the thread
    thread = Thread(target=knock, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answers == [True]


def _address(written: str, variable: str) -> tuple[SplitResult, int]:
    """Parse an address and its port. Raises ModelError without the address, since a proxy's can contain a password."""
    try:
        parts = urlsplit(written if "://" in written else f"//{written}")
        port = parts.port
    except ValueError as error:
        raise ModelError(f"{variable} is no address: {error}", f"Mend the variable {variable}, or unset it.") from None
    return parts, port or (443 if parts.scheme == "https" else 80)
