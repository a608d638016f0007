"""`make compat`: which versions of Python, megatron-core and vLLM were run together, and what came of it.

    records.py    a run of tests and what came of it; the file of all that were kept, records.jsonl
    recording.py  a pytest plugin: `make test`, `make core-tests` and `make pure-tests` leave a record
    surface.py    `make vllm-surface` leaves one, too
    cells.py      what the code says of a combination, and the record that shows it
    page.py       docs/compatibility.md, of page_template.md
    __main__.py   takes in what was run in this checkout, prints the table, writes the page

Runs write to runs/compatibility.jsonl, which is not in git; `make compat` takes from there what is newer. A run that
was given further arguments, or was interrupted, leaves nothing.
"""
