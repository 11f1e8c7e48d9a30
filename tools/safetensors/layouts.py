"""Write the golden layouts: whole safetensors files as sluice lays them out, made here by the rule alone.

Usage: python3 tools/safetensors/layouts.py testdata/layouts

The rule: tensors whose size is a multiple of 64 come first, then wider elements before narrower ones, then names in byte order; the header lists the metadata first, its
keys in byte order, escapes as \\u00XX what is below a space, and is padded with spaces so that data begins at a multiple of 64. The tests of every language make these bytes
again from what they read in them.
"""

import struct
import sys
from pathlib import Path

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1,
}
COMMON = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")  # what torch 1.13 has

Tensor = tuple[str, str, list[int]]


def size_of(tensor: Tensor) -> int:
    """Return the size of a tensor (name, tag, shape) in bytes."""
    n = SIZES[tensor[1]]
    for d in tensor[2]:
        n *= d
    return n


def quoted(text: str) -> str:
    """Return text as a JSON string of the layout."""
    out = ""
    for c in text:
        out += f"\\u{ord(c):04x}" if c < " " else "\\" + c if c in '"\\' else c
    return f'"{out}"'


def layout(tensors: list[Tensor], metadata: dict[str, str]) -> bytes:
    """Return the file. The bytes of the tensors count up from their number in the list; those of a BOOL are 0 and 1."""
    order = sorted(tensors, key=lambda t: (size_of(t) % 64 > 0, -SIZES[t[1]], t[0].encode()))
    members = []
    if metadata:
        members.append(quoted("__metadata__") + ":{" + ",".join(quoted(k) + ":" + quoted(metadata[k]) for k in sorted(metadata, key=str.encode)) + "}")
    data = b""
    for t in order:
        name, tag, shape = t
        n = size_of(t)
        members.append(f'{quoted(name)}:{{"dtype":"{tag}","shape":[{",".join(map(str, shape))}],"data_offsets":[{len(data)},{len(data) + n}]}}')
        data += bytes((tensors.index(t) + i) % (2 if tag == "BOOL" else 256) for i in range(n))
    header = ("{" + ",".join(members) + "}").encode()
    header += b" " * (-(8 + len(header)) % 64)
    return struct.pack("<Q", len(header)) + header + data


def every(tags: tuple[str, ...]) -> list[Tensor]:
    """Return tensors of every tag in awkward shapes."""
    return [(f"{tag}{shape}".replace(" ", ""), tag, shape) for tag in tags for shape in ([], [0], [3, 0, 2], [5], [2, 3], [1, 64])]


def golden() -> dict[str, bytes]:
    """Return all golden files by name."""
    sample: list[Tensor] = [
        ("aux_hidden_states", "BF16", [1, 7, 24]), ("input_ids", "I64", [1, 7]), ("attention_mask", "I64", [1, 7]),
        ("loss_mask", "I64", [1, 7]), ("last_hidden_states", "BF16", [1, 7, 9]),
    ]
    awkward: list[Tensor] = [
        ("", "U8", [1]), ('quote " and \\', "I16", [3]), ("tab\tand\x01", "I8", [2]), ("größe", "F32", [2]), ("漢", "F32", [2]), ("😀", "F32", [2]), ("\uffff", "F32", [2]),
        ("\u2028\x7f", "F32", [1]), ("a", "F32", [1]), ("B", "F32", [1]), ("/", "F64", [8]),
    ]
    return {
        "common": layout(every(COMMON), {}),
        "every-dtype": layout(every(tuple(SIZES)), {"format": "pt"}),
        "sample": layout(sample, {"sluice.ref": '{"sample_id":"r1-0-17","attributes":{"shift":"0"}}'}),
        "awkward": layout(awkward, {"z": "line\nbreak \x00\x1f", "\u2028": "\x7f", "größe": 'say "hi" \\ there', "": "", "😀": "\uffff", "\uffff": "😀", "Z": "first"}),
        "metadata-alone": layout([], {"a": "b"}),
        "nothing": layout([], {}),
    }


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, data in golden().items():
        (out / f"{name}.safetensors").write_bytes(data)


if __name__ == "__main__":
    main()
