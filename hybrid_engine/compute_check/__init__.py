"""Whether vLLM computes what the trainer computes (`generate_config.check_compute`).

    probes.py          what both sides implement: limits, log-probabilities, layers
    gap.py             tokens that both sides compute; which difference rounding explains
    routes.py          experts that both sides select for the tokens
    attention.py       settings of each layer's attention, and their differences
    config_reads.py    keys of config.json that each side reads, and one side alone
    fingerprint.py     structure of the trainer's model; changes make a comparison due again
    logprob_check.py   the comparison at set-up and in switches

A run that agrees is never overruled by a reading. A reading refuses only what no run within its
limits can reach: thresholds, clamps, and positions and lengths beyond the probe.
"""
