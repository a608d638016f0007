"""Other frameworks' trainers with this switch; each module imports its framework when it is used.

trl.py   TRL's trainers with a colocated vLLM, and its AsyncGRPOTrainer
"""
