"""A service, its runs, and the short way to one of them."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .address import Address, resolve
from .answers import count, fields, items, run_path, seconds, text, understood
from .errors import ClosedError, ConflictError, InvalidError, NotFoundError, SluiceError, StaleError
from .producer import Producer
from .queue import RunQueue, VisibilityTimeout
from .store import RunStore
from .transport import Transport, new_id

if TYPE_CHECKING:
    import torch

    from .collate import CollateFunction, FinalNorm
    from .dataset import StreamDataset
    from .loader import Loader
    from .refs import SampleRef
    from .stats import Figures
    from .stream import Counts, Stream


class Client:
    """One session with a service. Made with the address of one, or without, for the service of this host; the same rules as for the command line: ``url``, ``$SLUICE_URL``, the state directory.

    ``token`` or ``token_file`` prove who calls over TCP; the unix socket needs none, and the service of this host's state directory is called with the token that lies there.
    ``ca_file`` holds the certificates that vouch for an https service. ``http_only`` never maps or writes the service's files. ``ranges`` is how many connections carry one sample that is not
    mapped. ``patience`` is how many seconds a call goes on asking a service that does not answer.

    Raises UnavailableError (nobody answers), DeniedError (no token, or one that is not known), InvalidError.
    """

    def __init__(
        self, url: str | None = None, *, state_dir: str | os.PathLike[str] | None = None, token: str | None = None, token_file: str | os.PathLike[str] | None = None,
        ca_file: str | os.PathLike[str] | None = None, http_only: bool = False, ranges: int = 4, patience: float = 120.0,
    ) -> None:
        self._open(resolve(url, state_dir=state_dir, token=token, token_file=token_file, ca_file=ca_file), http_only, ranges, patience)

    @classmethod
    def _at(cls, address: Address, http_only: bool, ranges: int, patience: float) -> Client:
        """A session of its own with the service of another client."""
        client = cls.__new__(cls)
        client._open(address, http_only, ranges, patience)
        return client

    def _open(self, address: Address, http_only: bool, ranges: int, patience: float) -> None:
        if isinstance(ranges, bool) or not isinstance(ranges, int) or not 1 <= ranges <= 64:
            raise InvalidError(f"is {ranges!r}, want a whole number from 1 to 64", op="client", subject="ranges")
        self._http_only, self._ranges = http_only, ranges
        self._t = Transport(address, patience=patience)
        try:
            self.status()
        except BaseException:
            self._t.close()
            raise

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._t.address.name

    def status(self) -> dict[str, Any]:
        """The service and all its runs, as ``sluice status --json`` has them."""
        answer = self._t.call("GET", "/v1/status")
        return understood("status", self.url, lambda: dict(fields(answer)))

    def runs(self) -> list[str]:
        """The names of the runs that the token is good for."""
        answer = self._t.call("GET", "/v1/runs")
        return understood("runs", self.url, lambda: [text(r["spec"]["run_id"]) for r in items(fields(answer)["runs"])])

    def create_run(
        self, run_id: str, *, algorithm: str | None = None, schema: Mapping[str, Any] | None = None, mixed: bool = False, max_bytes: int | str | None = None, max_samples: int | None = None,
        high_watermark_bytes: int | str | None = None, low_watermark_bytes: int | str | None = None, high_watermark_samples: int | None = None, low_watermark_samples: int | None = None,
        visibility_timeout: float | None = None, max_fails: int | None = None, max_expiries: int | None = None, producers: int | None = None, producer_timeout: float | None = None,
        ranks: int | None = None, per_rank: int | None = None, prefetch_windows: int = 0, drop_tail: bool = False, largest_sample: int | str | None = None, steps_per_checkpoint: int | None = None,
        samples_per_step: int | None = None, target_versions: list[str] | None = None, min_draft_version: str | None = None,
    ) -> Run:
        """Create a run, or join the one that is there with the same spec. What is left out has the service's default.

        ``algorithm`` is a built-in schema (eagle3, dflash, dspark); ``schema`` a document of your own; ``mixed`` a run whose refs may be of any. Caps and marks are in bytes (also as a size like
        "4GiB", "2.5GB") and samples, times in seconds. ``ranks`` and ``per_rank`` deal the stream out in windows of ranks x per_rank samples, ``prefetch_windows`` of them ahead.

        Raises InvalidError (naming the field), ConflictError (the run is there with another spec, or the caps of all runs would exceed the service's), DeniedError.
        """
        op = "create run"
        spec: dict[str, Any] = {"run_id": run_id, "caps": _sizes(
            op, max_bytes=max_bytes, high_watermark_bytes=high_watermark_bytes, low_watermark_bytes=low_watermark_bytes,
        ) | _counts(op, max_samples=max_samples, high_watermark_samples=high_watermark_samples, low_watermark_samples=low_watermark_samples)}
        spec |= _given(
            algorithm=algorithm, schema=schema, mixed=mixed or None, visibility_timeout_seconds=visibility_timeout, producer_timeout_seconds=producer_timeout, target_versions=target_versions,
            min_draft_version=min_draft_version,
        ) | _sizes(op, largest_sample=largest_sample) | _counts(
            op, max_fails=max_fails, max_expiries=max_expiries, producers=producers, steps_per_checkpoint=steps_per_checkpoint, samples_per_step=samples_per_step,
        )
        if ranks is None and per_rank is None:
            for name, value in (("prefetch_windows", prefetch_windows), ("drop_tail", drop_tail)):
                if value:
                    raise InvalidError(f"is {value!r}, and a run without ranks has no windows", op=op, subject=name, hint="give ranks and per_rank")
        else:
            spec["windows"] = _counts(op, ranks=ranks, per_rank=per_rank) | _given(prefetch=_counts(op, prefetch_windows=prefetch_windows)["prefetch_windows"] or None, drop_tail=drop_tail or None)
        return Run(self, self._t.call("POST", "/v1/runs", spec))

    def run(self, run_id: str) -> Run:
        """Open a run. NotFoundError if there is none of that name."""
        try:
            return Run(self, self._t.call("GET", run_path(run_id)))
        except NotFoundError as e:
            e.hint = "make it by client.create_run(), or sluice.connect(create=...)"
            raise

    def check(self, ref: SampleRef, *, algorithm: str | None = None, schema: Mapping[str, Any] | None = None) -> None:
        """Check a ref against a built-in schema, or a document. SchemaError says what is wrong with it."""
        self._t.call("POST", "/v1/check", _given(ref=ref.wire(), algorithm=algorithm, schema=schema))

    def delete_run(self, run_id: str) -> None:
        """Remove a run with all its samples and records."""
        try:
            self._t.call("DELETE", run_path(run_id))
        except NotFoundError as e:
            if e.__dict__.get("attempts", 1) < 2:
                raise  # otherwise the answer to the first attempt was lost

    def close(self) -> None:
        """End the session: reservations and pins go, leases return to the head. Tensors that were handed out stay valid. Idempotent."""
        self._t.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Run:
    """One run of a service: its store, its queue, and the loader over both.

    ``spec`` is what it was created with, as resolved: defaults and marks filled in, the schema as a document.
    """

    def __init__(self, client: Client, described: Mapping[str, Any], *, owns_client: bool = False) -> None:
        self.client = client
        self.spec, self.run_id, lives, store = understood("run", client.url, lambda: _described(described))
        self._owns_client = owns_client
        self.store = RunStore(client._t, self.run_id, store, self.spec, ranges=client._ranges, http_only=client._http_only)
        self.queue = RunQueue(client._t, self.run_id, lives)
        self._streams: list[Stream] = []  # of this run's loaders
        self._ended: list[tuple[Counts, int]] = []  # what those did that have ended
        self._figures: Figures | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The schema document; empty for a mixed run."""
        return dict(self.spec.get("schema") or {})

    def status(self) -> dict[str, Any]:
        """The run's counters, holders and who waits for whom, as ``sluice status --json`` has them."""
        return self.queue.status()

    def producer(self, name: str, incarnation: int | None = None) -> Producer:
        """A named producer: ``with run.producer("p0") as p: p.put(...)``. ``incarnation`` grows with every start; the time if None."""
        return Producer(self, name, incarnation)

    def configure(
        self, *, visibility_timeout: float | None = None, high_watermark_bytes: int | str | None = None, low_watermark_bytes: int | str | None = None, high_watermark_samples: int | None = None,
        low_watermark_samples: int | None = None, reopen: bool = False,
    ) -> None:
        """Change what is given, for everybody: how long leases live (those that are out: from their next renewal on, if that is longer), the marks, and, with
        ``reopen``, whether a run that was closed and is drained takes puts again.

        Raises InvalidError by field, ConflictError (it is not drained).
        """
        described = self.client._t.call("POST", f"{run_path(self.run_id)}/configure", _given(visibility_timeout_seconds=visibility_timeout, reopen=reopen or None) | _sizes(
            "configure", high_watermark_bytes=high_watermark_bytes, low_watermark_bytes=low_watermark_bytes,
        ) | _counts("configure", high_watermark_samples=high_watermark_samples, low_watermark_samples=low_watermark_samples))
        self._respec("configure", described)

    def _respec(self, op: str, described: Any) -> None:
        spec, _, lives, _ = understood(op, self.run_id, lambda: _described(described))
        self.spec.update(spec)
        self.queue.visibility_timeout = VisibilityTimeout(lives)

    def refresh(self) -> dict[str, Any]:
        """Ask for the spec again, which a reshape changes, and return it."""
        self._respec("run", self.client._t.call("GET", run_path(self.run_id)))
        return self.spec

    def reshape(self, ranks: int, per_rank: int) -> None:
        """Deal the run out to another number of ranks, or of samples a rank and step. ConflictError while a lease is out."""
        self.client._t.call("POST", f"{run_path(self.run_id)}/reshape", _counts("reshape", ranks=ranks, per_rank=per_rank))
        self.refresh()

    # -- for trainers --------------------------------------------------------------------------------------------------

    def loader(
        self, *, rank: int = 0, ranks: int = 1, batch: int = 1, collate: str | CollateFunction = "pad", pad_to_multiple: int = 1, max_tokens: int = 0, prefetch: int = 2, ack: str = "next",
        device: torch.device | str | None = None, consumer: str | None = None, incarnation: int | None = None, members: int = 1, member: int = 0, timeout: float | None = None,
        progress: bool = False, final_norm: FinalNorm | None = None, skip: Callable[[SampleRef, BaseException], bool] | None = None, max_skips: int = 100,
        schema: Mapping[str, Any] | None = None, renew_every: float | None = None, max_idle: float = 1800.0, patience: float = 600.0,
    ) -> Loader:
        """Batches of the run: an iterator, and a context manager.

        ``rank`` of ``ranks`` is for a run that deals out windows, whose ranks get equal counts; ``batch`` samples make a batch, and divide what a rank has of a window. ``collate``,
        ``pad_to_multiple``, ``max_tokens`` and ``final_norm`` are those of :class:`sluice.collate.Collator`. ``prefetch`` is how many batches are made ahead of the one that the trainer has.

        ``ack`` says when what was taken is acknowledged: "next", when the next batch is taken; "step", by :meth:`step`; "checkpoint", by :meth:`checkpoint` (the run declares
        ``steps_per_checkpoint``). What is not acknowledged comes again.

        ``device`` is where the batches go: through pinned memory and a stream of its own. ``consumer`` is the name that the service knows, random if left out; a newer ``incarnation`` of a name takes
        over at once. ``member`` of ``members`` processes that share every sample (tensor, context or sequence parallel) have one ``consumer`` in common.

        ``timeout`` is how many seconds the loop waits for a batch (WaitTimeoutError); None waits as long as the stream lives. ``skip`` says of a ref and the error of making a batch of it whether it
        is passed over, by default CorruptError and NotFoundError, ``max_skips`` in a row. ``progress`` draws a line on a terminal. ``schema`` is needed in a mixed run.

        Leases are renewed every ``renew_every`` seconds (a third of their time), until the trainer has made no call for ``max_idle`` seconds. ``patience`` is how many seconds a service that is away
        is asked again.

        Raises InvalidError (naming the argument) and SchemaError.
        """
        from .loader import Loader

        return Loader(
            self, rank=rank, ranks=ranks, batch=batch, collate=collate, pad_to_multiple=pad_to_multiple, max_tokens=max_tokens, prefetch=prefetch, ack=ack, device=device, consumer=consumer,
            incarnation=incarnation, members=members, member=member, timeout=timeout, progress=progress, final_norm=final_norm, skip=skip, max_skips=max_skips, schema=schema,
            renew_every=renew_every, max_idle=max_idle, patience=patience,
        )

    def dataset(self, **options: Any) -> StreamDataset:
        """A torch ``IterableDataset`` whose iterators are loaders with these arguments of :meth:`loader`: ``DataLoader(dataset, batch_size=None, collate_fn=dataset.whole)``. It may be
        pickled; in a worker it opens a session of its own. UnsupportedError where torch is not installed."""
        from .dataset import StreamDataset

        return StreamDataset(self, options)

    def step(self) -> None:
        """:meth:`Loader.step` of all loaders of the run in this process, also of those whose loop has ended."""
        self._each("step", lambda stream: stream.step())

    def checkpoint(self) -> None:
        """:meth:`Loader.checkpoint` of all loaders of the run in this process."""
        self._each("checkpoint", lambda stream: stream.checkpoint())

    def fail(self, cause: object = None) -> None:
        """:meth:`Loader.fail` of all loaders of the run in this process."""
        self._each("fail", lambda stream: stream.fail(cause))

    def stats(self) -> dict[str, float]:
        """Figures for a logger: of this process's loaders (seconds, counts), and of the whole run as the service has them; docs/python-loader.md has the list. Never waits long: while the service does
        not answer, its figures are the last known, ``service_up`` is 0 and ``bottleneck`` -1."""
        return self._figure().figures([*self._ended, *(s.counts() for s in self._streams if s.pid == os.getpid())])

    def bottleneck(self) -> str:
        """Which side the run waits for, in a sentence."""
        return self._figure().bottleneck()

    def _figure(self) -> Figures:
        if self._figures is None:
            from .stats import Figures

            self._figures = Figures(self.client._t, self.run_id)
        return self._figures

    def _take(self, stream: Stream) -> None:
        mine = [s for s in self._streams if s.pid == stream.pid]  # a parent's are not ours
        self._ended += [s.counts() for s in mine if s.done]
        self._streams = [s for s in mine if not s.done] + [stream]

    def _each(self, op: str, call: Callable[[Stream], None]) -> None:
        if not self._streams:
            raise ConflictError("no loader of the run was made here", op=op, subject=self.run_id, hint="make one with run.loader()")
        for stream in self._streams:
            stream.own()  # of the parent of a fork: it refuses
        failed: list[SluiceError] = []
        for stream in self._streams:
            if stream.closing:
                continue
            try:
                call(stream)
            except (ClosedError, StaleError) as e:
                if not stream.retired:  # nobody has its loader any more, and it ended meanwhile, or another took over
                    failed.append(e)
            except SluiceError as e:
                failed.append(e)
        if failed:
            raise failed[0]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def abort(self, ref: SampleRef) -> None:
        """Free a sample that was stored and never enqueued."""
        self.store.abort(ref)

    def close(self) -> None:
        """End the use of the run here, its loaders regularly (:meth:`Loader.close`); if :func:`sluice.connect` made it, the session with the service too. The run itself goes on:
        :meth:`RunQueue.close` ends its puts."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        from .loader import end_stream

        unclosed: list[SluiceError] = []
        try:
            for stream in self._streams:
                try:
                    end_stream(stream, error)
                except SluiceError as e:
                    unclosed.append(e)
            if unclosed:
                raise unclosed[0]
        finally:
            self.store.close()
            if self._owns_client:
                self.client.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)


def connect(url: str | None = None, *, run: str, create: Mapping[str, Any] | None = None, **options: Any) -> Run:
    """Open a run of a service, in a session of its own that ends with ``close()`` or the ``with`` block.

    ``url`` is ``http://host:port``, ``https://host:port`` or ``unix:/path``; without it ``$SLUICE_URL`` or the service of this host. ``create`` holds keyword arguments of
    :meth:`Client.create_run`: then the run is made if it is not there. ``options`` are those of :class:`Client`.
    """
    client = Client(url, **options)
    try:
        opened = client.create_run(run, **create) if create is not None else client.run(run)
    except BaseException:
        client.close()
        raise
    opened._owns_client = True
    return opened


def _described(answer: Any) -> tuple[dict[str, Any], str, float, Mapping[str, Any]]:
    """Of a run that the service describes: its spec, its name, its visibility timeout in seconds, and its store."""
    spec = dict(fields(answer["spec"]))
    lives = seconds(spec["visibility_timeout_seconds"])
    VisibilityTimeout(lives)  # as it must be
    schema = fields(spec.get("schema") or {})
    text(schema.get("name", ""))
    count(schema.get("version", 1))
    return spec, text(spec["run_id"]), lives, fields(answer["store"])


def _given(**values: Any) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1}
_SIZE = re.compile(rf"([0-9]{{1,16}}(?:\.[0-9]{{1,16}})?) ?({'|'.join(_UNITS)})")


def _counts(op: str, *, want: str = "a whole number", **values: object) -> dict[str, int]:
    """Whole numbers of a call's body, by the names of their arguments."""
    out: dict[str, int] = {}
    for name, value in _given(**values).items():
        try:
            out[name] = operator.index(value)
        except TypeError:
            raise InvalidError(f"is {value!r:.80}, want {want}", op=op, subject=name) from None
        if isinstance(value, bool) or not -(1 << 53) < out[name] < 1 << 53:
            raise InvalidError(f"is {value!r:.80}, want {want}", op=op, subject=name)
    return out


def _sizes(op: str, **values: object) -> dict[str, int]:
    """The same of bytes, which may also be sizes as the command line takes them."""
    for name, value in values.items():
        if isinstance(value, str) and (m := _SIZE.fullmatch(value)):
            n = Fraction(m[1]) * _UNITS[m[2]]
            values[name] = int(n) if n.denominator == 1 else value
    return _counts(op, want='a whole number of bytes, or a size like "4GiB"', **values)


def consumer_name(prefix: str = "consumer") -> str:
    """A name that no other process has."""
    return f"{prefix}-{os.uname().nodename.split('.')[0]}-{os.getpid()}-{new_id()[:8]}"
