"""Reload the weights of a model whose lm_head is tied to its embedding, on a CPU."""

import sys
import tempfile

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

VOCAB_SIZE, HIDDEN_SIZE = 128, 64


class Model(torch.nn.Module):
    """The embedding and the head of a model, tied as the models of vLLM tie them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.lm_head = ParallelLMHead(VOCAB_SIZE, HIDDEN_SIZE)
        self.lm_head = self.lm_head.tie_weights(self.embed_tokens)

    def load_weights(self, weight: torch.Tensor) -> None:
        """Load a checkpoint, which has no weight for the head."""
        parameter = self.embed_tokens.weight
        parameter.weight_loader(parameter, weight)


with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
    initialize_model_parallel()
    model = Model()
    record_metadata_for_reloading(model)
    former, new = torch.randn(2, VOCAB_SIZE, HIDDEN_SIZE)
    model.load_weights(former)
    for layer in (model.embed_tokens, model.lm_head):
        layer.quant_method.process_weights_after_loading(layer)

    # as LLM.collective_rpc("reload_weights") does
    initialize_layerwise_reload(model)
    model.load_weights(new)
    finalize_layerwise_reload(model, None)

hidden = torch.randn(3, HIDDEN_SIZE)
logits = model.lm_head.quant_method.apply(model.lm_head, hidden)
for name, weight in (("former", former), ("new", new)):
    print(f"{name} weights: logits differ by {(logits - hidden @ weight.T).abs().max():.1e}")
print(f"weight of lm_head is the new one: {torch.equal(model.lm_head.weight, new)}")
sys.exit(int(not torch.allclose(logits, hidden @ new.T, atol=1e-4)))
