"""Save training shards as a Hugging Face checkpoint, or adapters in PEFT's format.

    save_hf_checkpoint creates `<name>.incomplete`, in which all files are written
    write_files      round by round: each rank receives the tensors of one file, then writes it;
                     rank i modulo the number of ranks writes file i
    put_in_place     replaces the old directory by the new one

Each tensor of the files is a buffer of the rank that writes it. The planner chooses the replica
that sends. A kill leaves the old directory or the new one, never a mixture of weights, or of
weights and configuration. Between two renames there is no directory, and the old one is
`<name>.replaced`.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from hybrid_engine.backends.huggingface.loading import FLOATS, check_names, layout_of
from hybrid_engine.backends.huggingface.safetensors_files import (
    StoredTensor,
    StoredTensors,
    stored_tensors,
    write_file,
)
from hybrid_engine.backends.training_side import NamedTensor, require_finite_to_save
from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    HybridEngineError,
    ParameterMismatchError,
    Violation,
    Violations,
    first_of,
    require_none,
    shortened,
)
from hybrid_engine.files.checksums import CHECKSUMS, checksum_of, read_checksums, write_checksums
from hybrid_engine.files.documents import MAX_JSON_NBYTES, MAX_NBYTES, given_path
from hybrid_engine.files.durable import (
    naming,
    recover_directory,
    replace_directory,
    replaced_path,
    sync,
    write_bytes,
    write_text,
)
from hybrid_engine.files.model_files import (
    CODE,
    COMPANIONS,
    CONFIG,
    DATA,
    DOWNLOAD_AGAIN,
    INDEX,
    SINGLE,
    files_like,
    indexed_files,
)
from hybrid_engine.files.reading import read_regular
from hybrid_engine.models.lora_tensors import ActorLora
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.planning.planner import box_transfers
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.sides import Side
from hybrid_engine.switch.setup import gather_side
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.runs import strided

FILE_NBYTES = 5 * 10**9
"""Bytes of data per file of a saved checkpoint: the default of transformers."""

_ADAPTER_CONFIG = "adapter_config.json"
_FILES_OF_ADAPTERS = (_ADAPTER_CONFIG, "adapter_model.safetensors", CHECKSUMS, "README.md")
"""Files of adapters, also of PEFT's `save_pretrained`."""
_NUMBER = "[0-9]" * 5
_FILES_OF_MODELS = (*DATA, INDEX, SINGLE, f"model-{_NUMBER}-of-{_NUMBER}.safetensors", CHECKSUMS)
"""Patterns of a checkpoint's files, also of a save with another number of files."""


def save_hf_checkpoint(
    path: str | Path,
    weights: TrainingWeights,
    table: ModelTable,
    job: Job,
    model_dir: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    file_nbytes: int = FILE_NBYTES,
    *,
    check_nan: bool = True,
    lora: ActorLora | None = None,
) -> None:
    """Write the training shards as a checkpoint that transformers and vLLM can load. Collective.

    The directory is replaced as a whole. A kill at any moment leaves the old one or the new one;
    see the module's docstring.

    Args:
        path: directory on storage that all ranks share; created if missing.
        weights: this rank's shards, on the device.
        table: name table of the model.
        job: job of all ranks.
        model_dir: directory from which configuration and tokenizer are copied; None: `path`.
        dtype: dtype of the stored weights, e.g. "bfloat16" or torch.bfloat16; None: that of the
            shards.
        file_nbytes: maximum bytes of data in one file.
        check_nan: raise WeightError, before anything is written, if a value would be stored as NaN
            or infinity.
        lora: adapters, which `weights` shows separately, to be written in place of the weights in
            one file of PEFT's, with `model_dir` as the model that they adapt.

    Raises:
        ConfigError: the dtype is not supported, or the directory has weights of another model or
            foreign files. Nothing has been written.
        FileError: a file cannot be written. The old directory is unchanged.
        WeightError: listing the tensors that are not finite, or overflow in `dtype`.
    """
    with job.agreement.phase("preparing the weights"), naming("looking into", str(path)):
        directory = given_path(path, "path").resolve()
        stored_dtype = _dtype_name(dtype)
        weights.prepare()
    source = gather_side(job, weights)
    unread: Collection[str] = ()
    files_of_save = "model{suffix}.safetensors"
    if lora is not None:
        unread = table.shapes
        files_of_save = f"adapter_{files_of_save}"
        file_nbytes = sys.maxsize
        table = replace(table, shapes=lora.shapes, dtypes={}, copies={}, unserved=())
    with job.agreement.phase("planning the checkpoint"):
        tensors = _tensors_to_store(source.holdings.dtypes, table, stored_dtype)
        # As transformers would distribute them: a larger tensor is alone in its file.
        split = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern=files_of_save,
            max_shard_size=file_nbytes,
        )
        files = split.tensor_to_filename
        stored = {name: replace(tensor, file=files[name]) for name, tensor in tensors.items()}
        ranks = {
            name: index % job.world_size
            for index, names in enumerate(by_file(stored).values())
            for name in names
        }
        transfers = transfers_to_writers(source, stored, ranks, table.copies, job, unread)
        buffers = weights.buffers()
        # Checked in the stored dtype, in which a large value may become infinite.
        if check_nan:
            require_finite_to_save(lambda: _converted(transfers, buffers, stored, job.rank))
    new = incomplete(directory)
    # Until the directory is checked, `new` may hold files of others.
    is_removable = False
    try:
        with (
            job.agreement.phase("creating the checkpoint's directory"),
            naming("creating", new),
        ):
            if job.rank == 0:
                require_target(directory, table if lora is None else None)
                is_removable = True
                # The remains of earlier saves.
                recover_directory(directory)
                if new.exists():
                    shutil.rmtree(new)
                new.mkdir(parents=True)
        checksums = write_files(new, stored, transfers, buffers, job)
        with job.agreement.phase("publishing the checkpoint"):
            if job.rank == 0:
                # The config has one dtype, that of most tensors: a router's bias may be float32
                # in a bfloat16 checkpoint.
                dtypes = Counter(tensor.dtype for tensor in stored.values())
                ((usual_dtype, _),) = dtypes.most_common(1)
                companions_dir = directory if model_dir is None else Path(model_dir)
                if lora is None:
                    _copy_companions(companions_dir, new, usual_dtype)
                else:
                    config = {**lora.settings.in_peft(), "base_model_name_or_path": str(model_dir)}
                    write_text(new / _ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
                put_in_place(new, directory, stored, checksums)
    except BaseException as error:
        # Also after KeyboardInterrupt: the next save would remove it, but it takes disk space.
        if is_removable and new.exists():
            try:
                shutil.rmtree(new)
            except OSError as failure:
                error.add_note(f"{new} could not be removed: {failure}")
        raise


def require_target(path: str | Path, table: ModelTable | None) -> None:
    """Check that `save_hf_checkpoint` may replace a directory. Called on one rank.

    `table`: of the model; None for a directory of adapters.

    Raises:
        ConfigError: the directory has weights of another model, or foreign files.
        FileError: the directory cannot be read.
    """
    directory = given_path(path, "path").resolve()
    with naming("looking into", directory):
        patterns = _FILES_OF_ADAPTERS if table is None else _FILES_OF_MODELS
        require_none(_not_replaceable(directory, patterns))
        if table is None or not any((directory / name).is_file() for name in (INDEX, SINGLE)):
            return
        # Weights of the same model may be replaced.
        try:
            check_names(stored_tensors(directory), table, directory)
        except HybridEngineError as error:
            reason = error.findings[0] if isinstance(error, ParameterMismatchError) else error
            raise ConfigError.of(
                "path",
                f"{directory} has weights of another model ({reason})",
                "Name another directory, or remove its weights",
                code="weights-of-another-model",
            ) from error


def _dtype_name(dtype: object) -> str | None:
    """Return the name of a dtype of stored weights. Raises ArgumentError for any other value."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if name is None or (isinstance(name, str) and name in FLOATS):
        return name
    raise ArgumentError.of(
        "dtype",
        f"weights cannot be stored as {shortened(dtype)}",
        f"Use one of {', '.join(FLOATS)}, as a name or torch's, or leave it out for the weights' "
        "dtype",
        code="unsupported-dtype",
    )


def _tensors_to_store(
    dtypes: Mapping[str, str],
    table: ModelTable,
    dtype: str | None,
) -> dict[str, StoredTensor]:
    """Return the tensors in the order of a checkpoint, copies last, without their files.

    `dtypes`: dtype of each tensor that a rank has.

    Layers for multi-token prediction may be missing, as in transformers' models. vLLM does not read
    them.
    """
    stored = {}
    missing = []
    for name, shape in table.shapes.items():
        if name in dtypes:
            stored_dtype = table.dtypes.get(name) or dtype or dtypes[name]
            stored[name] = StoredTensor("", shape, stored_dtype)
        elif table.is_served(name):
            missing.append(f"{name}: no training rank has it")
    if missing:
        raise ParameterMismatchError(missing)
    if dtypes.keys() >= table.shapes.keys():
        # Copies are shared embeddings of the layers for multi-token prediction.
        for copy, name in table.copies.items():
            stored[copy] = stored[name]
    return stored


def _converted(
    transfers: Sequence[Transfer],
    buffers: FlatBuffers,
    stored: StoredTensors,
    rank: int,
) -> Iterator[NamedTensor]:
    """Yield a description of each box that this rank sends, and the box in its stored dtype."""
    for transfer in transfers:
        if transfer.src_rank == rank:
            dtype = stored[transfer.dst.buffer.name].dtype
            box = source_box(transfer, buffers).to(getattr(torch, dtype))
            yield f"{transfer.tensor} as {dtype} on rank {rank}", box


def source_box(transfer: Transfer, buffers: FlatBuffers) -> torch.Tensor:
    """Return the box that a rank sends, in its buffer."""
    return strided(buffers[transfer.src.buffer.name], transfer.lengths, transfer.src).detach()


def _copy_companions(model_dir: Path, new: Path, dtype: str) -> None:
    """Copy configuration, tokenizer and code.

    The configuration is copied with `dtype`, without quantization, and without an `auto_map` whose
    code is not here: transformers would look for the code before it takes a class of its own.
    """
    for path in files_like(model_dir, COMPANIONS):
        if path.name != CONFIG:
            with naming("copying", path, DOWNLOAD_AGAIN):
                write_bytes(new / path.name, read_regular(path, MAX_NBYTES))
    path = model_dir / CONFIG
    if path.is_file():
        with naming("reading", path, DOWNLOAD_AGAIN):
            config = json.loads(read_regular(path, MAX_JSON_NBYTES))
            if not isinstance(config, dict):
                raise ValueError(f"a {type(config).__name__}, not a mapping")
        # The stored weights are not quantized, even if the original checkpoint was.
        config.pop("quantization_config", None)
        # Code of another repository is named as "repository--module.Class".
        modules = re.findall(r"'(\w+)\.\w+'", str(config.get("auto_map")))
        if not all((new / f"{module}.py").is_file() for module in modules):
            del config["auto_map"]
        # transformers renamed the key, and reads both.
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        write_text(new / CONFIG, json.dumps(config, indent=2) + "\n")


# -- files -----------------------------------------------------------------------------------------


def by_file(stored: StoredTensors) -> dict[str, list[str]]:
    """Return file -> names of its tensors, both in order."""
    files: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        files.setdefault(tensor.file, []).append(name)
    return files


def write_files(
    directory: Path,
    stored: StoredTensors,
    transfers: Sequence[Transfer],
    buffers: FlatBuffers,
    job: Job,
) -> dict[str, str]:
    """Write the files, and return the checksums of all files on all ranks. Collective.

    Each rank that writes a file holds it in host memory meanwhile.

    Args:
        directory: directory of the files.
        stored: all tensors of the checkpoint.
        transfers: transfers from and to this rank, in an order on which the ranks agree.
        buffers: this rank's flat buffers, by name.
        job: job of all ranks.

    Raises:
        FileError: a file cannot be written.
    """
    written: dict[str, str] = {}
    files = list(by_file(stored).items())
    with ExitStack() as stack:
        delivery = Delivery(stored, transfers, buffers, job, stack)
        # In each round rank i writes the i-th file.
        for start in range(0, len(files), job.world_size):
            files_of_round = files[start : start + job.world_size]
            tensors: dict[str, TensorDict] = {}
            with (
                job.agreement.phase("collecting the weights", SHORT_PATIENCE),
                torch.no_grad(),
            ):
                # All ranks go through the tensors in the same order, so sends and receives match.
                for writer, (file, names) in enumerate(files_of_round):
                    for name in names:
                        tensor = delivery.bring(name)
                        if writer == job.rank:
                            tensors.setdefault(file, {})[name] = tensor
            with job.agreement.phase("writing the checkpoint"):
                for file, contents in tensors.items():
                    write_file(directory / file, contents)
                    written[file] = checksum_of(directory / file)
    checksums: dict[str, str] = {}
    for of_rank in job.agreement.gather(written, dict[str, str], "writing the checkpoint"):
        checksums |= of_rank
    return checksums


def transfers_to_writers(
    source: Side,
    stored: StoredTensors,
    ranks: Mapping[str, int],
    copies: Mapping[str, str],
    job: Job,
    may_stay_unread: Collection[str] = (),
) -> list[Transfer]:
    """Return the transfers from and to this rank that bring tensors to their writers.

    Args:
        source: layouts of all ranks for training.
        stored: the tensors.
        ranks: tensor -> rank that writes it.
        copies: tensor -> other tensor that it repeats.
        job: job of all ranks.
        may_stay_unread: tensors that need no writer.
    """
    destination = Side.split(layout_of(stored, ranks, copies), job.world_size)
    return box_transfers(source, destination, [""] * job.world_size, job.rank, may_stay_unread)


class Delivery:
    """Tensors on their way from the ranks that train them to the ranks that write them.

    Construction is collective, and all ranks bring the same tensors in the same order.

    Args:
        stored: the tensors.
        transfers: transfers of their boxes from and to this rank.
        buffers: this rank's flat buffers, by name.
        job: job of all ranks.
        stack: ends the connections.
    """

    def __init__(
        self,
        stored: StoredTensors,
        transfers: Sequence[Transfer],
        buffers: FlatBuffers,
        job: Job,
        stack: ExitStack,
    ) -> None:
        self._stored = stored
        self._buffers = buffers
        self._rank = job.rank
        self._transfers: dict[str, list[Transfer]] = {name: [] for name in stored}
        for transfer in transfers:
            self._transfers[transfer.dst.buffer.name].append(transfer)
        peers = {rank for each in transfers for rank in (each.src_rank, each.dst_rank)}
        # Ranks in different parts exchange nothing, so each part has a group.
        parts = job.parts_that_meet(peers)
        self._group = None if parts is None else job.new_group(stack, parts)

    def bring(self, name: str) -> torch.Tensor:
        """Return a tensor on the host, or an empty tensor on a rank that does not write it."""
        stored = self._stored[name]
        transfers = self._transfers[name]
        dtype = getattr(torch, stored.dtype)
        is_writer = any(transfer.dst_rank == self._rank for transfer in transfers)
        whole = torch.empty(stored.shape if is_writer else 0, dtype=dtype)
        works = []
        # Boxes stay referenced until their transfers end.
        received = []
        sent = []
        for transfer in transfers:
            if transfer.src_rank == self._rank:
                box = source_box(transfer, self._buffers).to(device="cpu", dtype=dtype)
                if transfer.dst_rank == self._rank:
                    strided(whole.view(-1), transfer.lengths, transfer.dst).copy_(box)
                else:
                    assert self._group is not None, "a transfer to another rank needs a group"
                    sent.append(_bytes_of(box.contiguous()))
                    works.append(self._group.begin_send(sent[-1], transfer.dst_rank))
            else:
                assert self._group is not None, "a transfer from another rank needs a group"
                box = torch.empty(transfer.lengths, dtype=dtype)
                received.append((transfer, box))
                works.append(self._group.begin_receive(_bytes_of(box), transfer.src_rank))
        for work in works:
            work.wait()
        for transfer, box in received:
            strided(whole.view(-1), transfer.lengths, transfer.dst).copy_(box)
        return whole


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


# -- the directory, on one rank --------------------------------------------------------------------


def incomplete(directory: Path) -> Path:
    """Return the path of the directory that replaces `directory` once it is complete."""
    return directory.with_name(f"{directory.name}.incomplete")


def _not_replaceable(directory: Path, patterns: Sequence[str]) -> Violations:
    """Yield why a save must not replace a directory, or the remains of a killed save.

    `patterns`: of the names of its files.
    """
    if Path.cwd().is_relative_to(directory) or directory.is_mount():
        yield Violation(
            "path",
            f"{directory} is a mount point, the working directory, or above it, and cannot be "
            "replaced",
            "Name a directory below it",
            code="not-replaceable",
        )
    for place in (directory, incomplete(directory), replaced_path(directory)):
        if place.exists() and (names := _foreign_names(place, patterns)):
            yield Violation(
                "path",
                f"{place} has files that this save does not write: {first_of(names, 5)}",
                "Save to another directory, or move these files away",
                code="foreign-files",
            )


def _foreign_names(directory: Path, patterns: Sequence[str]) -> list[str]:
    """Return the sorted names of entries that a save of files like `patterns` does not write."""
    ours = {*(indexed_files(directory) or ())}
    if directory.suffix == ".incomplete":
        patterns = [*patterns, CODE]
    elif (directory / CHECKSUMS).is_file():
        # Other code is a user's.
        ours.update(fnmatch.filter(read_checksums(directory, "Remove it"), CODE))
    foreign = []
    for path in directory.iterdir():
        # A killed write of a file leaves it under this name.
        name = path.name.removesuffix(".incomplete")
        is_ours = name in ours or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        if not (is_ours and path.is_file()):
            foreign.append(path.name)
    return sorted(foreign)


def put_in_place(
    new: Path,
    directory: Path,
    stored: StoredTensors,
    checksums: Mapping[str, str],
) -> None:
    """Write index and checksums to a new directory, and replace `directory` by it.

    Raises:
        FileError: a file or directory cannot be written.
    """
    # A single file needs no index.
    if len(checksums) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
            "weight_map": {name: tensor.file for name, tensor in stored.items()},
        }
        write_text(new / INDEX, json.dumps(index, indent=2) + "\n")
    # Those of other files also tell later that code is not a user's.
    others = {path.name: checksum_of(path) for path in new.iterdir() if path.name not in checksums}
    write_checksums(new, {**others, **checksums})
    with naming("replacing", directory):
        # The entries must be on the disk before the old directory goes.
        sync(new)
        replace_directory(new, directory)
