"""Hugging Face checkpoints, read into training shards and written from them. The only package that imports safetensors.

hf_checkpoint.py       `load_hf_checkpoint`, `save_hf_checkpoint` (called by `ActorHybridWorker` and verify)
safetensors_files.py   names, headers, offsets and checksums of files; slices read in place
pretrained.py          the weights that training begins with, from the Hub where need be (called by `ActorHybridWorker`)
unused_tensors.py      tensors of a checkpoint that fill no parameter: compared with what they repeat, or named
progress.py            how far reading has come
publishing.py          new files, filled by all ranks, which replace an older set

load   1  headers of all files -> the checkpoint as a layout of one more rank -> plan: files -> training shards
       2  checksums, and tensors that repeat others, shared out among the ranks; until here no rank has changed anything
       3  every rank reads its own boxes; padding and LoRA become zero
save   1  layouts of all ranks -> plan: training shards -> files; among replicas the planner picks who writes
       2  rank 0 creates the files, every rank writes its own boxes, checksums are added
       3  rank 0 publishes: config and tokenizer, then the new files, the index, and the old set is removed
"""

from hybrid_engine.backends.huggingface.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint
from hybrid_engine.backends.huggingface.pretrained import fetch_weights, load_pretrained

__all__ = ["fetch_weights", "load_hf_checkpoint", "load_pretrained", "save_hf_checkpoint"]
