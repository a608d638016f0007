"""Plan of a job on a cluster, computed without one: traffic of a switch, memory, and time.

    1  activations.py    memory of computation in addition to state: activations, parameters that
                         FSDP2 gathers, a step of vLLM
    2  cluster_plan.py   plan_job: a configuration -> both layouts (layouts/), rank order and bytes
                         (planning/), memory of every phase (layouts/memory.py), room for the KV
                         cache -> JobPlan; traced_side.py has vLLM's layout of a model without a
                         name table
    3  answer.py         JobPlan -> named numbers (`plan --json`), tables of these, sentences of the
                         verdict, explanations

Called by the command `plan`. This package plans no transfers: bytes come from `planning.summary`,
and the transfers of a rank from `planning.planner`.
"""
