"""The libraries at either end of a switch. Each is imported only below its own folder.

    megatron/         a training side: megatron-core's models, optimizers and schedules
    fsdp/             another: transformers models that torch's FSDP2 has sharded
    vllm/             the inference side: vLLM inside the training processes
    huggingface/      checkpoints as a source or destination of weights, in safetensors

    training_side.py  parts of all trainers: guards of state off the device, facts of flat buffers
    computed_sources.py  tensors that a switch reads and no buffer of a trainer stores: sums of
                         weights and LoRA
    quantised_sources.py  weights quantised before they are sent, from records of any trainer
    block_arithmetic.py   their elements and scales

A backend turns its library's objects into the records of records/ and implements the ports of
ports.py. Nothing else knows a library: planning/, transports/ and switch/ see layouts and flat
buffers only.

Another trainer is a folder beside these, with a class for `ports.Trainer` and one for
`ports.TrainingWeights`; another inference engine has classes for `ports.InferenceWeights` and
`ports.InferenceCaches`.
"""
