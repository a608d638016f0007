"""The files of a Hugging Face model: configuration, tokenizer and weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError, Violation, clipped, first_of
from hybrid_engine.files.durable import naming
from hybrid_engine.files.reading import read_regular

CONFIG = "config.json"
HfConfig = Mapping[str, Any]
"""Contents of a config.json."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

CODE = "*.py"
"""Pattern of the code that an `auto_map` names; it is copied, and never imported here."""
TOKENIZER = (
    *("*token*.json", "tekken.json", "*.model", "*.tiktoken"),
    *("vocab.*", "merges.txt", "*.jinja"),
)
"""Patterns of the files of a model's tokenizer, without its code."""
PROCESSOR = ("*processor*.json", "chat_template.json")
"""Patterns of the files of a processor of images."""
DATA = (CONFIG, "generation_config.json", *TOKENIZER, *PROCESSOR)
COMPANIONS = (*DATA, CODE)
"""Patterns of a model's files other than its weights."""

DOWNLOAD_AGAIN = "Download it again, or restore it from a copy"

_MAX_INDEX_NBYTES = 1 << 27
"""The index of DeepSeek-V3 has 9 MB."""
_MAX_COMPANION_NBYTES = 1 << 30

_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth")


def files_like(directory: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the files of a directory that match each pattern, pattern by pattern."""
    for pattern in patterns:
        yield from directory.glob(pattern)


def companions_digest(directory: Path) -> str:
    """Return a digest of configuration and tokenizer, as 16 hexadecimal digits.

    It covers names and contents, not the location of the directory.

    Raises:
        FileError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=8)
    # A set, because a file can match several patterns.
    paths = {path for path in files_like(directory, COMPANIONS) if path.is_file()}
    for path in sorted(paths):
        with naming("reading", path, DOWNLOAD_AGAIN):
            contents = read_regular(path, _MAX_COMPANION_NBYTES)
        # The length separates the contents from the next file.
        header = f"{path.name}:{len(contents)}:"
        digest.update(header.encode(errors="surrogateescape"))
        digest.update(contents)
    return digest.hexdigest()


def weight_files(directory: Path, key: str = "path") -> list[str]:
    """Return the names of the safetensors files with a model's weights, which all exist.

    Raises:
        ConfigError: under `key`; there are no safetensors files, or the index is invalid or lists
            missing files.
        FileError: the index cannot be read.
    """
    names = indexed_files(directory, key)
    if names is None:
        if not (directory / SINGLE).is_file():
            raise ConfigError([_without_weights(directory, key)])
        return [SINGLE]
    # `os.path.isfile` accepts any name, unlike `Path.is_file`.
    missing = [clipped(name) for name in names if not os.path.isfile(directory / name)]
    if missing:
        raise ConfigError.of(
            key,
            f"{directory / INDEX} names missing files: {first_of(missing, 5)}",
            "Complete the download",
            code="missing-files",
        )
    return names


def _without_weights(directory: Path, key: str) -> Violation:
    for pattern in _PICKLED:
        for path in sorted(directory.glob(pattern)):
            return Violation(
                key,
                f"{directory} has its weights in {path.name}, a pickle, which is not read",
                "Convert them: load it with transformers and call save_pretrained, "
                "which writes safetensors",
                code="pickled-weights",
            )
    return Violation(
        key,
        f"{directory} has neither {INDEX} nor {SINGLE}",
        "Name the directory of a safetensors checkpoint",
        code="no-weights",
    )


def indexed_files(directory: Path, key: str = "path") -> list[str] | None:
    """Return the sorted names of the files in the index; None if there is no index.

    Raises:
        ConfigError: under `key`; the index is invalid.
        FileError: the index cannot be read.
    """
    path = directory / INDEX
    if not path.is_file():
        return None
    with naming("reading", path, DOWNLOAD_AGAIN):
        index = json.loads(read_regular(path, _MAX_INDEX_NBYTES))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError.of(
            key,
            f"{path} has no weight_map",
            "Download it again",
            code="invalid-index",
        )
    outside = [str(name) for name in weight_map.values() if not is_plain_name(name)]
    if outside:
        raise ConfigError.of(
            key,
            f"{path} names files outside its directory: {', '.join(outside)[:200]}",
            "Name files without directories",
            code="invalid-index",
        )
    return sorted(set(weight_map.values()))


def is_plain_name(name: object) -> bool:
    """Return whether `name` is a file name without a directory."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return "/" not in name and "\0" not in name
