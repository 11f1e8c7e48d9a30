"""The end of a program whose threads are at work."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("private_services")
PATIENCE = 120.0

BEGIN = """
import sys, threading, time, torch, sluice, sluice.service
from sluice import *
sys.path.insert(0, sys.argv[1])
from tests.streams import Target, prompts
sluice.service.IDLE_SECONDS = 0.3
store = LocalFeatureStore(max_samples=10_000)
queue = SampleRefQueue(store)
inside = threading.Event()
"""

PIPELINE = BEGIN + """
class Slow(Target):
    def generate_batch(self, *arguments, **more):
        inside.set()
        time.sleep(0.5)
        print("it returned", flush=True)
        return super().generate_batch(*arguments, **more)

AsyncFeaturePipeline(FeatureProducer(Slow(), store, "r"), queue, prompts(1000)).start()
assert inside.wait(60)
"""

LOADER = BEGIN + """
producer = FeatureProducer(Target(), store, "r")
for prompt in prompts(4):
    queue.put(producer.produce(*prompt))

def collate(samples):
    inside.set()
    time.sleep(0.5)
    print("it returned", flush=True)
    return {}

loader = store._run.loader(collate=collate, schema=sluice.schema.builtin("eagle3"))
threading.Thread(target=loader.next, daemon=True).start()
assert inside.wait(60)
"""

BUSY = BEGIN + """
class Busy(Target):
    def generate_batch(self, *arguments, **more):
        x = torch.ones(64, 64)
        for _ in range(20):
            x = torch.softmax(x @ x, -1)
        return super().generate_batch(*arguments, **more)

AsyncFeaturePipeline(FeatureProducer(Busy(), store, "r"), queue, prompts(100_000)).start()
loader = FeatureDataLoader(queue, store)
for _ in range(3):
    next(loader)
"""


def program(code: str) -> subprocess.Popen[str]:
    root = __file__.rsplit("/tests/", 1)[0]
    return subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [PIPELINE, LOADER], ids=["pipeline", "loader"])
def test_the_end_of_a_program_waits_for_what_its_threads_are_in(code: str) -> None:
    p = program(code)
    out, said = p.communicate(timeout=PATIENCE)
    assert (p.returncode, out) == (0, "it returned\n"), said


def test_a_program_that_ends_while_its_target_computes_does_not_abort() -> None:
    for _ in range(5):
        for p in [program(BUSY), program(BUSY)]:
            _, said = p.communicate(timeout=PATIENCE)
            assert p.returncode == 0, said
