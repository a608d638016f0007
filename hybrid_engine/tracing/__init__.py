"""`generate_config.trace`: one timeline of every switch over all ranks, for https://ui.perfetto.dev.

    recording.py    `with span("commit", bucket=3):` anywhere inside a switch; nothing where none is recorded
    clocks.py       what the clocks of the ranks differ by, from the moments at which all ranks meet
    timeline.py     Timeline: records a switch, gathers the spans of all ranks, has rank 0 write them
    trace_file.py   the file: Chrome's trace events, valid JSON after every switch, bounded

Each rank is a process of the trace; its slices lie in each other as the calls did:

    train->infer  >  fill  >  bucket  >  allocate | shared_memory > read, transfer, write | verify | fence |
                                         offload bucket | commit
                     wait: from the rank's arrival at the end of a phase until all ranks are there

Phases have the names of `ReshardReport.seconds_by_phase`.
"""
