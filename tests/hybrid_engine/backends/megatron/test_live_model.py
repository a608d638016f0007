"""What Megatron is configured as is checked before anything looks at its weights."""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from tests.zoo.families import served_config


def test_every_setting_that_does_not_go_with_a_switch_is_named_at_once() -> None:
    chunk = torch.nn.Module()
    chunk.config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4)
    chunk.config.fp8_param = True
    chunk.ddp_config = DistributedDataParallelConfig(use_megatron_fsdp=True)
    with pytest.raises(ConfigError) as caught:
        LiveModel([chunk], None, table_for(served_config("llama")))
    assert [(finding.key, finding.problem) for finding in caught.value.findings] == [
        ("TransformerConfig.fp8_param", "weights are switched in 16 or 32 bits"),
        ("DistributedDataParallelConfig.use_megatron_fsdp", "there are no flat buffers to read"),
    ]
