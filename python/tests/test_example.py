"""examples/train_eagle3.py: what it computes, and a very short training through a real service."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sluice

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import train_eagle3  # noqa: E402
from eagle3 import draft as drafts  # noqa: E402
from eagle3 import prompts, speculate  # noqa: E402
from eagle3.target import ASSISTANT, BOS, END, Target  # noqa: E402

AUSTEN = ROOT / "target/tinyllama/austen"
CONVERSATIONS = ROOT / "internal/demo/prompts.jsonl"
SHORT = ["--steps", "3", "--batch", "2", "--evals", "1", "--held-out", "2", "--decode", "8", "--reply", "12", "--context", "48"]

# What vLLM and SGLang load for a draft of the architecture LlamaForCausalLMEagle3, in this target's sizes (docs/train_eagle3.md). H = 128, 4 heads
# and 2 key/value heads of 32, I = 352, V = 264.
LAYOUT = {
    "fc.weight": ("F32", [128, 384]),
    "midlayer.input_layernorm.weight": ("F32", [128]),
    "midlayer.hidden_norm.weight": ("F32", [128]),
    "midlayer.post_attention_layernorm.weight": ("F32", [128]),
    "midlayer.self_attn.q_proj.weight": ("F32", [128, 256]),
    "midlayer.self_attn.k_proj.weight": ("F32", [64, 256]),
    "midlayer.self_attn.v_proj.weight": ("F32", [64, 256]),
    "midlayer.self_attn.o_proj.weight": ("F32", [128, 128]),
    "midlayer.mlp.gate_proj.weight": ("F32", [352, 128]),
    "midlayer.mlp.up_proj.weight": ("F32", [352, 128]),
    "midlayer.mlp.down_proj.weight": ("F32", [128, 352]),
    "norm.weight": ("F32", [128]),
    "lm_head.weight": ("F32", [264, 128]),
    "embed_tokens.weight": ("F32", [264, 128]),
    "d2t": ("I64", [264]),
    "t2d": ("BOOL", [264]),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(AUSTEN)


@pytest.fixture(scope="module")
def contexts() -> list[list[int]]:
    return [c for c in prompts.contexts(CONVERSATIONS, held_out=True) if len(c) <= 64]


@pytest.fixture
def draft(target: Target) -> drafts.Draft:
    return drafts.Draft(target, seed=3)


def batch_of(target: Target, contexts: list[list[int]], n: int) -> dict[str, Any]:
    rows = prompts.rows(target, contexts, seed=5, limit=16, together=4)
    return prompts.collate([prompts.sample(target, row) for row in itertools.islice(rows, n)])


# -- target --------------------------------------------------------------------------------------------------------------


def test_the_target_computes_what_the_golden_arrays_hold(target: Target) -> None:
    from safetensors.torch import load_file

    want = load_file(str(ROOT / "target/tinyllama/testdata/expected-austen.safetensors"))
    aux, last = target.forward(want["input_ids"])
    real = want["attention_mask"].bool()
    assert target.aux_layers == (1, 3, 4)
    for got, name in zip(aux.split(128, dim=-1), ("hidden_1", "hidden_3", "hidden_4"), strict=True):
        torch.testing.assert_close(got[real], want[name][real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last[real], want["last_post"][real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(last)[real], want["logits"][real], atol=1e-4, rtol=1e-4)


def test_a_cache_that_is_written_token_by_token_gives_the_states_of_the_whole_row(target: Target, contexts: list[list[int]]) -> None:
    ids = torch.tensor([contexts[0]])
    want = target.forward(ids)
    cache = target.cache(1, ids.shape[1] + 3)
    target.forward(torch.full((1, 9), 65), cache=cache)  # what a rejected proposal leaves behind is forgotten
    target.forward(ids[:, :5], cache=cache)
    for at in range(5, ids.shape[1]):
        aux, last = target.forward(ids[:, at : at + 1], torch.tensor([[at]]), cache)
        torch.testing.assert_close(aux[:, 0], want[0][:, at], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(last[:, 0], want[1][:, at], atol=1e-4, rtol=1e-4)


def test_replies_depend_on_the_seed_and_not_on_the_other_rows_padding(target: Target, contexts: list[list[int]]) -> None:
    def drawn(seed: int) -> list[list[int]]:
        return target.replies(contexts[:3], 12, torch.Generator().manual_seed(seed))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    for reply in drawn(1):
        assert 1 <= len(reply) <= 12
        assert all(token < BOS for token in reply[:-1])
    # Almost without temperature a drawn reply is the greedy one, whatever stands beside it.
    sharp = Target(AUSTEN)
    sharp.embedding = sharp.embedding.clone()
    logits = sharp.logits
    sharp.logits = lambda last: logits(last) * 1e4  # type: ignore[method-assign]
    for context, reply in zip(contexts[:3], sharp.replies(contexts[:3], 12, torch.Generator().manual_seed(1)), strict=True):
        assert reply == greedy(target, context, 12)


def greedy(target: Target, context: list[int], limit: int) -> list[int]:
    """Without any cache."""
    tokens = list(context)
    while len(tokens) < len(context) + limit and (tokens[-1] < BOS or len(tokens) == len(context)):
        tokens.append(int(target.logits(target.forward(torch.tensor([tokens]))[1][0, -1]).argmax()))
    return tokens[len(context) :]


# -- prompts -------------------------------------------------------------------------------------------------------------


def test_no_turn_is_both_trained_on_and_held_out() -> None:
    def turns(held_out: bool) -> set[bytes]:
        found = set()
        for context in prompts.contexts(CONVERSATIONS, held_out):
            assert context[0] == BOS and context[-1] == ASSISTANT
            found |= {bytes(part) for token, part in split(context[1:-1]) if token != 259}
        return found

    def split(ids: list[int]) -> Iterator[tuple[int, list[int]]]:
        while ids:
            end = ids.index(END)
            yield ids[0], ids[1:end]
            ids = ids[end + 1 :]

    trained, held_out = turns(False), turns(True)
    assert len(trained) > 200 and len(held_out) > 40
    assert not trained & held_out


def test_a_batch_is_shifted_and_padded_as_the_contract_says() -> None:
    ids = [torch.tensor([[10, 11, 12, 13, 14, 15]]), torch.tensor([[20, 21, 22]])]
    masks = [torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 1]])]
    states = [torch.arange(6.0).reshape(1, 6, 1), torch.arange(3.0).reshape(1, 3, 1)]
    samples = [{"aux_hidden_states": s, "input_ids": i, "loss_mask": m, "last_hidden_states": s} for i, m, s in zip(ids, masks, states, strict=True)]
    batch = prompts.collate(samples)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 15, 0], [21, 22, 0, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert batch["last_hidden_states"][..., 0].tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 0, 0, 0, 0]]
    assert batch["aux_hidden_states"][..., 0].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 0]]


def test_a_samples_bytes_are_known_before_the_forward(target: Target) -> None:
    row = prompts.Row([BOS, 65, 66], [0, 1, 1])
    assert prompts.sample_bytes(target, row) == sum(t.numel() * t.element_size() for t in prompts.sample(target, row).values())


def test_a_stream_without_contexts_is_refused_instead_of_waited_for(target: Target) -> None:
    with pytest.raises(ValueError, match="no contexts"):
        next(prompts.rows(target, [], seed=1, limit=4))


# -- draft ---------------------------------------------------------------------------------------------------------------


def test_drafting_a_chain_is_what_the_training_time_test_trains(
    target: Target, draft: drafts.Draft, contexts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kth proposal behind t + 2 tokens comes of the same states and tokens as row t of step k, if training is given the tokens that were proposed."""
    logits, chain = draft.logits, []

    def noting(hidden: Any) -> Any:
        chain.append(logits(hidden))
        return chain[-1]

    monkeypatch.setattr(draft, "logits", noting)
    tokens = [*contexts[0], 84]  # the last one has no states yet
    aux, _ = target.forward(torch.tensor([tokens[:-1]]))
    proposed = speculate.Chain(draft).propose(tokens, aux, 4)
    monkeypatch.undo()

    batch = {"input_ids": torch.tensor([[*tokens[1:], *proposed]]), "aux_hidden_states": torch.nn.functional.pad(aux, [0, 0, 0, 4])}
    with torch.no_grad():
        trained = [step[0, len(tokens) - 2] for step in drafts.training_test(draft, batch, 4)]
    assert [int(step.argmax()) for step in trained] == proposed
    torch.testing.assert_close(torch.stack(trained), torch.cat(chain)[:, 0], atol=1e-4, rtol=1e-4)
    assert (trained[0] - trained[3]).abs().max() > 0.1, "steps that are alike show nothing"


def test_a_drafter_that_goes_on_proposes_what_a_new_one_would(target: Target, draft: drafts.Draft, contexts: list[list[int]]) -> None:
    tokens = [*contexts[1], *b"It is"]
    aux, _ = target.forward(torch.tensor([tokens[:-1]]))
    chain = speculate.Chain(draft)
    for n in (len(tokens) - 4, len(tokens) - 3, len(tokens)):
        assert chain.propose(tokens[:n], aux[:, : n - 1], 3) == speculate.Chain(draft).propose(tokens[:n], aux[:, : n - 1], 3)


def test_only_supervised_rows_count_in_the_loss(target: Target, draft: drafts.Draft, contexts: list[list[int]]) -> None:
    batch = batch_of(target, contexts, 2)
    want = drafts.losses(draft, target, batch, 3)
    unsupervised = batch["loss_mask"] == 0
    for change, same in ((unsupervised, True), (~unsupervised, False)):
        changed = dict(batch, last_hidden_states=batch["last_hidden_states"].masked_fill(change[..., None], 0.5))
        assert torch.equal(drafts.losses(draft, target, changed, 3), want) is same
    # A row of step k supervises the token k further on, which is outside the mask for the last rows.
    mask = batch["loss_mask"].clone()
    mask[:, -4:] = 0
    last = torch.zeros_like(mask)
    last[0, mask[0].nonzero().max()] = 1
    assert drafts.losses(draft, target, dict(batch, loss_mask=last), 3).gt(0).all()


def test_the_draft_learns(target: Target, draft: drafts.Draft, contexts: list[list[int]]) -> None:
    batch = batch_of(target, contexts, 2)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    before = drafts.agreement(draft, target, [batch], 2)
    for _ in range(20):
        loss = drafts.losses(draft, target, batch, 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = drafts.agreement(draft, target, [batch], 2)
    assert all(b > a + 0.3 for a, b in zip(before, after, strict=True)), (before, after)
    assert torch.equal(draft.embed_tokens.weight, target.embedding)


# -- speculative decoding ------------------------------------------------------------------------------------------------


class Oracle:
    """Proposes what the target will say, with every nth token wrong."""

    def __init__(self, reply: list[int], context: list[int], wrong: int) -> None:
        self.reply, self.begin, self.wrong = reply, len(context), wrong

    def propose(self, tokens: list[int], aux: Any, k: int) -> list[int]:
        assert aux.shape[1] == len(tokens) - 1
        at = len(tokens) - self.begin
        right = [*self.reply, *[0] * k][at : at + k]
        return [token ^ 1 if (at + i) % self.wrong == 0 else token for i, token in enumerate(right)]


def test_decoding_says_what_the_target_says_whatever_is_proposed(target: Target, draft: drafts.Draft, contexts: list[list[int]]) -> None:
    for context in contexts[:2]:
        want = greedy(target, context, 24)
        for drafter in (speculate.Unigram(32), speculate.Chain(draft), Oracle(want, context, 3), Oracle(want, context, 100)):
            assert speculate.decode(target, drafter, context, 24, 4).tokens == want


def test_a_pass_gives_the_accepted_proposals_and_one_token_more(target: Target, contexts: list[list[int]]) -> None:
    context = contexts[0]
    want = greedy(target, context, 26)
    assert len(want) == 26
    for wrong, k, passes in ((100, 4, 5), (5, 4, 5), (2, 4, 13), (1, 4, 25), (100, 1, 13)):
        done = speculate.decode(target, Oracle(want, context, wrong), context, 26, k)
        assert (done.verified, done.passes) == (25, passes), (wrong, k)


# -- checkpoint ----------------------------------------------------------------------------------------------------------


def check_layout(folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), framework="pt") as f:
        assert {name: (f.get_slice(name).get_dtype(), list(f.get_slice(name).get_shape())) for name in f.keys()} == LAYOUT  # noqa: SIM118
        assert f.metadata() == {"format": "pt"}
        assert not f.get_tensor("d2t").any() and f.get_tensor("t2d").all()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert not config["tie_word_embeddings"], "SGLang would take the embedding for the head"
    sizes = {"vocab_size": 264, "draft_vocab_size": 264, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 1, "head_dim": 32}
    assert {name: config[name] for name in sizes} == sizes


def test_a_checkpoint_has_the_layout_that_servers_load(target: Target, draft: drafts.Draft, contexts: list[list[int]], tmp_path: Path) -> None:
    drafts.save(draft, tmp_path)
    check_layout(tmp_path)
    again, batch = drafts.load(target, tmp_path), batch_of(target, contexts, 1)
    with torch.no_grad():
        for a, b in zip(drafts.training_test(draft, batch, 2), drafts.training_test(again, batch, 2), strict=True):
            assert torch.equal(a, b)


# -- the whole -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(binary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer's process finds the package and the service that the tests use."""
    monkeypatch.setenv("SLUICE_BINARY", binary)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(sluice.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))


def test_streamed_and_colocated_training_are_equal_bit_for_bit(here: None, tmp_path: Path) -> None:
    streamed = train_eagle3.main([*SHORT, "--out", str(tmp_path / "streamed")])
    alone = train_eagle3.main([*SHORT, "--out", str(tmp_path / "alone"), "--colocated"])
    other = train_eagle3.main([*SHORT, "--out", str(tmp_path / "other"), "--colocated", "--seed", "2"])
    assert streamed["losses"] == alone["losses"] != other["losses"]
    assert streamed["weights_sha256"] == alone["weights_sha256"] != other["weights_sha256"]
    assert streamed["agreement"] == alone["agreement"]
    assert streamed["accepted_length"] == alone["accepted_length"]
    assert streamed["same_replies"]

    assert len(streamed["losses"]) == 3 and all(len(each) == 4 for each in streamed["losses"])
    stats = streamed["stream"]["stats"]
    assert [s["step"] for s in stats] == [1, 2, 3]
    assert stats[-1]["samples"] == 6 and stats[-1]["redelivered"] == 0
    assert alone["stream"] is None
    for folder, pictures in (("streamed", 4), ("alone", 3)):
        check_layout(tmp_path / folder / "draft")
        report = json.loads((tmp_path / folder / "report.json").read_text())
        assert report["losses"] == streamed["losses"]
        found = sorted((tmp_path / folder).glob("*.png"))
        assert len(found) == pictures
        assert all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in found)


def test_a_producer_that_fails_is_the_trainers_error(here: None, tmp_path: Path) -> None:
    with sluice.local(max_bytes=8 << 20) as client:
        run = client.create_run("broken", algorithm="eagle3", max_bytes=8 << 20)
        with run, run.loader(batch=2, ack="step") as loader:
            process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
            process.wait(30)
            with pytest.raises(RuntimeError, match="the producer ended with status 3"):
                next(train_eagle3.streamed(loader, process, patience=0.1))


@pytest.mark.parametrize("flag", ["--steps", "--batch", "--ttt", "--decode", "--held-out"])
def test_a_zero_on_the_command_line_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        train_eagle3.options([flag, "0"])
    assert e.value.code == 2
    assert f"{flag} is 0, want 1 or more" in capsys.readouterr().err


def test_without_its_packages_the_example_shows_its_help_and_says_what_to_install(tmp_path: Path) -> None:
    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.modules.update(safetensors=None, matplotlib=None); sys.path[:0] = [{str(ROOT / 'examples')!r}, {str(ROOT / 'python/src')!r}]; import train_eagle3; train_eagle3.main()"
        return subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    helped = ran("--help")
    assert (helped.returncode, helped.stderr) == (0, "") and "--colocated" in helped.stdout
    refused = ran()
    assert (refused.returncode, refused.stderr) == (1, "train_eagle3.py needs safetensors and matplotlib: pip install safetensors matplotlib\n")
    assert ran("--produce").stderr == "train_eagle3.py needs safetensors: pip install safetensors\n"
