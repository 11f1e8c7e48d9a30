"""Write the golden refs: canonical JSON as Python's own json module makes it.

Usage: python3 tools/refs/golden.py testdata/refs

Each file holds one ref, without a final newline. The Go tests read them and must give the same bytes back; whoever writes refs from
another language checks against the same files.
"""

import json
import sys
from pathlib import Path

SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}


def ref(sample_id: str, features: list[tuple[str, list[int], str]], algorithm: str, attributes: dict[str, str], num_tokens: int = 0, **other: object) -> dict[str, object]:
    """Return the fields of a ref in their canonical order. A feature is (name, shape, dtype)."""
    total = 0
    for _, shape, dtype in features:
        n = SIZES[dtype]
        for d in shape:
            n *= d
        total += n
    fields: dict[str, object] = {
        "sample_id": sample_id,
        "run_id": "r1",
        "store_uri": "file:///dev/shm/sluice/r1",
        "generation": "6f1c0a2b3c4d5e6f708192a3b4c5d6e7",
        "features": [{"name": n, "key": f"{sample_id}/{n}", "shape": s, "dtype": d} for n, s, d in features],
        "algorithm": algorithm,
        "schema_version": 1,
        "num_tokens": num_tokens,
        "estimated_bytes": total,
        "target_model_version": "0",
        "draft_weight_version": "0",
        "attributes": dict(sorted(attributes.items(), key=lambda kv: kv[0].encode())),
    }
    fields.update(other)
    return fields


def golden() -> dict[str, dict[str, object]]:
    """Return all golden refs by file name."""
    ids = ("input_ids", [1, 2048], "int64")
    attention = ("attention_mask", [1, 2048], "int64")
    loss = ("loss_mask", [1, 2048], "int64")
    return {
        "eagle3": ref("r1-0-17", [("aux_hidden_states", [1, 2048, 12288], "bfloat16"), ids, attention, loss, ("last_hidden_states", [1, 2048, 4096], "bfloat16")],
                      "eagle3", {"aux_layers": "hf:1,15,28", "last_norm": "post", "shift": "0"}, 1873),
        "eagle3-probs": ref("r1-0-18", [ids, attention, loss, ("aux_hidden_states", [1, 2048, 12288], "float16"), ("target_probs", [1, 2048, 8192], "float32"), ("position_mask", [1, 2048, 1], "bool")],
                            "eagle3", {"shift": "1", "aux_layers": "unknown"}, 12),
        "dflash": ref("r1-0-19", [("hidden_states", [2, 7, 160], "float32"), ("input_ids", [2, 7], "int64"), ("attention_mask", [2, 7], "int64"), ("loss_mask", [2, 7], "int64")],
                      "dflash", {"shift": "0", "aux_layers": "vllm:2,4,6,8,10"}, 14),
        "dspark": ref("r1-0-20", [("target_hidden_states", [1, 5, 96], "float32"), ("target_last_hidden_states", [1, 5, 32], "float32"), ("input_ids", [1, 5], "int64"), ("loss_mask", [1, 5], "int64")],
                      "dspark", {"shift": "0", "last_norm": "post", "aux_layers": "hf:-1,2,4"}, 3),
        "every-dtype": ref("all.dtypes:1", [(f"f_{d}", [3, 0, 2] if d == "int8" else [3, 2], d) for d in SIZES], "custom", {}),
        "scalar-and-text": ref("_", [("x", [], "uint64")], "custom-2",
                               {"quote": 'say "hi" \\ there', "angle": "<&>", "Zebra": "first, since bytes sort", "_": "é漢😀", "a": ""},
                               schema_version=7, num_tokens=2**53 - 1, store_uri='mem:"quoted"', target_model_version="step-10\\final", draft_weight_version="18446744073709551615"),
    }


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, fields in golden().items():
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        (out / f"{name}.json").write_bytes(text.encode())


if __name__ == "__main__":
    main()
