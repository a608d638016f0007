"""A job as it would be on a cluster, without one: what moves at a switch, what fits, how long it takes.

    1  cluster_plan.py    plan_job: a configuration -> both layouts (layouts/), rank order and bytes (planning/), memory
                          of every phase (layouts/memory_plan.py) -> JobPlan
       cache_room.py      what vLLM's share of a device leaves for its KV cache
       prefetch_estimate.py   what a rollout could hide of the way back, where it is asked for
       later_switches.py  what later switches move where some weights are frozen
    2  facts.py           JobPlan -> numbers with names: the content of `plan --json`, rows of tables and page
    3  job_verdict.py     whether it fits, what moves, how long: the answer in a few sentences
       sections.py        the numbers as people read them, the same on the terminal and on the page
    4  page.py            an answer -> one HTML page (page_files/): who holds what, memory, traffic

Called by the command `plan`. Nothing here plans by itself: bytes are those of `planning.summary`, the transfers of a
rank those of `planning.planner`.
"""
