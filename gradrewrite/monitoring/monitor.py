"""The monitor: records of rewritten backwards, read by the host on demand."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args, overload

from torch import Tensor, distributed

from gradrewrite._utils.elements import split_element
from gradrewrite._utils.formatting import Table, nearest, table_of
from gradrewrite._utils.warnings import warn
from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.nonfinite_steps import first_bad_step
from gradrewrite.diagnostics.run_file import checked_config
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.diagnostics.skipped_updates import skipped_updates, skips_text
from gradrewrite.diagnostics.stacked_records import split_call
from gradrewrite.diagnostics.used_gradients import checked_clip, missing_norms, used_norms
from gradrewrite.errors import NonFiniteError
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import KEPT, OnFailure
from gradrewrite.monitoring.culprits import Culprits, find_culprits
from gradrewrite.monitoring.host_copy import pack_of
from gradrewrite.monitoring.logged_tokens import logged_tokens
from gradrewrite.monitoring.messages import failure_of, numbered
from gradrewrite.monitoring.rank_reduction import RankReduction
from gradrewrite.monitoring.step_record import StepRecord
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.monitoring.wholes import How, Summands
from gradrewrite.monitoring.writers import JsonLines, Mode, TensorBoard, path_of_rank
from gradrewrite.policy.sampling import checked_interval
from gradrewrite.replay.root_cause import find_anywhere
from gradrewrite.sites import AT_GUARD, Pattern, Site

_OF_UPDATES = {*AT_GUARD, "optimizer"}  # kinds of sites whose records are one an update


class _Records(dict[str, float]):
    """Records by address; a missing one is an error that names the nearest."""

    def __missing__(self, address: str) -> float:
        raise _no_record(address, list(self))


class _Kept(dict[Site | str, Tensor]):
    """Tensors by site, found by the text of the site too; a missing one is an error that names the nearest."""

    def __missing__(self, key: Any) -> Tensor:
        names = {str(site): tensor for site, tensor in self.items()}
        if key in names:
            return names[key]
        near = nearest(str(key), list(names))
        raise KeyError(f"nothing was kept at {str(key)!r}; nearest: {', '.join(near) or 'no site has Keep'}")


def _by_number(
    rows: Sequence[Mapping[str, float]], address: str, split: Callable[[str], tuple[str, int | None]]
) -> list[list[float]]:
    """Return the records of each row by the numbers behind an address, from 0 on."""
    numbers: dict[int, str] = {}
    for name in {name for row in rows for name in row}:
        start, number = split(name)
        if start == address and number is not None:
            numbers[number] = name
    if rows and not any(name in row for row in rows for name in numbers.values()):
        raise _no_record(address, [name for row in rows for name in row])
    return [[row.get(numbers.get(n, ""), math.nan) for n in range(max(numbers, default=-1) + 1)] for row in rows]


def _no_record(address: str, known: Sequence[str]) -> KeyError:
    names = nearest(address, list(dict.fromkeys(known)))
    text = f"no record {address!r}; nearest: {', '.join(names) or 'there are none'}"
    if any(split_element(name)[0] == address for name in known):
        text += f". It is a vector: monitor.history({address!r}, per='element') has its elements"
    return KeyError(text)


class Monitor:
    """The records of a rewritten model's backward passes.

    A step is one ``loss.backward()``, however many graphs ran in it. Where a site ran several times in one backward
    (the model was called twice), counts of elements add up and of all else the last value is kept. The last
    ``capacity`` steps stay on their device; nothing waits for the device before the host asks, or the interval is over.
    Reading is safe from any thread. Of several models of ``gr.transform`` with parameters of equal names the first has
    the plain addresses, and the second ``error:cell@2``, ``error:cell@2#1``, ``group:default@2``; records of updates
    are numbered by their guards.

    Attributes:
        capacity: How many steps are kept.
        every: After how many steps they are copied to the host, without waiting, and written to files; None: only when
            something is read.
        sample: Number of steps from one measurement to the next, of all actions that only measure: ``Observe``,
            ``Keep``, ``CheckFinite`` with ``"warn"`` or ``"record"``, and update ratios of ``gr.guard``. It may be set
            at any time. In the steps between, code without them runs, with the kernels and saved tensors of the
            policy that lacks them. Each of both is compiled when it is first needed; nothing is compiled again.
            (Under ``gr.backend`` both are compiled at the first call, if it is > 1 then; else all is measured.)
            ``Observe(every=n)`` is due in those of these steps whose number ``n`` divides. A step is one of a guarded
            optimizer, all its micro-batches, or a backward where no optimizer is guarded; step 0 is measured. All
            ranks have to have the same.
    """

    def __init__(self, capacity: int = 1000, *, every: int | None = None, sample: int = 1) -> None:
        """Create a monitor without records.

        Raises:
            ValueError: ``capacity``, ``every`` or ``sample`` is not a whole number >= 1, or ``every`` exceeds
                ``capacity``.
        """
        capacity = checked_interval("Monitor", "capacity", capacity)
        every = None if every is None else checked_interval("Monitor", "every", every)
        if every is not None and every > capacity:
            raise ValueError(f"Monitor: every={every} steps would not fit into capacity={capacity}")
        self.capacity = capacity
        self.every = every
        self._recorder = StepRecorder(capacity, every)
        self.sample = sample
        self._lock = self._recorder.lock
        self._over_ranks = RankReduction()
        self._warned_of_bound = False

    def __repr__(self) -> str:
        sample = f", sample={self.sample}" if self.sample != 1 else ""
        return f"Monitor(capacity={self.capacity}, every={self.every}{sample}): {self._recorder.num_steps} steps"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    @property
    def sample(self) -> int:
        """Number of steps from one measurement to the next."""
        return self._recorder.sampling.sample

    @sample.setter
    def sample(self, value: int) -> None:
        self._recorder.sampling.sample = checked_interval("Monitor", "sample", value)

    def sample_next(self) -> None:
        """Measure all in the next step, whatever ``sample`` and ``every`` of actions are.

        The next step is the first one with a forward that has not begun. On several ranks all of them call it.
        """
        self._recorder.sampling.num_requests += 1

    @property
    def dropped(self) -> int:
        """Number of steps that left the buffer before the host had read them."""
        return self._recorder.writers.num_dropped

    @property
    def skipped(self) -> int:
        """Number of updates that ``gr.guard`` has skipped; waits for the device."""
        with self._lock:
            return sum(map(int, self._recorder.guards.num_skipped))

    @property
    def is_guarded(self) -> bool:
        """Return whether ``gr.guard`` has given it an optimizer that still exists."""
        return bool(self._recorder.guards.live)

    def latest(self) -> dict[str, float]:
        """Records of the last backward by address ``record@site``; ``{}`` when nothing was recorded.

        Waits for the device. Values are float32 (float64 if a source was), NaN and infinities as they were.
        """
        rows = self._steps(last=1)
        return _Records(rows[-1].records if rows else {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        """Return the monitor itself.

        Code that is compiled with copied arguments, as by Lightning, reports to the monitor that was given.
        """
        return self

    def reduce(
        self,
        how: How | None = None,
        process_group: distributed.ProcessGroup | None = None,
        *,
        per: Literal["backward", "step"] = "backward",
    ) -> dict[str, float]:
        """Return the records of the last backward, combined over ranks; ``{}`` where no rank has any.

        A collective call: all ranks of the group make it, at the same point of the program. Waits for the device. By
        default a figure is that of the whole tensor, of which each rank has a part: a norm is the root of the sum of
        squares, means and shares are weighted by numbers of elements, counts add up, extremes are those of all,
        ``std`` and ``kurtosis`` are about the mean of all. What measures no tensor (records of your own, bounds and
        factors of clips, ``loss@run``, learning rates) is averaged. Gradients at gradient sites are parts too: their
        figures are those of the gradients of all ranks side by side, and not of their mean, which step sites have.
        What all ranks have (a DTensor, what follows ``AllReduce``, step sites) counts once.

        A record that some ranks lack is combined over those that have it. NaN on one rank makes the result NaN;
        infinities are combined as numbers are. The first call sends the names of the records; then it takes one
        all-reduce with ``SUM`` (with ``std`` or ``kurtosis`` two, the first for the means) and, where there are
        extremes, one with ``MAX``, for any number of ranks.

        Args:
            how: ``"mean"``, ``"max"`` or ``"sum"`` of the figures of the ranks, instead of the figure of the whole.
            process_group: The ranks. By default those of the DistributedDataParallel in which the model was called,
                or of the largest group of ``AllReduce``, else all; without any, the result is that of one rank.
            per: ``"step"`` combines the backwards since the last update, the micro-batches, too; see ``history``.

        Raises:
            ValueError: ``how`` or ``per`` is none of these.
        """
        if how not in (None, "mean", "max", "sum"):
            raise ValueError(f'Monitor.reduce: how is None, "mean", "max" or "sum", got {how!r}')
        with self._lock:
            records = self._read()
            last = records[-1:]
            if per != "backward":
                last = next(reversed(_by_update(records, per).values()), [])
            own = _combined(last, how)
        found = self._over_ranks(own, how, process_group or self._recorder.links.process_group).figures()
        return {str(key): value for key, value in found.items()}

    @overload
    def history(self, address: str, *, per: Literal["backward", "step"] | None = None) -> list[float]: ...

    @overload
    def history(self, address: str, *, per: Literal["iteration", "element"]) -> list[list[float]]: ...

    def history(
        self, address: str, *, per: Literal["backward", "step", "iteration", "element"] | None = None
    ) -> list[float] | list[list[float]]:
        """One record over the steps in the buffer, oldest first; NaN where a step lacks it. Waits for the device.

        Args:
            address: ``record@site``.
            per: ``"backward"`` is one value for each backward. ``"step"`` is one for each update of the guarded
                optimizer (of any of several): the figure of its micro-batches together, and of all calls in a
                backward, as ``reduce`` combines those of ranks. The last one may still lack some. Without a guarded
                optimizer each backward is a step. By default records of updates (``step:``, ``param:``, ``state:``,
                ``optimizer:``) have one value for each update, all others one for each backward. ``"iteration"`` is one
                row for each backward, with the record in each iteration of a loop, or call of a module, from 0 on:
                ``history("norm@error:lstm.l0/h", per="iteration")``; all rows are as long as the longest.
                ``"element"`` is one row for each backward, or update, with the elements of a vector of ``gr.record``.

        Raises:
            KeyError: There are steps, and none has that record.
            ValueError: ``per`` is none of these.
        """
        if per not in (None, "backward", "step", "iteration", "element"):
            raise ValueError(f'Monitor.history: per is "backward", "step", "iteration" or "element", got {per!r}')
        is_of_update = address.partition("@")[2].partition(":")[0] in _OF_UPDATES
        by_step = per == "step" or (per in (None, "element") and is_of_update)
        with self._lock:
            records = self._read()
            if not by_step:
                rows = [record.on_host().records for record in records]
            else:
                steps = _by_update(records, "step").values()
                rows = [{str(key): v for key, v in _combined(step).figures().items()} for step in steps]
        if per in ("iteration", "element"):
            return _by_number(rows, address, split_call if per == "iteration" else split_element)
        if rows and not any(address in row for row in rows):
            raise _no_record(address, [name for row in rows for name in row])
        return [row.get(address, math.nan) for row in rows]

    @overload
    def kept(
        self, what: Literal["tensor", "example_norms", "second_moment"] = "tensor", *, loss: str | None = None
    ) -> dict[Site, Tensor]: ...

    @overload
    def kept(self, what: str, *, loss: str | None = None) -> dict[Site | str, Tensor]: ...

    def kept(self, what: str = "tensor", *, loss: str | None = None) -> Any:
        """Return copies of the tensors kept in the last backward.

        They are those of ``Keep(what)``, or of ``gr.keep(what, ...)`` in a function, on their device, with their dtype,
        by site or the text of a site; those of a group by its text, ``"group:default"``.

        Args:
            what: What ``Keep`` keeps (``"tensor"``, ``"example_norms"``, ``"second_moment"``) or a name of ``gr.keep``.
            loss: The name of a loss, where ``WeighLosses`` takes the backward apart and ``Keep`` comes before it: its
                key in the mapping that the model returns, or ``"loss0"``, ``"loss1"`` in their order. None for the
                gradient of all losses.

        Raises:
            ValueError: ``what`` is nothing that ``Keep`` keeps and no name of a kept tensor; or of this loss nothing
                was kept.
        """
        with self._lock:
            self._recorder.messages.flush()
            records = self._recorder.records
            found = records[-1].kept if records else {}
        known = dict.fromkeys((*KEPT, *(name for name, *_ in found)))
        if what not in known:
            raise ValueError(
                f"kept(what) is what Keep keeps, or a name under which gr.keep has kept a tensor in the last backward: "
                f"{', '.join(map(repr, known))}, got {what!r}"
            )
        losses = dict.fromkeys(of for _, _, of in found if of)
        if loss is not None and found and loss not in losses:
            raise ValueError(
                f"nothing was kept of the loss {loss!r}; there is: {', '.join(losses) or 'none by itself'}"
            )
        return _Kept({site: tensor for (own, site, of), tensor in found.items() if (own, of) == (what, loss or "")})

    def table(self, pattern: str = "*") -> Table:
        """Records over the steps in the buffer; ``print`` shows it. Waits for the device.

        The caption counts skipped updates, and says of the first and the last one in the buffer why it was skipped.
        Five or more calls of one site, or elements of a vector, are one row where it is shown; ``rows`` has each.

        Args:
            pattern: Which sites, ``[kind:]glob[#call]`` as in a rule: ``"error:*"``; by default all.

        Raises:
            KeyError: There are records, and none at such a site.
            ValueError: The pattern is malformed.
        """
        steps, wanted = self._steps(), Pattern.parse(pattern)
        rows = [step.records for step in steps]
        if pattern != "*":
            sites = dict.fromkeys(address.partition("@")[2] for row in rows for address in row)
            own = {site for site in sites if wanted.matches_text(site)}
            if sites and not own:
                near = ", ".join(nearest(pattern, list(sites))[:5])
                raise KeyError(f"no record at {pattern!r}; nearest sites with records: {near}")
            rows = [{key: value for key, value in row.items() if key.partition("@")[2] in own} for row in rows]
        parts = [f"{len(rows)} of {self._recorder.num_steps} steps"]
        if not any(rows):
            parts.append("nothing was recorded: Observe, CheckFinite, gr.record and clips by norm make records")
        if self.dropped:
            parts.append(f"{self.dropped} were dropped unread (capacity {self.capacity})")
        if self._recorder.guards or self._recorder.guards.num_skipped:
            number, known = self.skipped, skipped_updates(last_run(steps))
            parts.append(f"{number} update{'s' * (number != 1)} skipped")
            parts += ["of those in the buffer"] * (0 < len(known) < number) + [skips_text(known)] * bool(known)
        return table_of(rows, ", ".join(parts))

    def diagnose(self, *, clip: float | None = None) -> tuple[Cause, ...]:
        """Return the faults of the run in the buffer, the gravest first; ``()`` if it is healthy.

        The judge is that of ``gr.diagnose`` and ``gradrewrite report``: the causes of a bad outcome come first, then
        what else was found. What is no fault, as a clip that always acts where the loss falls, is left out.

        Args:
            clip: The global norm to which the training clips by itself, as by ``torch.nn.utils.clip_grad_norm_``: it is
                compared with the norms of the gradients that updates used, ``gr.on("step:*", Observe("norm"))`` with
                ``gr.guard``. A warning tells if there are none.

        Raises:
            ValueError: ``clip`` is no number > 0.
        """
        steps = self.steps(explain=True)
        if clip is None:
            return examine(steps).faults
        bound = checked_clip(clip, "monitor.diagnose")
        if steps and not used_norms(last_run(steps)):
            warn(f"monitor.diagnose: {missing_norms(bound)}")
        return examine(steps, evidence=Evidence(clip=bound)).faults

    def steps(self, *, explain: bool = False) -> list[Step]:
        """The steps in the buffer, oldest first, with the bounds of clips. Waits for the device.

        Args:
            explain: Replay the last step where it is the first that is not finite, for its ``failure``; where it can
                no longer be replayed, the records tell what they can.
        """
        steps = self._steps()
        if (
            not steps
            or not explain
            or steps[-1].failure is not None
            or first_bad_step(last_run(steps)) is not steps[-1]
        ):
            return steps
        with contextlib.suppress(RuntimeError):
            self.failure(anywhere=True)
        return self._steps()

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a scalar of your own, such as the loss, to the step of the last backward; nothing waits for the device.

        Its address is ``name@run``. Logged again before the next backward is over, the last value is kept. NaN and
        infinities are kept as they are. Where no backward records anything, but step sites may, it is added to the
        step that the next ``optimizer.step()`` makes. ``SkipSpikes(of="loss")`` reads ``"loss"``: log it once for each
        micro-batch, before ``optimizer.step()``. What is logged after ``flush`` or ``to_jsonl`` has written the step is
        in the monitor and not in the file; a warning tells once.

        Args:
            name: Any text without ``@``.
            value: A real number, or a real tensor with one element on any device: detached, and copied at once
                (float64 if it is that or no floating point, else float32).

        Raises:
            RuntimeError: No backward has been recorded yet, and no guarded optimizer may have actions at step sites.
            TypeError: ``name`` is no string, or ``value`` no real number.
            ValueError: ``name`` is empty or has an ``@``, or ``value`` has not exactly one element.

        Example:
            >>> import torch, gradrewrite as gr
            >>> from gradrewrite.passes import Observe
            >>> model = gr.transform(torch.nn.Linear(2, 1), gr.on("gradient:*", Observe("norm")))
            >>> loss = model(torch.ones(1, 2)).square().sum()
            >>> loss.backward()
            >>> model.monitor.log("loss", loss)
            >>> model.monitor.latest()["loss@run"] == loss.item()
            True
        """
        pack = pack_of(name, value)
        if not self._recorder.log(RecordKey.of(name, "run"), pack):
            raise RuntimeError(
                f"monitor.log({name!r}, ...) adds to the last backward, and none has been recorded yet: call it after "
                "loss.backward(), with a policy that records something (Observe, CheckFinite, a clip by norm), or with "
                "actions at step sites and gr.guard"
            )

    def to_jsonl(
        self,
        path: str | os.PathLike[str],
        mode: Mode = "a",
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the steps to a file, one JSON object a line, and the later ones as they come.

        The first line is the origin of the run: the version of gradrewrite, the policy and ``config``. A run that goes
        on after ``gr.load_state_dict`` goes on in its file: reports, plots and the doctor read the parts as one run,
        without what was computed twice.

        Later steps are written every ``every`` steps (100 if None, at most half of ``capacity``), by ``flush``, and
        when the program ends. Non-finite numbers are the strings ``"NaN"``, ``"Infinity"`` and
        ``"-Infinity"``. If a later step cannot be written (a full disk), a warning says so and training goes on
        without the file.

        On several ranks each writes a file of its own: ``run.jsonl`` becomes ``run.rank0.jsonl``, unless the path
        says with ``{rank}`` where the rank belongs. ``gradrewrite doctor run.rank*.jsonl`` reads them together.

        Args:
            path: The file; its folder is made. ``{rank}`` in it is the rank.
            mode: As of ``open``: ``"a"`` appends to a file that is there, ``"w"`` writes it anew, ``"x"`` refuses it.
            config: What the user wants to know of the run later: numbers, strings, lists and dicts by name.

        Raises:
            OSError: The file cannot be written now, or is no run log, which is left as it is; ``FileExistsError`` with
                ``"x"``.
            TypeError: ``config`` is no dict with names, or JSON has no such value.
            ValueError: ``mode`` is none of these, or ``config`` has NaN or an infinity.
        """
        if mode not in get_args(Mode):
            raise ValueError(f'Monitor.to_jsonl: mode is "a", "w" or "x", got {mode!r}')
        given = checked_config(config)
        with self._lock:
            own, writers = path_of_rank(path), self._recorder.writers
            key = os.path.abspath(own)
            sink = writers.find(key) if mode == "a" else None
            origin = partial(self._recorder.links.origin, given)
            is_known = sink is not None
            sink = sink or JsonLines(own, origin, mode)
            if mode != "a":
                writers.forget(key)
            writers.attach(sink, self._read())
            if isinstance(sink, JsonLines) and is_known and config is not None:
                sink.begin(origin)  # for the steps to come

    def to_tensorboard(self, writer: Any) -> None:
        """Write the steps with a ``SummaryWriter``, tag ``record/site``, and the later ones as ``to_jsonl`` does.

        ``rate/site`` is the share of the steps written together in which a clip acted.

        Raises:
            TypeError: ``writer`` has no ``add_scalar``.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"Monitor.to_tensorboard takes a SummaryWriter, got {type(writer).__name__}")
        with self._lock:
            writers = self._recorder.writers
            writers.attach(writers.find(id(writer)) or TensorBoard(writer), self._read())

    def flush(self) -> None:
        """Write the steps that are still missing to the files that are attached. Waits for the device."""
        self._recorder.flush()

    def failure(self, *, anywhere: bool = False) -> NonFiniteError | None:
        """Return the failure of the last step as an error; None if nothing failed. Waits for the device.

        The step is replayed op by op if it still can be: until the next backward, and until its inputs or the
        parameters are changed.

        Args:
            anywhere: Take all that leaves the model for checked, not only the sites of checks.
        """
        with self._lock:
            if not self._recorder.records:
                return None
            record = self._recorder.records[-1]
            if not anywhere:
                failures = (failure_of(part, get_args(OnFailure)) for part in (record, *record.updates))
                return next((failure for failure in failures if failure is not None), None)
            record.fetch()
            failure = find_anywhere(record.step, record.checked_graphs())
            if failure is None:
                return None
            if failure.op or failure.cause or record.failure is None:  # else it can no longer be replayed
                record.failure = numbered(failure, record)
            return record.failure

    def culprits(self, k: int = 5) -> Culprits:
        """Return the rank, micro-batch, rows, tokens and layers behind the last skipped update.

        The update was skipped by ``SkipSpikes`` or ``CheckFinite("skip")``. Its micro-batches are replayed op by op,
        with the inputs, the gradients of outputs and the random state of the step; nothing changes, and nothing is
        computed in steps that are not asked about. The rows are those of the micro-batch, of all ranks, that has the
        row with the largest norm. A row's norm is that of what it adds to the gradient of its micro-batch, before the
        actions at gradient sites, as ``backward`` computed it (of a scaled loss it is scaled); every tensor input of
        the model has the rows in dimension 0. Where these norms are refused (rows act on each other: batch norm,
        contrastive losses, graphs), it is the micro-batch with the largest gradient. Its rows are then those of the
        first value that is not finite, or have the norms of the error at the logits; ``rows_by`` and ``note`` say so.
        After ``log_tokens`` the tokens are named in the same two ways.

        The step can be replayed until the next training forward; until then inputs and gradients of outputs (up to
        64 MiB each) of its micro-batches are kept alive. Later, where an input was changed in place (by torch: what
        numpy writes is not noticed), or where another update was made since, records tell what they can. Waits for the
        device. On several ranks that skip together it is a collective call: all of them make it, and shards of
        parameters (FSDP2) are gathered for it.

        Args:
            k: How many rows and layers are named at most.

        Raises:
            RuntimeError: No update was skipped in the steps of the buffer.
            ValueError: ``k`` is not a whole number >= 1.

        Example:
            >>> import torch, gradrewrite as gr
            >>> from gradrewrite.passes import CheckFinite
            >>> model = gr.transform(torch.nn.Linear(2, 1), gr.on("gradient:*", CheckFinite("skip")))
            >>> optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
            >>> model.monitor.log_ids(["a", "b", "c"])
            >>> model(torch.tensor([[1.0, 2.0], [float("inf"), 1.0], [0.0, 1.0]])).sum().backward()
            >>> optimizer.step()
            >>> found = model.monitor.culprits()
            >>> found.micro_batch, found.rows[0].index, found.rows[0].id
            (0, 1, 'b')
        """
        return find_culprits(self._recorder, checked_interval("Monitor.culprits", "k", k))

    def log_ids(self, ids: Sequence[int | str] | Tensor) -> None:
        """Give names to the rows of the next forward's batch; ``culprits`` shows them.

        Args:
            ids: Integers or strings, or a tensor of integers ``[B]`` on any device (which is copied), one for each row.

        Raises:
            TypeError: ``ids`` is none of these.
        """
        if isinstance(ids, Tensor) and ids.dim() == 1 and not ids.is_floating_point() and not ids.is_complex():
            self._recorder.links.note_ids(ids.detach().clone())
            return
        if isinstance(ids, Tensor | str) or not isinstance(ids, Iterable):
            raise TypeError(f"monitor.log_ids takes integers or strings, one for each row, got {type(ids).__name__}")
        self._recorder.links.note_ids(tuple(ids))

    def log_tokens(
        self, *, cu_seqlens: Tensor | None = None, position_ids: Tensor | None = None, **values: Tensor
    ) -> None:
        """Give values of the tokens of the next forward's batch; ``culprits`` shows those of the worst ones.

        Nothing waits for the device: values are copied, and read when somebody asks.

        Args:
            cu_seqlens: Of a packed batch: where its sequences begin, and the number of tokens, ``[0, n_1, n_1 + n_2,
                ..., total]``, as FlashAttention takes it. Tokens are then named by sequence and position in it.
            position_ids: Of a packed batch, instead: the positions of the tokens, as transformers takes them; a
                sequence begins at each 0.
            values: Tensors ``[B, T]``, such as ratio, advantage or mask, all of one shape; of a packed batch
                ``[total]`` or ``[1, total]``. Logits have this shape in front, ``[B, T, V]``.

        Raises:
            TypeError: A value is no tensor of real numbers.
            ValueError: There is no value, or the shapes do not fit each other.
        """
        self._recorder.links.note_tokens(logged_tokens(values, cu_seqlens, position_ids))

    def _read(self, last: int | None = None) -> list[StepRecord]:
        with self._lock:
            self._recorder.messages.flush()
            records = list(self._recorder.records)[-(last or 0) :]
            for record in records:
                record.read()
                for part in (record, *record.updates):
                    self._look_at_bounds(part)
            return records

    def _steps(self, last: int | None = None) -> list[Step]:
        with self._lock:  # the last record may still grow
            origin = self._recorder.links.origin({})
            return [record.on_host(origin) for record in self._read(last)]

    def _look_at_bounds(self, record: StepRecord) -> None:
        """Warn once of a clip with a bound of 0, in a record that was not looked at before."""
        key = None if self._warned_of_bound else record.take_zero_bound()
        if key is not None:
            self._warned_of_bound = True
            warn(
                f"{key} was 0 or negative at step {record.update}: the clip makes zeros, so that nothing is learned "
                "there. Give it a bound > 0 (a number in its tensor, a gr.Schedule above 0); infinity only measures"
            )


def _by_update(records: Sequence[StepRecord], per: str) -> dict[int, list[StepRecord]]:
    """Group backwards by their update; ValueError unless ``per`` is ``"step"``."""
    if per != "step":
        raise ValueError(f'per is "backward" or "step", got {per!r}')
    found: dict[int, list[StepRecord]] = {}
    for record in records:
        found.setdefault(record.update_key, []).append(record)
    return found


def _combined(records: Sequence[StepRecord], how: How | None = None) -> Summands:
    """Add up the records of several backwards."""
    summands = Summands()
    for record in records:
        record.add_to(summands, how)
    return summands


def note_failure(monitor: Monitor, failure: NonFiniteError) -> None:
    """Add the op behind the last step's non-finite values to its record."""
    recorder = recorder_of(monitor)
    with recorder.lock:
        if recorder.records:
            recorder.records[-1].failure = failure


def steps_since(monitor: Monitor, step: int) -> list[Step]:
    """Return the steps from this one on, as far as they are in the buffer. Waits for the device."""
    with monitor._lock:
        new = monitor._recorder.num_steps - step
        return monitor._steps(last=new) if new > 0 else []


def recorder_of(monitor: Monitor) -> StepRecorder:
    """Return the recorder behind a monitor."""
    return monitor._recorder
