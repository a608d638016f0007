"""Hugging Face checkpoints, read into training shards and written from them. The only package that imports safetensors.

hf_checkpoint.py       `load_hf_checkpoint`, `save_hf_checkpoint` (called by `ActorHybridWorker` and verify)
safetensors_files.py   through safetensors: names and shapes of tensors, slices read in place, whole files written
pretrained.py          the weights that training begins with, from the Hub where need be (called by `ActorHybridWorker`)
unused_tensors.py      tensors of a checkpoint that fill no parameter: compared with what they repeat, or named
saving.py              new files: brought together by the ranks that write them, then put in place of an older set

load   1  headers of all files -> the checkpoint as a layout of one more rank -> plan: files -> training shards
       2  checksums, and tensors that repeat others, shared out among the ranks; until here no rank has changed anything
       3  every rank reads its own boxes; padding and LoRA become zero
save   1  layouts of all ranks -> plan: training shards -> tensors of the files, on the ranks that write them
       2  every rank receives a file's tensors and writes it, until all are written, with checksums
       3  rank 0 adds config, tokenizer and index, and puts the new directory in the old one's place
"""

from hybrid_engine.backends.huggingface.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint
from hybrid_engine.backends.huggingface.pretrained import fetch_weights, load_pretrained

__all__ = ["fetch_weights", "load_hf_checkpoint", "load_pretrained", "save_hf_checkpoint"]
