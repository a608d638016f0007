"""Hugging Face checkpoints, read into training shards and written from them.

This is the only package that imports safetensors.

    loading.py             `fetch_weights` downloads from the Hub; `load_pretrained` and
                           `load_hf_checkpoint` read files into training shards
    saving.py              `save_hf_checkpoint` writes training shards to new files, which replace
                           an older set
    safetensors_files.py   names and shapes of stored tensors, reads of slices, writes of whole
                           files, all through safetensors
    weights_digest.py      `weights_digest`: a digest of the weights that does not depend on the
                           parallel layout

    load   1  the headers of all files give the checkpoint's layout, as of one additional rank;
              plan: files -> training shards
           2  the ranks share the check of checksums, and of tensors that repeat others; until here
              no rank has changed anything
           3  every rank reads its own boxes; padding and LoRA become zero
    save   1  the layouts of all ranks are gathered; plan: training shards -> tensors of the files,
              on the ranks that write them
           2  round by round, every rank receives the tensors of one file and writes it, with its
              checksum
           3  rank 0 adds config, tokenizer and index, and replaces the old directory by the new one
"""

from hybrid_engine.backends.huggingface.loading import (
    fetch_weights,
    load_hf_checkpoint,
    load_pretrained,
)
from hybrid_engine.backends.huggingface.saving import require_target, save_hf_checkpoint
from hybrid_engine.backends.huggingface.weights_digest import weights_digest

__all__ = [
    "fetch_weights",
    "load_hf_checkpoint",
    "load_pretrained",
    "require_target",
    "save_hf_checkpoint",
    "weights_digest",
]
