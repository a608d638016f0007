"""A job as it would be on a cluster, without one: what moves at a switch, what fits, how long it takes.

    1  activations.py    what computing takes beside state: activations, what FSDP2 gathers, a step of vLLM
    2  cluster_plan.py   plan_job: a configuration -> both layouts (layouts/), rank order and bytes (planning/), memory
                         of every phase (layouts/memory.py), room for the KV cache -> JobPlan
    3  search.py         find_pairs: a configuration that leaves sizes open -> the best pairs of layouts, each planned;
                         where none fits, what would mend it
    4  answer.py         JobPlan -> numbers with names (`plan --json`), the verdict's sentences, tables

Called by the command `plan`. Nothing here plans by itself: bytes are those of `planning.summary`, the transfers of a
rank those of `planning.planner`.
"""
