"""vLLM's config object: values that it takes in place of config.json's, and a record of the keys that it reads.

vLLM's classes read keys of other families too, by `getattr(config, "logit_scale", 1.0)`. A config.json that sets such a
key changes what vLLM computes, and nothing else. So vLLM is given a config object that records its reads:

    reads = ConfigReads(model_dir)       is passed to vLLM as `hf_overrides`, which vLLM calls with its config object
    with reads.checked():
        ...                              vLLM makes its configuration and constructs the model
    reads.require_known(model)           before any weight is sent
    reads.stop()                         before forward passes, which may be compiled

Only keys that the family's schema (models/config_json.py) lacks are recorded, and most files have none that vLLM reads.
A read that gives what it would give without the key changes nothing and is not reported.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import ConfigError, HybridEngineError, Violation, shortened
from hybrid_engine.files.documents import read_json
from hybrid_engine.models.config_json import Rope, Schema
from hybrid_engine.models.families import TABLES

logger = logging.getLogger(__name__)

_OF_ALL_FAMILIES = {"architectures", "model_type", "dtype", "torch_dtype"}
_ABSENT = object()


class ConfigReads:
    """Values that vLLM takes in place of those in config.json, and its reads of keys that the trainer does not know.

    Args:
        model_dir: directory with config.json. Of a family without a name table nothing is recorded.
    """

    def __init__(self, model_dir: str) -> None:
        self._path = Path(model_dir, "config.json")
        self._config = read_json(self._path, "model", "Name a Hugging Face model directory")
        schema = next((TABLES[name].schema for name in self._config.get("architectures") or () if name in TABLES), None)
        # what vLLM reads but transformers 5 does not write, for its class computes nothing else
        self._values: dict[str, Any] = {} if schema is None else dict(schema.implied)
        if self._config.get("quantization_config"):
            self._values["quantization_config"] = None
            logger.info("%s: its quantization_config is not followed: the weights come unquantised", model_dir)
        self._unknown: set[str] = set()
        self._unknown_rotary: dict[str, str] = {}  # key -> its section
        if schema is not None:
            given = {key for key, value in self._config.items() if value is not None}
            self._unknown = given - _keys_of(schema) - schema.implied.keys() - _OF_ALL_FAMILIES
            for section in ("rope_scaling", "rope_parameters"):
                unknown = _nested_keys(self._config.get(section)) - _keys_of(Rope)
                self._unknown_rotary |= dict.fromkeys(unknown, section)
        self._readers: dict[str, str] = {}  # key -> its value and who reads it
        self._recording: list[type] = []

    def __call__(self, config: Any) -> Any:
        """Return vLLM's config object with the other values; it records its reads if there is an unknown key."""
        config.update(self._values)
        if self._unknown_rotary and isinstance(getattr(config, "rope_parameters", None), dict):
            config.rope_parameters = self._recording_section(config.rope_parameters)
        if self._unknown:
            config.__class__ = self._recording_class(type(config))
        return config

    def __deepcopy__(self, memo: object) -> ConfigReads:
        return self  # a copy of vLLM's config object is recorded here, too

    def __repr__(self) -> str:
        return repr(dict(self._values))

    def require_known(self, model: torch.nn.Module | None = None, cause: Exception | None = None) -> None:
        """Raise ConfigError with each unknown key that vLLM has read, and those that a forward pass would look up.

        Args:
            model: vLLM's, if there is one: in a constructed model nothing has called `forward` yet.
            cause: of the error.
        """
        for kind in {type(module) for module in (() if model is None else model.modules())}:
            code = getattr(inspect.unwrap(kind.forward), "__code__", None)
            if code is None or "config" not in code.co_names:
                continue
            for key in self._unknown.intersection(code.co_consts):  # names that it passes to getattr
                self._note_reader(key, self._config[key], f"{code.co_qualname} in {kind.__module__}")
        remedy = "Remove it from config.json, or use a model of a family that has it"
        violations = [
            Violation(key, f"{reader}, but the trainer does not know it, in {self._path}", remedy)
            for key, reader in sorted(self._readers.items())
        ]
        if violations:
            raise ConfigError(violations) from cause

    def stop(self) -> None:
        """Record no more reads: config objects, and copies of them, behave as their plain classes again."""
        for recording in self._recording:
            for name in vars(recording).keys() & {"__getattribute__", "__contains__", "__getitem__", "get"}:
                delattr(recording, name)
        self._recording.clear()
        self._unknown.clear()
        self._unknown_rotary.clear()

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """At the end of this context, also by an error of vLLM's, `require_known`."""
        try:
            yield
        except HybridEngineError:
            raise
        except Exception as error:
            self.require_known(cause=error)
            raise
        self.require_known()

    def _recording_class(self, config_class: Any) -> Any:
        """A subclass of a config's class, of the same name, for transformers looks classes up by name."""
        reads = self

        def __getattribute__(config: Any, key: str) -> Any:
            value = config_class.__getattribute__(config, key)
            if key in reads._unknown:
                reads._note(key, value, sys._getframe(1), lambda: reads._without(key, config_class))
            return value

        names = {"__getattribute__": __getattribute__, "__module__": config_class.__module__}
        recording = type(config_class.__name__, (config_class,), names)
        self._recording.append(recording)
        return recording

    def _recording_section(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A dictionary of rotary settings, maybe by kind of layer, that records reads of its unknown keys."""
        reads = self

        class Section(dict[str, Any]):
            def __contains__(self, key: object) -> bool:
                reads._note_rotary(str(key), super().get(str(key)), sys._getframe(1))
                return super().__contains__(key)

            def __getitem__(self, key: str) -> Any:
                reads._note_rotary(key, super().get(key), sys._getframe(1))
                return super().__getitem__(key)

            def get(self, key: str, default: Any = None) -> Any:
                reads._note_rotary(key, super().get(key), sys._getframe(1))
                return super().get(key, default)

        self._recording.append(Section)
        return Section(
            {key: self._recording_section(each) if isinstance(each, dict) else each for key, each in values.items()}
        )

    def _without(self, key: str, config_class: Any) -> Any:
        """Value of an attribute of vLLM's config object if config.json had no such key; `_ABSENT`: no attribute."""
        rest = {name: value for name, value in self._config.items() if name != key}
        return getattr(config_class.from_dict(rest), key, _ABSENT)

    def _note_rotary(self, key: str, value: Any, frame: FrameType) -> None:
        if key in self._unknown_rotary:
            self._note(f"{self._unknown_rotary[key]}.{key}", value, frame, lambda: _ABSENT)

    def _note(self, key: str, value: Any, frame: FrameType, without: Callable[[], Any]) -> None:
        """Note a key and who reads it, if it is vLLM and the value is not what it would read without the key.

        Args:
            key: as errors name it.
            value: what is read.
            frame: of the reader.
            without: returns what the config object has without the key; where that is `_ABSENT`, readers have defaults.
        """
        module = frame.f_globals.get("__name__", "")
        if key in self._readers or not module.startswith("vllm."):
            return
        if frame.f_code is internals.LENGTH_LIMITS.load().__code__:
            return
        usual = without()
        if value is not None and value != (_default_of(frame) if usual is _ABSENT else usual):
            self._note_reader(key, self._config.get(key, value), f"{frame.f_code.co_qualname} in {module}")

    def _note_reader(self, key: str, value: Any, reader: str) -> None:
        if value is not None:
            self._readers.setdefault(key, f"{shortened(value)} is read by vLLM ({reader})")


def _keys_of(schema: type[Schema]) -> set[str]:
    """Names of a schema's fields in config.json."""
    return {field.alias or name for name, field in schema.model_fields.items()}


def _nested_keys(section: Any) -> set[str]:
    """Keys of a dictionary and of the dictionaries in it."""
    if not isinstance(section, dict):
        return set()
    return section.keys() | {key for each in section.values() for key in _nested_keys(each)}


def _default_of(frame: FrameType) -> Any:
    """Value of the literal default in the call of `getattr` that a frame is in; `_ABSENT` if there is no such call."""
    where = inspect.getframeinfo(frame, context=0).positions
    lines = linecache.getlines(frame.f_code.co_filename)
    if not lines or where is None or where.lineno is None:
        return _ABSENT
    source = [line.encode() for line in lines[where.lineno - 1 : where.end_lineno]]  # positions count bytes
    source[-1] = source[-1][: where.end_col_offset]
    source[0] = source[0][where.col_offset :]
    match ast.parse(b"(" + b"".join(source) + b")", mode="eval").body:
        case ast.Call(func=ast.Name(id="getattr"), args=[_, _, default]):
            with contextlib.suppress(ValueError):  # not a literal
                return ast.literal_eval(default)
    return _ABSENT
