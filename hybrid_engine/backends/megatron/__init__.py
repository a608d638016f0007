"""The training side. Only the modules below this folder import megatron.

build.py        a GPT from a Hugging Face config, with DDP and optimizer
specs.py        which modules its layers consist of
extras.py       what some architectures compute and megatron-core has no setting for
adaptor.py      where its weights lie (layout) and their live storage (buffers)
train_engine.py steps and log-probabilities through Megatron's pipeline schedules
checkpoint.py   save and load, to resume a run
"""
