"""What the engines say of their weights: this box of this canonical tensor lies at this place of this buffer.

    regions.py      Region: a box of a tensor, with intersection and subtraction; boxes of a copy between strided views
    layout.py       Buffer, Place, Shard (the record), and Layout: the records of one rank or of all
    validation.py   every fault of a layout: bounds, overlaps, gaps, dtypes
    holdings.py     the records of all ranks in compact form, for the planner; BoxOwners: the ranks that hold a box
    sides.py        Side: what all ranks of one side hold, of ranks that hold the same once; layouts as messages

Adaptors of engines make a `Layout` of their own rank. Ranks tell each other theirs, which become a `Side`, and that is
made compact. A `SideLayout` of `layouts` is compact from the start.
"""
