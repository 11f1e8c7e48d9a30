"""Dtypes: one name for each, whatever framework it comes from."""

from __future__ import annotations

import numpy as np
import pytest

from sluice import dtypes
from sluice.errors import InvalidError, UnsupportedError

from .interpreter import run_python

NUMPY_NAMES = tuple(n for n in dtypes.NAMES if n not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))


def test_names_tags_and_sizes_are_those_of_the_contract() -> None:
    assert [(n, dtypes.tag(n), dtypes.itemsize(n)) for n in dtypes.NAMES] == [
        ("float64", "F64", 8),
        ("float32", "F32", 4),
        ("float16", "F16", 2),
        ("bfloat16", "BF16", 2),
        ("float8_e4m3fn", "F8_E4M3", 1),
        ("float8_e5m2", "F8_E5M2", 1),
        ("int64", "I64", 8),
        ("int32", "I32", 4),
        ("int16", "I16", 2),
        ("int8", "I8", 1),
        ("uint8", "U8", 1),
        ("uint16", "U16", 2),
        ("uint32", "U32", 4),
        ("uint64", "U64", 8),
        ("bool", "BOOL", 1),
    ]
    assert [dtypes.name_of_tag(dtypes.tag(n)) for n in dtypes.NAMES] == list(dtypes.NAMES)


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_numpy_dtypes_have_the_same_names(name: str) -> None:
    dtype = dtypes.numpy_dtype(name)
    assert dtype.itemsize == dtypes.itemsize(name)
    for given in (dtype, dtype.type, dtype.newbyteorder(">"), name):
        assert dtypes.name_of(given) == name


def test_torch_dtypes_have_the_same_names() -> None:
    torch = pytest.importorskip("torch")
    known = [n for n in dtypes.NAMES if hasattr(torch, n)]
    assert {"bfloat16", "float16", "float32", "int64", "bool", "uint8"} <= set(known)
    for name in known:
        assert dtypes.torch_dtype(name) is getattr(torch, name)
        assert dtypes.name_of(dtypes.torch_dtype(name)) == name


def test_a_dtype_that_this_torch_lacks_is_unsupported_and_names_its_version() -> None:
    torch = pytest.importorskip("torch")
    for name in (n for n in dtypes.NAMES if not hasattr(torch, n)):
        with pytest.raises(NotImplementedError) as e:
            dtypes.torch_dtype(name)
        assert isinstance(e.value, UnsupportedError)
        assert name in str(e.value)
        assert torch.__version__ in str(e.value)


def test_an_old_torch_is_asked_and_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch, "int16")
    with pytest.raises(UnsupportedError, match=r"has no such dtype"):
        dtypes.torch_dtype("int16")


@pytest.mark.parametrize(
    "bad",
    ["float", "BF16", "torch.float32", "", "Float32", None, 1, float, bool, int, np.complex64, np.dtype("M8[s]"), np.dtype("U3"),
     np.dtype(object), np.dtype([("a", "f4")]), np.dtype(("f4", (2,))), np.zeros(1), [], {}],
)  # fmt: skip
def test_what_is_no_dtype_is_refused_with_its_value(bad: object) -> None:
    with pytest.raises(ValueError, match="want one of float64") as e:
        dtypes.name_of(bad)
    assert isinstance(e.value, InvalidError)
    assert repr(bad)[:40] in str(e.value)


def test_torch_dtypes_that_no_feature_has_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for bad in (torch.complex64, torch.quint8):
        with pytest.raises(InvalidError):
            dtypes.name_of(bad)


@pytest.mark.parametrize("bad", ["F4", "bfloat16", "", "bf16"])
def test_tags_of_no_feature_are_refused(bad: str) -> None:
    with pytest.raises(InvalidError):
        dtypes.name_of_tag(bad)


@pytest.mark.parametrize("call", [dtypes.tag, dtypes.itemsize, dtypes.numpy_dtype, dtypes.torch_dtype])
def test_no_name_passes_that_is_none(call: object) -> None:
    assert callable(call)
    for bad in ("float", "BF16", ["float32"]):
        with pytest.raises(InvalidError):
            call(bad)


def test_bfloat16_needs_ml_dtypes_in_numpy() -> None:
    run_python("""
        sys.modules["ml_dtypes"] = None
        from sluice import dtypes, errors
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            try:
                dtypes.numpy_dtype(name)
            except errors.UnsupportedError as e:
                assert name in str(e) and "ml_dtypes" in str(e), e
            else:
                raise SystemExit(name)
    """)


def test_nothing_here_imports_torch_before_it_is_asked_for() -> None:
    run_python("""
        import numpy as np
        from sluice import dtypes
        assert dtypes.name_of(np.float32) == "float32" and dtypes.numpy_dtype("int64") == np.int64
        assert "torch" not in sys.modules
    """)


def test_without_torch_everything_but_its_dtypes_works() -> None:
    run_python("""
        sys.modules["torch"] = None
        from sluice import dtypes, errors
        assert dtypes.torch_module() is None and not dtypes.is_torch_dtype("float32")
        assert dtypes.numpy_dtype("float16").itemsize == 2 and dtypes.name_of("bfloat16") == "bfloat16"
        try:
            dtypes.torch_dtype("float32")
        except errors.UnsupportedError as e:
            assert "torch is not installed" in str(e)
        else:
            raise SystemExit("a dtype of no torch")
    """)


def test_a_broken_torch_is_not_taken_for_none(tmp_path: object) -> None:
    run_python(f"""
        import pathlib
        pathlib.Path({str(tmp_path)!r}, "torch.py").write_text("import no_such_library_of_torch")
        sys.path.insert(0, {str(tmp_path)!r})
        from sluice import dtypes
        try:
            dtypes.torch_module()
        except ModuleNotFoundError as e:
            assert e.name == "no_such_library_of_torch", e
        else:
            raise SystemExit("no error")
    """)


@pytest.mark.skipif(dtypes.torch_module() is None, reason="torch is not installed")
def test_the_import_of_torch_keeps_no_frame_of_its_caller() -> None:
    run_python("""
        import gc, weakref
        gc.disable()
        from sluice import dtypes

        class Held:
            pass

        def caller(held):
            assert "torch" not in sys.modules and dtypes.torch_module() is sys.modules["torch"]

        held = Held()
        gone = weakref.ref(held)
        caller(held)
        del held
        assert gone() is None
    """)


def test_without_torch_no_thread_looks_for_it() -> None:
    run_python("""
        import threading
        from sluice import dtypes

        class Without:
            def __init__(self, finder):
                self.finder = finder

            def find_spec(self, name, *where):
                return None if name == "torch" else self.finder.find_spec(name, *where)

        def start(thread):
            raise SystemExit("a thread")

        sys.meta_path[:] = map(Without, sys.meta_path)
        threading.Thread.start = start
        assert dtypes.torch_module() is None
    """)


@pytest.mark.skipif(dtypes.torch_module() is None, reason="torch is not installed")
def test_torch_is_imported_also_while_the_program_ends() -> None:
    run_python("""
        import atexit, os, traceback
        from sluice import dtypes

        def late():
            try:
                assert "torch" not in sys.modules and dtypes.torch_module() is sys.modules["torch"]
            except BaseException:
                traceback.print_exc()
                os._exit(1)

        atexit.register(late)
    """)
