"""The reference implementation's own producer, pipeline and loader run on a Sluice service."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sluice  # noqa: E402

from . import nemo_standin as nemo  # noqa: E402
from .interpreter import run_python  # noqa: E402
from .samples import ATTRIBUTES, wait_until  # noqa: E402
from .streams import Target, packed, prompt, prompts, shift, tensors  # noqa: E402

pytestmark = pytest.mark.usefixtures("private_services")
NAME = "nemo_automodel.components.speculative.streaming"
OURS = "sluice.integrations.nemo"


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter on the stand-in, whether or not the real package is installed."""
    parts = NAME.split(".")
    for i in range(1, len(parts)):
        package = ModuleType(".".join(parts[:i]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, NAME, nemo)
    setattr(sys.modules["nemo_automodel.components.speculative"], "streaming", nemo)  # noqa: B010
    sys.modules.pop(OURS, None)
    yield importlib.import_module(OURS)
    sys.modules.pop(OURS, None)


@pytest.fixture
def local() -> Iterator[sluice.LocalFeatureStore]:
    s = sluice.LocalFeatureStore(max_samples=4)
    yield s
    s.close()


def put(store: Any, i: int = 0, **more: Any) -> Any:
    return store.put(f"s{i}", tensors(i), run_id="r1", **more)


def test_without_the_package_the_import_says_what_is_missing() -> None:
    run_python("""
        import sluice.integrations
        assert "nemo_automodel" not in sys.modules
        sys.modules["nemo_automodel"] = None
        try:
            import sluice.integrations.nemo
        except ImportError as e:
            assert "sluice.integrations.nemo needs the streaming package of NeMo AutoModel" in str(e), e
        else:
            raise SystemExit("it was imported")
    """)


def test_their_producer_pipeline_and_loader_run_unchanged(adapter: Any, local: sluice.LocalFeatureStore) -> None:
    store = adapter.SluiceFeatureStore(local)
    assert isinstance(store, nemo.FeatureStore)
    said: list[Any] = []
    queue = adapter.SluiceSampleRefQueue(store, on_pause=said.append, on_resume=said.append)
    target = Target()
    pipeline = nemo.AsyncFeaturePipeline(nemo.FeatureProducer(target, store, run_id="r1"), queue, prompts(30))
    pipeline.thread.start()
    seen = []
    for batch in nemo.FeatureDataLoader(queue, store):
        seen.append(int(batch["aux_hidden_states"][0, 0, 0]))
        assert list(batch) == list(tensors()) and torch.equal(batch["input_ids"], shift(prompt(seen[-1])[0]))
        time.sleep(0.005)  # a step, so that the producer is faster
    pipeline.stop()
    del batch
    assert pipeline.error is None and seen == list(range(30)) and target.calls == 30
    assert said and all(isinstance(h, nemo.StoreHealth) for h in said)
    wait_until(lambda: store.health().sample_count == 0, "all to be freed")
    assert (queue.pending_count(), queue.outstanding_count(), queue.reclaim_expired(), store.gc()) == (0, 0, 0, 0)
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.health()


def test_refs_come_and_go_whole_however_they_were_copied(adapter: Any, local: sluice.LocalFeatureStore) -> None:
    store = adapter.SluiceFeatureStore(local)
    theirs = put(store, 3, algorithm=nemo.FeatureAlgorithm.EAGLE3, target_model_version="7", num_tokens=6, attributes={"aux_layers": "hf:1,2,3", "note": "a#b=c&d é"})
    assert type(theirs) is nemo.SampleRef and theirs.algorithm is nemo.FeatureAlgorithm.EAGLE3 and theirs.store_uri == store.store_uri
    ours = adapter.from_nemo(theirs)
    assert ours.attributes == {"shift": "1", "aux_layers": "hf:1,2,3", "note": "a#b=c&d é"} and ours.target_model_version == "7" and ours.feature_keys["logits"] == "s3/logits"
    copied = nemo.SampleRef(**{f.name: getattr(theirs, f.name) for f in dataclasses.fields(theirs)})
    assert adapter.from_nemo(copied) == ours and adapter.to_nemo(ours) == theirs
    got, handle = store.get(copied)
    assert torch.equal(got["logits"], tensors(3)["logits"]) and isinstance(handle, nemo.StoreHandle) and handle.ref is copied
    with pytest.raises(ValueError, match="no generation"):
        store.get(dataclasses.replace(theirs, feature_keys={n: n for n in theirs.feature_keys}))
    with pytest.raises(sluice.UnsupportedError, match="mine"):
        adapter.to_nemo(local.put("m", {"x": torch.zeros(1)}, "r1", "mine"))  # type: ignore[arg-type]


def test_handles_are_good_once_and_here_only(adapter: Any, local: sluice.LocalFeatureStore) -> None:
    store = adapter.SluiceFeatureStore(local)
    ref = put(store)
    first, second = store.get(ref)[1], store.get(ref)[1]
    store.release(first)
    store.release(first)
    store.release(nemo.StoreHandle(store, "another", ref, second.handle_id))
    adapter.SluiceFeatureStore(local).release(second)
    assert store.health().sample_count == 1
    store.release(second)
    wait_until(lambda: store.health().sample_count == 0, "it to be freed")
    with pytest.raises(KeyError):
        store.get(ref)


def test_an_unshifted_sample_arrives_shifted(adapter: Any, client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, algorithm="eagle3", max_bytes=1 << 20)
    ids, mask = prompt(5)[0], prompt(5)[1]
    made = {"aux_hidden_states": torch.zeros(1, 6, 24), "input_ids": ids, "attention_mask": mask, "loss_mask": mask, "logits": torch.arange(6.0)[None, :, None].repeat(1, 1, 4)}
    run.queue.put(run.store.put("s", made, attributes={**ATTRIBUTES, "aux_layers": "hf:1,2,3"}))
    run.queue.close()
    store = adapter.SluiceFeatureStore(run)
    (batch,) = nemo.FeatureDataLoader(adapter.SluiceSampleRefQueue(store), store)
    assert batch["input_ids"].tolist() == [[5] * 5 + [0]] and batch["logits"][0, :, 0].tolist() == [1, 2, 3, 4, 5, 0] and batch["attention_mask"].tolist() == [[1] * 6]


def test_the_padding_of_packed_rows_is_the_last_documents_to_them_and_nobodys_here(adapter: Any, local: sluice.LocalFeatureStore) -> None:
    store = adapter.SluiceFeatureStore(local)
    queue = adapter.SluiceSampleRefQueue(store)
    pipeline = nemo.AsyncFeaturePipeline(nemo.FeatureProducer(Target(), store, run_id="r1"), queue, iter([packed()]))
    pipeline.thread.start()
    lease = wait_until(queue.acquire, "the sample")
    raw, handle = local.get(adapter.from_nemo(lease.ref))
    assert raw["seq_lens"].tolist() == [[4, 3]]  # what attention_mask covers
    local.release(handle)
    got, handle = store.get(lease.ref)
    for name, t in zip(("position_ids", "seq_lens", "doc_remaining"), packed()[3:], strict=True):
        assert torch.equal(got[name], t)
    pipeline.stop()
    rows = {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]), "seq_lens": torch.tensor([[2, 1, 1], [3, 1, 0], [4, 0, 0]])}
    stored = dict(adapter._unfolded(rows))
    assert stored["seq_lens"].tolist() == [[2, 1, 0], [3, 1, 0], [0, 0, 0]]
    assert adapter._folded({**stored, "input_ids": torch.zeros(3, 4)})["seq_lens"].tolist() == [[2, 2, 0], [3, 1, 0], [4, 0, 0]]


def test_a_pipeline_that_is_stopped_while_it_waits_leaves_nothing_and_fails_not(adapter: Any, local: sluice.LocalFeatureStore) -> None:
    store = adapter.SluiceFeatureStore(local)
    for end in ("stop", "close"):
        queue = adapter.SluiceSampleRefQueue(store)
        pipeline = nemo.AsyncFeaturePipeline(nemo.FeatureProducer(Target(), store, run_id=end), queue, prompts(9))
        pipeline.thread.start()
        wait_until(lambda: local._run.status()["producers_waiting"], "it to wait")
        if end == "close":
            queue.close()
            pipeline.thread.join(30)
        pipeline.stop()
        assert pipeline.error is None
        assert queue.pending_count() == 2
        wait_until(lambda: store.health().sample_count == 2, "what was discarded to be freed")
        for lease in (queue.acquire(), queue.acquire()):
            queue.ack(lease)
        assert queue.acquire() is None and queue.is_closed
        wait_until(lambda: store.health().sample_count == 0, "the rest to be freed")


def test_a_lease_is_renewed_while_its_object_lives(adapter: Any, local: sluice.LocalFeatureStore) -> None:
    store = adapter.SluiceFeatureStore(local)
    queue = adapter.SluiceSampleRefQueue(store, nemo.VisibilityTimeout(0.4))
    queue.put(put(store))
    lease = wait_until(queue.acquire, "the sample")
    assert lease.visibility_timeout == nemo.VisibilityTimeout(0.4) and 0 < lease.deadline - time.monotonic() <= 0.4
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        assert queue.outstanding_count() == 1
        time.sleep(0.05)
    del lease
    gc.collect()
    again = wait_until(queue.acquire, "it to run out")
    assert again.redelivery_count == 1
    queue.fail(again)
    again = wait_until(queue.acquire, "it to come again")
    queue.ack(again)
    assert (queue.pending_count(), queue.outstanding_count()) == (0, 0)


def test_what_is_not_theirs_is_refused_by_name(adapter: Any, local: sluice.LocalFeatureStore) -> None:
    store = adapter.SluiceFeatureStore(local)
    queue = adapter.SluiceSampleRefQueue(store)
    ours = local.put("s", tensors(), "r1")
    for text, call in {
        "run: is a int": lambda: adapter.SluiceFeatureStore(3),
        "store: is a LocalFeatureStore": lambda: adapter.SluiceSampleRefQueue(local),
        "visibility_timeout: is VisibilityTimeout": lambda: adapter.SluiceSampleRefQueue(store, sluice.VisibilityTimeout(1)),
        "on_pause: is 3": lambda: adapter.SluiceSampleRefQueue(store, on_pause=3),
        "algorithm: is 'eagle3'": lambda: put(store, algorithm="eagle3"),
        "ref: is a SampleRef, want NeMo": lambda: store.get(ours),
        "handle: is a int": lambda: store.release(3),
        "ack: lease: is a str": lambda: queue.ack("lease"),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()
