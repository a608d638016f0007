"""What surrounds vLLM's own generation: prompts in any form, sampling, and ranks that share the work.

prompts.py           texts, chats, token ids and tensors -> token ids; completions in the form of their prompts
model_tokenizer.py   the model's tokenizer, loaded when it is needed; lent to vLLM, which is built without one
sampling_params.py   our `Sampling`, or vLLM's own `SamplingParams`
replica_exchange.py  which replica completes which prompts, and how completions reach the ranks that asked
"""
