"""Exchange files with the stock Python package `safetensors`.

    interop.py check          print the versions in use, or fail if a package is missing
    interop.py write DIR      write files with the stock package, and DIR/manifest.json, which says what is in them
    interop.py verify DIR     read the files that DIR/manifest.json describes, and compare

The manifest is the same in both directions: files, their metadata, and for each tensor its name, dtype (the format's name),
shape and bytes in hexadecimal. Needs numpy; torch is used where it is installed.
"""

import json
import os
import sys

import numpy as np
import safetensors
import safetensors.numpy

try:
    from safetensors import TensorSpec  # 0.8 and later
except ImportError:
    TensorSpec = None

try:
    import torch
    import safetensors.torch
except ImportError:
    torch = None

# The format's name, the name that serialize() takes, numpy's name or None, and the size of an element in bytes.
DTYPES = [
    ("F64", "float64", "float64", 8),
    ("F32", "float32", "float32", 4),
    ("F16", "float16", "float16", 2),
    ("BF16", "bfloat16", None, 2),
    ("F8_E4M3", "float8_e4m3fn", None, 1),
    ("F8_E5M2", "float8_e5m2", None, 1),
    ("I64", "int64", "int64", 8),
    ("I32", "int32", "int32", 4),
    ("I16", "int16", "int16", 2),
    ("I8", "int8", "int8", 1),
    ("U8", "uint8", "uint8", 1),
    ("U16", "uint16", "uint16", 2),
    ("U32", "uint32", "uint32", 4),
    ("U64", "uint64", "uint64", 8),
    ("BOOL", "bool", "bool", 1),
]
FOREIGN = [("F8_E8M0", "float8_e8m0fnu", 1), ("C64", "complex64", 8), ("F8_E4M3FNUZ", "float8_e4m3fnuz", 1)]
SHAPES = [(), (0,), (3, 0, 2), (5,), (2, 3), (1, 64)]
METADATA = {"format": "np", "quote\"\\": "line\nbreak\ttab\x01", "größe": "\u2028\U0001f600"}


def payload(dtype, count, size, seed):
    """Bytes that differ from tensor to tensor; booleans stay 0 or 1."""
    data = bytes((seed * 7 + i * 31) % 256 for i in range(count * size))
    return bytes(b % 2 for b in data) if dtype == "BOOL" else data


def count_of(shape):
    n = 1
    for d in shape:
        n *= d
    return n


def serialize(tensors, metadata):
    """Serialize (name, dtype for serialize(), shape, bytes) with the stock package, whatever its version takes."""
    spec, keep = {}, []
    for name, dtype, shape, data in tensors:
        if TensorSpec is None:
            spec[name] = {"dtype": dtype, "shape": list(shape), "data": data}
            continue
        buf = np.frombuffer(data, np.uint8).copy()
        keep.append(buf)
        spec[name] = TensorSpec(dtype=dtype, shape=list(shape), data_ptr=buf.ctypes.data, data_len=len(data))
    return bytes(safetensors.serialize(spec, metadata))


class Writer:
    def __init__(self, folder):
        self.folder, self.files, self.skipped = folder, [], []

    def path(self, name):
        return os.path.join(self.folder, name)

    def add(self, name, tensors, metadata):
        self.files.append(
            {
                "file": name,
                "metadata": metadata,
                "tensors": [{"name": n, "dtype": d, "shape": list(s), "hex": data.hex()} for n, d, s, data in tensors],
            }
        )

    def numpy(self):
        arrays, tensors = {}, []
        for seed, (dtype, _, np_name, size) in enumerate(DTYPES):
            if np_name is None:
                continue
            for shape in SHAPES:
                name = f"{np_name}{list(shape)}"
                data = payload(dtype, count_of(shape), size, seed)
                arrays[name] = np.frombuffer(data, np_name).reshape(shape)
                tensors.append((name, dtype, shape, data))
        safetensors.numpy.save_file(arrays, self.path("numpy.safetensors"), metadata=METADATA)
        self.add("numpy.safetensors", tensors, METADATA)

    def raw(self):
        specs, tensors = [], []
        for seed, (dtype, stock, _, size) in enumerate(DTYPES):
            for shape in SHAPES:
                name = f"{stock}{list(shape)} \"\\\n\u00e9"
                data = payload(dtype, count_of(shape), size, seed)
                specs.append((name, stock, shape, data))
                tensors.append((name, dtype, shape, data))
        with open(self.path("raw.safetensors"), "wb") as f:
            f.write(serialize(specs, None))
        self.add("raw.safetensors", tensors, None)

    def foreign(self):
        for dtype, stock, size in FOREIGN:
            file, data = f"foreign-{dtype}.safetensors", payload(dtype, 6, size, 1)
            try:
                content = serialize([("t", stock, (2, 3), data)], None)
            except safetensors.SafetensorError as err:  # an older package does not know the dtype
                self.skipped.append(f"{dtype}: {err}")
                continue
            with open(self.path(file), "wb") as f:
                f.write(content)
            self.add(file, [("t", dtype, (2, 3), data)], None)

    def empty(self):
        with open(self.path("empty.safetensors"), "wb") as f:
            f.write(serialize([], {"only": "metadata"}))
        self.add("empty.safetensors", [], {"only": "metadata"})

    def torch(self):
        if torch is None:
            self.skipped.append("torch: not installed")
            return
        saved, tensors = {}, []
        for seed, (dtype, stock, _, size) in enumerate(DTYPES):
            kind = getattr(torch, stock, None)
            if kind is None:
                self.skipped.append(f"torch.{stock}: not in torch {torch.__version__}")
                continue
            data = payload(dtype, 6, size, seed)
            name = f"torch.{stock}"
            saved[name] = torch.frombuffer(bytearray(data), dtype=kind).reshape(2, 3)
            tensors.append((name, dtype, (2, 3), data))
        safetensors.torch.save_file(saved, self.path("torch.safetensors"), metadata=METADATA)
        self.add("torch.safetensors", tensors, METADATA)


def write(folder):
    w = Writer(folder)
    w.numpy()
    w.raw()
    w.foreign()
    w.empty()
    w.torch()
    with open(w.path("manifest.json"), "w", encoding="utf-8") as f:
        json.dump({"files": w.files, "skipped": w.skipped}, f)
    return f"wrote {len(w.files)} files with {sum(len(f['tensors']) for f in w.files)} tensors; skipped: {w.skipped or 'nothing'}"


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def expect(what, got, want):
    if got != want:
        raise SystemExit(f"interop.py: {what}: stock package has {got!r}, want {want!r}")


def verify(folder):
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as f:
        files = json.load(f)["files"]
    by_format = {d[0]: d for d in DTYPES}
    tensors = checksums = 0
    for file in files:
        path = os.path.join(folder, file["file"])
        with open(path, "rb") as f:
            content = f.read()
        # deserialize() needs no array library, so it covers the dtypes that numpy lacks.
        got = dict(safetensors.deserialize(content))
        expect(f"{file['file']}: names", sorted(got), sorted(t["name"] for t in file["tensors"]))
        with safetensors.safe_open(path, framework="np") as opened:
            metadata = opened.metadata()
            expect(f"{file['file']}: metadata", metadata or None, file["metadata"] or None)
            sums = json.loads((metadata or {}).get("sluice.crc32c", "{}"))
            for want in file["tensors"]:
                what, data = f"{file['file']}: {want['name']!r}", bytes.fromhex(want["hex"])
                t = got[want["name"]]
                expect(f"{what}: dtype", t["dtype"], want["dtype"])
                expect(f"{what}: shape", list(t["shape"]), want["shape"])
                expect(f"{what}: bytes", bytes(t["data"]), data)
                if by_format[want["dtype"]][2] is not None:
                    array = opened.get_tensor(want["name"])
                    expect(f"{what}: numpy dtype", array.dtype.name, by_format[want["dtype"]][2])
                    expect(f"{what}: numpy shape", list(array.shape), want["shape"])
                    expect(f"{what}: numpy bytes", array.tobytes(), data)
                if sums:
                    expect(f"{what}: crc32c", sums[want["name"]], f"{crc32c(data):08x}")
                    checksums += 1
                tensors += 1
        if torch is not None:
            known = [t for t in file["tensors"] if hasattr(torch, by_format[t["dtype"]][1])]
            with safetensors.safe_open(path, framework="pt") as opened:
                for want in known:
                    t = opened.get_tensor(want["name"])
                    expect(f"{want['name']!r}: torch dtype", str(t.dtype), f"torch.{by_format[want['dtype']][1]}")
                    expect(f"{want['name']!r}: torch shape", list(t.shape), want["shape"])
    return f"read {len(files)} files with {tensors} tensors and {checksums} checksums"


def main(args):
    versions = f"safetensors {safetensors.__version__}, numpy {np.__version__}, torch {torch.__version__ if torch else 'absent'}"
    if args == ["check"]:
        print(versions)
    elif len(args) == 2 and args[0] in ("write", "verify"):
        print(f"{(write if args[0] == 'write' else verify)(args[1])} ({versions})")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
