"""Online resharding beside the ways in which others do it: same weights, same machine, one run.

    benchmarks/reshard.py --torchrun--> ranks.main        one launch for each number of ranks
        workplace.Workplace                               both real engines of one case
        measuring.measure(contender)                      barrier, run, slowest rank, median
            ours, mbridge_export, gather_broadcast        Megatron -> vLLM's parameters
            megatron_bridge_export                        the same, if asked for
            megatron_core, ours                           Megatron -> a Megatron model in the inference layout
            floor                                         a plain copy of as many bytes
    figures.Figures                                       what is written, one per case; tables and plots

Every contender's result is compared with ours, bit by bit, through digests of what it wrote. A figure whose result
differs is void: null, with the reason.
"""
