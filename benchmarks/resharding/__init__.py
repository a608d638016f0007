"""Online resharding beside the ways in which others do it: same weights, same machine, one run.

    benchmarks.reshard --run_ranks--> ranks.main          one launch for each number of ranks
        ranks.run_case                                    both real engines of one case
        measuring.measure(contender)                      barrier, run, slowest rank, median
            ours, bridges, gather_broadcast               Megatron -> vLLM's parameters
            megatron_core                                 Megatron -> a Megatron model in the inference layout
            floor                                         a plain copy of as many bytes
    figures.Figures                                       what is written, one per case; tables and plots

Every contender's result is compared with ours, bit by bit, through digests of what it wrote. A figure whose result
differs is void: null, with the reason.
"""
