"""Hugging Face checkpoints as one more end of the planner; the only package that imports safetensors.

files.py       the files: names, headers, offsets, checksums; slices read in place
writing.py     new files, filled by all ranks, which take the place of an older set
checkpoint.py  load_hf_checkpoint, save_hf_checkpoint: plan between files and training shards, each rank its own bytes
"""

from hybrid_engine.backends.huggingface.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint

__all__ = ["load_hf_checkpoint", "save_hf_checkpoint"]
