"""vLLM's config object: replaced values of config.json, and a record of the keys that vLLM reads.

vLLM's classes also read keys of other families, by `getattr(config, "logit_scale", 1.0)`. A
config.json that sets such a key changes only vLLM's computation. So vLLM gets a config object that
records its reads:

    reads = ConfigReads(model_dir)       passed to vLLM as `hf_overrides`, which it calls
    with reads.checked():
        ...                              vLLM makes its configuration and constructs the model
    reads.require_known(model)           before any weight is sent
    reads.stop()                         before forward passes, which may be compiled

Only keys that the family's schema (models/config_json.py) lacks are recorded; most files have none
that vLLM reads. A read that returns the same as without the key changes nothing and is not
reported.
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
from hybrid_engine.models.derived import takes_images
from hybrid_engine.models.families import TABLES

logger = logging.getLogger(__name__)

_OF_ALL_FAMILIES = {"architectures", "model_type", "dtype", "torch_dtype"}
_ABSENT = object()


class ConfigReads:
    """Replaced values of config.json, and vLLM's reads of keys unknown to the trainer.

    Args:
        model_dir: directory with config.json. Reads are recorded only for families with a name
            table.
        quantization_config: that of the weights that arrive; None: they are unquantised.
    """

    def __init__(
        self, model_dir: str, quantization_config: Mapping[str, Any] | None = None
    ) -> None:
        self._path = Path(model_dir, "config.json")
        self._config = read_json(self._path, "model", "Name a Hugging Face model directory")
        architectures = self._config.get("architectures") or ()
        schema = next((TABLES[name].schema for name in architectures if name in TABLES), None)
        # vLLM reads keys that transformers 5 does not write, because its class computes nothing
        # else.
        self._values: dict[str, Any] = {} if schema is None else dict(schema.implied)
        if quantization_config is not None:
            self._values["quantization_config"] = dict(quantization_config)
        elif self._config.get("quantization_config"):
            self._values["quantization_config"] = None
            logger.info(
                "%s: its quantization_config is ignored: the weights arrive unquantised", model_dir
            )
        self._unknown: set[str] = set()
        self._unknown_rotary: dict[str, str] = {}  # key -> its section
        if schema is not None:
            present = {key for key, value in self._config.items() if value is not None}
            known = _keys_of(schema) | self._values.keys() | _OF_ALL_FAMILIES
            self._unknown = present - known
            for section in ("rope_scaling", "rope_parameters"):
                unknown = _nested_keys(self._config.get(section)) - _keys_of(Rope)
                self._unknown_rotary |= dict.fromkeys(unknown, section)
        self._readers: dict[str, str] = {}  # key -> its value and its reader
        self._recording: list[type] = []

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return takes_images(self._config)

    def __call__(self, config: Any) -> Any:
        """Return vLLM's config object with the replaced values.

        It records its reads if config.json has unknown keys.
        """
        config.update(self._values)
        if self._unknown_rotary and isinstance(getattr(config, "rope_parameters", None), dict):
            config.rope_parameters = self._recording_section(config.rope_parameters)
        if self._unknown:
            config.__class__ = self._recording_class(type(config))
        return config

    def __deepcopy__(self, memo: object) -> ConfigReads:
        return self  # reads of a copy of vLLM's config object are recorded here as well

    def __repr__(self) -> str:
        return repr(dict(self._values))

    def require_known(
        self, model: torch.nn.Module | None = None, cause: Exception | None = None
    ) -> None:
        """Raise ConfigError with each unknown key that vLLM has read or would read in a forward.

        Args:
            model: vLLM's model, if it exists: no `forward` has run in a constructed model yet.
            cause: cause of the error.
        """
        modules = () if model is None else model.modules()
        for kind in {type(module) for module in modules}:
            code = getattr(inspect.unwrap(kind.forward), "__code__", None)
            if code is None or "config" not in code.co_names:
                continue
            # Constants of the code that are keys: names that it passes to getattr.
            for key in self._unknown.intersection(code.co_consts):
                reader = f"{code.co_qualname} in {kind.__module__}"
                self._note_reader(key, self._config[key], reader)
        remedy = "Remove it from config.json, or use a model of a family that has it"
        violations = [
            Violation(
                key,
                f"{reader}, but the trainer does not know it, in {self._path}",
                remedy,
                code="read-by-vllm-alone",
            )
            for key, reader in sorted(self._readers.items())
        ]
        if violations:
            raise ConfigError(violations) from cause

    def stop(self) -> None:
        """Stop recording: config objects and their copies behave as their plain classes again."""
        methods = {"__getattribute__", "__contains__", "__getitem__", "get"}
        for recording in self._recording:
            for name in vars(recording).keys() & methods:
                delattr(recording, name)
        self._recording.clear()
        self._unknown.clear()
        self._unknown_rotary.clear()

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Call `require_known` at the end of this context, and also after an error of vLLM's."""
        try:
            yield
        except HybridEngineError:
            raise
        except Exception as error:
            self.require_known(cause=error)
            raise
        self.require_known()

    def _recording_class(self, config_class: Any) -> Any:
        """Return a recording subclass of a config class.

        It has the same name, because transformers looks classes up by name.
        """
        reads = self

        def __getattribute__(config: Any, key: str) -> Any:
            value = config_class.__getattribute__(config, key)
            if key in reads._unknown:
                reader = sys._getframe(1)
                reads._note(key, value, reader, lambda: reads._without(key, config_class))
            return value

        attributes = {
            "__getattribute__": __getattribute__,
            "__module__": config_class.__module__,
        }
        recording = type(config_class.__name__, (config_class,), attributes)
        self._recording.append(recording)
        return recording

    def _recording_section(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dictionary of rotary settings that records reads of its unknown keys.

        The settings may be nested by kind of layer.
        """
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
            {
                key: self._recording_section(value) if isinstance(value, dict) else value
                for key, value in values.items()
            }
        )

    def _without(self, key: str, config_class: Any) -> Any:
        """Return an attribute's value without the key in config.json; `_ABSENT` without a value."""
        rest = {name: value for name, value in self._config.items() if name != key}
        return getattr(config_class.from_dict(rest), key, _ABSENT)

    def _note_rotary(self, key: str, value: Any, frame: FrameType) -> None:
        if key in self._unknown_rotary:
            self._note(f"{self._unknown_rotary[key]}.{key}", value, frame, lambda: _ABSENT)

    def _note(self, key: str, value: Any, frame: FrameType, without: Callable[[], Any]) -> None:
        """Record a read by vLLM whose value differs from the value without the key.

        Args:
            key: key as errors name it.
            value: value that is read.
            frame: frame of the reader.
            without: returns the config object's value without the key; `_ABSENT` if readers use
                their defaults then.
        """
        module = frame.f_globals.get("__name__", "")
        if key in self._readers or not module.startswith("vllm."):
            return
        if frame.f_code is internals.LENGTH_LIMITS.load().__code__:
            return
        usual = without()
        if usual is _ABSENT and value is not None:
            usual = _default_of(frame)
        if value is not None and value != usual:
            reader = f"{frame.f_code.co_qualname} in {module}"
            self._note_reader(key, self._config.get(key, value), reader)

    def _note_reader(self, key: str, value: Any, reader: str) -> None:
        if value is not None:
            self._readers.setdefault(key, f"{shortened(value)} is read by vLLM ({reader})")


def _keys_of(schema: type[Schema]) -> set[str]:
    """Return the names of a schema's fields in config.json."""
    return {field.alias or name for name, field in schema.model_fields.items()}


def _nested_keys(section: Any) -> set[str]:
    """Return the keys of a dictionary and of the dictionaries in it."""
    if not isinstance(section, dict):
        return set()
    keys = set(section)
    for value in section.values():
        keys |= _nested_keys(value)
    return keys


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
