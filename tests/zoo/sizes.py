"""Short names of parallel sizes, as keys of the configuration."""

from __future__ import annotations

TRAIN_KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vocab": "make_vocab_size_divisible_by",
    "layout": "pipeline_model_parallel_layout",
}
INFER_KEYS = {
    "tp": "infer_tensor_parallel_size",
    "pp": "infer_pipeline_parallel_size",
    "ep": "infer_expert_parallel_size",
}
