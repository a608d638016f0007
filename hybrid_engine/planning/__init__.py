"""The planner: decides which rank sends which box of which tensor to which rank, in which order.

A plan is made in numbered steps, all called by `planner.plan`. `switch` calls it once the ranks
have exchanged their layouts. `planner.plan_sides` does the same for layouts computed from sizes
(`tools/plan`), and `planner.box_transfers` serves the files of a checkpoint
(`backends/huggingface`).

    1  records/validation.py    every fault of the two layouts; records/holdings.py compacts them
    2  tensor_classes.py        classes of tensors with the same owners on both sides; gaps
    3  routes.py                senders of each class, in round robins: self, host, network
    4  planner.py               transfers between places, of all ranks or of one
    5  buckets.py               tensors in buckets, so that ranks free about as much as they fill
    6  relays.py                relay buffers, in which a box arrives once for several places
    7  coalescing.py            transfers at regular distances become one
       -> plan.py               ReshardPlan, Bucket, Transfer: executed as planned; Costs of that

Every input is sorted and numbered by position, so ranks that plan the same layouts get the same
plan without communication. The plan of one rank is made independently of the others and has
exactly those transfers of the global plan that involve the rank.

Related to a plan:

    summary.py     lower bounds and the bytes of all ranks, counted without creating transfers
    buckets.py     training memory that can be released after each bucket; buckets that stay
    rank_order.py  assignment of inference shards to ranks, so that most bytes are already in place

Where to change what: the sending rank in routes.py; size and order of buckets in buckets.py; the
dtype on the wire, and with it every count of bytes, in `plan.wire_dtype`.
"""
