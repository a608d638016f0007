"""Hugging Face checkpoints, read into training shards and written from them. The only package that imports safetensors.

loading.py             `fetch_weights` from the Hub, `load_pretrained`, `load_hf_checkpoint`: files -> training shards
saving.py              `save_hf_checkpoint`: training shards -> new files, put in place of an older set
safetensors_files.py   through safetensors: names and shapes of tensors, slices read in place, whole files written
weights_digest.py      `weights_digest`: training shards as one number, whatever the parallel layout

load   1  headers of all files -> the checkpoint as a layout of one more rank -> plan: files -> training shards
       2  checksums, and tensors that repeat others, shared out among the ranks; until here no rank has changed anything
       3  every rank reads its own boxes; padding and LoRA become zero
save   1  layouts of all ranks -> plan: training shards -> tensors of the files, on the ranks that write them
       2  every rank receives a file's tensors and writes it, until all are written, with checksums
       3  rank 0 adds config, tokenizer and index, and puts the new directory in the old one's place
"""

from hybrid_engine.backends.huggingface.loading import fetch_weights, load_hf_checkpoint, load_pretrained
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
