"""Saving a Hugging Face checkpoint from one rank: kills, full disks, foreign files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_engine.backends.huggingface import (
    load_hf_checkpoint,
    require_target,
    save_hf_checkpoint,
)
from hybrid_engine.backends.training_side import WholeTensors
from hybrid_engine.errors import ConfigError, FileError
from hybrid_engine.files.checksums import CHECKSUMS
from hybrid_engine.files.model_files import INDEX, SINGLE
from hybrid_engine.records.regions import Shape
from tests.harness.errors import has_code, has_violations, violated
from tests.harness.kills import accepted_flips, kill_at_every_step
from tests.zoo.families import read_config

SHAPES: dict[str, Shape] = {"a": (30,), "b": (2, 3), "c": ()}
ONE_FILE = 10**9
SEVERAL_FILES = 30
# A job of one rank, for which collectives are trivial.
AGREEMENT = SimpleNamespace(
    phase=lambda name, patience=None: nullcontext(),
    gather=lambda value, kind, phase, limit=0: [value],
    share=lambda messages, phase: ([range(len(messages))], messages),
    rounds=lambda name, steps: list(steps),
)
ALONE: Any = SimpleNamespace(
    rank=0,
    world_size=1,
    agreement=AGREEMENT,
    parts_that_meet=lambda peers: None,
    new_group=lambda owner, parts: None,
)
TABLE: Any = SimpleNamespace(
    shapes=SHAPES,
    copies={"d": "a"},
    dtypes={},
    architecture="AForCausalLM",
    dims=SimpleNamespace(tied_embeddings=False),
    match=lambda name: None,
    is_served=SHAPES.__contains__,
    may_be_new=frozenset(),
    left_out=frozenset(),
    is_ignored=lambda name: False,
)


def weights_of(value: float) -> WholeTensors:
    """Return the training weights of one rank, with all elements equal to `value`."""
    return WholeTensors(
        {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}, 0
    )


def save(directory: Path, value: float = 1, file_nbytes: int = ONE_FILE, **settings: Any) -> None:
    weights = weights_of(value)
    save_hf_checkpoint(directory, weights, TABLE, ALONE, file_nbytes=file_nbytes, **settings)


def contents_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """Temporary directory, in memory where possible: hundreds of saves need no disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else None
    ) as directory:
        yield Path(directory)


@pytest.mark.parametrize(
    "file_nbytes", [ONE_FILE, SEVERAL_FILES], ids=["one file", "several files"]
)
def test_saved_files_match_the_index(tmp_path: Path, file_nbytes: int) -> None:
    save(
        tmp_path / "hf",
        2,
        file_nbytes,
        dtype="bfloat16" if file_nbytes == ONE_FILE else torch.bfloat16,
    )
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    loaded = {file: load_file(tmp_path / "hf" / file) for file in files}
    tensors = {name: tensor for contents in loaded.values() for name, tensor in contents.items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        **SHAPES,
        "d": SHAPES["a"],
    }
    assert all(
        tensor.dtype == torch.bfloat16 and (tensor == 2).all() for tensor in tensors.values()
    )
    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1
    if file_nbytes == ONE_FILE:
        assert files == [SINGLE]
    else:
        index = json.loads((tmp_path / "hf" / INDEX).read_text())
        assert index["weight_map"] == {
            name: file for file, contents in loaded.items() for name in contents
        }
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("dtype", ["bf16", torch.int8, 16])
def test_a_dtype_other_than_of_weights_is_refused(tmp_path: Path, dtype: Any) -> None:
    with violated(ConfigError, ("dtype", "unsupported-dtype")):
        save(tmp_path / "hf", dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("newer", [ONE_FILE, SEVERAL_FILES], ids=["to one file", "to several"])
@pytest.mark.parametrize(
    "older", [None, ONE_FILE, SEVERAL_FILES], ids=["nothing", "one file", "several files"]
)
def test_a_killed_save_leaves_the_old_or_the_new_directory(
    quick_path: Path, older: int | None, newer: int
) -> None:
    model, directory, replaced = (quick_path / name for name in ("model", "hf", "hf.replaced"))
    model.mkdir()
    (model / "config.json").write_text(
        '{"dtype": "float64", "quantization_config": {}, "hidden_size": 8}'
    )
    (model / "tokenizer.json").write_text("{}")
    (model / "modeling.py").write_text("")
    expected: list[dict[str, bytes] | None] = [None, None]
    for number, file_nbytes in enumerate((older, newer)):
        if file_nbytes is not None:
            save(quick_path / f"expected-{number}", number, file_nbytes, model_dir=model)
            expected[number] = contents_of(quick_path / f"expected-{number}")
    results = []

    def prepare() -> None:
        for path in (directory, replaced):
            shutil.rmtree(path, ignore_errors=True)
        if older is not None:
            shutil.copytree(quick_path / "expected-0", directory)

    # Killed before each call that changes a file.
    for _ in kill_at_every_step(lambda: save(directory, 1, newer, model_dir=model), prepare):
        if directory.exists():
            results.append(contents_of(directory))
        else:
            # Between two renames the old directory lies at hf.replaced.
            assert older is None or contents_of(replaced) == expected[0]
            results.append(expected[0])
    assert results == [expected[0]] * results.count(expected[0]) + [expected[1]] * results.count(
        expected[1]
    )
    assert (results[0], results[-1]) == tuple(expected)
    config = json.loads(expected[1]["config.json"] if expected[1] else b"")
    # The dtype of the saved weights replaces the original.
    assert config == {"dtype": "float32", "hidden_size": 8}
    # Every save removed the leftovers of the killed save before it.
    assert sorted(path.name for path in quick_path.glob("hf*")) == ["hf"]


def check_refused(base: Path, code: str, directory: str) -> None:
    """Check that a save to `base` names a directory with contents that it would remove, and removes
    none.
    """
    # Files and folders, with contents.
    before = {path: path.is_file() and path.read_bytes() for path in base.rglob("*")}
    with violated(ConfigError, ("path", code)) as caught:
        save(base / "hf")
    assert str(base / directory) in str(caught.value)
    assert {path: path.is_file() and path.read_bytes() for path in base.rglob("*")} == before


@pytest.mark.parametrize(
    "name",
    [
        *(
            "hf/notes.txt",
            "hf/train.py",
            "hf/adapter_model.safetensors",
            "hf/tokenizer.json/of a folder",
        ),
        *("hf.incomplete/notes.txt", "hf.replaced/notes.txt"),
    ],
)
def test_foreign_files_are_never_removed(tmp_path: Path, name: str) -> None:
    save(tmp_path / "hf")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    check_refused(tmp_path, "foreign-files", name.partition("/")[0])


def test_adapters_never_replace_weights(tmp_path: Path) -> None:
    save(tmp_path / "hf")
    with violated(ConfigError, ("path", "foreign-files")):
        require_target(tmp_path / "hf", None)


@pytest.mark.parametrize("name", ["z", "a"])
def test_weights_of_another_model_are_never_removed(tmp_path: Path, name: str) -> None:
    """Another name, and another shape."""
    save(tmp_path / "hf")
    save_file({name: torch.ones(3)}, tmp_path / "hf" / SINGLE)
    check_refused(tmp_path, "weights-of-another-model", "hf")


CONFIGURATION = """
from transformers import DeepseekV3Config

class MadeUpConfig(DeepseekV3Config):
    model_type = "made_up"
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizer
from .ranks import read

class MadeUpTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **options):
        self.ranks = read(vocab_file)
        super().__init__(**options)

    vocab_size = property(lambda self: len(self.ranks))
    get_vocab = lambda self: dict(self.ranks)
    _tokenize = lambda self, text: list(text)
    _convert_token_to_id = lambda self, token: self.ranks[token]
"""
RANKS = (
    "def read(path):\n    return {token: rank for rank, token in enumerate(open(path).read())}\n"
)
OF_CONFIG = {"auto_map": {"AutoConfig": "configuration_made_up.MadeUpConfig"}}
OF_TOKENIZER = {"auto_map": {"AutoTokenizer": ["tokenization_made_up.MadeUpTokenizer", None]}}


@pytest.mark.parametrize(("model_type", "has_code"), [("deepseek_v3", False), ("made_up", True)])
def test_transformers_loads_a_saved_model_with_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, has_code: bool
) -> None:
    """Kimi-K2 has code and a tokenizer of tiktoken; transformers knows DeepSeek-V3 without its
    code.
    """
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    files = {
        "config.json": json.dumps({"model_type": model_type, **OF_CONFIG}),
        "tiktoken.model": "abc",
    }
    files["tokenizer_config.json"] = json.dumps(OF_TOKENIZER)
    if has_code:
        code = {
            "configuration_made_up": CONFIGURATION,
            "tokenization_made_up": TOKENIZATION,
            "ranks": RANKS,
        }
        files |= {f"{name}.py": text for name, text in code.items()}
    model = tmp_path / "model"
    model.mkdir()
    for name, text in files.items():
        (model / name).write_text(text)
    saved = tmp_path / f"saved_{model_type}"
    for value in (1, 2):  # the second save replaces the first one's code
        save(saved, value, model_dir=model)
    assert {path.name for path in saved.iterdir()} == {*files, SINGLE, CHECKSUMS}
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(saved, trust_remote_code=True)
    if has_code:
        assert type(config).__name__ == "MadeUpConfig"
        tokenizer = AutoTokenizer.from_pretrained(saved, trust_remote_code=True)
        assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("cab")) == [2, 0, 1]
    else:
        assert type(config).__name__ == "DeepseekV3Config"


def test_working_directories_are_not_replaced_and_links_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path / "disk")
    for place in (".", "..", "/proc"):  # none can be renamed or removed
        with pytest.raises(
            ConfigError, check=has_violations(("path", "not-replaceable"), exactly=False)
        ):
            save(Path(place))
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "hf")
    for value in (1, 2):
        save(tmp_path / "link", value)
        assert load_file(tmp_path / "disk" / "hf" / SINGLE)["c"] == value
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["hf"]


def test_an_existing_configuration_is_kept(tmp_path: Path) -> None:
    for model_dir in (None, tmp_path):  # nothing to copy from, or the directory itself
        (tmp_path / "config.json").write_text('{"torch_dtype": "float16", "a": 1}')
        save(tmp_path, model_dir=model_dir)
        assert read_config(tmp_path) == {
            "torch_dtype": "float32",
            "a": 1,
        }


def test_a_full_disk_raises_and_the_old_files_stay(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(small_disk / "hf")
    before = contents_of(small_disk / "hf")
    monkeypatch.setitem(SHAPES, "a", (1 << 20,))  # more than the disk holds
    with violated(ConfigError, ("path", "weights-of-another-model")):
        save(small_disk / "hf")
    full = has_code("file-failed", "new.incomplete/model.safetensors", "no space left", "MB free")
    with pytest.raises(FileError, check=full):
        save(small_disk / "new")
    assert contents_of(small_disk / "hf") == before
    assert [path.name for path in small_disk.iterdir()] == ["hf"]


def load(directory: Path, weights: WholeTensors | None = None) -> list[float]:
    weights = weights or weights_of(0)
    load_hf_checkpoint(directory, weights, TABLE, ALONE)
    return [float(tensor.mean()) for tensor in weights.tensors.values()]


def test_contents_are_compared_with_their_checksums(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rope_theta": 1000}')
    save(tmp_path, 1, SEVERAL_FILES)
    assert (tmp_path / INDEX).is_file()
    kept = weights_of(7)
    assert accepted_flips(tmp_path.iterdir(), lambda: load(tmp_path, kept), every=17) == []
    assert all((tensor == 7).all() for tensor in kept.tensors.values())
    save(tmp_path)
    path = (tmp_path / SINGLE).rename(tmp_path / "elsewhere").with_name(SINGLE)
    path.symlink_to("elsewhere")  # like the cache of the Hub
    assert load(tmp_path) == [1.0] * len(SHAPES)
    path.unlink()
    save_file(
        {name: torch.full(shape, 5.0) for name, shape in SHAPES.items()}, path
    )  # as another program would
    with pytest.raises(FileError, match=CHECKSUMS):
        load(tmp_path)
    (tmp_path / CHECKSUMS).unlink()
    assert load(tmp_path) == [5.0] * len(SHAPES)
