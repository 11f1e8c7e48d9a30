"""The element types that a feature may have: their names, the tags of the safetensors format, and what torch and numpy call them.

The name is the one word for a dtype everywhere in the package and on the wire: torch's own name without the module, such as "bfloat16".
Nothing here imports torch before it is needed, since that takes more than a second.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidError, UnsupportedError

if TYPE_CHECKING:
    import torch

# name -> (tag of the safetensors format, bytes of an element)
_TABLE: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "bool": ("BOOL", 1),
}
_NAME_OF_TAG = {tag: name for name, (tag, _) in _TABLE.items()}

# What numpy has only by the package ml_dtypes.
_EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

NAMES: tuple[str, ...] = tuple(_TABLE)
"""Every name, in the order of the contract."""


def itemsize(name: str) -> int:
    """Return the size of one element in bytes. Raises InvalidError for a name that is none."""
    return _entry(name)[1]


def tag(name: str) -> str:
    """Return the safetensors format's tag for a dtype: "BF16" for "bfloat16". Raises InvalidError for a name that is none."""
    return _entry(name)[0]


def name_of_tag(tag: str) -> str:
    """Return the dtype of a tag of the safetensors format. Raises InvalidError for a tag that no feature's dtype has."""
    try:
        return _NAME_OF_TAG[tag]
    except KeyError:
        raise InvalidError(f"dtype tag is {tag!r:.80}, want one of {', '.join(_NAME_OF_TAG)}", op="dtype") from None


def name_of(dtype: object) -> str:
    """Return the name of a dtype that is given as a torch.dtype, a numpy dtype or scalar type, or already as a name.

    The byte order of a numpy dtype is no part of its name. Python's own types (bool, int, float) are refused, since torch and numpy
    disagree about what float is. Raises InvalidError for whatever no feature may have.
    """
    name: str | None = None
    if isinstance(dtype, str):
        name = str(dtype)
    elif is_torch_dtype(dtype):
        name = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, np.dtype):
        name = _numpy_name(dtype)
    elif isinstance(dtype, type) and issubclass(dtype, np.generic):
        name = _numpy_name(np.dtype(dtype))
    if name is None or name not in _TABLE:
        raise InvalidError(f"dtype is {dtype!r:.80}, want one of {', '.join(NAMES)}", op="dtype")
    return name


def is_torch_dtype(value: object) -> bool:
    """Report whether value is a torch.dtype, without importing torch: where nobody has, there is none."""
    module = loaded_torch()
    return module is not None and isinstance(value, module.dtype)


def loaded_torch() -> ModuleType | None:
    """Return torch if somebody has imported it: where nobody has, nothing is a tensor or a dtype of torch."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None  # another thread may be in the middle of its import


def torch_module() -> ModuleType | None:
    """Return torch, imported at the first call, or None where it is not installed. An installed torch that fails to import raises."""
    try:
        if "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
            _import_alone("torch")  # its import keeps the frames of its callers until the next collection, and with them what they hold: it gets none
        return importlib.import_module("torch")
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        return None


def _import_alone(name: str) -> None:
    """Import a module in a thread of its own, unless none can be started any more since the program ends."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            importlib.import_module(name)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    try:
        thread.start()
    except RuntimeError:
        return
    thread.join()
    if errors:
        raise errors.pop()


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name.

    Raises UnsupportedError where torch is not installed or is too old for it, and InvalidError for a name that is none.
    """
    _entry(name)
    module = torch_module()
    if module is None:
        raise UnsupportedError("torch is not installed", op="dtype", subject=name)
    dtype: torch.dtype | None = getattr(module, name, None)
    if dtype is None:
        raise UnsupportedError(f"torch {module.__version__} has no such dtype", op="dtype", subject=name, hint="install a newer torch")
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of that name.

    bfloat16 and float8 exist in numpy by the package ml_dtypes only. Raises UnsupportedError where that is not installed, and
    InvalidError for a name that is none.
    """
    _entry(name)
    if name not in _EXTENDED:
        return np.dtype(name)
    try:
        extended = importlib.import_module("ml_dtypes")
    except ModuleNotFoundError as e:
        if e.name != "ml_dtypes":
            raise
        raise UnsupportedError(
            f"numpy {np.__version__} has no such dtype", op="dtype", subject=name, hint="install torch or ml_dtypes"
        ) from None
    dtype: np.dtype[Any] = np.dtype(getattr(extended, name))
    return dtype


def _entry(name: str) -> tuple[str, int]:
    try:
        return _TABLE[name]
    except (KeyError, TypeError):
        raise InvalidError(f"dtype is {name!r:.80}, want one of {', '.join(NAMES)}", op="dtype") from None


def _numpy_name(dtype: np.dtype[Any]) -> str | None:
    if dtype.fields is not None or dtype.subdtype is not None:
        return None
    return str(dtype.name)
