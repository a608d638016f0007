"""Directories of models, by path or by id on the Hugging Face Hub.

A model on the Hub is a directory in the cache of huggingface_hub.

    find_model("org/name", revision)      fetches configuration and tokenizer, on every process
    HubSnapshot.at(directory).download()  fetches the weights, on one process of each host

With HF_HUB_OFFLINE=1, or if the Hub cannot be reached, only the cache is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybrid_engine.errors import ConfigError, clipped, needing_package
from hybrid_engine.files.model_files import (
    COMPANIONS,
    CONFIG,
    INDEX,
    SINGLE,
    indexed_files,
    weight_files,
)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubSnapshot:
    """A commit of a model in the cache.

    Its documented path is `<cache>/models--<org>--<name>/snapshots/<commit>`.

    Attributes:
        repo_id: `org/name`.
        commit: 40 hexadecimal digits.
        cache: huggingface_hub's directory.
    """

    repo_id: str
    commit: str
    cache: Path

    @classmethod
    def at(cls, directory: Path) -> HubSnapshot | None:
        """Return the snapshot in a directory; None if it is not in a cache."""
        repository = directory.parent.parent
        kind, *names = repository.name.split("--")
        is_model = kind == "models" and len(names) == 2
        if not is_model or directory.parent.name != "snapshots":
            return None
        if not _COMMIT.fullmatch(directory.name):
            return None
        return cls("/".join(names), directory.name, repository.parent)

    @classmethod
    def in_cache(cls, name: str, revision: str | None = None) -> HubSnapshot | None:
        """Return the cached snapshot of an id; None if there is none. Needs no network."""
        if not _ID.fullmatch(name):
            return None
        from huggingface_hub import try_to_load_from_cache

        # A file that is known to be missing is reported by an object that is not a string.
        path = try_to_load_from_cache(name, CONFIG, revision=revision)
        return cls.at(Path(path).parent) if isinstance(path, str) else None

    @property
    def directory(self) -> Path:
        repository = f"models--{self.repo_id.replace('/', '--')}"
        return self.cache / repository / "snapshots" / self.commit

    def download(self, key: str = "model") -> None:
        """Download the missing safetensors files.

        Raises:
            ConfigError: the download fails, or the model has no complete safetensors weights.
        """
        names = indexed_files(self.directory, key) or [SINGLE]
        if all(os.path.isfile(self.directory / name) for name in names):
            return
        _download(self.repo_id, self.commit, names, key, self.cache)
        try:
            weight_files(self.directory, key)
        except ConfigError as error:
            reason = error.findings[0].problem
            raise ConfigError.of(
                key,
                f"{self.repo_id} has no complete safetensors weights at commit "
                f"{self.commit}: {reason}",
                "Choose a revision or a model that has them, or set random_weights: true",
                code="no-weights",
            ) from None


def find_model(
    name: str | Path,
    revision: str | None = None,
    *,
    key: str = "model",
    relative_to: Path | None = None,
) -> Path:
    """Return the directory of a model.

    Args:
        name: a directory, a config.json in a directory, or `org/name` on the Hub. An existing path
            takes precedence. Files of a model on the Hub, except for its weights, are downloaded
            unless they are in the cache.
        revision: branch, tag or commit on the Hub; default: main.
        key: configuration key or option with the name.
        relative_to: base of a relative path; default: the working directory.

    Returns:
        The directory. A path that does not exist and is not an id is returned unchanged.

    Raises:
        ConfigError: the download fails, or `revision` is set for a directory.
        DependencyError: the model is on the Hub, and huggingface_hub is not installed.
    """
    path = Path(name) if relative_to is None else relative_to / name
    # `os.path.exists` accepts any name, unlike `Path.exists`.
    exists = os.path.exists(path)
    if not exists and _ID.fullmatch(str(name)):
        return _download(str(name), revision, (*COMPANIONS, INDEX), key)
    if revision is not None:
        raise ConfigError.of(
            _revision_key(key),
            f"{clipped(revision)}, but {key} is a path: {path}",
            "Leave it out, or name a model on the Hub",
            code="revision-of-a-path",
        )
    is_config = exists and path.name == CONFIG and path.is_file()
    return path.parent if is_config else path


def _download(
    repo_id: str,
    revision: str | None,
    patterns: Sequence[str],
    key: str,
    cache: Path | None = None,
) -> Path:
    with needing_package(
        f"{key}: {repo_id} is not a directory, and a model on the Hub needs huggingface_hub: "
        "pip install huggingface_hub (transformers and vLLM bring it)"
    ):
        from huggingface_hub import snapshot_download
    with _naming(repo_id, revision, key):
        directory = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(patterns),
            cache_dir=cache,
        )
    return Path(directory)


@contextmanager
def _naming(repo_id: str, revision: str | None, key: str) -> Iterator[None]:
    """Convert errors of huggingface_hub and its HTTP client to a ConfigError."""
    from huggingface_hub import constants, errors

    site = f"{constants.ENDPOINT}/{repo_id}"
    try:
        yield
    # GatedRepoError is a RepositoryNotFoundError, so it comes first.
    except errors.GatedRepoError as error:
        raise ConfigError.of(
            key,
            f"{repo_id} is gated",
            f"Accept its terms on {site}, then log in with `hf auth login`, or set HF_TOKEN",
            code="gated-model",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError.of(
            key,
            f"{repo_id} is neither a directory nor a model on the Hub that you may see",
            "Correct the name; for a private model log in with `hf auth login`, or set HF_TOKEN",
            code="unknown-model",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError.of(
            _revision_key(key),
            f"{repo_id} has no revision {clipped(str(revision))}",
            f"Choose one of {site}/tree/main",
            code="unknown-revision",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        reason = "the Hub cannot be reached"
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        at = "" if revision is None else f" at {clipped(revision)}"
        raise ConfigError.of(
            key,
            f"{repo_id}{at} is not a directory, nor complete in the cache, and {reason}",
            f"Correct the path, or run `hf download {repo_id}` where there is a network",
            code="not-in-cache",
        ) from error
    # The HTTP client, and with it the type of its errors, changed between versions.
    except Exception as error:
        reason = clipped(f"{type(error).__name__}: {error}", 500)
        raise ConfigError.of(
            key,
            f"{repo_id} cannot be downloaded: {reason}",
            "Try again, or download it by hand and name the directory",
            code="download-failed",
        ) from error


def _revision_key(key: str) -> str:
    """Return the key of the revision that belongs to a model's key."""
    return ".".join([*key.split(".")[:-1], "revision"])
