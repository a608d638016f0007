"""Tensors over memory that torch did not allocate, on any device, without touching that memory.

Made through DLPack, since torch takes the device from the record and does not access the address, which may still
be unmapped. The owner lives as long as the tensor's storage.
"""

from __future__ import annotations

import atexit
import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLDeviceType
_UNSIGNED = 1  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h. The deleter is kept as an address, so that it can be taken out."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_lent: dict[int, tuple[_ManagedTensor, ctypes.Array[ctypes.c_int64], object]] = {}
"""By address of the record: what must stay alive until torch returns it."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _give_back(address: int) -> None:
    _lent.pop(address, None)


def tensor_over(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return a flat uint8 tensor over [address, address + nbytes) of `device`; its storage keeps `owner` alive."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    flat = _Tensor(
        data=address,
        device_type=_DEVICE_TYPES[device.type],
        device_id=device.index or 0,
        ndim=1,
        code=_UNSIGNED,
        bits=8,
        lanes=1,
        shape=shape,
    )
    managed = _ManagedTensor(flat, None, ctypes.cast(_give_back, ctypes.c_void_p))
    key = ctypes.addressof(managed)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new_capsule(key, b"dltensor", None)
    _lent[key] = (managed, shape, owner)
    try:
        return from_dlpack(capsule)
    except BaseException:
        _lent.pop(key, None)
        raise


def host_tensor_over(address: int, nbytes: int, dtype: torch.dtype, numel: int, owner: object) -> torch.Tensor:
    """Return a flat tensor of `numel` elements over host memory of `nbytes`; its storage keeps `owner` alive.

    Unlike `tensor_over` it runs no Python when the tensor dies, so it can be made and dropped at any time.
    """
    pages = (ctypes.c_ubyte * nbytes).from_address(address)
    pages.owner = owner  # type: ignore[attr-defined]  # ctypes arrays take any attribute; torch keeps this one
    return torch.frombuffer(pages, dtype=dtype, count=numel)


@atexit.register
def _forget() -> None:
    """Storages that outlive the interpreter must not call back into it; the system frees their memory."""
    for managed, _, _ in _lent.values():
        managed.deleter = None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))  # torch still reads the record
