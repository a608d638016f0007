"""Records of the engines' weights: which box of which canonical tensor lies where in which buffer.

    regions.py      Region: a box of a tensor, with intersection and subtraction; copies as boxes
    layout.py       Buffer, Place, Shard (the record), and Layout: the records of one rank or of all
    validation.py   every fault of a layout: bounds, overlaps, gaps, dtypes
    holdings.py     compact records of all ranks for the planner; BoxOwners: ranks that hold a box
    sides.py        Side: records of all ranks, once for equal ranks; layouts as messages

An adaptor of an engine emits the `Layout` of its rank. Ranks exchange their layouts, which form a
`Side`, which is then converted to compact holdings. A `SideLayout` of `layouts` is compact from
the start.
"""
