"""vLLM in separate processes: one job of trainers and servers, where each process has one side.

    trainers                               servers: `vllm serve`, AsyncLLM, LLM, Ray actors
    publisher.py   WeightPublisher         receiver.py   WeightReceiver, in each worker
      trainer's weights, NoInference         NoTraining, the worker's weights
            |                                      |
            |-- clients.py: join, switch --------->|      vLLM's weight-transfer calls
            |                                      |
            +----- ShardingManager of one job -----+      layouts, plan, buckets, verification

    invitation.py   messages to a server: rendezvous, ranks, and the configuration keys of a switch;
                    network addresses
    comparison.py   check that servers compute what the trainers compute, before they generate
    answers.py      completions of a server, validated against the request
    roles.py        a switch of which a process has one side, and null objects for the other

Trainers and servers keep separate process groups; the job has a separate store (ranks/world.py).
This package does not depend on vLLM: backends/vllm/server/ calls `WeightReceiver`.
"""

from __future__ import annotations

NAME = "hybrid_engine"
"""Name of a server's load format and of its weight transfer engine, for vLLM."""
