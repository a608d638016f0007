"""Box algebra compared with sets of indices, and boxes of copies with torch's copies."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_engine.records.regions import (
    Region,
    StridedView,
    boxes_of_copy,
    contiguous_strides,
    refined_boxes,
    splits_of,
    subtract_all,
    union,
)

Index = tuple[int, ...]


def elements(region: Region) -> set[Index]:
    return set(
        itertools.product(
            *(range(low, high) for low, high in zip(region.offsets, region.ends, strict=True))
        )
    )


@st.composite
def regions(draw: st.DrawFn, num_dims: int) -> Region:
    offsets = draw(st.tuples(*[st.integers(0, 4)] * num_dims))
    lengths = draw(st.tuples(*[st.integers(1, 4)] * num_dims))
    return Region("t", offsets, lengths)


def several_regions(smallest: int, largest: int) -> st.SearchStrategy[list[Region]]:
    return st.integers(0, 3).flatmap(
        lambda dims: st.lists(regions(dims), min_size=smallest, max_size=largest)
    )


@given(several_regions(2, 2))
def test_intersection_equals_that_of_elements(pair: list[Region]) -> None:
    first, second = pair
    common = first.intersect(second)
    assert (elements(common) if common else set()) == elements(first) & elements(second)
    assert common == second.intersect(first)


@given(several_regions(2, 2))
def test_difference_equals_that_of_elements(pair: list[Region]) -> None:
    first, second = pair
    pieces = first.subtract(second)
    assert len(pieces) <= max(1, 2 * len(first.offsets))
    assert_disjoint_cover(pieces, elements(first) - elements(second))


@given(several_regions(1, 5), st.data())
def test_subtracting_several_regions(boxes: list[Region], data: st.DataObject) -> None:
    others = data.draw(st.lists(regions(len(boxes[0].offsets)), max_size=4))
    subtracted = set().union(*map(elements, others))
    assert_disjoint_cover(subtract_all(boxes[:1], others), elements(boxes[0]) - subtracted)
    assert_disjoint_cover(union(boxes), set().union(*map(elements, boxes)))


def assert_disjoint_cover(pieces: list[Region], expected: set[Index]) -> None:
    counts = Counter(itertools.chain.from_iterable(map(elements, pieces)))
    assert counts.keys() == expected
    assert all(count == 1 for count in counts.values())
    assert sum(piece.numel for piece in pieces) == len(expected)


def test_regions_of_different_tensors_are_disjoint() -> None:
    first = Region("a", (0,), (3,))
    second = Region("b", (0,), (3,))
    assert first.intersect(second) is None
    assert first.subtract(second) == [first]


@pytest.mark.parametrize(
    ("offsets", "lengths", "numbers"),
    [((0, 0), (1,), "2 offsets but 1 lengths"), ((-1,), (1,), r"\(-1,\)"), ((0,), (0,), r"\(0,\)")],
)
def test_an_invalid_region_is_refused(offsets: Index, lengths: Index, numbers: str) -> None:
    with pytest.raises(ValueError, match=rf"my\.tensor: .*{numbers}"):
        Region("my.tensor", offsets, lengths)


def narrowed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, tensor.dim() - 1))
    start = draw(st.integers(0, tensor.shape[dim] - 1))
    return tensor.narrow(dim, start, draw(st.integers(1, tensor.shape[dim] - start)))


def stepped(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, tensor.dim() - 1))
    step = draw(st.integers(1, 3))
    return tensor[
        tuple(
            [slice(None)] * dim + [slice(draw(st.integers(0, tensor.shape[dim] - 1)), None, step)]
        )
    ]


def selected(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, tensor.dim() - 1))
    return tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1)))


def chunked(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, tensor.dim() - 1))
    return draw(st.sampled_from(tensor.chunk(draw(st.integers(1, 3)), dim)))


def permuted(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


def reshaped(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Reshape to a random factorisation if torch can do so without a copy."""
    left = tensor.numel()
    shape = []
    while left > 1 and len(shape) < 4:
        factor = draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
        shape.append(factor)
        left //= factor
    try:
        return tensor.view(*shape, left)
    except RuntimeError:
        return tensor


def unsqueezed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(draw(st.integers(0, tensor.dim())))


def expanded(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    tensor = unsqueezed(draw, tensor)
    return tensor.expand([draw(st.integers(1, 3)) if size == 1 else size for size in tensor.shape])


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a canonical tensor, a view of it, and a strided view of other memory."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    canonical = torch.arange(math.prod(shape)).reshape(shape)
    source = canonical
    for _ in range(draw(st.integers(0, 6))):
        steps = [unsqueezed, expanded, reshaped]
        if source.dim():
            steps += [narrowed, stepped, selected, chunked, permuted]
        changed = draw(st.sampled_from(steps))(draw, source)
        if changed.numel() <= 300:  # expanding must not grow without bound
            source = changed
    assert source.untyped_storage().data_ptr() == canonical.untyped_storage().data_ptr()
    return canonical, source, draw(destinations(tuple(source.shape)))


@st.composite
def destinations(draw: st.DrawFn, shape: Index) -> torch.Tensor:
    """Draw a view without overlap: dims in random memory order, with gaps."""
    strides = [0] * len(shape)
    step = draw(st.integers(1, 2))
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step = step * shape[dim] + draw(st.sampled_from([0, 0, 0, 2]))
    offset = draw(st.integers(0, 3))
    numel = (
        offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    )
    return torch.full((numel,), -1).as_strided(shape, strides, offset)


def view_of(tensor: torch.Tensor) -> StridedView:
    return StridedView(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


@given(copies())
@example((torch.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3), torch.full((2, 3), -1)))
@example((torch.tensor(7), torch.tensor(7), torch.tensor(-1)))
def test_boxes_copy_what_torch_copies(
    copy: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    assert_boxes_copy(*copy)


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2), (3, 1, 4), (2, 1, 2, 3)])
def test_windows_across_row_ends_are_copied(shape: Index) -> None:
    """Every run and every grid of a flattened tensor; few of them are boxes."""
    canonical = torch.arange(math.prod(shape)).reshape(shape)
    for start, length in itertools.product(range(12), range(1, 13)):
        for width, step in itertools.product(range(1, 4), range(1, 7)):
            if start + length - 1 + (width - 1) * step < 12:
                source = canonical.as_strided((width, length), (step, 1), start)
                assert_boxes_copy(canonical, source, torch.full((width, length), -1))


def assert_boxes_copy(
    canonical: torch.Tensor, source: torch.Tensor, destination: torch.Tensor
) -> None:
    """Assert that boxes write like torch's copy, each element once, and stay inside the tensor."""
    boxes = boxes_of_copy(tuple(canonical.shape), view_of(source), view_of(destination))
    written = torch.zeros_like(flat(destination))
    copied = flat(destination).clone()
    for box in boxes:
        assert len(box.offsets) == len(box.lengths) == len(box.strides) == canonical.dim()
        part = canonical
        for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            part = part.narrow(dim, offset, length)  # raises if the box leaves the tensor
        copied.as_strided(box.lengths, box.strides, box.start).copy_(part)
        written.as_strided(box.lengths, box.strides, box.start).add_(1)
    destination.copy_(source)
    assert torch.equal(copied, flat(destination))
    assert torch.equal(written, (flat(destination) >= 0).long()), (
        "an element is in no box or in several boxes"
    )


def test_common_copies_are_single_boxes() -> None:
    """Frequent copies of loaders must not split into many shards."""
    weight = torch.arange(48 * 32).reshape(48, 32)
    views = {
        "rows": weight[12:24],
        "columns": weight[:, 8:16],
        "transposed": weight[12:24].t(),
        "heads": weight.view(6, 8, 32)[2:4],
        "flattened": weight.view(-1),
        "row by row": weight[5:6],
        "unsqueezed": weight[None, 4:8],
    }
    for name, view in views.items():
        destination = torch.empty(view.shape, dtype=view.dtype)
        assert len(boxes_of_copy((48, 32), view_of(view), view_of(destination))) == 1, name


@given(
    st.lists(
        st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
    ),
    st.data(),
)
def test_refined_boxes_have_the_elements_of_the_box(
    splits: list[Index], data: st.DataObject
) -> None:
    shape = tuple(map(math.prod, splits))
    finer = tuple(itertools.chain(*splits))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(
        data.draw(st.integers(1, size - offset))
        for size, offset in zip(shape, offsets, strict=True)
    )
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    buffer = torch.full((math.prod(lengths),), -1)
    for box in refined_boxes(
        Region("t", offsets, lengths), contiguous_strides(lengths), tuple(splits)
    ):
        part = tensor.view(finer)
        for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        place = buffer.as_strided(box.lengths, box.strides, box.start)
        assert (place == -1).all(), "an element is in several boxes"
        place.copy_(part)
    expected = tensor[
        tuple(slice(low, low + size) for low, size in zip(offsets, lengths, strict=True))
    ]
    assert torch.equal(buffer.view(lengths), expected)


@pytest.mark.parametrize(
    ("shape", "finer", "splits"),
    [
        ((4, 6), (4, 6), ((4,), (6,))),
        ((4, 6), (4, 3, 2), ((4,), (3, 2))),
        ((4, 1, 6), (2, 2, 1, 6), ((2, 2), (1,), (6,))),
        ((4, 6), (4, 2, 2), None),
        ((4, 6), (24,), None),
        ((4, 6), (8, 3), None),
        ((4, 6), (4, 6, 1), None),
    ],
)
def test_a_finer_shape_splits_dims(
    shape: Index, finer: Index, splits: tuple[Index, ...] | None
) -> None:
    assert splits_of(shape, finer) == splits


def test_boxes_of_whole_rows_stay_single() -> None:
    splits = ((8,), (6,), (5, 2))
    columns = Region("t", (0, 0, 4), (8, 6, 4))
    assert len(refined_boxes(columns, (60, 10, 1), splits)) == 1
