"""The planner: which rank sends which box of which tensor to whom, in which order.

A plan in numbered steps. `planner.plan` calls them all; `switch` calls it once the ranks know each other's layouts.
`planner.plan_sides` does the same for layouts computed from sizes (`advisor`), and `planner.box_transfers` serves the
files of a checkpoint (`backends/huggingface`).

    1  records/validation.py    every fault of the two layouts; records/holdings.py makes them compact
    2  routes.py                tensors with the same owners on both sides; what no training rank holds
    3                           the senders of each class: self before same host before network, in round robins
    4  planner.py               transfers between places, of all ranks or of one
    5  buckets.py               tensors into buckets, so that ranks free about as much as they fill
    6  relays.py                what several places of a host need comes to it once, over relay buffers
    7  coalescing.py            transfers at regular distances become one
       -> plan.py               ReshardPlan, Bucket, Transfer: what is planned is what runs

Everything is sorted and counted by position, so ranks that plan the same layouts get the same plan without talking. The
plan of one rank is made without that of others, and has exactly those transfers of everybody's that it is part of.

Beside a plan:

    summary.py     what must be received whatever the plan; the bytes of all ranks, counted without making transfers
    buckets.py     which training memory nobody reads any more after each bucket; which buckets' weights may stay
    rank_order.py  which rank takes which inference shard, so that most of it is there already

To change: which rank sends - routes.py; the size and order of buckets - buckets.py; the dtype on the wire, and so every
count of bytes - `plan.wire_dtype`.
"""
