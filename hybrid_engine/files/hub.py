"""Models by directory or by id of the Hugging Face Hub, which become a directory of huggingface_hub's cache.

    find_model("org/name", revision)   configuration and tokenizer; by every process, before there is a job
    Snapshot.at(directory).download()  the weights, by one process of each host

With HF_HUB_OFFLINE=1, or where the Hub cannot be reached, the cache answers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybrid_engine.errors import ConfigError, DependencyError, Violation, clipped
from hybrid_engine.files.model_files import COMPANIONS, CONFIG, INDEX, SINGLE, indexed_files, weight_files

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Snapshot:
    """One commit of a model in the cache: `<cache>/models--<org>--<name>/snapshots/<commit>`, a documented layout.

    Attributes:
        repo_id: `org/name`.
        commit: 40 hexadecimal digits.
        cache: huggingface_hub's directory.
    """

    repo_id: str
    commit: str
    cache: Path

    @classmethod
    def at(cls, directory: Path) -> Snapshot | None:
        """The snapshot that a directory is; None for any other."""
        repository = directory.parent.parent
        kind, *names = repository.name.split("--")
        is_one = directory.parent.name == "snapshots" and kind == "models" and len(names) == 2
        if not is_one or not _COMMIT.fullmatch(directory.name):
            return None
        return cls("/".join(names), directory.name, repository.parent)

    @classmethod
    def in_cache(cls, name: str, revision: str | None = None) -> Snapshot | None:
        """The cached snapshot of an id; None for anything else. Needs no network."""
        if not _ID.fullmatch(name):
            return None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, CONFIG, revision=revision)
        return cls.at(Path(found).parent) if isinstance(found, str) else None

    @property
    def directory(self) -> Path:
        return self.cache / f"models--{self.repo_id.replace('/', '--')}" / "snapshots" / self.commit

    def download(self, key: str = "model") -> None:
        """Bring the safetensors files that are missing. Raises ConfigError, where there are none on the Hub too."""
        wanted = indexed_files(self.directory, key) or [SINGLE]
        if all(os.path.isfile(self.directory / name) for name in wanted):
            return
        _download(self.repo_id, self.commit, wanted, key, self.cache)
        try:
            weight_files(self.directory, key)
        except ConfigError as error:
            found = error.findings[0].problem
            problem = f"{self.repo_id} has no complete safetensors weights at commit {self.commit}: {found}"
            remedy = "Choose a revision or a model that has them, or set random_weights: true"
            raise ConfigError([Violation(key, problem, remedy)]) from None


def find_model(
    name: str | Path, revision: str | None = None, *, key: str = "model", relative_to: Path | None = None
) -> Path:
    """Return the directory of a model: what `name` says if that exists, else of a model on the Hub.

    Args:
        name: a directory, a config.json in one, or `org/name` on the Hub. What is on the Hub is downloaded but for the
            weights, unless it is in the cache.
        revision: branch, tag or commit on the Hub; default: main.
        key: the configuration key or option that `name` is from.
        relative_to: where a relative path begins; default: the working directory.

    A path that does not exist and is no id is returned as it is. Raises ConfigError for a model that cannot be had, and
    for a revision of a directory.
    """
    place = Path(name) if relative_to is None else relative_to / name
    is_there = os.path.exists(place)  # unlike Path's, for any name
    if not is_there and _ID.fullmatch(str(name)):
        return _download(str(name), revision, (*COMPANIONS, INDEX), key)
    if revision is not None:
        problem = f"{clipped(revision)}, but {key} is a path: {place}"
        raise ConfigError([Violation(_sibling(key), problem, "Leave it out, or name a model on the Hub")])
    return place.parent if is_there and place.name == CONFIG and place.is_file() else place


def _download(repo_id: str, revision: str | None, patterns: Sequence[str], key: str, cache: Path | None = None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DependencyError(
            f"{key}: {repo_id} is no directory, and a model on the Hub needs huggingface_hub: pip install "
            "huggingface_hub (transformers and vLLM bring it)"
        ) from error
    with _naming(repo_id, revision, key):
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns), cache_dir=cache))


@contextmanager
def _naming(repo_id: str, revision: str | None, key: str) -> Iterator[None]:
    """Turn errors of huggingface_hub and its HTTP client into a ConfigError."""
    from huggingface_hub import constants, errors

    site = f"{constants.ENDPOINT}/{repo_id}"
    try:
        yield
    except errors.GatedRepoError as error:
        problem = f"{repo_id} is gated"
        remedy = f"Accept its terms on {site}, then log in with `hf auth login`, or set HF_TOKEN"
        raise ConfigError([Violation(key, problem, remedy)]) from error
    except errors.RepositoryNotFoundError as error:
        problem = f"{repo_id} is neither a directory nor a model on the Hub that you may see"
        remedy = "Correct the name; for a private model log in with `hf auth login`, or set HF_TOKEN"
        raise ConfigError([Violation(key, problem, remedy)]) from error
    except errors.RevisionNotFoundError as error:
        problem = f"{repo_id} has no revision {clipped(str(revision))}"
        raise ConfigError([Violation(_sibling(key), problem, f"Choose one of {site}/tree/main")]) from error
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        at = "" if revision is None else f" at {clipped(revision)}"
        problem = f"{repo_id}{at} is not a directory, nor complete in the cache, and {reason}"
        remedy = f"Correct the path, or run `hf download {repo_id}` where there is a network"
        raise ConfigError([Violation(key, problem, remedy)]) from error
    except Exception as error:  # its HTTP client changed with its versions, and the errors of that with it
        problem = f"{repo_id} cannot be downloaded: {clipped(f'{type(error).__name__}: {error}', 500)}"
        remedy = "Try again, or download it by hand and name the directory"
        raise ConfigError([Violation(key, problem, remedy)]) from error


def _sibling(key: str) -> str:
    """The key of the revision beside a model's."""
    return ".".join([*key.split(".")[:-1], "revision"])
