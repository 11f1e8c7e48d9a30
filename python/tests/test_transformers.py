"""The producer over a Hugging Face causal language model: against a stand-in of the same structure, and against transformers where that is installed."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import sluice
from sluice.integrations.prompts import JsonLines, Refusal, Row

torch = pytest.importorskip("torch")

from sluice.integrations import transformers as module  # noqa: E402
from sluice.integrations.transformers import Counts, TransformersProducer, default_aux_layers, main, target_fingerprint, tokenizer_fingerprint  # noqa: E402

from .conftest import Service  # noqa: E402
from .samples import put, wait_until  # noqa: E402
from .standin import VOCAB, CausalLM, Tokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")

ENCODINGS = {"eagle3": ("last_hidden_states", "logits", "target_probs"), "dflash": (None, "logits"), "dspark": (None,)}
CASES = [(algorithm, encoding) for algorithm, encodings in ENCODINGS.items() for encoding in encodings]
DRAFT = list(range(0, VOCAB, 3))[::-1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def new_run(client: sluice.Client, run_id: str) -> Iterator[Callable[..., sluice.Run]]:
    made: list[sluice.Run] = []

    def make(algorithm: str = "eagle3", **spec: Any) -> sluice.Run:
        made.append(client.create_run(f"{run_id}-{len(made)}", **({"algorithm": algorithm, "max_bytes": 1 << 24} | spec)))
        return made[-1]

    yield make
    for run in made:
        run.close()
        client.delete_run(run.run_id)


def rows(*lengths: int, seed: int = 0) -> list[Row]:
    """Rows of random ids; the second half of each is supervised."""
    g = torch.Generator().manual_seed(seed)
    return [Row(torch.randint(0, 128, (n,), generator=g).numpy(), [0] * (n // 2) + [1] * (n - n // 2)) for n in lengths]


def samples(run: sluice.Run, n: int) -> list[tuple[sluice.SampleRef, dict[str, Any]]]:
    """Everything that was put, acknowledged."""
    out: list[tuple[sluice.SampleRef, dict[str, Any]]] = []
    me = sluice.Consumer("reader")
    while len(out) < n:
        got = run.queue.acquire(me, max=n, timeout=20)
        assert got.leases, f"{len(out)} of {n} came: {got}"
        for lease in got.leases:
            tensors, handle = run.store.get(lease.ref)
            out.append((lease.ref, {name: t.clone() for name, t in tensors.items()}))
            run.store.release(handle)
        run.queue.ack(me, *got.leases)
    return out


def by_hand(model: Any, row: Row) -> Any:
    """The model's own hidden states and logits of one row alone; the last but one entry of hidden_states is not normed, the last is."""
    ids = torch.as_tensor(row.input_ids)[None]
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, output_hidden_states=True)


def residual(model: Any, row: Row) -> Any:
    """What the last layer gives, before the final norm."""
    seen: list[Any] = []
    hook = model.model.layers[-1].register_forward_hook(lambda m, i, o: seen.append(o[0] if isinstance(o, tuple) else o))
    by_hand(model, row)
    hook.remove()
    return seen[0]


# -- what is in a sample ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "encoding"), CASES)
def test_a_row_alone_gives_the_models_own_hidden_states_bit_for_bit(new_run: Callable[..., sluice.Run], algorithm: str, encoding: str | None) -> None:
    model, run = CausalLM(), new_run(algorithm)
    needs = {"draft_vocab": DRAFT} if encoding == "target_probs" else {}
    (row,) = rows(11)
    with TransformersProducer(model, run, aux_layers=[5, -1, 2], supervision=encoding, **needs) as producer:
        (ref,) = producer.produce(row)
    ((got, tensors),) = samples(run, 1)
    assert got == ref and ref.estimated_bytes == producer.sample_bytes(11) == sum(t.numel() * t.element_size() for t in tensors.values())
    want = by_hand(model, row)
    states, logits = want.hidden_states, want.logits
    expected = {"input_ids": torch.as_tensor(row.input_ids)[None], "loss_mask": torch.tensor(row.loss_mask)[None], "attention_mask": torch.ones(1, 11, dtype=torch.int64)}
    aux = torch.cat([states[6], states[0], states[3]], -1)
    if algorithm == "dspark":
        del expected["attention_mask"]
        expected |= {"target_hidden_states": aux, "target_last_hidden_states": states[8]}
    else:
        expected["aux_hidden_states" if algorithm == "eagle3" else "hidden_states"] = aux
    if encoding == "last_hidden_states":
        expected[encoding] = states[8]
    elif encoding == "logits":
        expected[encoding] = logits
    elif encoding == "target_probs":
        chosen = torch.tensor(DRAFT)
        expected |= {"target_probs": logits[..., chosen].softmax(-1), "position_mask": (torch.isin(logits.argmax(-1), chosen) & (expected["loss_mask"] == 1))[..., None]}
        assert expected["position_mask"].any() and not expected["position_mask"].all()
    assert tensors.keys() == expected.keys() and [name for name, _ in ref.feature_specs.items()] == [f.name for f in producer.schema.features if f.name in expected]
    for name, t in expected.items():
        assert torch.equal(tensors[name], t), name
    assert ref.num_tokens == (int(sum(row.loss_mask)) if algorithm == "dspark" else 11)
    assert ref.attributes["shift"] == "0" and ref.attributes["aux_layers"] == "hf:5,-1,2" and ref.attributes["supervised_tokens"] == "6"
    assert ref.attributes["target"] == target_fingerprint(model) and ref.attributes["ids"].startswith("sha256:")
    assert ref.attributes.get("last_norm") == ("post" if algorithm == "dspark" or encoding == "last_hidden_states" else None)


def test_rows_of_a_batch_are_those_of_each_row_alone(new_run: Callable[..., sluice.Run]) -> None:
    model, run = CausalLM(), new_run()
    many = rows(9, 3, 17, 17, 2)
    with TransformersProducer(model, run, batch_size=4) as producer:
        assert len(producer.produce(many)) == 5
    assert producer.counts.forwards == 2
    for row, (ref, tensors) in zip(many, samples(run, 5), strict=True):
        want = by_hand(model, row).hidden_states
        assert torch.equal(tensors["input_ids"][0], torch.as_tensor(row.input_ids)) and tensors["input_ids"].shape == (1, len(row.input_ids))
        torch.testing.assert_close(tensors["aux_hidden_states"], torch.cat([want[2], want[4], want[5]], -1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tensors["last_hidden_states"], want[8], rtol=1e-4, atol=1e-5)
        assert ref.attributes["aux_layers"] == "hf:1,3,4"


def test_the_last_layer_is_before_the_norm_save_where_the_schema_wants_it_behind(new_run: Callable[..., sluice.Run]) -> None:
    model = CausalLM()
    (row,) = rows(6)
    before, behind = residual(model, row), by_hand(model, row).hidden_states[-1]
    assert not torch.allclose(before, behind)
    for algorithm, name, want in (("eagle3", "aux_hidden_states", before), ("dflash", "hidden_states", before), ("dspark", "target_hidden_states", behind)):
        run = new_run(algorithm)
        with TransformersProducer(model, run, aux_layers=[7, 0]) as producer:
            producer.produce(row)
        ((_, tensors),) = samples(run, 1)
        assert torch.equal(tensors[name][..., :16], want), algorithm


def test_a_schema_of_a_users_own_may_want_the_last_state_before_the_norm(new_run: Callable[..., sluice.Run]) -> None:
    document = {
        "name": "mine", "version": 3,
        "features": [
            {"name": "ids", "from": "input_ids", "axes": ["B", "S"], "dtypes": ["int64"], "required": True},
            {"name": "mask", "from": "loss_mask", "axes": ["B", "S"], "dtypes": ["int64"], "required": True},
            {"name": "stream", "from": "last", "norm": "pre", "axes": ["B", "S", "H"], "dtypes": ["float16"], "required": True},
        ],
        "attributes": [{"name": "last_norm", "required": True, "pattern": "pre|post"}],
    }
    model, run = CausalLM(), new_run(schema=document, algorithm=None)
    (row,) = rows(5)
    with pytest.raises(sluice.SchemaError, match="float32"):
        TransformersProducer(model, run)
    with TransformersProducer(model, run, dtype=torch.float16, attributes={"set": "a"}) as producer:
        (ref,) = producer.produce(row)
    ((_, tensors),) = samples(run, 1)
    assert torch.equal(tensors["stream"], residual(model, row).half()) and (ref.attributes["last_norm"], ref.attributes["set"], ref.schema_version) == ("pre", "a", 3)
    assert "aux_layers" not in ref.attributes and "ids" in tensors


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_in_half_precision_is_stored_as_it_is(new_run: Callable[..., sluice.Run], dtype: str) -> None:
    model, run = CausalLM().to(torch.bfloat16), new_run()
    (row,) = rows(6)
    with TransformersProducer(model, run, dtype=None if dtype == "bfloat16" else dtype) as producer:
        (ref,) = producer.produce(row)
    ((_, tensors),) = samples(run, 1)
    assert {ref.feature_specs[n].dtype_name for n in ("aux_hidden_states", "last_hidden_states")} == {dtype}
    assert torch.equal(tensors["last_hidden_states"], by_hand(model, row).hidden_states[-1].to(getattr(torch, dtype)))


def test_layers_in_vllms_numbering_are_the_same_states(new_run: Callable[..., sluice.Run]) -> None:
    model, run = CausalLM(), new_run()
    assert TransformersProducer(model, run, aux_layers="vllm:6,0,8").aux_layers == (5, -1, 7)
    assert TransformersProducer(model, run, aux_layers="hf:5,-1,7").aux_layers == TransformersProducer(model, run, aux_layers="5,-1,7").aux_layers == (5, -1, 7)
    assert default_aux_layers(32) == (1, 15, 28) and TransformersProducer(model, run).aux_layers == (1, 3, 4)


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"aux_layers": [1, 8]}, "aux_layers.*-1 to 7"), ({"aux_layers": [1, 1]}, "each once"), ({"aux_layers": []}, "aux_layers"), ({"aux_layers": [-2]}, "aux_layers"),
        ({"aux_layers": "vllm:9"}, "0 to 8 in vllm"), ({"aux_layers": "tf:1"}, "aux_layers"), ({"aux_layers": [True]}, "aux_layers"), ({"aux_layers": "1,x"}, "aux_layers"),
        ({"supervision": "labels"}, "supervision.*last_hidden_states or logits or target_probs"), ({"supervision": "target_probs"}, "draft_vocab.*empty"),
        ({"supervision": "target_probs", "draft_vocab": [1, VOCAB]}, "draft_vocab"), ({"supervision": "target_probs", "draft_vocab": [1, 1]}, "each once"), ({"draft_vocab": [1]}, "draft_vocab"),
        ({"batch_size": 0}, "batch_size"), ({"max_tokens": 65}, "max_tokens.*1 to 64"), ({"max_faults": 0}, "max_faults"), ({"turns": "some"}, "turns"), ({"dtype": "int3"}, "int3"),
        ({"parts": {"tail": "x"}}, "tail"), ({"parts": {"norm": "model.no"}}, "model.no"), ({"name": ""}, "name"),
    ],
)
def test_a_bad_argument_is_named(new_run: Callable[..., sluice.Run], options: dict[str, Any], says: str) -> None:
    with pytest.raises(sluice.InvalidError, match=says):
        TransformersProducer(CausalLM(), new_run(), **options)


def test_an_encoding_that_the_schema_lacks_is_refused(new_run: Callable[..., sluice.Run]) -> None:
    with pytest.raises(ValueError, match="supervision"):
        TransformersProducer(CausalLM(), new_run("dspark"), supervision="logits")
    with pytest.raises(ValueError, match="too shallow"):
        TransformersProducer(CausalLM(layers=6), new_run())
    with pytest.raises(ValueError, match="any schema"):
        TransformersProducer(CausalLM(), new_run(algorithm=None, mixed=True))
    with pytest.raises(ValueError, match="model"):
        TransformersProducer("llama", new_run())


def test_a_head_that_does_not_give_the_models_logits_is_found_at_the_construction(new_run: Callable[..., sluice.Run]) -> None:
    class Capped(CausalLM):
        """Changes its logits behind the head."""

        def forward(self, *args: Any, **more: Any) -> Any:
            out = super().forward(*args, **more)
            out.logits = out.logits.tanh()
            return out

    class Late(CausalLM):
        """Its head is given what the norm was given, since the norm that counts is elsewhere."""

        def forward(self, *args: Any, **more: Any) -> Any:
            seen: list[Any] = []
            hook = self.model.norm.register_forward_hook(lambda m, i, o: seen.append(i[0]))
            out = super().forward(*args, **more)
            hook.remove()
            out.logits = self.lm_head(seen[0])
            return out

    run = new_run()
    with pytest.raises(sluice.UnsupportedError, match="does not give the model's logits.*store logits"):
        TransformersProducer(Capped(), run)
    with pytest.raises(sluice.UnsupportedError, match="before the norm"):
        TransformersProducer(Late(), run)
    with pytest.raises(sluice.UnsupportedError, match="target_last_hidden_states"):
        TransformersProducer(Capped(), new_run("dspark"))
    with TransformersProducer(Capped(), run, supervision="logits") as producer:  # the model's own, whatever made them
        producer.produce(rows(5))
    assert float(samples(run, 1)[0][1]["logits"].abs().max()) <= 1


def test_capped_logits_are_found_in_half_precision_too(new_run: Callable[..., sluice.Run]) -> None:
    class Capped(CausalLM):
        """As Gemma 2 caps its logits."""

        def forward(self, *args: Any, **more: Any) -> Any:
            out = super().forward(*args, **more)
            out.logits = 30 * torch.tanh(out.logits / 30)
            return out

    for model in (Capped(), CausalLM()):
        with torch.no_grad():
            model.lm_head.weight.mul_(4)
        model.to(torch.bfloat16)
        logits = by_hand(model, rows(4)[0]).logits.abs().max()
        assert 5 < float(logits) < 25
        if isinstance(model, Capped):
            with pytest.raises(sluice.UnsupportedError, match="does not give the model's logits"):
                TransformersProducer(model, new_run())
        else:
            TransformersProducer(model, new_run())


def test_a_structure_that_is_not_found_is_named_and_may_be_given(new_run: Callable[..., sluice.Run]) -> None:
    class Odd(CausalLM):
        def __init__(self) -> None:
            super().__init__()
            self.model.ending = self.model.norm
            del self.model._modules["norm"]

        def forward(self, *args: Any, **more: Any) -> Any:
            self.model.__dict__["norm"] = self.model.ending
            return super().forward(*args, **more)

    run = new_run()
    with pytest.raises(sluice.UnsupportedError, match="no norm.*parts"):
        TransformersProducer(Odd(), run)
    assert TransformersProducer(Odd(), run, parts={"norm": "model.ending"}).hidden_size == 16
    with pytest.raises(sluice.UnsupportedError, match="does not give the model's logits"):
        TransformersProducer(CausalLM(), run, parts={"norm": "model.layers.7.drop"})


def test_hooked_layers_that_are_not_the_reported_states_are_found(new_run: Callable[..., sluice.Run]) -> None:
    class Shifted(CausalLM):
        def forward(self, *args: Any, **more: Any) -> Any:
            out = super().forward(*args, **more)
            out.hidden_states = out.hidden_states and (*out.hidden_states[1:], out.hidden_states[-1])
            return out

    with pytest.raises(sluice.UnsupportedError, match=r"hidden_states\[2\]"):
        TransformersProducer(Shifted(), new_run())


def test_rows_that_are_not_admitted_cost_no_forward_and_are_counted(new_run: Callable[..., sluice.Run]) -> None:
    model, run, seen = CausalLM(), new_run(), []
    with TransformersProducer(model, run, max_tokens=8, on_refused=seen.append) as producer:
        before = producer.counts.forwards
        assert producer.produce([Row([5], [1]), Row([5, 6, 7], [1, 0, 0]), Row([], []), Row([3] * 12, [0] * 8 + [1] * 4)]) == []
        assert producer.counts.forwards == before == 0 and producer.counts.refused == {"short": 2, "unsupervised": 2} and producer.counts.truncated == 1
        (ref,) = producer.produce(Row([3] * 12, [0] * 4 + [1] * 8))
    assert ref.num_tokens == 8 and [r.reason for r in seen] == ["short", "unsupervised", "short", "unsupervised"] and "admits 2 or more" in seen[0].detail
    assert run.store.counters()["reserved_bytes"] == 0


@pytest.mark.parametrize(
    ("row", "says"),
    [(Row([1, VOCAB], [0, 1]), "entry 1 is 160"), (Row([-1, 1], [0, 1]), "entry 0 is -1"), (Row([1, 2], [1]), "loss_mask"), (Row([1, 2], [0, 2]), "want 0 or 1"), (Row([1.5, 2], [0, 1]), "float64")],
)
def test_a_row_that_breaks_its_form_is_an_error_or_counted(new_run: Callable[..., sluice.Run], row: Row, says: str) -> None:
    model, run = CausalLM(), new_run()
    with TransformersProducer(model, run) as producer, pytest.raises(sluice.InvalidError, match=says):
        producer.produce(row)
    with TransformersProducer(model, run, skip_bad=True, name="p1") as producer:
        assert producer.produce([row]) == [] and producer.counts.refused == {"bad": 1}


def poison(model: CausalLM, token: int, value: float = float("nan")) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[token, 3] = value


def test_states_that_are_not_finite_are_refused_by_row_and_the_others_of_the_batch_go_on(new_run: Callable[..., sluice.Run]) -> None:
    model, run, seen = CausalLM(), new_run(), []
    poison(model, 100)
    good, bad = Row([5, 6, 7], [0, 1, 1]), Row([5, 6, 100, 8], [0, 1, 1, 1])
    with TransformersProducer(model, run, batch_size=3, on_refused=seen.append) as producer:
        refs = producer.produce([good, bad, good])
    assert len(refs) == 2 and producer.counts.refused == {"not_finite": 1} and len(samples(run, 2)) == 2
    assert seen[0].reason == "not_finite" and "aux_hidden_states as float32 is not finite at token" in seen[0].detail
    assert run.store.counters()["reserved_bytes"] == 0


@pytest.mark.parametrize("encoding", ["logits", "target_probs"])
def test_logits_that_are_not_finite_are_refused_too(new_run: Callable[..., sluice.Run], encoding: str) -> None:
    class Masked(CausalLM):
        def forward(self, *args: Any, **more: Any) -> Any:
            out = super().forward(*args, **more)
            out.logits[..., 1].masked_fill_(args[0] == 100 if args else more["input_ids"] == 100, float("-inf"))
            return out

    run = new_run()
    with TransformersProducer(Masked(), run, supervision=encoding, draft_vocab=[0, 2, 3] if encoding == "target_probs" else None) as producer:
        assert len(producer.produce([Row([5, 100, 7], [0, 1, 1]), Row([5, 6], [0, 1])])) == 1
    assert producer.counts.refused == {"not_finite": 1}


def test_what_is_too_large_for_the_stored_dtype_is_refused(new_run: Callable[..., sluice.Run]) -> None:
    model, run = CausalLM(), new_run()
    poison(model, 100, 1e6)
    with TransformersProducer(model, run, aux_layers=[-1], dtype="float16") as producer:
        assert producer.produce(Row([5, 100], [0, 1])) == []
    assert producer.counts.refused == {"not_finite": 1}


def test_a_target_that_gives_nothing_finite_ends_the_producer(new_run: Callable[..., sluice.Run]) -> None:
    model, run = CausalLM(), new_run()
    poison(model, 100)
    with pytest.raises(sluice.TargetFaultError, match="3 rows in a row are not finite"):
        TransformersProducer(model, run, max_faults=3, batch_size=2).run([Row([5, 100], [0, 1])] * 9)
    assert run.store.counters()["reserved_bytes"] == 0
    delivery = wait_until(lambda: (d := run.queue.acquire(sluice.Consumer("x"), timeout=5)).end and d, "the end")
    assert delivery.cause is not None and "not finite" in str(delivery.cause)


def test_a_source_without_an_admitted_row_is_no_regular_end(new_run: Callable[..., sluice.Run]) -> None:
    run = new_run()
    with pytest.raises(sluice.InvalidError, match="short.*1"):
        TransformersProducer(CausalLM(), run).run([Row([1], [1])])
    assert run.queue.acquire(sluice.Consumer("x"), timeout=5).cause is not None


# -- the forward -----------------------------------------------------------------------------------------------------------


def hooks(model: Any) -> int:
    """Those of this package: transformers 5 leaves some of its own on a model that was asked for hidden states."""
    return sum(h.__module__.startswith("sluice") for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))


def test_the_model_is_left_as_it_was(new_run: Callable[..., sluice.Run]) -> None:
    model, run = CausalLM(), new_run(producers=2)
    model.train()
    model.model.layers[2].eval()
    modes = [m.training for m in model.modules()]
    (row,) = rows(7)
    producer = TransformersProducer(model, run, aux_layers=[-1, 7, 2])
    with producer, torch.autocast("cpu", dtype=torch.bfloat16):
        (ref,) = producer.produce(row)
    assert [m.training for m in model.modules()] == modes and hooks(model) == 0
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    ((_, tensors),) = samples(run, 1)
    assert torch.equal(tensors["last_hidden_states"], by_hand(model.eval(), row).hidden_states[-1]), "dropout or autocast was on"
    model.train()

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with TransformersProducer(model, run, name="p1") as producer:
        hook = model.model.layers[5].register_forward_pre_hook(broken)
        with pytest.raises(sluice.TargetFaultError, match="out of memory.*batch_size"):
            producer.produce(row)
        hook.remove()
    assert [m.training for m in model.modules()] == [True] * len(modes) and hooks(model) == 0 and run.store.counters()["reserved_bytes"] == 0


def test_the_head_is_not_run_where_no_logits_are_wanted(new_run: Callable[..., sluice.Run]) -> None:
    model, run, calls = CausalLM(), new_run(), []
    producer = TransformersProducer(model, run)
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    with producer:
        producer.produce(rows(5))
    assert calls == []


def test_layers_that_write_into_what_they_are_given_change_no_feature(new_run: Callable[..., sluice.Run]) -> None:
    class InPlace(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any, mask: Any) -> Any:
            return (x.copy_(self.inner(x, mask)[0]),)

    plain, model, run = CausalLM(), CausalLM(), new_run()
    model.model.layers = torch.nn.ModuleList(InPlace(layer) for layer in model.model.layers)
    model.model.forward = functools.partial(_without_hidden_states, model.model.forward)
    (row,) = rows(6)
    with TransformersProducer(model, run, aux_layers=[-1, 0, 3]) as producer:
        producer.produce(row)
    states = by_hand(plain, row).hidden_states
    assert torch.equal(samples(run, 1)[0][1]["aux_hidden_states"], torch.cat([states[0], states[1], states[4]], -1))


def _without_hidden_states(forward: Any, *args: Any, **more: Any) -> Any:
    """What a model reports is not right either, where its layers write into it."""
    return forward(*args, **{k: v for k, v in more.items() if k != "output_hidden_states"})


def test_a_layer_that_does_not_run_once_is_a_fault(new_run: Callable[..., sluice.Run]) -> None:
    class Skips(CausalLM):
        skip = False

        def forward(self, *args: Any, **more: Any) -> Any:
            layers = self.model.layers
            if self.skip:
                self.model.layers = torch.nn.ModuleList(list(layers)[:4])
            try:
                return super().forward(*args, **more)
            finally:
                self.model.layers = layers

    model, run = Skips(), new_run()
    with TransformersProducer(model, run, supervision="logits") as producer:
        model.skip = True
        with pytest.raises(sluice.TargetFaultError, match="layer 4 ran 0 times"):
            producer.produce(rows(5))


def test_a_turn_that_does_not_come_is_an_error(new_run: Callable[..., sluice.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = CausalLM(), new_run()
    with TransformersProducer(model, run, supervision="logits") as p:
        monkeypatch.setattr(module, "_TURN_SECONDS", 0.1)
        with module._turn(model), pytest.raises(sluice.UnavailableError, match=r"another forward of it has not ended for 0\.1 s"):
            p.produce(rows(5, seed=1))
        assert len(p.produce(rows(5, seed=1))) == 1


def test_producers_that_share_a_model_take_turns(new_run: Callable[..., sluice.Run]) -> None:
    class Watched(CausalLM):
        inside = most = 0

        def forward(self, *args: Any, **more: Any) -> Any:
            self.inside += 1
            self.most = max(self.most, self.inside)
            try:
                return super().forward(*args, **more)
            finally:
                self.inside -= 1

    model, run = Watched(), new_run(producers=2)
    failed: list[BaseException] = []

    def work(name: str, seed: int) -> None:
        try:
            with TransformersProducer(model, run, name=name, supervision="logits", batch_size=2) as p:
                p.produce(rows(*range(5, 15), seed=seed))
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(f"p{i}", i)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failed and model.most == 1
    for _, tensors in samples(run, 20):
        want = by_hand(model, Row(tensors["input_ids"][0], tensors["loss_mask"][0]))
        torch.testing.assert_close(tensors["logits"], want.logits, rtol=1e-4, atol=1e-4)


def test_room_is_reserved_before_the_forward_and_a_batch_is_cut_to_it(new_run: Callable[..., sluice.Run]) -> None:
    model = CausalLM()
    many = rows(*[10] * 12)
    nbytes = TransformersProducer(model, new_run(), name="measure").sample_bytes(10)
    run = new_run(max_bytes=2 * nbytes + 1, high_watermark_bytes=2 * nbytes, low_watermark_bytes=nbytes)
    sizes: list[int] = []
    reserved: list[int] = []

    class Watch(CausalLM):
        def __init__(self) -> None:
            super().__init__()
            self.model.register_forward_pre_hook(lambda m, i: reserved.append(run.store.counters()["reserved_bytes"]))
            self.model.layers[0].register_forward_hook(lambda m, i, o: sizes.append(o[0].shape[0]))

    producer = TransformersProducer(Watch(), run, batch_size=8)
    sizes.clear()
    reserved.clear()
    thread = threading.Thread(target=producer.run, args=(many,))
    thread.start()
    got = samples(run, 12)
    thread.join(30)
    assert not thread.is_alive() and sum(sizes) == 12 and max(sizes) <= 2 and reserved == [n * nbytes for n in sizes]
    assert [t["input_ids"][0].tolist() for _, t in got] == [list(r.input_ids) for r in many]


def test_a_sample_larger_than_the_cap_is_refused_before_the_forward(new_run: Callable[..., sluice.Run]) -> None:
    run = new_run(max_bytes=1000)
    with pytest.raises(sluice.FullError), TransformersProducer(CausalLM(), run) as producer:
        producer.produce(rows(40))
    assert producer.counts.forwards == 0


def test_a_put_that_fails_gives_up_those_behind_it_and_leaves_no_room_reserved(new_run: Callable[..., sluice.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    producer = TransformersProducer(CausalLM(), run, batch_size=3)
    real, calls = producer._producer.put, []

    def second_fails(*args: Any, **more: Any) -> sluice.SampleRef:
        calls.append(args[0])
        if len(calls) == 2:
            run.queue.unreserve(more["reservation"].id)
            raise sluice.CorruptError("the disk")
        return real(*args, **more)

    monkeypatch.setattr(producer._producer, "put", second_fails)
    with pytest.raises(sluice.CorruptError, match="the disk"), producer:
        producer.produce(rows(*[5] * 9))
    assert 1 <= producer.counts.samples <= 2
    counters = run.store.counters()
    assert counters["reserved_bytes"] == 0 and counters["resident_samples"] == len(calls) - 1


def test_a_sample_whose_reservation_was_lost_waits_for_room_again(new_run: Callable[..., sluice.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = TransformersProducer(CausalLM(), new_run(), name="measure").sample_bytes(30)
    model, run = CausalLM(), new_run(max_bytes=2 * nbytes)
    producer = TransformersProducer(model, run)
    reserve, rooms, others = producer._producer.reserve_many, [], []
    monkeypatch.setattr(producer._producer, "reserve_many", lambda sizes: rooms.extend(reserve(sizes)) or list(rooms))

    def lose(*_: Any) -> None:
        hook.remove()
        run.queue.unreserve(*(r.id for r in rooms))
        with pytest.raises(sluice.FullError):
            for i in range(1000):
                others.append(put(run, i))

    hook = model.model.layers[3].register_forward_hook(lose)
    with ThreadPoolExecutor(1) as pool, producer:
        made = pool.submit(producer.produce, rows(30))
        got = samples(run, 1)
        while got[-1][0].num_tokens != 30:
            got += samples(run, 1)
        assert [r.sample_id for r in made.result(20)] == [got[-1][0].sample_id] and len(got) == len(others) + 1


def test_a_service_that_was_started_anew_during_the_forward_loses_nothing(own_service: Service) -> None:
    with sluice.Client(own_service.socket) as client:
        run = client.create_run("r", algorithm="eagle3", max_bytes=1 << 24)
        model = CausalLM()
        producer = TransformersProducer(model, run)

        def again(*_: Any) -> None:
            hook.remove()
            own_service.kill()
            own_service.start()

        hook = model.model.layers[3].register_forward_hook(again)
        with producer:
            assert len(producer.produce(rows(6, 7))) == 2
        assert len(samples(run, 2)) == 2 and run.store.counters()["reserved_bytes"] == 0
        run.close()


# -- conversations, and the whole way to batches ---------------------------------------------------------------------------


CHATS = [
    {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"It is {i}."}, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}]}
    for i in range(6)
]


@pytest.mark.parametrize(("algorithm", "encoding"), CASES)
def test_conversations_reach_a_trainer_as_batches_with_the_right_shift(new_run: Callable[..., sluice.Run], algorithm: str, encoding: str | None) -> None:
    model, run, tokenizer = CausalLM(), new_run(algorithm), Tokenizer()
    options = {"draft_vocab": DRAFT} if encoding == "target_probs" else {}
    producer = TransformersProducer(model, run, tokenizer, supervision=encoding, batch_size=5, **options)
    thread = threading.Thread(target=producer.run, args=(CHATS,))
    thread.start()
    aux = {"eagle3": "aux_hidden_states", "dflash": "hidden_states", "dspark": "target_hidden_states"}[algorithm]
    seen = 0
    for batch in run.loader(batch=3, timeout=30):
        assert batch.shifted == (algorithm == "eagle3")
        for r, s in enumerate(batch.samples):
            seen += 1
            assert s.ref.attributes["tokenizer"] == tokenizer_fingerprint(tokenizer)
            n = s.ref.feature_specs["input_ids"].shape[1]
            ids, mask, states = batch["input_ids"][r, :n], batch["loss_mask"][r, :n], batch[aux][r, :n]
            if algorithm == "eagle3":
                assert ids[-1] == 0 == mask[-1]
                ids, mask = torch.cat([torch.tensor([128]), ids[:-1]]), torch.cat([torch.tensor([0]), mask[:-1]])
            answer = "".join(map(chr, ids[mask == 1][:-1].tolist()))
            assert (answer.startswith("It is ") or answer == "No.") and int(ids[mask == 1][-1]) == 132
            want = by_hand(model, Row(ids, mask))
            torch.testing.assert_close(states, torch.cat([want.hidden_states[i + 1] for i in (1, 3, 4)], -1)[0], rtol=1e-4, atol=1e-5)
            if encoding == "last_hidden_states":  # row t of the shifted states gives the logits of the token behind the one at t
                torch.testing.assert_close(model.lm_head(batch[encoding][r, :n - 1]), want.logits[0, 1:], rtol=1e-4, atol=1e-4)
        run.step()
    thread.join(30)
    assert seen == 12 == producer.counts.samples and producer.counts.refused == {}


def test_a_producer_that_starts_again_passes_over_what_the_run_has(new_run: Callable[..., sluice.Run]) -> None:
    model, run = CausalLM(), new_run(producers=3)
    source = [*CHATS, {"messages": CHATS[0]["messages"][:1]}]

    class Breaks:
        name = "chats"

        def __iter__(self) -> Iterator[Any]:
            yield from source[:2]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TransformersProducer(model, run, Tokenizer(), name="a", batch_size=3).run(Breaks())
    assert run.producer("a").taken("chats") == {0: [(0, 3)]}, "the fourth row was still waiting for its batch"


def test_positions_are_those_of_the_rows_and_epochs_count(new_run: Callable[..., sluice.Run]) -> None:
    model, run, tokenizer = CausalLM(), new_run(producers=2), Tokenizer()
    source = [CHATS[0], Refusal("bad", "a line"), {"messages": CHATS[0]["messages"][:1]}, "Text.", CHATS[1]]
    first = TransformersProducer(model, run, tokenizer, name="a", skip_bad=True)
    first.run(source, name="set", epochs=2)
    assert first.counts.refused == {"bad": 2, "unsupervised": 2} and first.counts.samples == 10
    assert run.producer("a").taken("set") == {0: [(0, 2), (4, 7)], 1: [(0, 2), (4, 7)]}
    assert {ref.attributes["source"] for ref, _ in samples(run, 10)} == {f"set@{e}/{i}" for e in (0, 1) for i in (0, 1, 4, 5, 6)}
    second = TransformersProducer(model, run, tokenizer, name="b", skip_bad=True)
    counts = second.run(source, name="set", epochs=2)
    assert isinstance(counts, Counts) and counts.samples == 0 and counts.taken == 10 and counts.forwards == 0
    with pytest.raises(ValueError, match="source.*str"):
        TransformersProducer(model, run, tokenizer, name="c").run("text")
    with pytest.raises(ValueError, match="once only"):
        TransformersProducer(model, run, tokenizer, name="c").run(iter(source), epochs=2)


# -- the command -----------------------------------------------------------------------------------------------------------

FAKE = """
import sys
sys.path.insert(0, {python!r})
from tests.standin import CausalLM, Tokenizer

class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(path, torch_dtype="auto"):
        if path == "none":
            raise OSError("none is not a local folder\\nand is not a model identifier")
        return CausalLM()

class AutoTokenizer:
    @staticmethod
    def from_pretrained(path):
        return Tokenizer()
"""


@pytest.fixture
def command(tmp_path: Path, service: Service) -> Callable[..., subprocess.Popen[str]]:
    """The command in a process of its own, with a package in transformers' place that loads the stand-in."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "transformers.py").write_text(FAKE.format(python=str(ROOT / "python")))
    env = os.environ | {"PYTHONPATH": f"{fake}:{ROOT / 'python' / 'src'}", "OMP_NUM_THREADS": "1"}

    def start(*arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "sluice.integrations.transformers", "--url", service.socket, *arguments]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_the_command_produces_and_after_a_kill_goes_on_without_loss(command: Callable[..., subprocess.Popen[str]], new_run: Callable[..., sluice.Run], tmp_path: Path) -> None:
    prompts = tmp_path / "chats.jsonl"
    prompts.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS * 4))  # 48 rows
    source = JsonLines(prompts).name
    nbytes = TransformersProducer(CausalLM(), new_run(), name="measure").sample_bytes(40)
    run = new_run(max_bytes=8 * nbytes)
    arguments = ("--run", run.run_id, "--model", "standin", "--prompts", str(prompts), "--batch-size", "2")
    seen: list[str] = []

    def take(n: int) -> None:
        for ref, _ in samples(run, n):
            seen.append(ref.attributes["source"])

    first = command(*arguments)
    take(20)
    first.kill()
    first.communicate(timeout=20)
    assert first.returncode == -signal.SIGKILL
    second = command(*arguments)
    batches = 0
    for batch in run.loader(batch=1, timeout=60):
        seen += [s.ref.attributes["source"] for s in batch.samples]
        batches += 1
    _, says = second.communicate(timeout=30)
    assert second.returncode == 0 and f"{48 - _taken_of(says)} samples" in says, says
    assert sorted(seen) == sorted(f"{source}@0/{i}" for i in range(48)), "each row once"


def _taken_of(says: str) -> int:
    return int(says.split(" rows taken before")[0].split()[-1])


def test_the_command_says_errors_in_one_line(
    new_run: Callable[..., sluice.Run], service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    fake = types.ModuleType("transformers")
    exec(FAKE.format(python=str(ROOT / "python")), fake.__dict__)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setattr(logging.getLogger("sluice"), "setLevel", lambda level: None)  # the command's; this process goes on
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages": 7}\n')
    run = new_run()
    for arguments, says in (
        (("--run", "no-such", "--model", "m", "--prompts", str(prompts)), "no-such"),
        (("--run", run.run_id, "--model", "none", "--prompts", str(prompts)), "none is not a local folder and is not"),
        (("--run", run.run_id, "--model", "m", "--prompts", str(tmp_path / "q.jsonl")), "q.jsonl"),
        (("--run", run.run_id, "--model", "m", "--prompts", str(prompts), "--draft-vocab", f"{prompts}x"), "draft vocabulary"),
        (("--run", run.run_id, "--model", "m", "--prompts", str(prompts), "--load-dtype", "int3"), "int3"),
        (("--run", run.run_id, "--model", "m", "--prompts", str(prompts)), "p.jsonl line 1: messages is a int"),
    ):
        assert main(["--quiet", "--url", service.socket, *arguments]) == 1
        err = capsys.readouterr().err
        assert says in err and len(err.splitlines()) == 1, err
    with pytest.raises(SystemExit) as ended:
        main(["--model", "m"])
    assert ended.value.code == 2 and "--prompts" in capsys.readouterr().err


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and all(word in text for word in ("--aux-layers", "hf i is the output of decoder layer i", "--turns", "it goes on behind what the run has taken"))


# -- fingerprints ----------------------------------------------------------------------------------------------------------


def test_fingerprints_are_of_weights_settings_and_template() -> None:
    base = target_fingerprint(CausalLM())
    assert target_fingerprint(CausalLM()) == base and base.startswith("sha256:")
    renamed, other, theta = CausalLM(), CausalLM(), CausalLM()
    renamed.config._name_or_path = "elsewhere"
    poison(other, 3)
    theta.config.rope_theta = 20000.0
    assert target_fingerprint(renamed) == base and len({base, target_fingerprint(other), target_fingerprint(theta), target_fingerprint(CausalLM().half())}) == 4
    changed = Tokenizer()
    changed.chat_template = "<bos>"
    assert tokenizer_fingerprint(Tokenizer()) == tokenizer_fingerprint(Tokenizer()) != tokenizer_fingerprint(changed)


# -- transformers itself ---------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": SIZES | {"num_key_value_heads": 2}, "MistralConfig": SIZES | {"num_key_value_heads": 2, "sliding_window": 4}, "Qwen2Config": SIZES | {"num_key_value_heads": 2},
    "Qwen3Config": SIZES | {"num_key_value_heads": 2, "head_dim": 8}, "Gemma3TextConfig": SIZES | {"num_key_value_heads": 2, "head_dim": 8}, "PhiConfig": SIZES, "GPTNeoXConfig": SIZES,
    "GPT2Config": {"n_embd": 32, "n_layer": 8, "n_head": 4, "vocab_size": 96, "n_positions": 64}, "OPTConfig": {k: v for k, v in SIZES.items() if k != "intermediate_size"} | {"ffn_dim": 48},
}


def made(config: str) -> Any:
    """A random model of transformers; its weights are large enough for every operation to matter."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**CONFIGS[config]))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.ndim > 1 else None
    return model.eval()


def fast_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Rules
    from tokenizers import models, pre_tokenizers, trainers

    rules = Rules(models.BPE(unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<bos>", "<user>", "<assistant>", "<end>"]
    rules.train_from_iterator(["Say it is no and yes", "And so it was said"], trainers.BpeTrainer(vocab_size=80, special_tokens=special))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rules, bos_token="<bos>", eos_token="<end>", unk_token="<unk>", additional_special_tokens=["<user>", "<assistant>"])
    tokenizer.chat_template = (
        "<bos>{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@needs_transformers
@pytest.mark.parametrize("algorithm", list(ENCODINGS))
@pytest.mark.parametrize("config", list(CONFIGS))
def test_models_of_transformers_give_their_own_hidden_states(new_run: Callable[..., sluice.Run], config: str, algorithm: str) -> None:
    model, run = made(config), new_run(algorithm)
    many = rows(9, 3, 14, seed=4)
    many = [Row(r.input_ids % 96, r.loss_mask) for r in many]  # type: ignore[operator]
    with TransformersProducer(model, run, aux_layers=[4, -1, 1], batch_size=3) as producer:
        producer.produce(many[0])
        producer.produce(many)
    assert hooks(model) == 0
    aux = {"eagle3": "aux_hidden_states", "dflash": "hidden_states", "dspark": "target_hidden_states"}[algorithm]
    last = {"eagle3": "last_hidden_states", "dspark": "target_last_hidden_states"}.get(algorithm)
    got = samples(run, 4)
    for row, (_, tensors), exact in zip([many[0], *many], got, [True, False, False, False], strict=True):
        states = by_hand(model, row).hidden_states
        for name, want in [(aux, torch.cat([states[5], states[0], states[2]], -1))] + ([(last, states[8])] if last else []):
            assert not exact or torch.equal(tensors[name], want), name
            torch.testing.assert_close(tensors[name], want, rtol=1e-4, atol=1e-4)
        if last:
            torch.testing.assert_close(model.get_output_embeddings()(tensors[last]), by_hand(model, row).logits, rtol=1e-4, atol=1e-4)


@needs_transformers
def test_the_tokenizers_own_template_makes_the_rows(new_run: Callable[..., sluice.Run]) -> None:
    model, run, tokenizer = made("LlamaConfig"), new_run(), fast_tokenizer()
    chats = [*CHATS[:2], {"messages": [{"role": "judge", "content": "no"}, *CHATS[0]["messages"]]}]
    with TransformersProducer(model, run, tokenizer) as producer:
        refs = producer.produce(chats)
    assert len(refs) == 4 and producer.counts.refused == {"template": 2}
    for (ref, tensors), chat in zip(samples(run, 4), [c for c in CHATS[:2] for _ in range(2)], strict=True):
        ids, mask = tensors["input_ids"][0], tensors["loss_mask"][0]
        turn = 1 if int(mask.sum()) and int((ids == tokenizer.convert_tokens_to_ids("<assistant>")).sum()) == 1 else 3
        assert ids.tolist() == tokenizer(tokenizer.apply_chat_template(chat["messages"][:turn + 1], tokenize=False), add_special_tokens=False)["input_ids"]
        assert ids[mask == 1].tolist() == tokenizer(chat["messages"][turn]["content"] + "<end>", add_special_tokens=False)["input_ids"]
        assert ref.attributes["tokenizer"] == tokenizer_fingerprint(tokenizer)
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=2) if tokenizer.pad_token else tokenizer("a", truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before


@needs_transformers
def test_the_shipped_target_gives_the_states_that_the_go_target_is_held_against(new_run: Callable[..., sluice.Run]) -> None:
    transformers = pytest.importorskip("transformers")
    load_file = pytest.importorskip("safetensors.torch").load_file
    folder = ROOT / "target/tinyllama"
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "austen")).float()
    golden = load_file(str(folder / "testdata/expected-austen.safetensors"))
    run = new_run("dspark")
    lengths = golden["attention_mask"].sum(1).tolist()
    many = [Row(ids[:n].numpy(), [1] * n) for ids, n in zip(golden["input_ids"], lengths, strict=True)]
    with TransformersProducer(model, run, batch_size=len(many)) as producer:
        producer.produce(many)
    eagle = new_run()
    with TransformersProducer(model, eagle, aux_layers=[7], batch_size=len(many), supervision="logits") as other:
        other.produce(many)
    assert producer.aux_layers == (1, 3, 4)
    for r, ((_, tensors), (_, eagle_tensors), n) in enumerate(zip(samples(run, len(many)), samples(eagle, len(many)), lengths, strict=True)):
        got = {"last_post": tensors["target_last_hidden_states"], "last_pre": eagle_tensors["aux_hidden_states"], "logits": eagle_tensors["logits"]}
        got |= {f"hidden_{layer}": t for layer, t in zip(producer.aux_layers, tensors["target_hidden_states"].split(128, -1), strict=True)}
        for name, t in got.items():
            want = golden[name][r:r + 1, :n]  # rounded from float64
            assert float((t - want).abs().max()) <= 1e-4 * float(want.abs().max()), name


@needs_transformers
def test_the_command_loads_a_folder_of_transformers(new_run: Callable[..., sluice.Run], service: Service, tmp_path: Path) -> None:
    model, run = made("LlamaConfig"), new_run(max_bytes=1 << 24)
    folder = tmp_path / "model"
    model.to(torch.bfloat16).save_pretrained(folder)
    fast_tokenizer().save_pretrained(folder)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    arguments = ["--url", service.socket, "--run", run.run_id, "--model", str(folder), "--prompts", str(prompts), "--aux-layers", "vllm:2,4,5"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "python" / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "sluice.integrations.transformers", *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "12 samples" in done.stderr, done.stderr
    got = samples(run, 12)
    assert {ref.attributes["aux_layers"] for ref, _ in got} == {"hf:1,3,4"} and {ref.feature_specs["aux_hidden_states"].dtype_name for ref, _ in got} == {"bfloat16"}
