"""The reference API, as its page has it, and the faults of its first implementation that are not to be inherited."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sluice  # noqa: E402
from sluice import (  # noqa: E402
    AsyncFeaturePipeline,
    Eagle3TargetBatch,
    FeatureAlgorithm,
    FeatureDataLoader,
    FeatureProducer,
    LocalFeatureStore,
    SampleRef,
    SampleRefQueue,
    ServiceFeatureStore,
    SharedDirFeatureStore,
    StoreHandle,
    StoreHealth,
    VisibilityTimeout,
    assert_no_tensors,
    reference,  # noqa: E402
)
from sluice import service as private  # noqa: E402

from .samples import wait_until  # noqa: E402
from .streams import Target, filler, packed, prompt, prompts, shift, tensors  # noqa: E402

pytestmark = pytest.mark.usefixtures("private_services")
MIB = 1 << 20
PATIENCE = 30.0


@pytest.fixture
def store() -> Iterator[LocalFeatureStore]:
    s = LocalFeatureStore()
    yield s
    s.close()


def put(store: Any, i: int = 0, **more: Any) -> SampleRef:
    ref: SampleRef = store.put(f"s{i}", tensors(i), "r1", **more)
    return ref


def lease_of(queue: SampleRefQueue) -> sluice.Lease:
    lease = wait_until(lambda: queue.acquire(1.0), "a lease")
    assert isinstance(lease, sluice.Lease)
    return lease


def use(store: Any, queue: SampleRefQueue) -> str:
    """Take a sample and let it go."""
    lease = lease_of(queue)
    _, handle = store.get(lease.ref)
    queue.ack(lease)
    store.release(handle)
    return lease.ref.sample_id


def resident(store: Any) -> int:
    return int(store.health().sample_count)


def thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run work in a thread; what it returned or raised is in the list."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(work())
        except BaseException as e:
            out.append(e)

    t = threading.Thread(target=run, daemon=True)
    t.start()
    return t, out


# -- the page's cycle ------------------------------------------------------------------------------------------------------


def test_put_acquire_get_release_ack(store: LocalFeatureStore) -> None:
    queue = SampleRefQueue(store)
    made = tensors(3)
    ref = store.put("s", made, "r1", FeatureAlgorithm.EAGLE3, 1, "7", "8", 6)
    assert (ref.run_id, ref.algorithm, ref.schema_version, ref.target_model_version, ref.draft_weight_version, ref.num_tokens) == ("r1", FeatureAlgorithm.EAGLE3, 1, "7", "8", 6)
    assert ref.store_uri == store.store_uri and ref.feature_names() == tuple(made) and ref.estimated_bytes == sum(t.nbytes for t in map(torch.Tensor.numpy, made.values()))
    assert ref.feature_specs["logits"].dtype is torch.float32 and ref.feature_specs["logits"].shape == (1, 6, 32)
    queue.put(ref)
    assert (queue.pending_count(), queue.outstanding_count(), queue.is_closed) == (1, 0, False)
    lease = lease_of(queue)
    assert lease.ref == ref and lease.redelivery_count == 0 and lease.visibility_timeout == VisibilityTimeout(30.0) and 0 < lease.deadline - time.monotonic() <= 30
    assert (queue.pending_count(), queue.outstanding_count()) == (0, 1)
    got, handle = store.get(lease.ref)
    assert list(got) == list(made) and all(torch.equal(got[n], made[n]) and got[n].dtype is made[n].dtype for n in made)
    assert (handle.store, handle.sample_id, handle.ref) == (store, "s", ref)
    health = store.health()
    assert health == StoreHealth(ref.estimated_bytes, 256 * MIB, 1, False, True)
    queue.ack(lease)
    del got
    store.release(handle)
    wait_until(lambda: resident(store) == 0, "the sample to be freed")
    with pytest.raises(KeyError):
        store.get(ref)
    assert queue.outstanding_count() == 0 and queue.acquire(0.001) is None and queue.reclaim_expired() == 0
    queue.close()
    assert queue.is_closed and queue.acquire() is None
    with pytest.raises(RuntimeError, match="closed"):
        queue.put(put(store, 1))


def test_without_a_queue_the_last_release_frees(store: LocalFeatureStore) -> None:
    ref = put(store)
    first, (kept, second) = store.get(ref)[1], store.get(ref)
    assert first.handle_id != second.handle_id
    store.release(first)
    store.release(first)  # again: it is nobody else's
    assert resident(store) == 1
    store.release(second)
    with pytest.raises(KeyError):
        store.get(ref)
    assert torch.equal(kept["logits"], tensors(0)["logits"]) and resident(store) == 1  # its bytes count until they are gone
    del kept
    wait_until(lambda: resident(store) == 0, "the sample to be freed")
    store.put("s0", tensors(), "r1")


def test_a_put_copies_and_a_get_is_the_consumers_own(store: LocalFeatureStore) -> None:
    made = tensors(3)
    ref = store.put("s", made, "r1")
    made["logits"].zero_()
    first, _ = store.get(ref)
    first["logits"].fill_(-1)
    second, _ = store.get(ref, device="cpu")
    assert torch.equal(second["logits"], tensors(3)["logits"])


def test_tensors_come_back_on_the_devices_that_they_were_put_from(store: LocalFeatureStore) -> None:
    said: dict[str, str] = {}
    store._note(said, {"a": SimpleNamespace(device="cpu"), "b": SimpleNamespace(device="cuda:1")})  # type: ignore[dict-item]
    assert said == {"devices": "cpu,cuda:1"}
    ref = store.put("s", tensors(), "r1", attributes={"devices": "cpu,cpu,cpu,cpu,meta"})
    got, _ = store.get(ref)
    assert [t.device.type for t in got.values()] == ["cpu"] * 4 + ["meta"]  # type: ignore[union-attr]
    got, _ = store.get(ref, device="cpu")
    assert {t.device.type for t in got.values()} == {"cpu"}  # type: ignore[union-attr]
    assert "devices" not in put(store).attributes


def test_a_sample_that_is_no_sample_is_refused_and_leaves_nothing(store: LocalFeatureStore) -> None:  # [U5]
    put(store)
    before = store.health()
    made = tensors()
    for subject, call in {
        "sample_id": lambda: store.put("", made, "r1"),
        "features": lambda: store.put("x", {}, "r1", "mine"),  # type: ignore[arg-type]
        "lack aux_hidden_states": lambda: store.put("x", {"input_ids": made["input_ids"]}, "r1"),
        "s0": lambda: store.put("s0", made, "r1"),
        "tensors": lambda: store.put("x", [1], "r1"),  # type: ignore[arg-type]
        "logits": lambda: store.put("x", {**made, "logits": "words"}, "r1"),
        "run_id": lambda: store.put("x", made, ""),
        "schema_version": lambda: store.put("x", made, "r1", schema_version=0),
        "num_tokens": lambda: store.put("x", made, "r1", num_tokens=-1),
        "target_model_version": lambda: store.put("x", made, "r1", target_model_version=3),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(ValueError, match=subject if subject != "features" else "(?i)empty|at least one"):
            call()
    with pytest.raises(MemoryError, match="cap"):
        store.put("large", filler(257 * MIB), "r1")
    assert store.health() == before
    assert store._run.store.counters()["reserved_bytes"] == 0
    store.put("x", made, "r1")  # no id was taken by a refused put


def test_a_closed_store_refuses_everything_but_release() -> None:
    store = LocalFeatureStore()
    ref = put(store)
    got, handle = store.get(ref)
    store.close()
    store.close()
    for call in (lambda: put(store, 1), lambda: store.get(ref), store.gc, store.health, lambda: store.abort(ref)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    store.release(handle)
    assert torch.equal(got["input_ids"], tensors(0)["input_ids"])


def test_a_dropped_store_frees_what_it_had(store: LocalFeatureStore) -> None:
    other = LocalFeatureStore()
    put(other)
    runs, gone = store._client.runs, other._run.run_id
    assert gone in runs()
    del other
    gc.collect()
    wait_until(lambda: gone not in runs(), "its run to be deleted")


@pytest.mark.parametrize("kind", ["local", "directory", "service"])
def test_a_program_written_for_the_page_runs(kind: str, tmp_path: Path, client: sluice.Client, run_id: str) -> None:
    """Thirty batches through a cap of four samples, so that the producer has to wait."""
    one = sum(t.numel() * t.element_size() for t in tensors().values())
    caps = {"max_samples": 4, "max_bytes": 5 * one}
    store = {
        "local": lambda: LocalFeatureStore(**caps), "directory": lambda: SharedDirFeatureStore(str(tmp_path / "d"), **caps),
        "service": lambda: ServiceFeatureStore(client.create_run(run_id, mixed=True, **caps)),
    }[kind]()
    pauses: list[str] = []
    queue = SampleRefQueue(store, on_pause=lambda h: pauses.append("pause"), on_resume=lambda h: pauses.append("resume"))
    target = Target()
    producer = FeatureProducer(target, store, "r1")
    seen, most = [], 0
    with AsyncFeaturePipeline(producer, queue, prompts(30)) as pipeline, FeatureDataLoader(queue, store) as loader:
        wait_until(lambda: pauses, "the producer to wait")
        for batch in loader:
            most = max(most, resident(store))
            assert isinstance(batch, Eagle3TargetBatch) and batch.shifted
            batch.aux_hidden_states += 1  # the trainer's own
            seen.append(int(batch.aux_hidden_states[0, 0, 0]) - 1)
            assert torch.equal(batch.input_ids, shift(prompt(seen[-1])[0]))
            assert set(batch.to_trainer_inputs()) == {"aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "target_logits"}
        pipeline.join(PATIENCE)
    del batch
    assert seen == list(range(30)) and target.calls == 30
    assert 1 < most <= 4
    assert pauses[:2] == ["pause", "resume"] and pauses.count("pause") == pauses.count("resume")
    wait_until(lambda: resident(store) == 0, "the last sample to be freed")
    store.close()


def test_packed_prompts_pass_unchanged(store: LocalFeatureStore) -> None:
    queue = SampleRefQueue(store)
    with AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, iter([packed()])), FeatureDataLoader(queue, store) as loader:
        (batch,) = loader
    for name, t in zip(("position_ids", "seq_lens", "doc_remaining"), packed()[3:], strict=True):
        assert torch.equal(getattr(batch, name), t)


def test_a_producer_hands_on_what_is_the_targets(store: LocalFeatureStore) -> None:
    target = Target()
    producer = FeatureProducer(target, store, "r1", target_model_version="5", draft_weight_version="6", sample_id_factory=lambda n: f"mine-{n}")
    assert producer.get_input_embeddings() is target.embeddings
    producer.set_vocab_mapping(torch.tensor([1]), torch.tensor([True]))
    assert target.vocabulary[0].tolist() == [1]
    ref = producer.produce(*prompt(1))
    assert (ref.sample_id, ref.run_id, ref.target_model_version, ref.draft_weight_version, ref.num_tokens, ref.attributes["shift"]) == ("mine-1", "r1", "5", "6", 6, "1")
    producer.discard(ref)
    producer.discard(ref)  # it is gone, which is what was wanted
    assert resident(store) == 0
    producer.close()


def test_a_batch_that_no_loader_could_take_is_refused_before_it_is_stored(store: LocalFeatureStore) -> None:
    class Bad(Target):
        def generate_batch(self, *args: Any, **kwargs: Any) -> Eagle3TargetBatch:
            batch = super().generate_batch(*args, **kwargs)
            batch.loss_mask = batch.loss_mask.float()
            return batch

    with pytest.raises(ValueError, match='produce: the target\'s batch: .*"loss_mask" is float32'):
        FeatureProducer(Bad(), store, "r1").produce(*prompt(1))
    assert resident(store) == 0


# -- alignment -------------------------------------------------------------------------------------------------------------


def test_an_unshifted_sample_is_shifted_by_the_loader(store: LocalFeatureStore) -> None:
    """A trainer written for the page looks at no attribute: whatever it gets must be shifted."""

    class Unshifted(Target):
        def generate_batch(self, input_ids: Any, attention_mask: Any, loss_mask: Any, **packing: Any) -> Eagle3TargetBatch:
            states = input_ids[..., None].float().repeat(1, 1, 24)
            logits = torch.nn.functional.one_hot(input_ids, 32).float()
            return Eagle3TargetBatch(states, input_ids, attention_mask, loss_mask, logits, **packing, shifted=False)

    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    fields = (ids, torch.ones_like(ids), torch.tensor([[0, 0, 0, 1, 1, 1]]))
    queue = SampleRefQueue(store)
    for target in (Unshifted(), Target()):
        ref = FeatureProducer(target, store, "r1").produce(*fields)
        assert ref.attributes["shift"] == ("0" if isinstance(target, Unshifted) else "1")
        queue.put(ref)
    queue.close()
    for batch in FeatureDataLoader(queue, store):
        assert batch.shifted
        assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, 0]] and batch.loss_mask.tolist() == [[0, 0, 1, 1, 1, 0]]
        assert batch.aux_hidden_states[0, :, 0].tolist() == [10, 11, 12, 13, 14, 15]
        assert batch.logits is not None and batch.logits[0, :5].argmax(-1).tolist() == [11, 12, 13, 14, 15]


def test_a_sample_whose_alignment_is_not_said_is_no_batch(store: LocalFeatureStore) -> None:
    queue = SampleRefQueue(store)
    queue.put(store.put("s", tensors(), "r1", attributes={"shift": "2"}))
    with pytest.raises(ValueError, match="shift"):
        next(FeatureDataLoader(queue, store))
    (dead,) = store._run.queue.dead_letters()  # another try would end the same
    assert "shift" in dead.reasons[0]


def test_a_loader_of_a_queue_takes_the_store_of_the_queue(store: LocalFeatureStore) -> None:
    with contextlib.closing(LocalFeatureStore()) as other, pytest.raises(ValueError, match="and the queue is that of"):
        FeatureDataLoader(SampleRefQueue(store), other)


# -- refs ------------------------------------------------------------------------------------------------------------------


def test_refs_can_be_pickled_copied_compared_and_hashed(store: LocalFeatureStore) -> None:  # [U1]
    ref = put(store)
    for other in (pickle.loads(pickle.dumps(ref)), copy.copy(ref), copy.deepcopy(ref), SampleRef.from_json(ref.to_json())):
        assert other == ref and hash(other) == hash(ref) and {ref: 1}[other] == 1 and other.feature_names() == ref.feature_names()
    assert torch.equal(store.get(pickle.loads(pickle.dumps(ref)))[0]["logits"], tensors(0)["logits"])


def test_sets_and_cycles_do_not_pass_the_guard() -> None:  # [U2]
    cycle: list[Any] = []
    cycle.append(cycle)
    for bad in ({1, 2}, cycle, {"x": [torch.zeros(1)]}, object()):
        with pytest.raises(ValueError, match="ref"):
            assert_no_tensors(bad)


def test_a_ref_reads_no_later_put_of_its_id(store: LocalFeatureStore) -> None:  # [U3]
    old = put(store)
    store.release(store.get(old)[1])
    wait_until(lambda: resident(store) == 0, "it to be freed")
    new = put(store)
    assert old != new
    with pytest.raises(KeyError):
        store.get(old)
    queue = SampleRefQueue(store)
    with pytest.raises(KeyError):
        queue.put(old)
    store.get(new)


# -- store -----------------------------------------------------------------------------------------------------------------


def test_fail_after_release_reads_the_same_bits_again(store: LocalFeatureStore) -> None:  # [U4]
    queue = SampleRefQueue(store)
    queue.put(put(store, 3))
    lease = lease_of(queue)
    got, handle = store.get(lease.ref)
    first = got["logits"].clone()
    got["logits"].zero_()
    store.release(handle)
    queue.fail(lease)
    again = lease_of(queue)
    assert again.redelivery_count == 1 and again.lease_id != lease.lease_id
    got, handle = store.get(again.ref)
    assert torch.equal(got["logits"], first)
    queue.ack(again)  # and in the other order
    assert torch.equal(got["logits"], first)
    del got
    store.release(handle)
    wait_until(lambda: resident(store) == 0, "it to be freed")


def test_a_handle_that_is_forged_or_foreign_is_useless(store: LocalFeatureStore) -> None:
    ref = put(store)
    handle = store.get(ref)[1]
    other = LocalFeatureStore(max_samples=1)
    store.release(StoreHandle(store, "s0", ref, handle.handle_id + 1000))
    store.release(StoreHandle(store, "another", ref, handle.handle_id))
    other.release(handle)
    assert resident(store) == 1
    other.close()
    store.release(handle)
    wait_until(lambda: resident(store) == 0, "it to be freed")


def test_discard_reads_nothing(store: LocalFeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:  # [U7]
    producer = FeatureProducer(Target(), store, "r1")
    ref = producer.produce(*prompt(1))
    monkeypatch.setattr(LocalFeatureStore, "get", lambda *_: pytest.fail("it was read"))
    producer.discard(ref)
    assert resident(store) == 0


def test_abort_of_an_enqueued_sample_is_refused(store: LocalFeatureStore) -> None:
    queue = SampleRefQueue(store)
    ref = put(store)
    queue.put(ref)
    with pytest.raises(sluice.ConflictError):
        store.abort(ref)
    assert use(store, queue) == "s0"


def test_gc_tells_what_it_freed(store: LocalFeatureStore) -> None:  # [U8]
    put(store)
    assert store.gc() == 0  # it is a live session's, however old
    assert resident(store) == 1


CONSUMER = """
import sys
from sluice import SharedDirFeatureStore, SampleRefQueue
store = SharedDirFeatureStore(sys.argv[1], max_bytes=64 << 20, max_samples=None)
queue = SampleRefQueue(store)
for line in sys.stdin:
    lease = queue.acquire(30.0)
    tensors, handle = store.get(lease.ref)
    said = lease.ref.sample_id, tensors["logits"].numel() * 4
    del tensors
    queue.ack(lease)
    store.release(handle)
    print(*said, flush=True)
store.close()
"""


def program(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_another_process_frees_is_free(tmp_path: Path) -> None:  # [U10]
    """Samples of 20 MB under a cap of 64 MiB: the fourth fits once a consumer elsewhere has taken the first."""
    store = SharedDirFeatureStore(str(tmp_path), max_bytes=64 * MIB, max_samples=None)
    queue = SampleRefQueue(store)
    for i in range(3):
        queue.put(store.put(f"s{i}", filler(20_000_000), "r1"))
    with pytest.raises(MemoryError, match="cap"):
        store.put("s3", filler(20_000_000), "r1")
    p = program(CONSUMER, str(tmp_path))
    try:
        assert p.stdin is not None and p.stdout is not None
        p.stdin.write("one\n")
        p.stdin.flush()
        assert p.stdout.readline().split() == ["s0", "20000000"]
        queue.put(store.put("s3", filler(20_000_000), "r1"))
        assert resident(store) == 3 and store.health().capacity_bytes == 64 * MIB and not [f for f in os.listdir(tmp_path) if f.endswith(".sock")]
        p.stdin.write("one\none\none\n")
        p.stdin.flush()
        assert [p.stdout.readline().split()[0] for _ in range(3)] == ["s1", "s2", "s3"]
        wait_until(lambda: resident(store) == 0, "all to be freed")
    finally:
        _, said = p.communicate(timeout=PATIENCE)
    assert p.returncode == 0, said
    store.close()


def test_the_sample_cap_pauses_a_pipeline_and_ends_none() -> None:  # [U11] [U14]
    store = LocalFeatureStore(max_samples=2, max_bytes=None)
    queue = SampleRefQueue(store)
    target = Target()
    with AsyncFeaturePipeline(FeatureProducer(target, store, "r1"), queue, prompts(8)) as pipeline:
        wait_until(lambda: store._run.status()["producers_waiting"], "the producer to wait at the gate")
        assert target.calls <= 2  # it waits before the target runs
        assert [use(store, queue)[-2:] for _ in range(8)] == [f"-{i}" for i in range(1, 9)]
        pipeline.join(PATIENCE)
    assert queue.acquire() is None and queue.is_closed
    store.close()


def test_marks_go_with_a_smaller_cap() -> None:  # [U11]
    store = LocalFeatureStore(max_bytes=1000_000)
    store.put("s", filler(800_000), "r1")
    assert store.health().high_watermark_hit
    store.close()


def test_a_finished_producer_leaves_the_consumers_backlog(tmp_path: Path) -> None:  # [U12]
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from sluice import SharedDirFeatureStore, SampleRefQueue, FeatureProducer, AsyncFeaturePipeline
from tests.streams import Target, prompts
store = SharedDirFeatureStore(sys.argv[1])
queue = SampleRefQueue(store)
with AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, prompts(5)) as pipeline:
    pipeline.join(30)
store.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(Path(__file__).resolve().parents[1])], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with SharedDir(tmp_path) as store:
        queue = SampleRefQueue(store)
        assert queue.is_closed and queue.pending_count() == 5
        assert [int(b.aux_hidden_states[0, 0, 0]) for b in FeatureDataLoader(queue, store)] == list(range(5))
        again = SampleRefQueue(store)  # drained: the next stream
        assert not again.is_closed
        again.put(put(store, 9))
        assert use(store, again) == "s9"


def test_a_new_stream_waits_for_the_end_of_the_last_ones_consumers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that has yet to hear the end of a stream must hear it; one whose process has just ended is no reason to stay closed."""
    with SharedDir(tmp_path) as store:
        queue = SampleRefQueue(store)
        queue.put(put(store))
        p = program(CONSUMER, str(tmp_path))
        try:
            assert p.stdin is not None and p.stdout is not None
            p.stdin.write("one\n")
            p.stdin.flush()
            assert p.stdout.readline().split()[0] == "s0"
            queue.close()
            monkeypatch.setattr(reference, "_LEAVING_SECONDS", 0.1)
            assert SampleRefQueue(store).is_closed and "other processes consume from it" in caplog.text
        finally:
            p.kill()
            p.communicate(timeout=PATIENCE)
        monkeypatch.setattr(reference, "_LEAVING_SECONDS", PATIENCE)
        assert not SampleRefQueue(store).is_closed


class SharedDir:
    def __init__(self, path: Path, **caps: Any) -> None:
        self.store = SharedDirFeatureStore(str(path), **caps)

    def __enter__(self) -> SharedDirFeatureStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()


def test_caps_may_change_once_a_directory_is_empty_and_nobodys(tmp_path: Path, private_services: Path) -> None:
    with SharedDir(tmp_path, max_samples=4) as store, pytest.warns(UserWarning, match="max_samples is 4, not 5"), SharedDir(tmp_path, max_samples=5) as other:
        queue = SampleRefQueue(store)
        queue.put(put(store))
        assert resident(other) == 1
    wait_until(lambda: not list(private_services.glob("*.sock")), "the service to end")
    with pytest.warns(UserWarning, match="max_samples is 4, not 6"), SharedDir(tmp_path, max_samples=6) as store:
        assert use(store, SampleRefQueue(store)) == "s0"
    wait_until(lambda: not list(private_services.glob("*.sock")), "the service to end")
    with SharedDir(tmp_path, max_samples=6) as store:
        assert store._caps["max_samples"] == 6


@pytest.mark.parametrize("share", [0.3, 0.4, 0.48, 0.7, 1.0])
def test_samples_of_any_size_go_through(share: float) -> None:  # [U13]
    """Larger than the low mark, or so large that marks alone would stop the pair, or so large that no two fit."""
    size = int(4 * MIB * share) - sum(t.numel() * t.element_size() for n, t in tensors().items() if n != "logits")

    class Large(Target):
        def generate_batch(self, *args: Any, **kwargs: Any) -> Eagle3TargetBatch:
            batch = super().generate_batch(*args, **kwargs)
            assert batch.logits is not None
            batch.logits = torch.zeros(1, 6, size // 4 // 6)
            return batch

    store = LocalFeatureStore(max_bytes=4 * MIB)
    queue = SampleRefQueue(store)
    with AsyncFeaturePipeline(FeatureProducer(Large(), store, "r1"), queue, prompts(6)), FeatureDataLoader(queue, store) as loader:
        assert [int(b.aux_hidden_states[0, 0, 0]) for b in loader] == list(range(6))
    store.close()


# -- queue -----------------------------------------------------------------------------------------------------------------


def test_a_stale_ack_changes_nothing(store: LocalFeatureStore, caplog: pytest.LogCaptureFixture) -> None:  # [U15] [U18]
    queue = SampleRefQueue(store, VisibilityTimeout(0.2))
    queue.put(put(store))
    old = lease_of(queue)
    new = lease_of(queue)  # nobody called reclaim_expired
    assert new.ref == old.ref and new.lease_id != old.lease_id and new.redelivery_count == 1
    with caplog.at_level(logging.WARNING, "sluice"):
        queue.ack(old)
        queue.fail(old)
    assert caplog.text.count("stale lease of s0") == 2
    assert (queue.pending_count(), queue.outstanding_count()) == (0, 1)
    queue.ack(new)
    queue.ack(new)
    assert (queue.pending_count(), queue.outstanding_count()) == (0, 0)


def test_a_put_and_a_close_wake_who_acquires(store: LocalFeatureStore) -> None:  # [U16]
    queue = SampleRefQueue(store)
    waiting, out = thread(lambda: (queue.acquire(PATIENCE), time.monotonic()))
    wait_until(lambda: store._run.status()["consumers_waiting"], "it to wait")
    ref = put(store)
    sent = time.monotonic()
    queue.put(ref)
    waiting.join(PATIENCE)
    lease, came = out[0]
    assert lease.ref == ref and came - sent < PATIENCE / 3
    waiting, out = thread(lambda: queue.acquire(PATIENCE))
    wait_until(lambda: store._run.status()["consumers_waiting"], "it to wait")
    queue.ack(lease)
    queue.close()
    waiting.join(PATIENCE / 3)
    assert out == [None]


def test_none_is_the_end_only_when_nothing_can_come(store: LocalFeatureStore) -> None:  # [U17]
    queue = SampleRefQueue(store)
    queue.put(put(store))
    lease = lease_of(queue)
    queue.close()
    assert queue.is_closed  # to those who don't acquire

    def drain() -> list[str]:
        got = []
        while True:
            mine = queue.acquire(0.02)
            if mine is None:
                if queue.is_closed:
                    return got
                polled.set()
                continue
            got.append(mine.ref.sample_id)
            queue.ack(mine)

    polled = threading.Event()
    other, out = thread(drain)
    assert polled.wait(PATIENCE)
    queue.fail(lease)
    other.join(PATIENCE)
    assert out == [["s0"]]
    assert queue.acquire() is None and queue.is_closed


def test_a_ref_that_fails_five_times_is_a_dead_letter(store: LocalFeatureStore) -> None:  # [U19] [U20]
    queue = SampleRefQueue(store)
    queue.put(put(store))
    for n in range(5):
        lease = lease_of(queue)
        assert lease.redelivery_count == n
        queue.fail(lease)
    assert queue.acquire(0.001) is None and (queue.pending_count(), queue.outstanding_count()) == (0, 0)
    (dead,) = store._run.queue.dead_letters()
    assert (dead.ref.sample_id, dead.fails) == ("s0", 5)
    assert store._run.queue.drop("s0") == 1
    wait_until(lambda: resident(store) == 0, "its bytes to be freed")


def test_refs_of_another_store_are_refused(store: LocalFeatureStore) -> None:  # [U21]
    other = LocalFeatureStore(max_samples=1)
    foreign = put(other)
    queue = SampleRefQueue(store)
    for call in (queue.put, queue.put_blocks_until_below):
        with pytest.raises(ValueError, match="store"):
            call(foreign)
    with pytest.raises(KeyError, match="store"):
        store.get(foreign)
    assert queue.pending_count() == 0
    other.close()


@pytest.mark.parametrize("failure", [ValueError("the prompts\nran out"), KeyError()], ids=["text", "empty"])
def test_a_producers_failure_is_raised_in_the_trainer_behind_the_drain(store: LocalFeatureStore, failure: Exception) -> None:  # [U22]
    def source() -> Iterator[Any]:
        yield from prompts(3)
        raise failure

    queue = SampleRefQueue(store)
    pipeline = AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, source())
    pipeline.start()
    seen = []
    with pytest.raises(sluice.SluiceError, match=type(failure).__name__) as raised:
        for batch in FeatureDataLoader(queue, store):
            seen.append(int(batch.aux_hidden_states[0, 0, 0]))
    assert seen == [0, 1, 2]
    assert raised.value.__cause__ is failure
    pipeline.join(PATIENCE)
    for _ in range(2):
        with pytest.raises(type(failure)):
            pipeline.stop()
    with pytest.raises(sluice.SluiceError, match=type(failure).__name__):
        queue.acquire()


def test_callbacks_may_call_the_queue_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:  # [U23]
    store = LocalFeatureStore(max_samples=4)
    said: list[Any] = []

    def paused(health: StoreHealth) -> None:
        said.append((health.sample_count, queue.pending_count()))
        queue.put(queue_later.pop())
        raise RuntimeError("the callback's own")

    queue = SampleRefQueue(store, on_pause=paused, on_resume=lambda h: said.append(h.sample_count))
    refs = [put(store, i) for i in range(4)]
    queue_later = [refs.pop()]
    for ref in refs[:2]:
        queue.put(ref)
    waiting, out = thread(lambda: queue.put_blocks_until_below(refs[2]))
    wait_until(lambda: said, "the pause")
    assert [use(store, queue) for _ in range(4)] == ["s0", "s1", "s3", "s2"]
    waiting.join(PATIENCE)
    assert out == [None] and said[0] == (4, 2) and len(said) == 2
    assert "the callback's own" in caplog.text
    store.close()


@pytest.mark.parametrize("how", ["acquire", "loader"])
def test_a_program_of_one_thread_does_not_wait_for_itself(how: str) -> None:
    with LocalStore(max_samples=2) as store:
        queue = SampleRefQueue(store, on_pause=lambda h: pytest.fail("it waits"))
        loader = FeatureDataLoader(queue, store)

        def stream() -> list[str]:
            got, kept = [], []
            for i in range(5):
                queue.put_blocks_until_below(put(store, i))
                if how == "loader":
                    kept = [next(loader)]
                    got.append(f"s{int(kept[0].aux_hidden_states[0, 0, 0])}")
                else:
                    got.append(use(store, queue))
            return got

        waiting, out = thread(stream)
        waiting.join(PATIENCE)
        assert out == [[f"s{i}" for i in range(5)]]
        loader.close()


def test_put_blocks_until_below_ends_with_abort_when_and_with_the_queue() -> None:
    store = LocalFeatureStore(max_samples=2)
    queue = SampleRefQueue(store)
    queue.put(put(store, 0))
    last = put(store, 1)
    stop = threading.Event()
    waiting, out = thread(lambda: queue.put_blocks_until_below(last, 0.01, stop.is_set))
    wait_until(lambda: queue._paused, "it to wait")
    stop.set()
    waiting.join(PATIENCE)
    assert isinstance(out[0], RuntimeError) and "abort_when" in str(out[0])
    waiting, out = thread(lambda: queue.put_blocks_until_below(last))
    wait_until(lambda: store._run.status()["producers_waiting"], "it to wait")
    queue.close()
    waiting.join(PATIENCE)
    assert isinstance(out[0], RuntimeError) and "closed" in str(out[0])
    store.close()


def test_ids_are_unique_over_producers_and_restarts(store: LocalFeatureStore) -> None:  # [U24]
    refs = [FeatureProducer(Target(), store, "r1").produce(*prompt(i)) for i in range(3)]
    assert len({r.sample_id for r in refs}) == 3 and all(r.sample_id.startswith("sample-r1-") and r.sample_id.endswith("-1") for r in refs)


def test_marks_of_the_queue_take_the_place_of_the_stores(store: LocalFeatureStore) -> None:
    queue = SampleRefQueue(store, high_watermark_bytes=3000, low_watermark_bytes=2000)
    queue.put(put(store, 0))
    queue.put(put(store, 1))
    waiting, out = thread(lambda: queue.put_blocks_until_below(put(store, 2)))
    wait_until(lambda: queue._paused, "it to wait")
    assert not store.health().high_watermark_hit  # the store's own is another
    use(store, queue)
    use(store, queue)
    waiting.join(PATIENCE)
    assert out == [None]
    use(store, queue)
    queue.close()
    again = SampleRefQueue(store)
    assert not again.is_closed and store._run.spec["caps"]["high_watermark_bytes"] == 192 * MIB


# -- pipeline --------------------------------------------------------------------------------------------------------------


def test_a_pipeline_starts_once() -> None:
    with LocalStore() as store:
        queue = SampleRefQueue(store)
        gate = threading.Event()

        def source() -> Any:
            gate.wait(PATIENCE)
            return None

        pipeline = AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, source)
        pipeline.start()
        worker = pipeline._thread
        pipeline.start()
        assert pipeline._thread is worker and worker is not None and worker.daemon and worker.name == "streaming-async-producer"
        pipeline.join(0.001)  # it does not end, which is no error
        gate.set()
        pipeline.join(PATIENCE)
        assert queue.is_closed
        with pytest.raises(RuntimeError, match="one use"):
            pipeline.start()
        pipeline.stop()


class LocalStore:
    def __init__(self, **caps: Any) -> None:
        self.store = LocalFeatureStore(**caps)

    def __enter__(self) -> LocalFeatureStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()


def test_a_source_may_fill_up_again() -> None:
    with LocalStore() as store:
        queue, given = SampleRefQueue(store), [prompt(1)]
        with AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, lambda: given.pop() if given else None, poll_interval=0.01, stop_on_exhausted=False):
            use(store, queue)
            given.append(prompt(2))
            use(store, queue)
            assert not queue.is_closed


def test_stop_in_the_middle_of_a_wait_orphans_nothing() -> None:  # [U25]
    with LocalStore(max_samples=2) as store:
        queue = SampleRefQueue(store)
        pipeline = AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, prompts(9))
        pipeline.start()
        wait_until(lambda: store._run.status()["producers_waiting"], "it to wait at the gate")
        pipeline.stop(PATIENCE)
        assert pipeline._thread is not None and not pipeline._thread.is_alive()
        counters = store._run.store.counters()
        assert (resident(store), counters["reserved_bytes"]) == (queue.pending_count(), 0)


def test_a_pipeline_of_a_producer_with_its_own_produce_waits_and_orphans_nothing() -> None:  # [U14] [U25]
    class Mine(FeatureProducer):
        def produce(self, *args: Any, **kwargs: Any) -> SampleRef:
            return super().produce(*args, **kwargs)

    with LocalStore(max_samples=2) as store:
        queue = SampleRefQueue(store)
        pipeline = AsyncFeaturePipeline(Mine(Target(), store, "r1"), queue, prompts(9))
        pipeline.start()
        wait_until(lambda: store._run.status()["producers_waiting"], "it to wait at the gate")
        for _ in range(3):
            use(store, queue)
        pipeline.stop(PATIENCE)
        assert resident(store) == queue.pending_count()


def test_what_the_queue_refuses_is_taken_out_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:  # [U25]
    with LocalStore() as store:
        queue = SampleRefQueue(store)

        def refuse(*_: object) -> None:
            raise OSError("no")

        monkeypatch.setattr(queue, "put", refuse)
        pipeline = AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, prompts(2))
        pipeline.start()
        pipeline.join(PATIENCE)
        with pytest.raises(OSError, match="no"):
            pipeline.stop()
        assert resident(store) == 0 and queue.is_closed


def test_a_trainer_that_leaves_early_ends_the_pipeline_without_an_error() -> None:
    with LocalStore(max_samples=2) as store:
        queue = SampleRefQueue(store)
        with AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, prompts(1000)) as pipeline:
            with FeatureDataLoader(queue, store) as loader:
                next(loader)
            pipeline.join(PATIENCE)  # the loader's close is its end
        wait_until(lambda: resident(store) == queue.pending_count(), "what was taken to be freed")


@pytest.mark.parametrize("source", [[1], "words", [(1, 2)], [tuple(range(6))]], ids=["number", "letters", "fields", "no tensors"])
def test_prompts_that_are_none_are_refused(source: Any) -> None:
    with LocalStore() as store:
        pipeline = AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), SampleRefQueue(store), iter(source))
        pipeline.start()
        pipeline.join(PATIENCE)
        with pytest.raises(ValueError, match="prompt"):
            pipeline.stop()


def test_swapped_packing_fields_are_caught() -> None:
    good = packed()
    with LocalStore() as store:
        producer = FeatureProducer(Target(), store, "r1")
        producer.discard(producer.produce(*good))
        for order in ((0, 1, 2, 5, 4, 3), (0, 1, 2, 4, 3, 5), (0, 1, 2, 3, 5, 4)):
            with pytest.raises(ValueError, match="seq_lens|position_ids|doc_remaining"):
                producer.produce(*(good[i] for i in order))
        with pytest.raises(ValueError, match="without doc_remaining"):
            producer.produce(*good[:5])
        assert resident(store) == 0


def test_a_plain_tensor_is_a_prompt() -> None:
    with LocalStore() as store:
        queue = SampleRefQueue(store)
        with AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, iter([prompt(4)[0]])), FeatureDataLoader(queue, store) as loader:
            (batch,) = loader
        assert batch.attention_mask.tolist() == [[1] * 6]


# -- loader ----------------------------------------------------------------------------------------------------------------


def filled(store: LocalFeatureStore, n: int, close: bool = True, **more: Any) -> SampleRefQueue:
    queue = SampleRefQueue(store, **more)
    for i in range(n):
        queue.put(put(store, i))
    if close:
        queue.close()
    return queue


def test_a_batch_is_acked_on_the_next_pull_by_consume_now_and_by_close(store: LocalFeatureStore) -> None:
    queue = filled(store, 3, close=False)
    loader = FeatureDataLoader(queue, store)
    assert iter(loader) is loader
    next(loader)
    assert queue.outstanding_count() == 1
    next(loader)
    assert queue.outstanding_count() == 1 and resident(store) == 2
    loader.consume_now()
    loader.consume_now()
    assert queue.outstanding_count() == 0
    next(loader)
    loader.close()
    loader.close()
    assert queue.outstanding_count() == 0 and queue.is_closed
    with pytest.raises(StopIteration):
        next(loader)
    wait_until(lambda: resident(store) == 0, "all to be freed")


def test_leaving_the_loop_by_an_exception_fails_the_batch(store: LocalFeatureStore) -> None:  # [U26]
    queue = filled(store, 2)
    with pytest.raises(ZeroDivisionError), FeatureDataLoader(queue, store) as loader:
        for _ in loader:
            raise ZeroDivisionError
    assert (queue.pending_count(), queue.outstanding_count()) == (2, 0)
    again = SampleRefQueue(store)
    leases = [lease_of(again), lease_of(again)]
    assert [(lease.ref.sample_id, lease.redelivery_count) for lease in leases] == [("s1", 0), ("s0", 1)]


def test_a_batch_that_can_not_be_made_keeps_no_pin(store: LocalFeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:  # [U27]
    queue = filled(store, 1, close=False)
    loader = FeatureDataLoader(queue, store)
    monkeypatch.setattr(Eagle3TargetBatch, "from_batch", classmethod(lambda *_: (_ for _ in ()).throw(OSError("no"))))
    with pytest.raises(OSError, match="no"):
        next(loader)
    monkeypatch.undo()
    assert (queue.pending_count(), queue.outstanding_count()) == (1, 0)
    assert all(not p.held for p in store._run.store._pins.values())
    del loader
    assert use(store, queue) == "s0"
    gc.collect()
    wait_until(lambda: resident(store) == 0, "it to be freed")


def test_a_batch_is_the_samples_own_memory(store: LocalFeatureStore) -> None:
    loader = FeatureDataLoader(filled(store, 2), store)
    batch = next(loader)
    assert store._run.store.kept() == []
    next(loader)
    assert [ref.sample_id for ref in store._run.store.kept()] == ["s0"]
    del batch
    wait_until(lambda: store._run.store.kept() == [], "the memory to be freed")
    loader.close()


def test_a_trainer_may_keep_its_batches() -> None:
    """The page's are copies: whoever keeps them all must not run out of room."""
    with LocalStore(max_samples=3) as store:
        queue = SampleRefQueue(store)
        with AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, prompts(9)), FeatureDataLoader(queue, store) as loader:
            batches = list(loader)
        assert [int(b.aux_hidden_states[0, 0, 0]) for b in batches] == list(range(9))


def test_a_sample_of_another_algorithm_is_failed(store: LocalFeatureStore) -> None:
    queue = SampleRefQueue(store)
    made = tensors()
    ids = {n: made[n] for n in ("input_ids", "attention_mask", "loss_mask")}
    queue.put(store.put("d", {"hidden_states": made["aux_hidden_states"], **ids}, "r1", FeatureAlgorithm.DFLASH))
    with pytest.raises(ValueError, match="d: is of dflash, the loader is for eagle3"):
        next(FeatureDataLoader(queue, store))
    assert queue.pending_count() == 1


def test_a_lease_is_renewed_while_the_trainer_has_its_batch(store: LocalFeatureStore) -> None:
    queue = filled(store, 2, visibility_timeout=VisibilityTimeout(0.6))
    loader = FeatureDataLoader(queue, store)
    next(loader)
    first = queue._queue.status()
    until = time.monotonic() + 1.5  # well beyond the lease's time
    while time.monotonic() < until:
        assert queue.outstanding_count() == 1
        time.sleep(0.05)
    assert queue._queue.status()["expired"] == first["expired"] == 0
    next(loader)
    with pytest.raises(StopIteration):
        next(loader)


def test_a_lease_is_renewed_by_the_time_that_it_was_given(store: LocalFeatureStore) -> None:
    short = filled(store, 2, visibility_timeout=VisibilityTimeout(0.6))
    loader = FeatureDataLoader(short, store)
    next(loader)
    short._vt = VisibilityTimeout(600.0)  # as a queue has it that was configured anew since
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert short.outstanding_count() == 1
        time.sleep(0.05)
    assert short._queue.status()["expired"] == 0
    loader.close()


def test_a_loader_that_is_dropped_leaves_no_thread_and_its_lease_runs_out(store: LocalFeatureStore) -> None:
    queue = filled(store, 1, visibility_timeout=VisibilityTimeout(0.3))
    loader = FeatureDataLoader(queue, store)
    next(loader)
    renewer = loader._keeper._thread
    assert renewer is not None
    del loader
    gc.collect()
    renewer.join(PATIENCE)
    assert not renewer.is_alive()
    assert lease_of(queue).redelivery_count == 1


# -- services that die -----------------------------------------------------------------------------------------------------


def kill(store: Any) -> int:
    pid = int(store._client.status()["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def test_everything_fails_at_once_when_the_service_of_a_local_store_has_died() -> None:
    store = LocalFeatureStore()
    queue = filled(store, 3)
    loader = FeatureDataLoader(queue, store)
    next(loader)
    _, waits = thread(lambda: list(store._run.loader(batch=4, collate="pad", patience=600.0)))
    begin = time.monotonic()
    pid = kill(store)
    for work in (lambda: next(loader), lambda: put(store, 7), lambda: store.health(), lambda: queue.acquire(5.0)):
        with pytest.raises(sluice.UnavailableError, match=f"the private service has died: process {pid}"):
            work()
    wait_until(lambda: waits, "the loader to fail", PATIENCE)
    assert isinstance(waits[0], sluice.SluiceError)
    store.close()
    assert time.monotonic() - begin < 10
    again = LocalFeatureStore()  # a new one begins anew
    assert use(again, filled(again, 1)) == "s0"
    again.close()


def test_the_service_of_a_directory_that_dies_is_started_anew(tmp_path: Path) -> None:
    store, other = SharedDirFeatureStore(str(tmp_path)), SharedDirFeatureStore(str(tmp_path))
    queue = filled(store, 2, close=False)
    begin = time.monotonic()
    for i in range(2, 4):
        pid = kill(store)
        queue.put(put(store, i))
        assert store._client.status()["pid"] == other._client.status()["pid"] != pid
    queue.close()
    assert [use(other, queue) for _ in range(4)] == ["s0", "s1", "s2", "s3"]
    assert time.monotonic() - begin < 20
    store.close()
    other.close()


def test_a_service_that_can_not_be_started_anew_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SharedDirFeatureStore(str(tmp_path))
    with monkeypatch.context() as m:
        m.setenv("SLUICE_BINARY", str(tmp_path / "none"))
        pid = kill(store)
        with pytest.raises(sluice.UnavailableError, match=f"process {pid}.*Another one can't be started: .*none"):
            put(store)
    store.close()
    with_one = SharedDirFeatureStore(str(tmp_path))  # and the directory is as good as before
    put(with_one)
    with_one.close()


# -- processes -------------------------------------------------------------------------------------------------------------


def _child(directory: str, blob: bytes, out: Any) -> None:
    ref = pickle.loads(blob)
    store = SharedDirFeatureStore(directory)
    got, handle = store.get(ref)
    out.put(got["input_ids"].tolist())
    del got
    store.close()


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_gets_a_sample_by_its_ref(how: str, tmp_path: Path) -> None:
    with SharedDir(tmp_path) as store:
        queue = SampleRefQueue(store)
        ref = put(store, 7)
        queue.put(ref)
        context: Any = multiprocessing.get_context(how)
        out = context.Queue()
        child = context.Process(target=_child, args=(str(tmp_path), pickle.dumps(ref), out))
        child.start()
        assert out.get(timeout=60) == tensors(7)["input_ids"].tolist()
        child.join(60)
        assert child.exitcode == 0
        assert torch.equal(store.get(ref)[0]["input_ids"], tensors(7)["input_ids"])  # what the child had pinned is not gone with it


def test_a_shared_directory_can_be_pickled_and_a_local_store_says_why_not(tmp_path: Path, store: LocalFeatureStore) -> None:
    with SharedDir(tmp_path) as shared:
        queue = SampleRefQueue(shared)
        ref = put(shared)
        queue.put(ref)
        again = pickle.loads(pickle.dumps(shared))
        assert again is not shared and again.store_uri == shared.store_uri
        again.get(ref)
        again.close()
    with pytest.raises(TypeError, match="processes share a SharedDirFeatureStore"):
        pickle.dumps(store)


def test_the_child_of_a_fork_has_a_session_of_its_own(store: LocalFeatureStore) -> None:
    """It may use its parent's store, and neither its end nor its close takes anything from the parent."""
    queue = filled(store, 2, close=False)
    loader = FeatureDataLoader(queue, store)
    batch = next(loader)
    _, handle = store.get(put(store, 5))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine = store.put("child", tensors(9), "r1")
            got, _ = store.get(mine)
            assert torch.equal(got["logits"], tensors(9)["logits"])
            store.release(handle)  # the parent's
            loader.consume_now()
            lease = queue.acquire(PATIENCE)
            assert lease is not None and lease.ref.sample_id == "s1"
            loader.close()
            store.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store._run.run_id in store._client.runs() and not queue.is_closed
    assert queue.outstanding_count() >= 1 and torch.equal(batch.input_ids, shift(prompt(0)[0]))
    assert lease_of(queue).ref.sample_id == "s1"  # what the child had leased came back with its end
    loader.consume_now()
    assert queue.outstanding_count() == 1
    assert torch.equal(store.get(handle.ref)[0]["input_ids"], tensors(5)["input_ids"])
    loader.close()


# -- bad input -------------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused_by_name_and_value(store: LocalFeatureStore, tmp_path: Path) -> None:
    queue = SampleRefQueue(store)
    ref = put(store)
    lease: Any = "lease"
    producer = FeatureProducer(Target(), store, "r1")
    (tmp_path / "file").touch()
    anything: Any = None

    def of(cls: Any, *arguments: Any, **more: Any) -> Callable[[], Any]:
        return lambda: cls(*arguments, **more)

    table: list[tuple[str, Callable[[], Any]]] = [
        *((f"LocalFeatureStore: {name}: is {value!r}", of(LocalFeatureStore, **{name: value})) for name in ("max_samples", "max_bytes", "high_watermark_bytes") for value in (0, -1, 1.5, True, "9")),
        *((f"LocalFeatureStore: low_watermark_bytes: is {value!r}", of(LocalFeatureStore, low_watermark_bytes=value)) for value in (-1, 1.5, True)),
        ("LocalFeatureStore: low_watermark_bytes: is 9, want less than high_watermark_bytes .9", of(LocalFeatureStore, high_watermark_bytes=9, low_watermark_bytes=9)),
        ("max_samples and max_bytes: are both None", of(LocalFeatureStore, None, None)),
        ("SharedDirFeatureStore: directory: is ''", of(SharedDirFeatureStore, "")),
        ("SharedDirFeatureStore: directory: is 3", of(SharedDirFeatureStore, 3)),
        ("SharedDirFeatureStore: directory: is .*file.*can't be made", of(SharedDirFeatureStore, str(tmp_path / "file"))),
        ("SharedDirFeatureStore: max_samples: is 0", of(SharedDirFeatureStore, str(tmp_path / "new"), 0)),
        ("ServiceFeatureStore: run: is a int", of(ServiceFeatureStore, 3)),
        ("VisibilityTimeout: seconds: is 0", of(VisibilityTimeout, 0)),
        ("VisibilityTimeout: seconds: is True", of(VisibilityTimeout, True)),
        ("VisibilityTimeout: seconds: is nan", of(VisibilityTimeout, float("nan"))),
        ("SampleRefQueue: store: is a int", of(SampleRefQueue, 3)),
        ("SampleRefQueue: visibility_timeout: is 30", of(SampleRefQueue, store, 30)),
        ("SampleRefQueue: high_watermark_bytes: is 0", of(SampleRefQueue, store, high_watermark_bytes=0)),
        ("SampleRefQueue: low_watermark_bytes: is -1", of(SampleRefQueue, store, low_watermark_bytes=-1)),
        ("SampleRefQueue: low_watermark_bytes: is 5, want less than high_watermark_bytes .5", of(SampleRefQueue, store, high_watermark_bytes=5, low_watermark_bytes=5)),
        ("SampleRefQueue: on_pause: is 3", of(SampleRefQueue, store, on_pause=3)),
        ("SampleRefQueue: on_resume: is 3", of(SampleRefQueue, store, on_resume=3)),
        ("put: ref: is a str", of(queue.put, "s0")),
        ("put_blocks_until_below: ref: is a str", of(queue.put_blocks_until_below, "s0")),
        ("put_blocks_until_below: poll_interval: is 0", of(queue.put_blocks_until_below, ref, 0)),
        ("put_blocks_until_below: abort_when: is 3", of(queue.put_blocks_until_below, ref, 1, 3)),
        ("acquire: poll_interval: is -1", of(queue.acquire, -1)),
        ("acquire: poll_interval: is '1'", of(queue.acquire, "1")),
        ("ack: lease: is a str", of(queue.ack, lease)),
        ("fail: lease: is a NoneType", of(queue.fail, anything)),
        ("get: ref: is a str", of(store.get, "s0")),
        ("release: handle: is a int", of(store.release, 3)),
        ("FeatureProducer: target_backend: is a object without generate_batch", of(FeatureProducer, object(), store, "r1")),
        ("FeatureProducer: store: is a int", of(FeatureProducer, Target(), 3, "r1")),
        ("FeatureProducer: run_id: is ''", of(FeatureProducer, Target(), store, "")),
        ("FeatureProducer: algorithm: is 'eagle3'", of(FeatureProducer, Target(), store, "r1", "eagle3")),
        ("FeatureProducer: target_model_version: is 1", of(FeatureProducer, Target(), store, "r1", None, 1)),
        ("FeatureProducer: draft_weight_version: is None", of(FeatureProducer, Target(), store, "r1", None, "0", None)),
        ("FeatureProducer: sample_id_factory: is 3", of(FeatureProducer, Target(), store, "r1", sample_id_factory=3)),
        ("produce: input_ids: is a list", of(producer.produce, [1], [1], [1])),
        ("produce: loss_mask: has the shape", of(producer.produce, *prompt(1)[:2], torch.ones(1, 5, dtype=torch.long))),
        ("AsyncFeaturePipeline: producer: is a int", of(AsyncFeaturePipeline, 3, queue, iter([]))),
        ("AsyncFeaturePipeline: queue: is a int", of(AsyncFeaturePipeline, producer, 3, iter([]))),
        ("AsyncFeaturePipeline: prompt_source: is a list", of(AsyncFeaturePipeline, producer, queue, [])),
        ("AsyncFeaturePipeline: poll_interval: is 0", of(AsyncFeaturePipeline, producer, queue, iter([]), 0)),
        ("AsyncFeaturePipeline: stop_on_exhausted: is 1", of(AsyncFeaturePipeline, producer, queue, iter([]), 0.1, 1)),
        ("FeatureDataLoader: queue: is a int", of(FeatureDataLoader, 3, store)),
        ("FeatureDataLoader: store: is a int", of(FeatureDataLoader, queue, 3)),
        ("FeatureDataLoader: algorithm: is <FeatureAlgorithm.DFLASH", of(FeatureDataLoader, queue, store, FeatureAlgorithm.DFLASH)),
        ("FeatureDataLoader: acquire_poll_interval: is 0", of(FeatureDataLoader, queue, store, None, 0)),
    ]
    for text, call in table:
        with pytest.raises(ValueError, match=text):
            call()
    assert not (tmp_path / "new").exists()


# -- nothing is leaked -----------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_stream(tmp_path: Path, private_services: Path) -> None:
    def stream(path: Path) -> None:
        for store in (LocalFeatureStore(max_samples=3), SharedDirFeatureStore(str(path), max_samples=3)):
            queue = SampleRefQueue(store)
            with AsyncFeaturePipeline(FeatureProducer(Target(), store, "r1"), queue, prompts(5)), FeatureDataLoader(queue, store) as loader:
                assert len(list(loader)) == 5
            store.close()

    def state() -> tuple[int, int, list[str]]:
        maps = Path("/proc/self/maps").read_text().count(".safetensors")
        return len(os.listdir("/proc/self/fd")), maps, sorted(t.name for t in threading.enumerate() if t.name.startswith(("sluice", "streaming")))

    stream(tmp_path / "a")
    gc.collect()
    before = state()
    assert before[1:] == (0, [])
    stream(tmp_path / "b")
    gc.collect()
    assert state() == before
    pids = [p for p in os.listdir("/proc") if p.isdigit() and b"serve" in _command(p) and str(private_services).encode() in _command(p)]
    wait_until(lambda: not any(os.path.exists(f"/proc/{p}") for p in pids), "the services to end")
    assert private.IDLE_SECONDS < 1
    assert sorted(os.listdir(tmp_path / "a")) == ["state", "store"]
    assert not list((tmp_path / "a" / "store").rglob("*.safetensors"))


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
