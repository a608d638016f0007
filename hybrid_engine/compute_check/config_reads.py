"""Keys of config.json that a side reads, and those that one side alone reads.

The classes of either side may read keys that the other side's classes ignore. Some have no effect
before weights or sequences have grown: a clamp of queries, a limit of an activation, a scaling by
position. So both sides get a config object that records its reads while they construct the model:

    recorder = ReadRecorder(is_reader)       which frames are a side's own code
    recorder.watch(config)                   the object, and its sections, record reads from now on
    ...                                      the model is constructed, and computes once if it can
    recorder.scan(model)                     names that forward methods read
    recorder.stop()                          before forward passes, which may be compiled
    one_sided(...)                           what each side reads alone, of all ranks

Numbers that one side alone reads are refused, because only numbers act as limits, unless
`_DECIDED_ELSEWHERE` has them. All other values choose code: they change every token, so the
log-probabilities tell.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from types import FrameType
from typing import Any

import torch

from hybrid_engine.errors import Violation, shortened

_ABSENT = object()
_TOKENS = ("_token_id", "_token_index")
"""Ends of the keys of tokens, which inputs have or lack."""
_SECTIONS = ("rope_parameters", "rope_scaling")
"""Keys whose values are dictionaries of rotary settings, possibly one for each kind of layer."""
_READS = ("__contains__", "__getitem__", "get")
"""Methods that read a key of a dictionary."""


@dataclass(frozen=True)
class Read:
    """First read of a key by a side's own code.

    Attributes:
        reader: function and module that read it.
        value: the value, for messages.
        is_usual: the reader has the same value if config.json lacks the key.
        is_number: the value is a number, or has numbers in it.
    """

    reader: str
    value: str
    is_usual: bool
    is_number: bool


Reads = Mapping[str, Read]
"""Key of config.json -> its first read."""


@dataclass(frozen=True)
class _Watched:
    """A config class whose objects record their reads, and the contents of the watched object."""

    config_class: Any
    prefix: str
    values: dict[str, Any]

    def without(self, key: str) -> Any:
        """Return an attribute's value without its key in config.json; `_ABSENT` without a value."""
        aliases = {name for name, of in self.config_class.attribute_map.items() if of == key}
        present = [self.values[name] for name in (key, *aliases) if name in self.values]
        default = getattr(self.config_class, key, _ABSENT)
        if not present or default == present[0]:
            return default
        rest = {name: value for name, value in self.values.items() if name not in {key, *aliases}}
        try:
            return getattr(self.config_class.from_dict(rest), key, _ABSENT)
        except Exception:
            # The other values need this one, as sizes of tensors do, which loading compares.
            return present[0]


_DECIDED_ELSEWHERE = {
    "sizes of tensors and numbers of layers, which loading compares": (
        # Whole words between underscores: head_dim and num_experts, but not dimension.
        r"(^|_)(num|n|size|dim|rank|heads?|layers?|experts?|groups?|k|topk|freq|step|replace|expand)(_|$)"
    ),
    "windows and rotations, which are compared layer by layer": (
        # The whole section of rotary settings but llama_4_scaling_beta, which does not rotate.
        r"window|rotary_(dim|pct)|^rope_(theta|scaling|parameters)$|rope_parameters\.(?!llama_4)"
    ),
    "lengths, which limit inputs": r"position_embeddings|length|seq_len",
    "training and initialisation": r"drop|jitter|loss|coef|init|std|time_step_(max|floor)",
    # transformers' Nemotron-H clamps steps there, which acts on the first tokens already.
    "effects on every token": r"^time_step_min$",
}
"""Reason -> pattern of keys whose numbers either side may read alone."""
_OF_POSITIONS = re.compile(r"llama_4_scaling_beta$")
"""Keys that act beyond `original_max_position_embeddings` alone."""
OF_ALL_FAMILIES = {"architectures", "model_type", "dtype", "torch_dtype"}


def merged_reads(ranks: Iterable[Reads | None]) -> dict[str, Read] | None:
    """Return the reads of all ranks' parts of a side; None if one does not record them."""
    merged: dict[str, Read] = {}
    for reads in ranks:
        if reads is None:
            return None
        for key, read in reads.items():
            _add(merged, key, read)
    return merged


def _add(reads: dict[str, Read], key: str, read: Read) -> None:
    """Add a read of a key, in place of one with the same value as without the key."""
    if reads.setdefault(key, read).is_usual:
        reads[key] = read


def one_sided(
    trainer: Reads | None,
    inference: Reads | None,
    scales_positions: bool,
) -> tuple[list[Violation], list[str]]:
    """Return violations for limits that one side alone reads, and texts about its other keys.

    Args:
        trainer, inference: reads of all ranks; None: unknown, so nothing is compared.
        scales_positions: sequences may be longer than `original_max_position_embeddings`.
    """
    violations: list[Violation] = []
    texts: list[str] = []
    if trainer is None or inference is None:
        return violations, texts
    by_trainer = partial(Violation, code="read-by-trainer-alone")
    by_vllm = partial(Violation, code="read-by-vllm-alone")
    sides = (
        (trainer, inference, "the trainer", "vLLM", by_trainer),
        (inference, trainer, "vLLM", "the trainer", by_vllm),
    )
    for reads, others, name, other, violation in sides:
        for key, read in sorted(reads.items()):
            is_decided = any(re.search(pattern, key) for pattern in _DECIDED_ELSEWHERE.values())
            if key in others or read.is_usual or is_decided or key in OF_ALL_FAMILIES:
                continue
            problem = (
                f"{read.value} is read by {name} ({read.reader}), but {other} does not read it"
            )
            is_of_positions = _OF_POSITIONS.search(key) is not None
            remedy = "Use its default in the model and in config.json"
            if is_of_positions:
                remedy = "Set generate_config.max_model_len to original_max_position_embeddings"
            if read.is_number and (scales_positions or not is_of_positions):
                violations.append(violation(key, problem, remedy))
            else:
                texts.append(f"{key}: {problem}")
    return violations, texts


class ReadRecorder:
    """Record of the keys of config objects that a side's code reads.

    Args:
        is_reader: returns whether a frame is the side's own code.

    Attributes:
        reads: key -> its first read, or the first with another value than without the key. Keys of
            other sections than the text model's have the names of these in front.
    """

    def __init__(self, is_reader: Callable[[FrameType], bool]) -> None:
        self.reads: dict[str, Read] = {}
        self._is_reader = is_reader
        self._sections: list[type] = []
        self._configs: list[Any] = []  # copies, too

    def watch(self, config: Any, prefix: str = "") -> None:
        """Make a config object of transformers, and its sections, record their reads."""
        values = {
            key: value for key, value in config.to_dict().items() if not key.endswith(_TOKENS)
        }
        for name, value in list(vars(config).items()):
            if hasattr(value, "attribute_map"):
                self.watch(value, "" if name == "text_config" else f"{prefix}{name}.")
            elif name in _SECTIONS and isinstance(value, dict):
                setattr(config, name, self._section(value, f"{prefix}{name}."))
        config.__class__ = self._recording_class(_Watched(type(config), prefix, values))
        self._configs.append(config)

    def scan(self, model: torch.nn.Module) -> None:
        """Record the keys that the forward methods of a model's classes read from its config."""
        for kind, module in {type(module): module for module in model.modules()}.items():
            code = getattr(inspect.unwrap(kind.forward), "__code__", None)
            config = getattr(module, "config", None)
            watched: _Watched | None = getattr(type(config), "_watched", None)
            if code is None or watched is None or "config" not in code.co_names:
                continue
            # Names that it passes to getattr, and attributes of `config`.
            names = [instruction.argval for instruction in dis.get_instructions(code)]
            read = {name for owner, name in pairwise(names) if owner == "config"}
            for key in watched.values.keys() & {*code.co_consts, *read}:
                reader = f"{code.co_qualname} in {kind.__module__}"
                self._note(watched.prefix + key, getattr(config, key), reader, _ABSENT)

    def stop(self) -> None:
        """Stop recording: config objects and their copies have their plain classes again."""
        for config in self._configs:
            config.__class__ = type(config).__base__
            for name, value in vars(config).items():
                if type(value) in self._sections:
                    vars(config)[name] = _converted(value, dict)
        # Modules may have kept sections.
        for section in self._sections:
            for name in _READS:
                delattr(section, name)
        self._sections.clear()
        self._configs.clear()

    def _recording_class(self, watched: _Watched) -> Any:
        """Return a recording subclass of a config's class.

        It has the same name, because transformers looks classes up by name.
        """
        recorder = self
        plain = watched.config_class
        aliases = plain.attribute_map
        without = cache(watched.without)  # A config takes milliseconds, and keys are read often.

        def __getattribute__(config: Any, key: str) -> Any:
            value = plain.__getattribute__(config, key)
            name = aliases.get(key, key)
            if name in watched.values and recorder._is_reader(frame := sys._getframe(1)):
                recorder._note_frame(watched.prefix + name, value, frame, partial(without, name))
            return value

        def __new__(kind: Any, *_args: Any, **_kwargs: Any) -> Any:
            config = plain.__new__(kind)
            recorder._configs.append(config)
            return config

        attributes = {
            "__getattribute__": __getattribute__,
            "__new__": __new__,
            "__module__": plain.__module__,
            "_watched": watched,
        }
        return type(plain.__name__, (plain,), attributes)

    def _section(self, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return a dictionary of rotary settings that records its reads.

        The settings may be nested by kind of layer.
        """
        recorder = self

        def recording(method: Callable[..., Any]) -> Callable[..., Any]:
            def read(section: dict[str, Any], key: str, *default: Any) -> Any:
                value = dict.get(section, key)
                frame = sys._getframe(1)
                if not isinstance(value, dict) and recorder._is_reader(frame):
                    recorder._note_frame(f"{prefix}{key}", value, frame, lambda: _ABSENT)
                return method(section, key, *default)

            return read

        methods = {name: recording(getattr(dict, name)) for name in _READS}
        section = type("Section", (dict,), methods)
        self._sections.append(section)
        return _converted(values, section)

    def _note_frame(
        self,
        key: str,
        value: Any,
        frame: FrameType,
        without: Callable[[], Any],
    ) -> None:
        """Record a read by a frame; `without` returns what it would read without the key."""
        known = self.reads.get(key)
        if known is None or known.is_usual:
            usual = without()
            if usual is _ABSENT and value is not None:
                usual = _default_of(frame)
            module = frame.f_globals.get("__name__", "")
            self._note(key, value, f"{frame.f_code.co_qualname} in {module}", usual)

    def _note(self, key: str, value: Any, reader: str, usual: Any) -> None:
        if isinstance(value, list) and isinstance(usual, tuple):
            usual = list(usual)  # as in a file
        read = Read(reader, shortened(value), value is None or value == usual, _has_number(value))
        _add(self.reads, key, read)


def _converted(values: Mapping[str, Any], kind: type[dict[str, Any]]) -> dict[str, Any]:
    """Return a dictionary, and those within it, as objects of the class `kind`."""
    return kind(
        {
            key: _converted(value, kind) if isinstance(value, dict) else value
            for key, value in values.items()
        }
    )


def _has_number(value: Any) -> bool:
    """Return whether a value is a number, or has one in it."""
    if isinstance(value, Mapping):
        return any(map(_has_number, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _default_of(frame: FrameType) -> Any:
    """Return the literal default of the `getattr` call in a frame; `_ABSENT` without one."""
    positions = inspect.getframeinfo(frame, context=0).positions
    lines = linecache.getlines(frame.f_code.co_filename)
    if not lines or positions is None or positions.lineno is None:
        return _ABSENT
    # Columns of positions count bytes.
    source = [line.encode() for line in lines[positions.lineno - 1 : positions.end_lineno]]
    # The end first: if there is one line, the start shifts the columns after it.
    source[-1] = source[-1][: positions.end_col_offset]
    source[0] = source[0][positions.col_offset :]
    match ast.parse(b"(" + b"".join(source) + b")", mode="eval").body:
        case ast.Call(func=ast.Name(id="getattr"), args=[_, _, default]):
            with contextlib.suppress(ValueError):  # the default is not a literal
                return ast.literal_eval(default)
    return _ABSENT
