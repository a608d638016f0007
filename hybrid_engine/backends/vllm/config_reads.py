"""vLLM's config object: replaced values of config.json, and a record of the keys that vLLM reads.

vLLM's classes also read keys of other families, by `getattr(config, "logit_scale", 1.0)`. A
config.json that sets such a key changes only vLLM's computation. So vLLM gets a config object that
records its reads (compute_check/config_reads.py):

    reads = ConfigReads(model_dir)       passed to vLLM as `hf_overrides`, which it calls
    with reads.checked():
        ...                              vLLM makes its configuration and constructs the model
    reads.require_known(model)           before any weight is sent
    reads.stop()                         before forward passes, which may be compiled

Keys that neither the family's table nor transformers' class of its config has are refused here, if
vLLM reads another value than without the key. Without a table the trainer's own reads are compared,
by `check_compute`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.compute_check.config_reads import OF_ALL_FAMILIES, ReadRecorder, Reads
from hybrid_engine.errors import ConfigError, HybridEngineError, Violation
from hybrid_engine.files.documents import read_json
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.models.config_json import ROTARY_KEYS
from hybrid_engine.models.derived import takes_images
from hybrid_engine.models.families import TABLES

logger = logging.getLogger(__name__)

_QUANTIZATION = "quantization_config"


class ConfigReads:
    """Replaced values of config.json, and vLLM's reads of its keys.

    Args:
        model_dir: directory with config.json.
        quantization_config: that of the weights that arrive; None: they are unquantised.
    """

    def __init__(self, model_dir: str, quantization_config: HfConfig | None = None) -> None:
        self._path = Path(model_dir, "config.json")
        self._config = read_json(self._path, "model", "Name a Hugging Face model directory")
        architectures = self._config.get("architectures") or ()
        known = (TABLES[name].config_class for name in architectures if name in TABLES)
        config_class = next(known, None)
        # vLLM reads keys that transformers 5 does not write, because its class computes nothing
        # else.
        self._values: dict[str, Any] = {} if config_class is None else dict(config_class.implied)
        self._without_quantization = quantization_config is None
        if quantization_config is not None:
            self._values[_QUANTIZATION] = dict(quantization_config)
        elif self._config.get(_QUANTIZATION):
            logger.info(
                "%s: its quantization_config is ignored: the weights arrive unquantised", model_dir
            )
        self._known: set[str] | None = None  # None: the trainer records its reads
        if config_class is not None:
            # transformers has the settings of `rope_scaling`, too, in `rope_parameters`.
            nested = {f"rope_parameters.{key}" for key in ROTARY_KEYS}
            self._known = config_class.keys | nested | OF_ALL_FAMILIES | {_QUANTIZATION}
        self._recorder = ReadRecorder(is_of_vllm)

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return takes_images(self._config)

    @property
    def reads(self) -> Reads:
        """First reads of keys by vLLM's code, but of replaced values, which no config.json has."""
        reads = self._recorder.reads
        return {key: reads[key] for key in reads if key not in self._values}

    def __call__(self, config: Any) -> Any:
        """Return vLLM's config object with the replaced values, which records its reads."""
        config.update(self._values)
        if self._without_quantization:
            # A key that is None is not one that is absent: some models ask whether there is one.
            for section in (config, getattr(config, "text_config", None)):
                if section is not None and _QUANTIZATION in vars(section):
                    delattr(section, _QUANTIZATION)
        self._recorder.watch(config)
        return config

    def __deepcopy__(self, memo: object) -> ConfigReads:
        return self  # reads of a copy of vLLM's config object are recorded here as well

    def __repr__(self) -> str:
        return repr(dict(self._values))

    def require_known(
        self,
        model: torch.nn.Module | None = None,
        cause: Exception | None = None,
    ) -> None:
        """Raise ConfigError with each unknown key that vLLM has read or would read in a forward.

        Args:
            model: vLLM's model, if it exists: no `forward` has run in a constructed model yet.
            cause: cause of the error.
        """
        if model is not None:
            self._recorder.scan(model)
        remedy = "Remove it from config.json, or use a model of a family that has it"
        violations = [
            Violation(
                key.replace("rope_parameters", "rope_scaling")
                if "rope_scaling" in self._config
                else key,
                f"{read.value} is read by vLLM ({read.reader}), but the trainer does not know it, "
                f"in {self._path}",
                remedy,
                code="read-by-vllm-alone",
            )
            for key, read in sorted(self.reads.items())
            if self._known is not None
            and (key in self._config or key.startswith("rope_parameters."))
            and key not in self._known
            and not read.is_usual
        ]
        if violations:
            raise ConfigError(violations) from cause

    def stop(self) -> None:
        """Stop recording: config objects and their copies behave as their plain classes again."""
        self._recorder.stop()

    @contextmanager
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


def is_of_vllm(frame: FrameType) -> bool:
    """Return whether a frame is code of vLLM, or of transformers' models, which vLLM may construct.

    What limits lengths is left out.
    """
    module = frame.f_globals.get("__name__", "")
    is_of_model = module.startswith("transformers.models.") and "modeling_" in module
    is_of_vllm = module.startswith("vllm.") or is_of_model
    return is_of_vllm and frame.f_code is not internals.LENGTH_LIMITS.__code__
