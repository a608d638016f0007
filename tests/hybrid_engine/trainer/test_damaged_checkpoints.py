"""Random damage to a checkpoint: it is refused by name, or the loaded state is bit-identical.

python -m tests.hybrid_engine.trainer.test_damaged_checkpoints 300      # per kind; prints counts
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.files.checksums import CHECKSUMS, checksum_of, read_checksums, write_checksums
from hybrid_engine.trainer import checkpoint_directory, checkpoint_metadata
from hybrid_engine.trainer.checkpoint_directory import LATEST, SavedCheckpoint, differences
from hybrid_engine.trainer.checkpoint_metadata import METADATA
from tests.hybrid_engine.rl.test_damaged_runs import HangError, time_limit
from tests.hybrid_engine.trainer.test_checkpoint_directory import ALONE, DATA, newest

SECONDS = 10
MOST_MEMORY = 1 << 36
"""Address space in bytes, so that a size with a flipped bit cannot fill the machine."""


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "weight": torch.randn(16, 8, generator=generator),
        "bias": torch.randn(16, generator=generator).bfloat16(),
        "exp_avg": torch.randn(16, 8, generator=generator),
        "exp_avg_sq": torch.randn(16, 8, generator=generator),
        "step": torch.tensor(7, dtype=torch.int64),
        "generator": torch.arange(64, dtype=torch.uint8),
        "values": {"lr": 0.1, "betas": (0.9, 0.95), "layout": {"tp": 2}},
    }


def load(directory: Path) -> dict[str, Any]:
    """Load as the trainers do: compare with the live state, then read everything."""
    saved = SavedCheckpoint(directory, ALONE)
    saved.require_fit(differences(saved.entries(""), state()))
    return saved.read_all("")


def are_equal(loaded: dict[str, Any]) -> bool:
    expected = state()
    if loaded.keys() != expected.keys() or loaded["values"] != expected["values"]:
        return False
    tensors = [name for name in expected if name != "values"]
    return all(
        loaded[name].dtype == expected[name].dtype and torch.equal(loaded[name], expected[name]) for name in tensors
    )


def reseal(save: Path) -> None:
    """Write new checksums, like an attacker who changes a file."""
    names = read_checksums(save, "")
    write_checksums(save, {name: checksum_of(save / name) for name in names})


def flip_bit(rng: random.Random, path: Path) -> str:
    contents = bytearray(path.read_bytes())
    position = rng.randrange(len(contents))
    bit = rng.randrange(8)
    contents[position] ^= 1 << bit
    path.write_bytes(contents)
    return f"bit {bit} of byte {position} of {path.name}"


def any_file(rng: random.Random, save: Path) -> Path:
    return rng.choice([save / DATA, save / METADATA, save / CHECKSUMS, save.parent / LATEST])


def flip_any_bit(rng: random.Random, save: Path) -> str:
    return flip_bit(rng, any_file(rng, save))


def truncate(rng: random.Random, save: Path) -> str:
    path = any_file(rng, save)
    length = rng.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"{path.name} cut to {length} bytes"


def replace_file(rng: random.Random, save: Path) -> str:
    """Put a pipe, a device, a link, a directory or a huge file in the place of a file."""
    path = any_file(rng, save)
    shutil.copy(path, save.parent.parent / "elsewhere")
    kinds: dict[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to a copy": lambda path: path.symlink_to(save.parent.parent / "elsewhere"),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a directory": Path.mkdir,
        "256 MB": lambda path: (path.touch(), os.truncate(path, 1 << 28)),
        "nothing": lambda path: None,
    }
    kind = rng.choice(list(kinds))
    path.unlink()
    kinds[kind](path)
    return f"{kind} for {path.name}"


def link_save(rng: random.Random, save: Path) -> str:
    save.rename(save.parent.parent / "elsewhere")
    save.symlink_to(save.parent.parent / "elsewhere")
    return "the save is a link"


def flip_bit_and_reseal(rng: random.Random, save: Path) -> str:
    damage = flip_bit(rng, save / METADATA)
    reseal(save)
    return f"resealed, {damage}"


class Code:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced  # a call that pickle makes on loading


def pickle_code(rng: random.Random, save: Path) -> str:
    marker = str(save.parent.parent / "was-run")
    objects = [
        Code(os.mkdir, marker),
        Code(os.system, f"touch {marker}"),
        Code(eval, f"open({marker!r}, 'w')"),
        Code(getattr, "text", "upper"),
        Code(torch.Size, [1 << 40]),
        {"state_dict_metadata": Code(os.mkdir, marker)},
        [],
    ]
    chosen = rng.randrange(len(objects))
    (save / METADATA).write_bytes(pickle.dumps(objects[chosen]))
    reseal(save)
    return f"resealed, a pickle of {type(objects[chosen]).__name__} {chosen}"


def edit_metadata(rng: random.Random, save: Path) -> str:
    """Change one number or name of the metadata with torch's own classes."""
    metadata = pickle.loads((save / METADATA).read_bytes())
    entries = metadata.state_dict_metadata
    stored = metadata.storage_data
    tensors = [name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]
    name, other = rng.sample(tensors, 2)
    entry = entries[name]
    index = next(index for index in stored if index.fqn == name)
    edits: dict[str, Callable[[], object]] = {
        "no parts": lambda: setattr(entry, "chunks", []),
        "a part twice": lambda: entry.chunks.append(entry.chunks[0]),
        "a part that is too small": lambda: setattr(entry.chunks[0], "sizes", torch.Size([1] * len(entry.size))),
        "a part elsewhere": lambda: setattr(entry.chunks[0], "offsets", torch.Size([1] * len(entry.size))),
        "another dtype": lambda: setattr(entry.properties, "dtype", torch.float16),
        "another size": lambda: setattr(entry, "size", torch.Size([2] * len(entry.size))),
        "stored nowhere": lambda: stored.pop(index),
        "stored in the place of another": lambda: stored.update(
            {index: next(info for key, info in stored.items() if key.fqn == other)}
        ),
        "exchanged": lambda: exchange(stored, index, next(key for key in stored if key.fqn == other)),
        "stored behind the end": lambda: setattr(stored[index], "offset", 1 << 40),
        "stored in another file": lambda: setattr(stored[index], "relative_path", "../elsewhere"),
        "stored in the metadata": lambda: setattr(stored[index], "relative_path", METADATA),
        "a negative place": lambda: setattr(stored[index], "offset", -8),
        "no number": lambda: setattr(stored[index], "length", "8"),
        "not an entry": lambda: entries.pop(name),
        "a value": lambda: entries.update({name: entries["values"]}),
        "a number": lambda: entries.update({name: 5}),
        "in another form": lambda: setattr(stored[index], "transform_descriptors", ["zstd"]),
    }
    edit = rng.choice(list(edits))
    edits[edit]()
    (save / METADATA).write_bytes(pickle.dumps(metadata))
    reseal(save)
    return f"resealed, {name}: {edit}"


def exchange(stored: dict[Any, Any], key: Any, other: Any) -> None:
    before = stored[key]
    stored[key] = stored[other]
    stored[other] = before


KINDS = (flip_any_bit, truncate, replace_file, link_save, flip_bit_and_reseal, pickle_code, edit_metadata)


@contextmanager
def memory_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome_of(kind: Callable[[random.Random, Path], str], seed: int, directory: Path) -> tuple[str, str]:
    """Return the damage, and its outcome: refused, equal, or a description of the defect."""
    checkpoint_directory.save(directory / "saved", state(), ALONE)
    damage = kind(random.Random(f"{kind.__name__}/{seed}"), newest(directory / "saved"))
    try:
        with time_limit(SECONDS), memory_limit(MOST_MEMORY):
            outcome = "equal" if are_equal(load(directory / "saved")) else "accepted wrong"
    except HybridEngineError as error:
        outcome = "refused" if len(str(error)) < 1000 and "\n" not in str(error) else f"wrong: a long message {error}"
    except HangError:
        outcome = "hang"
    except Exception as error:
        outcome = f"raw: {type(error).__name__}: {error}"
    if (directory / "was-run").exists():
        outcome = "wrong: code was run"
    shutil.rmtree(directory)
    return damage, outcome


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage_is_refused_or_harmless(tmp_path: Path, kind: Callable[[random.Random, Path], str]) -> None:
    outcomes = dict(outcome_of(kind, seed, tmp_path / "one") for seed in range(20))
    defects = {damage: outcome for damage, outcome in outcomes.items() if outcome not in ("refused", "equal")}
    assert defects == {}
    assert "refused" in outcomes.values()


def make_entry(size: list[int], *parts: tuple[list[int], list[int]]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in parts]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks)


@pytest.mark.parametrize(
    "entry",
    [
        make_entry([4, 4], ([0, 0], [2, 4]), ([2, 0], [2, 4])),
        make_entry([4, 4], ([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 4])),
        make_entry([3], ([0], [2]), ([2], [1]), ([3], [0])),
        make_entry([0]),
        make_entry([], ([], [])),
    ],
)
def test_parts_that_cover_a_tensor_once_are_accepted(entry: TensorStorageMetadata) -> None:
    checkpoint_metadata._require_covered("weight", entry)


@pytest.mark.parametrize(
    "entry",
    [
        make_entry([4, 4]),
        make_entry([4, 4], ([0, 0], [2, 4])),
        make_entry([4, 4], ([0, 0], [2, 4]), ([1, 0], [2, 4])),  # an overlap and a gap
        make_entry([4, 4], ([0, 0], [4, 4]), ([0, 0], [1, 1])),
        make_entry([4, 4], ([0, 0], [2, 4]), ([3, 0], [2, 4])),
        make_entry([4, 4], ([0, 0], [4, 5]), ([0, 0], [4, -1])),
        make_entry([4, 4], ([0], [16])),
        make_entry([], ([], []), ([], [])),
        make_entry([]),
    ],
)
def test_other_parts_are_refused(entry: TensorStorageMetadata) -> None:
    with pytest.raises(ValueError, match="weight"):
        checkpoint_metadata._require_covered("weight", entry)


def main(num_each: str = "125") -> None:
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for kind in KINDS:
            for seed in range(int(num_each)):
                damage, outcome = outcome_of(kind, seed, Path(directory) / "one")
                counts.setdefault(kind.__name__, Counter())[outcome.partition(":")[0]] += 1
                if outcome not in ("refused", "equal"):
                    print(f"{damage}: {outcome}", flush=True)
    for name, of_kind in counts.items():
        print(f"{name}: {dict(of_kind)}")
    print(f"{sum(of_kind.total() for of_kind in counts.values())} checkpoints: {dict(sum(counts.values(), Counter()))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
