"""Fetch a hub model into a local folder, without waiting long for an unreachable network."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from attnlens.errors import ModelError
from attnlens.files import shorten_text

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

    def fetch(self, select: Callable[[Collection[str]], list[str]]) -> Path:
        """Download the files `select(names of all files)` unless cached; return their folder, named by the commit.

        Without a connection the local cache is used. Raises ModelError if the model is unknown, gated or not
        reachable, the revision does not exist, or the server is not a hub, such as a log-in page.
        """
        from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        # the class of httpx or httpx2, depending on the version of huggingface_hub
        from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]

        if is_offline_mode():
            return self.find_cached("HF_HUB_OFFLINE is set")
        if not reachable(constants.ENDPOINT):
            return self.find_cached("the hub can't be reached")
        try:
            info = HfApi().model_info(self.id, revision=self.revision, timeout=ANSWER)
            if not info.sha:
                raise ValueError("its answer names no commit")  # noqa: TRY301  # handled below with all other invalid answers
            names = [sibling.rfilename for sibling in info.siblings or []]
            return Path(snapshot_download(self.id, revision=self.revision, allow_patterns=select(names)))
        except (HfHubHTTPError, HFValidationError) as error:
            raise self._refusal(error) from error
        except ConnectionFailure:
            return self.find_cached("the hub can't be reached")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"The server at {constants.ENDPOINT} is not a model hub: {first_line(error)}"
            remedy = "Log in to the network, or correct HF_ENDPOINT; --offline uses the local cache."
            raise ModelError(problem, remedy) from None

    def find_cached(self, reason: str) -> Path:
        """Return the model's folder in the local cache, named by the commit; `reason` why the hub is not used.

        Raises ModelError, which contains `reason`, if the model is not cached.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        # request only the config, because other programs cache only the files that they need
        options: dict[str, Any] = {"allow_patterns": "config.json", "local_files_only": True}
        try:
            return Path(snapshot_download(self.id, revision=self.revision, **options))
        except HFValidationError as error:
            raise self._refusal(error) from error
        except LocalEntryNotFoundError:
            # `hf download` has the option --revision; it does not understand id@revision
            suffix, option = (f"@{self.revision}", f" --revision {self.revision}") if self.revision else ("", "")
            problem = f"{self.id}{suffix} is neither a local folder nor in the local cache, and {reason}."
            remedy = f"Run `hf download {self.id}{option}` with a network connection, or give the path of a folder."
            raise ModelError(problem, remedy) from None

    def _refusal(self, error: Exception) -> ModelError:
        """Build the ModelError for an error answer of the hub."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError, so it comes first
            problem = f"{self.id} is gated: its owner gives access on request."
            return ModelError(problem, f"Ask on the page of {self.id} on the hub, then run `hf auth login`.")
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelError(f"{self.id} has no revision {self.revision!r}.", "See its branches and tags on the hub.")
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            problem = f"{self.id} is neither a local folder nor a model on the hub that you may see."
            return ModelError(problem, "Check the spelling; for a private model run `hf auth login`.")
        return ModelError(f"The hub does not provide {self.id}: {first_line(error)}", "Try again later.")


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's text, with the next line if it ends with a colon, or its type.

    The result is shortened, since it may repeat a file's content.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):  # the text of a KeyError is only the key
        return shorten_text(" ".join([type(error).__name__, *lines[:1]]))
    return shorten_text(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0])


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

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((target.hostname or "", port), timeout=PATIENCE).close()
            answers.append(True)

    # resolving an unknown name can block for longer than any socket timeout, hence the thread
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(answers)


def _address(text: str, variable: str) -> tuple[SplitResult, int]:
    """Parse an address and its port. Raises ModelError without the address, since a proxy's can contain a password."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        port = parts.port
    except ValueError as error:
        problem = f"{variable} is not a valid address: {error}"
        raise ModelError(problem, f"Correct the variable {variable}, or unset it.") from None
    return parts, port or (443 if parts.scheme == "https" else 80)
