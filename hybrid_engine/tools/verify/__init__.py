"""`python -m hybrid_engine verify`: bitwise check of a model's switch between two layouts.

Both real engines are built for a small model of the same architecture. The weights change three
times and are switched each time:

    random checkpoint --load_hf_checkpoint--> trainer --switch--> vLLM   (then a step, save, switch)
            |                                    |                  |
            +--- vLLM's own loader: same bits? --|------------------+
            +--- transformers: same logits? -----+------------------+

The trainer is Megatron, or a transformers model that FSDP2 shards. The latter computes with
transformers' own code, so equal logits prove that the right weights are in it. A model whose
computation megatron-core lacks is not trained: its weights come from a new checkpoint each time.

    cases.py         a small model with the layouts of both sides, as a checked configuration
    small_models.py  the small model: config.json with reduced sizes
    verify.py        launching of the ranks, and the program of each rank
    comparison.py    on one rank: change weights, switch, compare; verdict and faults
    reference.py     log-probabilities by transformers, in a separate process
    certify.py       another check: does a stock vLLM compute the same after a reload as after a
                     cold load?
    certificate.py   its result: which tensors differ, and why, judged by their bytes
    machine.py       facts of the machine for bug reports: `python -m hybrid_engine env`

Called by tools/cli/verify_command.py and the test matrix (`make matrix`).
"""
