"""A job as it would be on a cluster, without one: what moves at a switch, what fits, how long it takes.

    1  sizes_text.py      "tp=8,pp=2" -> sizes                            called by the command `plan`
       size_advice.py     what is wrong with them, and which would do
    2  cluster_plan.py    plan_job: both layouts (layouts/), rank order and bytes (planning/) -> JobPlan
    3  trainers.py        Megatron or FSDP2: the training layout, memory (layouts/memory_peaks.py) and peers, for step 2
       cache_room.py      what vLLM's share of a device leaves for its KV cache
       other_systems.py   what others would move by their formulas
       prefetch_estimate.py   what a rollout could hide of the way back, where it is asked for
       later_switches.py  what later switches move where some weights are frozen
    4  facts.py           JobPlan -> numbers with names: the content of `plan --json`, rows of tables and page
    5  job_verdict.py     whether it fits, what moves, how long: the answer in a few sentences
       sections.py        the numbers as people read them, the same on the terminal and on the page
    6  page.py            an answer -> one HTML page, of page_files/
       picture.py         who holds what; overview.py: by groups of ranks; drawing.py: as SVG

Nothing here plans by itself: bytes are those of `planning.summary`, the transfers of a rank those of
`planning.planner`.
"""
