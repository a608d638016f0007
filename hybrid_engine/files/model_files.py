"""Which files a Hugging Face model consists of, and which of them hold its weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybrid_engine.errors import ConfigError, Violation, clipped, first_of
from hybrid_engine.files.durable import naming
from hybrid_engine.files.reading import read_regular

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

TOKENIZER = ("*token*.json", "tokenizer.model", "vocab.*", "merges.txt", "*.jinja")
"""Patterns of the files of a model's tokenizer."""
COMPANIONS = (CONFIG, "generation_config.json", *TOKENIZER)
"""Patterns of the files that belong to a model beside its weights."""

DOWNLOAD_AGAIN = "Download it again, or restore it from a copy"

_MOST_INDEX_NBYTES = 1 << 27
"""The index of DeepSeek-V3 has 9 MB."""
_MOST_COMPANION_NBYTES = 1 << 30

_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth")


def files_like(directory: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Files of a model that one of the patterns is of."""
    return (path for pattern in patterns for path in directory.glob(pattern))


def companions_digest(directory: Path) -> str:
    """Digest of configuration and tokenizer, by names and contents, wherever the directory is. Raises FileError."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted({path for path in files_like(directory, COMPANIONS) if path.is_file()}):
        with naming("reading", path, DOWNLOAD_AGAIN):
            contents = read_regular(path, _MOST_COMPANION_NBYTES)
        digest.update(f"{path.name}:{len(contents)}:".encode(errors="surrogateescape"))
        digest.update(contents)
    return digest.hexdigest()


def weight_files(directory: Path, key: str = "path") -> list[str]:
    """Names of the safetensors files with a model's weights, all of which are there.

    Raises, under `key`:
        ConfigError: without safetensors files, and for an index that is invalid or names missing files.
        FileError: for an index that cannot be read.
    """
    names = indexed_files(directory, key)
    if names is None:
        if not (directory / SINGLE).is_file():
            raise ConfigError([_without_weights(directory, key)])
        return [SINGLE]
    if missing := [clipped(name) for name in names if not os.path.isfile(directory / name)]:  # for any name
        problem = f"{directory / INDEX} names missing files: {first_of(missing, 5)}"
        raise ConfigError([Violation(key, problem, "Complete the download")])
    return names


def _without_weights(directory: Path, key: str) -> Violation:
    problem = f"{directory} has neither {INDEX} nor {SINGLE}"
    pickled = next((path.name for pattern in _PICKLED for path in sorted(directory.glob(pattern))), None)
    if pickled is not None:
        problem = f"{directory} has its weights in {pickled}, a pickle, which is not read"
        remedy = "Convert them: load it with transformers and call save_pretrained, which writes safetensors"
        return Violation(key, problem, remedy)
    return Violation(key, problem, "Name the directory of a safetensors checkpoint")


def indexed_files(directory: Path, key: str = "path") -> list[str] | None:
    """Names of the files that the index names, sorted; None without an index. Raises ConfigError, FileError."""
    index = directory / INDEX
    if not index.is_file():
        return None
    with naming("reading", index, DOWNLOAD_AGAIN):
        found = json.loads(read_regular(index, _MOST_INDEX_NBYTES))
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError([Violation(key, f"{index} has no weight_map", "Download it again")])
    if foreign := [str(name) for name in weight_map.values() if not is_plain_name(name)]:
        problem = f"{index} names files outside its directory: {', '.join(foreign)[:200]}"
        raise ConfigError([Violation(key, problem, "Name files without directories")])
    return sorted(set(weight_map.values()))


def is_plain_name(name: object) -> bool:
    """Whether it is a file name without a directory."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name
