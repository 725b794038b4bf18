"""Files of a model on the Hugging Face hub, and its libraries kept quiet."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ArgumentError, needed

__all__ = ["from_hub", "quietly"]

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WANTED = ("*.json", "model*.safetensors", "*.txt", "*.model")  # of a model on the hub: not ten formats of it

_loading = threading.RLock()


def from_hub(name: str) -> Path:
    """The folder of a model on the hub, fetched unless it is in the cache.

    Raises:
        ArgumentError: a name that the hub does not know or does not hand out; a hub that cannot be reached.
        PackageMissing: transformers is not installed.
    """
    if not HUB_NAME.fullmatch(name):
        raise ArgumentError(
            f"model must be a folder or a name on the Hugging Face hub: got {name!r}; "
            "names look like google-bert/bert-base-uncased"
        )
    with needed("transformers", "trained models need transformers"):
        import transformers  # noqa: F401 - and with it the library of the hub
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        with quietly():
            return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(WANTED)))
    except HFValidationError as error:
        said = "names look like google-bert/bert-base-uncased"
        raise ArgumentError(f"model must be a name that the hub can have: got {name!r}; {said}") from error
    except GatedRepoError as error:
        raise ArgumentError(
            f"model must be open to you: {name!r} is gated; accept its terms there, then: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ArgumentError(
            f"model must be a folder or a name on the Hugging Face hub: there is no {name!r}, or it is "
            "private; check the name"
        ) from error
    except Exception as error:  # of several network libraries, by version of the hub's
        reason = error.__cause__ or error
        said = str(reason).strip().partition("\n")[0]
        raise ArgumentError(
            f"model must be here or on a hub that can be reached: there is no folder {name!r}, and asking "
            f"the hub failed ({type(reason).__name__}: {said}); {_remedy(name)}"
        ) from error


def _remedy(name: str) -> str:
    """How to come by a model without the hub."""
    from huggingface_hub import constants

    folder = name.rpartition("/")[2]
    first = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "check the name and the network"
    return (
        f"{first}, or where there is a network: hf download {name} --local-dir {folder}, and copy that "
        f"folder here: it is the model ./{folder}"
    )


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars and no advice from the libraries meanwhile; afterwards as before.

    Both are the process's: models are loaded one after another, or one would put back what another had set.
    """
    from huggingface_hub.utils import logging as hub
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    _loading.acquire()
    levels, bars = (logging.get_verbosity(), hub.get_verbosity()), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    if hub_bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        hub.set_verbosity(levels[1])
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
        _loading.release()
