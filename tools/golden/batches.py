"""Golden arrays for package stream: what a trainer must get for given target outputs.

An implementation of its own, in PyTorch, of what samples and batches are: it shares no code with the Go package and is
written the other way round, document by document. Run it with Debian's python3-torch; it needs torch and numpy only:

    /usr/bin/python3 tools/golden/batches.py stream/testdata/golden

Each file is one case in the safetensors format. Its metadata says what the case is; its tensors are

    prompt.<i>.<field>    the ith prompt batch
    target.<i>.<output>   what the target returned for it: aux (residual states, concatenated), last (post-norm), logits
    draft_vocab           the selected token ids
    sample.<i>.<feature>  the sample that must be in the store (shift 0), or that another producer put there (shift 1)
    batch.<feature>       the batch that collation must make of all samples
    final_norm            the weight of the target's final norm, where samples hold the last state as it is before that norm (last_norm pre)

Where the metadata says that documents cross, the samples are packed and shifted as upstream does it: a document's last slot keeps the loss of the next
document's first token.
"""

import json
import os
import struct
import sys

import torch

H, V, LAYERS = 4, 24, 6
DRAFT = [7, 3, 11, 0, 19, 23, 5]
PAD_TO = 4


def write(path, tensors, meta):
    names = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.bool: "BOOL"}
    header, blobs, at = {"__metadata__": meta}, [], 0
    # Wide elements first, so that every tensor is aligned.
    for name, t in sorted(tensors.items(), key=lambda kv: (-kv[1].element_size(), kv[0])):
        t = t.contiguous()
        raw = (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy().tobytes()
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        blobs.append(raw)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(len(head) + 8) % 64)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head + b"".join(blobs))


def rms(x):
    return x / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-6).float()


EPSILON = 1e-5


def final_norm(x, weight):
    """RMSNorm, as torch.nn.functional.rms_norm has it, in float32; rounded back to the type of x."""
    v = x.to(torch.float32)
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPSILON) * weight).to(x.dtype)


def make_docs(gen, lengths):
    """Documents: ids, loss mask, and the target's states at each of their positions."""
    docs = []
    for n in lengths:
        ids = torch.randint(1, V, (n,), generator=gen)
        loss = torch.randint(0, 2, (n,), generator=gen)
        loss[-1] = 1
        if n > 2:
            loss[0] = 1  # never predicted: must not count
        states = torch.randn(LAYERS, n, H, generator=gen).to(torch.bfloat16)
        last = rms(states[-1].float()).to(torch.bfloat16)
        logits = torch.randn(n, V, generator=gen) * 4
        docs.append(dict(ids=ids, loss=loss, states=states, last=last, logits=logits))
    return docs


def cat(parts, dim=0):
    return torch.cat(list(parts), dim)


def layout(rows, gen, layers, packed):
    """Rows (lists of documents) as one prompt batch and one target output. Padding holds garbage in the target's outputs."""
    width = max(sum(len(d["ids"]) for d in row) for row in rows)
    docs = max(len(row) for row in rows)
    p = {k: torch.zeros(len(rows), width, dtype=torch.int64) for k in ("input_ids", "attention_mask", "loss_mask")}
    if packed:
        p["position_ids"] = torch.zeros(len(rows), width, dtype=torch.int64)
        p["doc_remaining"] = torch.zeros(len(rows), width, dtype=torch.int64)
        p["seq_lens"] = torch.zeros(len(rows), docs, dtype=torch.int64)
    out = {
        "aux": torch.randn(len(rows), width, len(layers) * H, generator=gen).to(torch.bfloat16),
        "last": torch.randn(len(rows), width, H, generator=gen).to(torch.bfloat16),
        "logits": torch.randn(len(rows), width, V, generator=gen),
    }
    for r, row in enumerate(rows):
        at = 0
        for k, d in enumerate(row):
            n = len(d["ids"])
            here = slice(at, at + n)
            p["input_ids"][r, here] = d["ids"]
            p["attention_mask"][r, here] = 1
            p["loss_mask"][r, here] = d["loss"]
            if packed:
                p["position_ids"][r, here] = torch.arange(n)
                p["doc_remaining"][r, here] = torch.arange(n).flip(0)
                p["seq_lens"][r, k] = n
            out["aux"][r, here] = cat([d["states"][l] for l in layers], -1)
            out["last"][r, here] = d["last"]
            out["logits"][r, here] = d["logits"]
            at += n
    return p, out


NAMES = {
    "eagle3": dict(aux="aux_hidden_states", last="last_hidden_states"),
    "dflash": dict(aux="hidden_states"),
    "dspark": dict(aux="target_hidden_states", last="target_last_hidden_states"),
}


def make_sample(algorithm, encoding, p, out, layers):
    """The features of a sample, row t = position t, in the schema's order."""
    f, names = {}, NAMES[algorithm]
    aux = out["aux"].clone()
    if algorithm == "dspark":
        for k, l in enumerate(layers):
            if l == LAYERS - 1:
                aux[..., k * H : (k + 1) * H] = out["last"]
    f[names["aux"]] = aux
    if algorithm == "dspark":
        f[names["last"]] = out["last"]
    f["input_ids"] = p["input_ids"]
    if algorithm != "dspark":
        f["attention_mask"] = p["attention_mask"]
    f["loss_mask"] = p["loss_mask"]
    if encoding == "last_hidden_states":
        f["last_hidden_states"] = out["last"]
    if encoding == "logits":
        f["logits"] = out["logits"]
    if encoding == "target_probs":
        chosen = torch.tensor(DRAFT)
        f["target_probs"] = torch.softmax(out["logits"].index_select(-1, chosen), -1)
        in_draft = torch.zeros(V, dtype=torch.bool)
        in_draft[chosen] = True
        f["position_mask"] = (in_draft[out["logits"].argmax(-1)] & (p["loss_mask"] == 1)).unsqueeze(-1)
    for k in ("position_ids", "seq_lens", "doc_remaining"):
        if k in p:
            f[k] = p[k]
    return f


SHIFTED = {"input_ids", "loss_mask", "last_hidden_states", "logits", "target_probs", "position_mask"}


def left(t):
    """Shift by one along dim 1: roll, then zero the tail."""
    t = torch.roll(t, -1, 1).clone()
    t[:, -1] = 0
    return t


def aligned(algorithm, sample, cross=False):
    """A sample as the trainer sees it: shifted where the algorithm says so, no document supervising the next one's first token unless they cross."""
    if algorithm != "eagle3":
        return dict(sample)
    f = {k: left(v) if k in SHIFTED else v.clone() for k, v in sample.items()}
    if "seq_lens" in f and not cross:
        for r, lens in enumerate(f["seq_lens"].tolist()):
            ends = torch.tensor(lens).cumsum(0)
            for n, end in zip(lens, ends.tolist()):
                if n > 0:
                    f["loss_mask"][r, end - 1] = 0
                    if "position_mask" in f:
                        f["position_mask"][r, end - 1] = False
    return f


def pad_batch(samples):
    width = max(s["input_ids"].shape[1] for s in samples)
    width = -(-width // PAD_TO) * PAD_TO
    batch = {}
    for name in samples[0]:
        to = max(s[name].shape[1] for s in samples) if name == "seq_lens" else width
        rows = []
        for s in samples:
            t = s[name]
            fill = torch.zeros(t.shape[0], to - t.shape[1], *t.shape[2:], dtype=t.dtype)
            rows.append(cat([t, fill], 1))
        batch[name] = cat(rows)
    return batch


def pack_batch(algorithm, samples, rows_docs, shift, limit):
    """Packs real tokens into rows of at most limit tokens. Every row of a sample is cut to its tokens first, so that it ends in zeros after a shift."""
    bins = [[]]
    for s, rows in zip(samples, rows_docs):
        for r, lens in enumerate(rows):
            n = sum(lens)
            cut = {k: v[r : r + 1, :n] for k, v in s.items() if k not in ("position_ids", "seq_lens", "doc_remaining")}
            if shift == "0":
                cut = aligned(algorithm, dict(cut, seq_lens=torch.tensor([lens])))
                del cut["seq_lens"]
            if sum(sum(l) for _, l in bins[-1]) + n > limit:
                bins.append([])
            bins[-1].append((cut, lens))
    width = max(sum(sum(l) for _, l in b) for b in bins)
    width = -(-width // PAD_TO) * PAD_TO
    docs = max(sum(len(l) for _, l in b) for b in bins)
    batch = {}
    for name in bins[0][0][0]:
        rows = []
        for b in bins:
            t = cat([c[name] for c, _ in b], 1)
            rows.append(cat([t, torch.zeros(1, width - t.shape[1], *t.shape[2:], dtype=t.dtype)], 1))
        batch[name] = cat(rows)
    for name in ("position_ids", "doc_remaining"):
        batch[name] = torch.zeros(len(bins), width, dtype=torch.int64)
    batch["seq_lens"] = torch.zeros(len(bins), docs, dtype=torch.int64)
    for r, b in enumerate(bins):
        lens = [n for _, l in b for n in l]
        batch["seq_lens"][r, : len(lens)] = torch.tensor(lens)
        positions = cat([torch.arange(n) for n in lens])
        batch["position_ids"][r, : len(positions)] = positions
        batch["doc_remaining"][r, : len(positions)] = cat([torch.arange(n - 1, -1, -1) for n in lens])
    return batch


def supervised(rows_docs_masks):
    """Supervised tokens, the first of each document left out."""
    return sum(int(m[1:].sum()) for m in rows_docs_masks)


def case(out_dir, seed, algorithm, encoding, mode, shift):
    gen = torch.Generator().manual_seed(seed)
    layers = [0, LAYERS - 1] if algorithm == "dspark" else [1, 2, 4]
    packed = mode in ("packed", "repacked")
    if packed:
        rows = [[make_docs(gen, [3, 4, 2])], [make_docs(gen, [5, 2]), make_docs(gen, [6])]]
    else:
        rows = [[make_docs(gen, [5])], [make_docs(gen, [3]), make_docs(gen, [7])], [make_docs(gen, [2])]]
    tensors, samples, rows_docs, tokens = {"draft_vocab": torch.tensor(DRAFT)}, [], [], 0
    for i, sample_rows in enumerate(rows):
        p, target = layout(sample_rows, gen, layers, packed)
        for k, v in p.items():
            tensors[f"prompt.{i}.{k}"] = v
        for k, v in target.items():
            tensors[f"target.{i}.{k}"] = v
        s = make_sample(algorithm, encoding, p, target, layers)
        tokens += int((p["loss_mask"] if algorithm == "dspark" else p["attention_mask"]).sum())
        if shift == "1":
            s = aligned(algorithm, s)
        for k, v in s.items():
            tensors[f"sample.{i}.{k}"] = v
        samples.append(s)
        rows_docs.append([[len(d["ids"]) for d in row] for row in sample_rows])
    limit = 16
    if mode in ("padded", "packed"):
        batch = pad_batch([aligned(algorithm, s) if shift == "0" else s for s in samples])
    else:
        batch = pack_batch(algorithm, samples, rows_docs, shift, limit)
    for k, v in batch.items():
        tensors[f"batch.{k}"] = v
    name = f"{algorithm}-{encoding or 'plain'}-{mode}-{shift}"
    write(os.path.join(out_dir, name + ".safetensors"), tensors, {
        "algorithm": algorithm, "encoding": encoding, "mode": mode, "shift": shift, "samples": str(len(samples)), "pad_to": str(PAD_TO), "limit": str(limit),
        "hidden": str(H), "vocab": str(V), "layers": str(LAYERS), "aux_layers": ",".join(map(str, layers)), "tokens": str(tokens),
        "supervised": str(supervised([d["loss"] for rows_ in rows for row in rows_ for d in row])),
        "order": json.dumps(list(samples[0])),
    })


def crossing_case(out_dir, seed, encoding, mode):
    """Packed eagle3 samples that come shifted with the boundaries of their documents as they fall."""
    gen = torch.Generator().manual_seed(seed)
    layers = [1, 2, 4]
    rows = [[make_docs(gen, [3, 4, 2])], [make_docs(gen, [5, 2]), make_docs(gen, [6, 3])]]
    tensors, samples, rows_docs, tokens, kept = {"draft_vocab": torch.tensor(DRAFT)}, [], [], 0, 0
    for i, sample_rows in enumerate(rows):
        p, target = layout(sample_rows, gen, layers, True)
        s = aligned("eagle3", make_sample("eagle3", encoding, p, target, layers), cross=True)
        tensors[f"prompt.{i}.attention_mask"] = p["attention_mask"]
        for k, v in s.items():
            tensors[f"sample.{i}.{k}"] = v
        samples.append(s)
        tokens += int(p["attention_mask"].sum())
        # What is left out is the first token of each row, and nothing else: every other one stands in the slot before it.
        kept += sum(int(torch.cat([d["loss"] for d in row])[1:].sum()) for row in sample_rows)
        rows_docs.append([[len(d["ids"]) for d in row] for row in sample_rows])
    limit = 16
    batch = pad_batch(samples) if mode == "packed" else pack_batch("eagle3", samples, rows_docs, "1", limit)
    for k, v in batch.items():
        tensors[f"batch.{k}"] = v
    write(os.path.join(out_dir, f"eagle3-{encoding}-{mode}-1-crossing.safetensors"), tensors, {
        "algorithm": "eagle3", "encoding": encoding, "mode": mode, "shift": "1", "cross": "true", "samples": str(len(samples)), "pad_to": str(PAD_TO), "limit": str(limit),
        "hidden": str(H), "vocab": str(V), "layers": str(LAYERS), "aux_layers": ",".join(map(str, layers)), "tokens": str(tokens), "supervised": str(kept), "order": json.dumps(list(samples[0])),
    })


def norm_case(out_dir, seed, dtype, mode, shift):
    """Eagle3 samples whose last state is pre-norm; the batch has it post-norm."""
    gen = torch.Generator().manual_seed(seed)
    layers = [1, 2, 4]
    packed = mode in ("packed", "repacked")
    if packed:
        rows = [[make_docs(gen, [3, 4, 2])], [make_docs(gen, [5, 2]), make_docs(gen, [6])]]
    else:
        rows = [[make_docs(gen, [5])], [make_docs(gen, [3]), make_docs(gen, [7])]]
    weight = torch.rand(H, generator=gen) * 3 - 1
    tensors, stored, expected, rows_docs, tokens = {"final_norm": weight}, [], [], [], 0
    for i, sample_rows in enumerate(rows):
        p, target = layout(sample_rows, gen, layers, packed)
        # Streams of several magnitudes, and padding that is not zero.
        scales = 10.0 ** torch.randint(-2, 3, target["last"].shape[:2], generator=gen).unsqueeze(-1)
        target["last"] = (torch.randn(target["last"].shape, generator=gen) * scales).to(dtype)
        target["aux"] = target["aux"].to(dtype)
        s = make_sample("eagle3", "last_hidden_states", p, target, layers)
        want = dict(s, last_hidden_states=final_norm(target["last"], weight))
        tensors[f"prompt.{i}.attention_mask"] = p["attention_mask"]
        tokens += int(p["attention_mask"].sum())
        if shift == "1":
            s, want = aligned("eagle3", s), aligned("eagle3", want)
        for k, v in s.items():
            tensors[f"sample.{i}.{k}"] = v
        stored.append(s)
        expected.append(want)
        rows_docs.append([[len(d["ids"]) for d in row] for row in sample_rows])
    limit = 16
    if mode in ("padded", "packed"):
        batch = pad_batch([aligned("eagle3", s) if shift == "0" else s for s in expected])
    else:
        batch = pack_batch("eagle3", expected, rows_docs, shift, limit)
    for k, v in batch.items():
        tensors[f"batch.{k}"] = v
    name = f"eagle3-last_hidden_states-{mode}-{shift}-norm-{str(dtype).removeprefix('torch.')}"
    write(os.path.join(out_dir, name + ".safetensors"), tensors, {
        "algorithm": "eagle3", "encoding": "last_hidden_states", "mode": mode, "shift": shift, "last_norm": "pre", "epsilon": repr(EPSILON),
        "samples": str(len(stored)), "pad_to": str(PAD_TO), "limit": str(limit), "hidden": str(H), "vocab": str(V), "layers": str(LAYERS),
        "aux_layers": ",".join(map(str, layers)), "tokens": str(tokens),
        "supervised": str(supervised([d["loss"] for rows_ in rows for row in rows_ for d in row])), "order": json.dumps(list(stored[0])),
    })


def main(out_dir):
    os.makedirs(out_dir, exist_ok=True)
    seed = 0
    for algorithm, encodings in (("eagle3", ["last_hidden_states", "logits", "target_probs"]), ("dflash", ["", "logits"]), ("dspark", [""])):
        for encoding in encodings:
            for mode in ("padded", "packed", "joined", "repacked"):
                for shift in ("0", "1") if algorithm == "eagle3" else ("0",):
                    seed += 1
                    case(out_dir, seed, algorithm, encoding, mode, shift)
    for encoding in ("last_hidden_states", "target_probs"):
        for mode in ("packed", "repacked"):
            seed += 1
            crossing_case(out_dir, seed, encoding, mode)
    for dtype in (torch.float32, torch.bfloat16):
        for mode, shift in (("padded", "0"), ("padded", "1"), ("repacked", "0")):
            seed += 1
            norm_case(out_dir, seed, dtype, mode, shift)


if __name__ == "__main__":
    main(sys.argv[1])
