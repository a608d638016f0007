"""vLLM's compiled allocator over a libcuda of host memory."""
