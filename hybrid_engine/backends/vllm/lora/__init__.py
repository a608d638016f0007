"""LoRA beside weights that are not merged.

    delivered_loras.py    DeliveredLoras: by name, on the host; vLLM's worker takes them from there
    weights_with_lora.py  WeightsWithLora: the actor's LoRA as one more group of `InferenceWeights`

`InferenceEngine.set_lora` delivers one at any time. With `lora_delivery: adapter` the worker hands `WeightsWithLora`
to the switch: the LoRA arrives as a group, and its commit delivers it. Memory: a copy on the host for as long as it is
known; on the device what vLLM's slots hold, until a release.
"""
