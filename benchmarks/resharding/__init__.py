"""Online resharding compared with other systems: same weights, same machine, same run.

    benchmarks.reshard --run_ranks--> ranks.main          one launch per number of ranks
        ranks.run_case                                    both engines of a case
        measuring.measure(contender)                      barrier, run, slowest rank, median
            ours, bridges, gather_broadcast               Megatron -> vLLM's parameters
            megatron_core                                 Megatron -> Megatron, inference layout
            floor                                         a plain copy of the same bytes
    figures.Figures                                       JSON of a case; plots.py draws it

The weights that a contender writes are compared with ours bit by bit, by digests. If they differ,
its figure is null with a reason.
"""
