"""What of vLLM this backend stands on, and whether another version of it still has that: read off sources, not run.

    uses.py           every name with how it is called: those of internals.py, and those that vLLM exports
    behaviours.py     code that is relied on for what it does, by digests of the versions in which it was read
    source_reader.py  where a source tree defines a name, what it takes, what its code says; imports nothing of it
    compared.py       the three against a source tree
    wheels.py         a version of the package index, downloaded and never installed

`make vllm-surface VERSION=…` compares a version on the package index; `require_vllm(allow_version=True)` compares an
installed one that nobody has read. Tests compare the tested version, and see that nothing is used past this list.
"""
