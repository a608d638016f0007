"""What every rank holds, computed from a model's name table and parallel sizes alone: no device, no weights, no engine.

    TrainParallelism, ModelTable  --training.py-->   SideLayout (Megatron's)
    InferenceParallelism          --inference.py-->  SideLayout (vLLM's)
                                                        |  holdings: for each tensor (region, ranks), as numbers
              summary.py: bytes of all ranks            |  shards_of(rank), layout_of(rank): explicit records
              placement.py: which rank takes which inference position
              rank_plan.py: all transfers of one rank
              peers.py, memory.py: what others would move; what fits on a device

Tests hold these layouts equal to what the live engines' adaptors say.
"""
