"""vLLM in processes of its own: one job over trainers and servers, in which each process has one side.

    trainers                                              servers: `vllm serve`, AsyncLLM, LLM, Ray actors
    publisher.py    WeightPublisher                       receiver.py    WeightReceiver, in each worker
      trainer's weights, NoInference                        NoTraining, the worker's weights
            |                                                     |
            |---- clients.py: "join", "switch to infer" --------->|      vLLM's own weight-transfer calls
            |                                                     |
            +------------ ShardingManager of one job -------------+      layouts, plan, buckets, fences, verification

    invitation.py   what a server is told: where to meet, who it is, and the keys that a switch needs
    comparison.py   whether servers compute what the trainers do, before they draw a token
    answers.py      completions of a server, checked against what was asked for
    addresses.py    which addresses are open to anybody
    roles.py        the sides that a process does not have

Trainers and servers keep their own process groups; the job has a store of its own (ranks/world.py). Nothing here knows
vLLM: backends/vllm/server/ is where it calls a `WeightReceiver`.
"""

from __future__ import annotations
