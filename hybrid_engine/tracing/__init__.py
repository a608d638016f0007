"""`generate_config.trace`: one timeline of every switch over all ranks, for https://ui.perfetto.dev.

    recording.py    `with span("commit", bucket=3):` anywhere inside a switch; nothing where none is recorded
    timeline.py     Timeline: records a switch, gathers the events of all ranks, has rank 0 write them
    trace_file.py   the file: Chrome's trace events, valid JSON after every switch, bounded

Each rank is a process of the trace; its slices lie in each other as the calls did:

    train->infer  >  fill  >  bucket  >  allocate | shared_memory > read, transfer, write | verify | fence |
                                         offload bucket | commit
                     wait: from the rank's arrival at the end of a phase until all ranks are there

Phases have the names of `ReshardReport.seconds_by_phase`. A torch.profiler that runs meanwhile sees the same names.
"""
