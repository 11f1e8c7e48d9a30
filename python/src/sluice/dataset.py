"""A run as a torch dataset, for programs that are built around a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from .client import Client, Run
from .collate import Batch
from .dtypes import torch_module
from .errors import InvalidError, UnsupportedError

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

    _Base = IterableDataset[Batch]
else:
    _torch = torch_module()
    if _torch is None:
        raise UnsupportedError("torch is not installed", op="dataset", hint="run.loader() needs none")
    _Base = _torch.utils.data.IterableDataset


class StreamDataset(_Base):
    """Made by :meth:`sluice.Run.dataset`. Give it to ``DataLoader(dataset, batch_size=None, collate_fn=dataset.whole)``: the batches are made already.

    With ``num_workers=0`` it is a :class:`sluice.Loader` in this process, and ``run.step()`` works as ever. It is also what a worker gets, by fork or by pickle: there it opens a session of its
    own and is a consumer of its own, which owns nothing of its parent's leases. A worker acknowledges a batch when it makes the next one, which may be before the trainer has had it
    (``prefetch_factor``): what a trainer loses that way does not come again. So a loader's own prefetch, with no workers, is the better way.

    More than one worker is refused. A DataLoader asks its workers in turn, and one of them can't hear the end of the stream while another holds what may still fail: each would wait for the other.
    So are "step" and "checkpoint" in a worker, which no step of the trainer reaches.
    """

    def __init__(self, run: Run, options: dict[str, Any]) -> None:
        self._run: Run | None = run
        self._run_id = run.run_id
        self._address = run.client._t.address
        self._connection = run.client._http_only, run.client._ranges, run.client._t.patience
        self._options = options

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None}  # sockets and threads stay here

    @staticmethod
    def whole(batch: Batch) -> Batch:
        """For ``collate_fn``: the DataLoader's own conversion keeps the tensors of a batch and loses what it says of them."""
        return batch

    def __iter__(self) -> Iterator[Batch]:
        torch: Any = torch_module()
        worker = torch.utils.data.get_worker_info()
        if worker is None and self._run is not None:
            return iter(self._run.loader(**self._options))
        return self._elsewhere(1 if worker is None else worker.num_workers)

    def _elsewhere(self, workers: int) -> Iterator[Batch]:
        """In a process that has no session yet."""
        options = self._options
        if workers > 1:
            raise InvalidError(
                f"is {workers}, and workers that are asked in turn would wait for each other at the end of the stream", op="dataset", subject="num_workers",
                hint="let it be 0 or 1; the loader fetches ahead by itself, prefetch= batches",
            )
        if options.get("ack", "next") != "next":
            raise InvalidError(
                f"is {options['ack']!r}, and no step of the trainer reaches a worker's process", op="dataset", subject="ack", hint='let num_workers be 0, or ack be "next"',
            )
        with Client._at(self._address, *self._connection) as client, client.run(self._run_id) as run:
            with run.loader(**options) as loader:
                yield from cast("Iterator[Batch]", loader)
