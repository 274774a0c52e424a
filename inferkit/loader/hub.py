"""Models that are named by their Hugging Face id, through the hub's own client.

Token, endpoint, offline mode and cache folder are the client's: HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE, HF_HOME.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferkit.core.errors import ModelLoadError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXT_FILES = ["*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]
# Folders hold other formats of the same weights; so do these names of Mistral's own.
_IGNORED = ["*/*", "consolidated*", "params.json", "tekken.json"]


def fetch_from_hub(
    repo_id: str, *, with_weights: bool = True, progress: Callable[[int, int], None]
) -> Path:
    """Folder of the model in the hub's cache; downloads what is not there.

    Takes configuration, tokenizer and safetensors; no pickles and no code. Without a network the
    files of an earlier, complete download are used.

    Raises:
        ModelLoadError: the model does not exist, needs a login, or is not here and not reachable.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            repo_id,
            allow_patterns=_TEXT_FILES + (_WEIGHT_FILES if with_weights else []),
            ignore_patterns=_IGNORED,
            tqdm_class=_make_reporter(progress),
        )
    except HFValidationError as error:
        problem = f"is no folder, no file and no valid Hugging Face id: {error}"
    except GatedRepoError:
        problem = "needs a login that was granted access; run `hf auth login` or set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = (
            f"is no folder here and no model on {constants.ENDPOINT} (a private one needs "
            "`hf auth login` or HF_TOKEN); check the name"
        )
    except LocalEntryNotFoundError:
        why = f"{constants.ENDPOINT} cannot be reached"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        problem = (
            f"is no folder here, {why}, and {constants.HF_HUB_CACHE} does not hold all of it; "
            "download it where there is a network and give its folder, or set HF_HUB_CACHE"
        )
    except Exception as error:  # its transport's own types differ between releases of the client
        cause = (str(error).splitlines() or [""])[0]
        raise ModelLoadError(
            f"model.path={repo_id} cannot be downloaded from {constants.ENDPOINT}: "
            f"{type(error).__name__}: {cause}"
        ) from error
    else:
        return Path(folder)
    raise ModelLoadError(f"model.path={repo_id} {problem}") from None


def _make_reporter(progress: Callable[[int, int], None]) -> Any:
    """A progress bar class for the hub's client that draws nothing and reports bytes."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    furthest = 0

    class ByteReporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal furthest
            self.n += n or 0
            # Bytes on the wire and bytes on disk are counted by one bar each.
            if self.counts_bytes and self.n > furthest:
                furthest = int(self.n)
                progress(furthest, max(furthest, int(self.total or 0)))
            return None

    return ByteReporter
