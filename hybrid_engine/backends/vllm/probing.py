"""vLLM as a side whose computation is compared with the trainer's (port `Probed`, switch/computation.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.feasibility import generation_problem
from hybrid_engine.ports import NearEnd
from hybrid_engine.probes import ProbeAnswer, ProbeLimits


class ProbedEngine:
    """Part of `InferenceEngine` that answers probes, by its log-probabilities of prompts.

    Attributes:
        trained_lora: name of the LoRA that switches deliver beside the weights; None where there is none.
    """

    llm: Any
    settings: InferenceSettings
    near_end: NearEnd | None
    trained_lora: str | None = None
    _device_type: str
    _generator_state: tuple[Any, ...]

    def prompt_logprobs(self, token_ids: Sequence[Sequence[int]], lora: str | None = None) -> list[torch.Tensor]:
        """Log-probability of each token but the first: per sequence a float32 tensor [length - 1]."""
        raise NotImplementedError

    def probe_limits(self) -> ProbeLimits:
        """See the port. Quantized weights or caches are not compared: vLLM alone computes with them."""
        config, cache = self.llm.llm_engine.model_config, self.llm.llm_engine.vllm_config.cache_config
        refusal = generation_problem(self.settings.sizes, self._device_type) or ""
        if config.quantization is not None:
            refusal = f"vLLM computes with weights in {config.quantization}, the trainer does not"
        elif cache.cache_dtype not in ("auto", str(config.dtype).removeprefix("torch.")):
            refusal = f"vLLM keeps keys and values in {cache.cache_dtype}"
        return ProbeLimits(refusal, config.max_model_len - 1, vocab_size=config.get_vocab_size())

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """See the port. Uses the trained LoRA, draws nothing, and prefetches nothing at its end."""
        state, near_end, self.near_end = self._generator_state, self.near_end, None
        try:
            rows = self.prompt_logprobs(tokens.tolist(), self.trained_lora)
        finally:
            self._generator_state, self.near_end = state, near_end
        return ProbeAnswer(torch.stack(rows), self.llm.llm_engine.model_config.dtype)

    def computed_settings(self) -> Mapping[str, Any]:
        """config.json as vLLM has it."""
        return dict(self.llm.llm_engine.model_config.hf_config.to_dict())
