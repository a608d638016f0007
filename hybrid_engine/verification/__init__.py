"""`python -m hybrid_engine verify`: does a model survive the switch between two layouts, bit by bit?

Both real engines are built for a small model of the same architecture. Three times the weights change and are switched:

    random checkpoint --load_hf_checkpoint--> trainer --switch--> vLLM     (then: one training step, save, switch)
            |                                    |                  |
            +--- vLLM's own loader: same bits? --|------------------+
            +--- transformers: same logits? -----+------------------+

The trainer is Megatron, or a transformers model that FSDP2 shards: that one computes with transformers' own code, so
its logits show that the right weights are in it. A model whose computation megatron-core lacks is not trained: its
weights come from a new checkpoint each time.

    cases.py         a small model with both sides' layouts, as a checked configuration
    verify.py        starts the ranks, and what each of them runs
    comparison.py    on one rank: change the weights, switch, compare; what was found, and when that is a fault
    reference.py     what transformers computes, in a process of its own
    certify.py       another question: does a stock vLLM compute after its own reload what it does after a cold load?
    certificate.py   its answer: which tensors differ, and why, by their bytes
    machine.py       facts of the machine, for bug reports: `python -m hybrid_engine env`

Called by cli/verify_command.py, cli/certify_command.py and by the matrix of the tests (`make matrix`).
"""
