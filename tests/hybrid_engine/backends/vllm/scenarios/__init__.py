"""What ranks do in the tests of the vLLM backend: functions for tests/harness/launch.py that return frozen records.

asking.py    an engine, and what it is asked in every scenario
cycles.py    three switches on one engine, failures in between, and what the process is left with
replicas.py  two replicas, in several orders, with failures on one of them
serving.py   quantised weights, memory over switches, what transformers computes
layouts.py   models in any layout without an engine around them
lora.py      LoRAs beside each other, over switches and releases
"""
