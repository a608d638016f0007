"""GRPO on two-operand addition: Megatron trains, vLLM samples, weights are resharded between them every iteration.

    data/*.jsonl -> task.py (characters, problems, reward)
                         |
    train.py  ->  trainer.py: warm up, then again and again
    (processes,     generate   vLLM       groups of completions, reward by code
     signals,       score      Megatron   log-probabilities under the actor and the frozen reference
     terminal)      update     Megatron   grpo.py: clipped policy gradient + KL
                    evaluate   vLLM       greedy accuracy on held-out problems
                         |
                    run_state.py (checkpoints, resume)   report.py (metrics.jsonl, TensorBoard, reward.png, terminal)

settings.py documents every key of `rl_config`; configs/ has one file per layout.
"""
