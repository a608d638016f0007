"""A job as it would be on a cluster, without one: what moves at a switch, what fits, how long it takes.

    1  cluster_plan.py   plan_job: a configuration -> both layouts (layouts/), rank order and bytes (planning/), memory
                         of every phase (layouts/memory.py), room for the KV cache -> JobPlan
    2  answer.py         JobPlan -> numbers with names (`plan --json`), the verdict's sentences, tables
    3  page.py           an answer -> one HTML page (page_files/): the verdict, who holds what, the numbers

Called by the command `plan`. Nothing here plans by itself: bytes are those of `planning.summary`, the transfers of a
rank those of `planning.planner`.
"""
