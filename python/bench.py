"""Figures of the Python package, each beside a floor measured in the same run: `python bench.py [--only REGEXP] [--sample MIB] [--batches N] [--json]`.

It starts a service of its own (sluice.local), whose samples are in /dev/shm, and needs room there for twice the batches.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import http.server
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import sluice

WHO = sluice.Consumer("bench")


def tensors(nbytes: int) -> dict[str, Any]:
    """A sample of eagle3, of about so many bytes: three layers and the last one of 2,560 floats a token."""
    from sluice.dtypes import torch_module

    tokens = max(8, nbytes // (4 * 10_240 + 24))
    h = min(2560, nbytes // (4 * 4 * tokens))
    arrays = {
        "aux_hidden_states": np.ones((1, tokens, 3 * h), np.float32), "input_ids": np.ones((1, tokens), np.int64), "attention_mask": np.ones((1, tokens), np.int64),
        "loss_mask": np.ones((1, tokens), np.int64), "last_hidden_states": np.ones((1, tokens, h), np.float32),
    }
    torch = torch_module()
    return arrays if torch is None else {name: torch.from_numpy(a) for name, a in arrays.items()}


ATTRIBUTES = {"shift": "0", "aux_layers": "unknown", "last_norm": "post"}


def put(run: sluice.Run, name: str, sample: dict[str, Any]) -> sluice.SampleRef:
    ref = run.store.put(name, sample, attributes=ATTRIBUTES)
    run.queue.put(ref)
    return ref


def median(work: Callable[[], float], turns: int) -> float:
    work()
    return statistics.median(work() for _ in range(turns))


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Row:
    def __init__(self, what: str, figure: float, unit: str, floor_of: str = "", floor: float = 0.0, ratio: float = 0.0) -> None:
        self.what, self.figure, self.unit, self.floor_of, self.floor, self.ratio = what, figure, unit, floor_of, floor, ratio

    def __str__(self) -> str:
        text = f"{self.what:<58} {self.figure:10.3f} {self.unit}"
        return text + (f"   {self.ratio:5.2f} of {self.floor_of} ({self.floor:.3f} {self.unit})" if self.floor_of else "")


def fresh_write(nbytes: int) -> float:
    """GB/s of one write into a fresh file of /dev/shm."""
    data = memoryview(np.ones(nbytes, np.uint8))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as d:
        def once() -> float:
            path = os.path.join(d, "f")
            began = time.perf_counter()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            at = 0
            while at < nbytes:
                at += os.write(fd, data[at:])
            os.close(fd)
            took = time.perf_counter() - began
            os.unlink(path)
            return nbytes / took / 1e9

        return median(once, 9)


def cycle(client: sluice.Client, size: int) -> Iterator[Row]:
    run = client.create_run("cycle", algorithm="eagle3", max_bytes=8 * size + (1 << 20))
    sample, n = tensors(size), 0
    nbytes = sum(t.numel() * t.element_size() if hasattr(t, "element_size") else t.nbytes for t in sample.values())
    gets: list[float] = []

    def once() -> float:
        nonlocal n
        n += 1
        began = time.perf_counter()
        put(run, f"s{n}", sample)
        (lease,) = run.queue.acquire(WHO, timeout=10).leases
        at = time.perf_counter()
        got, handle = run.store.get(lease.ref)
        gets.append(time.perf_counter() - at)
        run.queue.ack(WHO, lease)
        del got
        run.store.release(handle)
        return nbytes / (time.perf_counter() - began) / 1e9

    floor = fresh_write(nbytes)
    figure = median(once, 15)
    yield Row(f"cycle of {nbytes / 1e6:.0f} MB, put to freed, mapped", figure, "GB/s", "one write to a fresh file in /dev/shm", floor, figure / floor)
    yield Row("get of a mapped sample, to tensors", 1e3 * statistics.median(gets), "ms")


def remote(client: sluice.Client, size: int) -> Iterator[Row]:
    with sluice.Client(client.url, http_only=True) as far:
        client.create_run("remote", algorithm="eagle3", max_bytes=8 * size + (1 << 20))
        run = far.run("remote")
        sample = tensors(size)
        n = 0

        def upload() -> float:
            nonlocal n
            n += 1
            return ref_bytes(lambda: run.store.put(f"u{n}", sample, attributes=ATTRIBUTES))

        def ref_bytes(work: Callable[[], sluice.SampleRef]) -> float:
            began = time.perf_counter()
            ref = work()
            took = time.perf_counter() - began
            run.store.abort(ref)
            return ref.estimated_bytes / took / 1e9

        yield Row("upload over a unix socket", median(upload, 7), "GB/s")
        ref = put(run, "d", sample)

        def download() -> float:
            began = time.perf_counter()
            got, handle = run.store.get(ref)
            took = time.perf_counter() - began
            del got
            run.store.release(handle)
            return ref.estimated_bytes / took / 1e9

        floor = plain_http(ref.estimated_bytes)
        figure = median(download, 7)
        yield Row("download over a unix socket, four ranges, checked", figure, "GB/s", "plain HTTP of http.server into a buffer, loopback", floor, figure / floor)


def plain_http(nbytes: int) -> float:
    body = bytes(nbytes)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(nbytes))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    buffer = memoryview(bytearray(nbytes))

    def once() -> float:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
        began = time.perf_counter()
        connection.request("GET", "/")
        response = connection.getresponse()
        at = 0
        while at < nbytes:
            at += response.readinto(buffer[at:at + (1 << 20)])
        took = time.perf_counter() - began
        connection.close()
        return nbytes / took / 1e9

    try:
        return median(once, 5)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def small(client: sluice.Client) -> Iterator[Row]:
    """What the loader adds to a trainer's step: 8 KB samples, with and without a prefetch."""
    sample = tensors(8 << 10)
    for prefetch, step in ((0, 0.0), (2, 0.0), (2, 0.005)):
        run = client.create_run(f"small-{prefetch}-{step}", algorithm="eagle3", max_bytes=64 << 20)
        n = 400
        refs = [run.store.put(f"s{i}", sample, attributes=ATTRIBUTES) for i in range(n)]
        run.queue.put_many([(ref, ()) for ref in refs])
        run.queue.close()
        waits, began = [], time.perf_counter()
        with run.loader(batch=1, prefetch=prefetch, ack="step", timeout=30) as loader:
            while True:
                at = time.perf_counter()
                batch = loader.next(30)
                if batch is None:
                    break
                waits.append(time.perf_counter() - at)
                if step:
                    time.sleep(step)
                at = time.perf_counter()
                loader.step()
                waits[-1] += time.perf_counter() - at
        del batch
        took = time.perf_counter() - began
        what = f"8 KB a batch, prefetch {prefetch}, step of {1e3 * step:.0f} ms: next and step()"
        yield Row(what, 1e3 * statistics.median(waits), "ms")
        yield Row("  the same, the whole loop a batch less the step", 1e3 * (took / n - step), "ms")


def filled(client: sluice.Client, size: int, batches: int) -> Iterator[Row]:
    """The store is full of batches, the trainer takes 20 ms for one: what it waits."""
    run = client.create_run("filled", algorithm="eagle3", max_bytes=(batches + 2) * size)
    sample = tensors(size)
    for i in range(batches):
        put(run, f"s{i}", sample)
    run.queue.close()
    waited, acked, busy = 0.0, 0.0, 0.0
    with run.loader(batch=1, prefetch=2, ack="step", timeout=30) as loader:
        loader.next(30)
        while True:
            at = time.perf_counter()
            batch = loader.next(30)
            if batch is None:
                break
            waited += time.perf_counter() - at
            at = time.perf_counter()
            time.sleep(0.02)
            busy += time.perf_counter() - at
            at = time.perf_counter()
            loader.step()
            acked += time.perf_counter() - at
            del batch
    whole = waited + acked + busy
    yield Row(f"{batches} batches of {size / 1e6:.0f} MB in store, 20 ms each: waited for a batch", 100 * waited / whole, "%")
    yield Row("  the same: in step(), whose ack is one call", 100 * acked / whole, "%")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--only", default="", help="regular expression: the groups to run (cycle, remote, small, filled)")
    p.add_argument("--sample", type=float, default=80, help="MiB a sample")
    p.add_argument("--batches", type=int, default=100, help="batches of the group filled")
    p.add_argument("--json", action="store_true")
    o = p.parse_args()
    size = int(o.sample * (1 << 20))
    groups: dict[str, Callable[[sluice.Client], Iterator[Row]]] = {
        "cycle": lambda c: cycle(c, size), "remote": lambda c: remote(c, size), "small": small, "filled": lambda c: filled(c, size, o.batches),
    }
    rows: list[Row] = []
    for name, group in groups.items():
        if not re.search(o.only, name):
            continue
        with sluice.local(store=f"/dev/shm/sluice-bench-{os.getpid()}") as client:
            for row in group(client):
                rows.append(row)
                if not o.json:
                    print(row, flush=True)
        gc.collect()
    if o.json:
        json.dump([vars(row) for row in rows], sys.stdout, indent=1)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
