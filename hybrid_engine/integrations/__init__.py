"""Other frameworks' trainers with this switch; each module imports its framework when it is used.

trl.py    TRL's trainers with a colocated vLLM, and its AsyncGRPOTrainer
verl.py   verl's checkpoint engine, checkpoint manager and FSDP2 actors; verl imports it, and nobody else
"""

NAME = "hybrid_engine"
"""Of the load format and the weight transfer backend that a server must have."""
